"""Safetensors files on their way into the live engine; a change while they are read is an error."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fp8rl.errors import ModelError, RefitError
from fp8rl.models.folder import read_index, require_listed
from fp8rl.weight_files import REMEDY, WeightFile
from vllm_fp8rl.refit.tensor_stream import Named

_DTYPES = ("BF16", "F16", "F32", "F8_E4M3")


def read_files(
    path: str | os.PathLike[str], check: Callable[[Sequence[Named]], None] = lambda tensors: None
) -> Iterator[Named]:
    """Read the tensors of a safetensors file, or of a folder of them, each in its own memory.

    In a folder with ``model.safetensors.index.json`` the files and tensors that it names are read,
    else all ``*.safetensors``. Every rank of a tensor-parallel engine must call this; before the
    first tensor it compares what the ranks see.

    Args:
        path: file or folder.
        check: called before the first tensor is read, with all of them on the meta device: whoever
            refuses one there has spent no memory on it.

    Raises:
        RefitError: a file that does not exist or is not whole, an unknown dtype, an index that
            disagrees with its files or names one elsewhere, or ranks that see different files.
            While reading: a file that is truncated, changed or replaced, at the latest after the
            last tensor.
    """
    problem, files = "", []
    try:
        files = _found(path)
    except RefitError as error:
        problem = str(error)
    # Name, size and time of each file are equal on all machines, unlike an inode.
    sources = [(file.path.name, file.state.size, file.state.modified) for file in files]
    _require_agreement(str(path), problem, sources)
    check(
        [
            (name, torch.empty(about.shape, dtype=file.dtype(name), device="meta"))
            for file in files
            for name, about in file.tensors.items()
        ]
    )
    return _read(Path(path), files)


def _found(path: str | os.PathLike[str]) -> list[WeightFile]:
    """Return the files, whose headers and index have been checked."""
    if not isinstance(path, (str, os.PathLike)):
        raise RefitError(f"{path!r} is no path of a safetensors file or of a folder of them.")
    try:
        paths, index = _listed(Path(path))
        files = [WeightFile(each) for each in paths]
        if index is not None:
            require_listed(files, index)
    except ModelError as error:
        raise RefitError(str(error)) from None
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise RefitError(
            f"'{path}' cannot be read ({why}); give a safetensors file, or a folder of them, "
            "that every worker sees."
        ) from None
    for file in files:
        for name, about in file.tensors.items():
            if about.dtype not in _DTYPES:
                raise RefitError(
                    f"'{name}' in '{file.path}' has dtype {about.dtype}; a refit takes "
                    f"{', '.join(_DTYPES)}."
                )
    return files


def _read(path: Path, files: Sequence[WeightFile]) -> Iterator[Named]:
    try:
        for file in files:
            yield from file.read()
    except ModelError as error:
        raise RefitError(str(error)) from None
    try:
        same = _listed(path)[0] == [file.path for file in files]
    except (OSError, ModelError, RefitError):  # gone
        same = False
    if not same or not all(file.is_unchanged() for file in files):
        raise RefitError(f"'{path}' was changed while it was read; {REMEDY}.")


def _listed(path: Path) -> tuple[list[Path], Mapping[str, Path] | None]:
    """Return the files to read, and the index's table of which file holds which tensor, if any."""
    index = read_index(path) if path.is_dir() else None
    if index is not None:
        files = sorted(set(index.values()))
    else:
        files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files:
        raise RefitError(f"'{path}' is a folder without safetensors files; give another one.")
    return files, index


def _require_agreement(path: str, problem: str, sources: list[tuple[Any, ...]]) -> None:
    """Raise RefitError on every rank where one has a problem, or other files than the first."""
    from vllm.distributed import get_tp_group

    said: list[Any] = [(problem, sources)]
    group = get_tp_group()
    if group.world_size > 1:
        said = said * group.world_size
        torch.distributed.all_gather_object(said, (problem, sources), group=group.cpu_group)
    for each, _ in said:
        if each:
            raise RefitError(each)
    for rank, (_, theirs) in enumerate(said):
        if theirs != said[0][1]:
            raise RefitError(
                f"'{path}' is not the same for rank {rank} as for rank 0 (names, sizes or times of "
                f"its files differ); {REMEDY}."
            )

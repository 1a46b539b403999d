"""Safetensors files, read so that a change of a file while it is read is an error.

The data is read, not mapped: a mapped file that is truncated meanwhile kills the process (SIGBUS).
A writer should write under a temporary name and rename the file, or the folder, at the end.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from fp8rl.errors import RefitError
from vllm_fp8rl.refit.intake import Named

INDEX = "model.safetensors.index.json"
_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
}
_LENGTH = 8  # bytes before the header, which hold its length
_LONGEST_HEADER = 100_000_000  # bytes, as in safetensors
_TICK = 0.02
"""Seconds: writes that are closer together may leave the same time stamp."""
_REMEDY = "write under a temporary name, rename when all is written, and refit again"


def read_files(path: str | os.PathLike[str]) -> Iterator[Named]:
    """Read the tensors of a safetensors file, or of a folder of them, each in its own memory.

    In a folder with ``model.safetensors.index.json`` the files and tensors that it names are read,
    else all ``*.safetensors``. Every rank of a tensor-parallel engine must call this; before the
    first tensor it compares what the ranks see.

    Raises:
        RefitError: a file that does not exist or is not whole, an index that disagrees with its
            files, or ranks that see different files. While reading: a file that is truncated,
            changed or replaced, at the latest after the last tensor, or an unknown dtype.
    """
    with ExitStack() as opened:
        problem, files = "", []
        try:
            files = _open(path, opened)
        except RefitError as error:
            problem = str(error)
        # Name, size and time of each file are equal on all machines, unlike an inode.
        sources = [(file.path.name, file.state.size, file.state.modified) for file in files]
        _require_agreement(str(path), problem, sources)
        return _read(Path(path), files, opened.pop_all())


def _open(path: str | os.PathLike[str], opened: ExitStack) -> list[_File]:
    """Open and check all files; ``opened`` closes them."""
    if not isinstance(path, (str, os.PathLike)):
        raise RefitError(f"{path!r} is no path of a safetensors file or of a folder of them.")
    try:
        paths, index = _listed(Path(path))
        files = [opened.enter_context(closing(_File(each))) for each in paths]
    except (OSError, ValueError) as error:
        raise RefitError(f"'{path}' cannot be read ({error}).") from None
    if index is not None:
        for file in files:
            file.require_names({name for name, where in index.items() if where == file.path})
    return files


def _read(path: Path, files: Sequence[_File], opened: ExitStack) -> Iterator[Named]:
    """Read all tensors, then close the files."""
    with opened:
        youngest = max(file.state.changed for file in files)
        # A write in the clock tick in which the state was read would leave it unchanged.
        time.sleep(min(_TICK, max(0.0, _TICK - (time.time_ns() - youngest) / 1e9)))
        for file in files:
            yield from file.read()
        try:
            same = _listed(path)[0] == [file.path for file in files]
            same = same and all(file.is_unchanged() for file in files)
        except (OSError, RefitError):  # gone
            same = False
        if not same:
            raise RefitError(f"'{path}' was changed while it was read; {_REMEDY}.")


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
                f"its files differ); {_REMEDY}."
            )


class _State(NamedTuple):
    """What changes when a file changes; times in nanoseconds."""

    inode: int
    size: int
    modified: int
    changed: int

    @classmethod
    def of(cls, found: os.stat_result) -> _State:
        return cls(found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


class _File:
    """One safetensors file, open for reading.

    Raises:
        OSError: it cannot be opened or read.
        RefitError: it is not a whole safetensors file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._io = FileIO(path)
        self.state = _State.of(os.fstat(self._io.fileno()))
        start = self._io.read(_LENGTH) or b""
        length = min(int.from_bytes(start, "little"), _LONGEST_HEADER, self.state.size)
        header = self._io.read(length) or b""
        self._data = _LENGTH + length
        try:
            self._tensors = _checked(start + header, self.state.size)
        except (SafetensorError, ValueError) as error:
            self.close()
            raise RefitError(
                f"'{path}' is not a whole safetensors file ({str(error).splitlines()[0]}); "
                f"{_REMEDY}."
            ) from None

    def close(self) -> None:
        self._io.close()

    def require_names(self, names: set[str]) -> None:
        """Raise RefitError unless these are the names of the tensors."""
        for name in sorted(names ^ self._tensors.keys()):
            here = "holds" if name in self._tensors else "lacks"
            raise RefitError(
                f"'{self.path}' {here} '{name}', against what '{INDEX}' says; write both anew, or "
                "remove the index."
            )

    def read(self) -> Iterator[Named]:
        """The tensors, in the order in which they lie."""
        for name, about in sorted(self._tensors.items(), key=lambda item: item[1]["data_offsets"]):
            dtype = _DTYPES.get(about["dtype"])
            if dtype is None:
                raise RefitError(
                    f"'{name}' in '{self.path}' has dtype {about['dtype']}; a refit takes "
                    f"{', '.join(_DTYPES)}."
                )
            tensor = torch.empty(about["shape"], dtype=dtype, device="cpu")
            self._fill(tensor.view(-1).view(torch.uint8).numpy().data, about["data_offsets"])
            yield name, tensor

    def _fill(self, bytes_: memoryview, offsets: tuple[int, int]) -> None:
        try:
            self._io.seek(self._data + offsets[0])
            while bytes_:
                count = self._io.readinto(bytes_)
                if not count:
                    raise RefitError(f"'{self.path}' was cut off while it was read; {_REMEDY}.")
                bytes_ = bytes_[count:]
        except OSError as error:
            raise RefitError(f"'{self.path}' cannot be read ({error}).") from None

    def is_unchanged(self) -> bool:
        """Whether the file has neither been changed nor replaced since it was opened."""
        return self.state == _State.of(os.fstat(self._io.fileno())) == _State.of(self.path.stat())


def _checked(start: bytes, size: int) -> dict[str, dict[str, Any]]:
    """Read the header's description of each tensor.

    safetensors checks it with a sparse file behind it, because the real one may be truncated at any
    moment.

    Args:
        start: first bytes of the file, with the header.
        size: size of the file in bytes.

    Raises:
        SafetensorError, ValueError: it is not the header of a file of that size.
    """
    with tempfile.NamedTemporaryFile() as copy:
        copy.write(start)
        copy.truncate(size)
        copy.flush()
        with safe_open(copy.name, framework="numpy"):
            pass
    tensors = json.loads(start[_LENGTH:])
    tensors.pop("__metadata__", None)
    return tensors


def _listed(path: Path) -> tuple[list[Path], Mapping[str, Path] | None]:
    """The files to read, and the index's table of which file holds which tensor, if any."""
    index = _read_index(path) if path.is_dir() and (path / INDEX).exists() else None
    if index is not None:
        files = sorted(set(index.values()))
    else:
        files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    for file in files:
        if not file.is_file():
            why = f"'{INDEX}' names it" if index is not None else "nor a folder of them"
            raise RefitError(
                f"'{file}' is no safetensors file, {why}; give a path that every worker sees."
            )
    if not files:
        raise RefitError(f"'{path}' is a folder without safetensors files; give another one.")
    return files, index


def _read_index(folder: Path) -> dict[str, Path]:
    try:
        table = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
        good = bool(table) and all(Path(where).name == where for where in table.values())
    except (ValueError, LookupError, TypeError, AttributeError):
        good = False
    if not good:
        raise RefitError(
            f"'{folder / INDEX}' is no index of files in its folder (an object 'weight_map' of "
            "names and files); write it anew, or remove it."
        )
    return {name: folder / where for name, where in table.items()}

"""Write an export that has been planned, whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from fp8rl.errors import ModelError, OptionError
from fp8rl.export.format import Export
from fp8rl.export.names import matrices
from fp8rl.models.folder import INDEX
from fp8rl.numerics import BLOCK, all_finite, quantize_block
from fp8rl.weight_files import flush

SHARD_BYTES = 2 * 2**30
"""Size from which a file of the new folder is full; a larger tensor has a file of its own."""


def write_export(
    export: Export,
    out: Path,
    *,
    device: str = "cpu",
    shard_bytes: int = SHARD_BYTES,
    progress: Callable[[str], None] = lambda tensor: None,
) -> None:
    """Write the folder; it appears complete or not at all.

    Memory holds one file of ``shard_bytes``, a copy of it while it is written, and one tensor of
    the source.

    Args:
        export: see :func:`plan_export`.
        out: folder that does not exist yet.
        device: device that quantizes.
        shard_bytes: size from which a file is full.
        progress: called with the name of each tensor that has been read.

    Raises:
        OptionError: ``out`` exists or cannot be written.
        ModelError: a tensor that has NaN or infinities, or a source that cannot be read or has been
            changed since :func:`plan_export`.
    """
    if os.path.lexists(out):
        raise _exists(out)
    own: Path | None = None
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        # Of a name that no other export has, in whatever container or on whatever machine it runs.
        own = Path(tempfile.mkdtemp(prefix=f".{out.name}.partial-", dir=out.parent))
        partial = own / out.name  # with the usual rights, unlike the folder around it
        partial.mkdir()
        _write_weights(export, partial, device, shard_bytes, progress)
        _write_config(export, partial)
        for source in (*export.described, *export.files, *export.copied):
            source.require_unchanged()
        mode = (partial / "config.json").stat().st_mode
        for file in partial.glob("*.safetensors"):
            file.chmod(mode)  # safetensors gives access to the owner alone
        for file in (*partial.iterdir(), partial):
            flush(file)
        partial.rename(out)
        flush(out.parent)
    except (OSError, SafetensorError) as error:
        if os.path.lexists(out):  # by another export
            raise _exists(out) from None
        raise OptionError(
            f"'{out}' cannot be written ({getattr(error, 'strerror', None) or error}); give a "
            "folder with enough space that you may write to."
        ) from None
    finally:
        if own is not None:
            shutil.rmtree(own, ignore_errors=True)


def _exists(out: Path) -> OptionError:
    return OptionError(f"'{out}' exists; give a folder that does not, or remove it first.")


def _write_weights(
    export: Export, folder: Path, device: str, shard_bytes: int, progress: Callable[[str], None]
) -> None:
    """Write the tensors in files of about ``shard_bytes``, and their index."""
    shard: dict[str, torch.Tensor] = {}
    size = total = 0
    table: dict[str, str] = {}
    written: list[Path] = []

    def flush() -> None:
        nonlocal shard, size
        if shard:
            file = folder / f"{len(written) + 1:05}.safetensors"
            save_file(shard, file, metadata={"format": "pt"})
            table.update(dict.fromkeys(shard, file.name))
            written.append(file)
            shard, size = {}, 0

    for name, tensor in _tensors(export, device, progress):
        if size and size + tensor.nbytes > shard_bytes:
            flush()
        shard[name] = tensor
        size += tensor.nbytes
        total += tensor.nbytes
    flush()
    final = {}
    for number, file in enumerate(written, 1):
        final[file.name] = f"model-{number:05}-of-{len(written):05}.safetensors"
        file.rename(folder / final[file.name])
    index = {
        "metadata": {"total_size": total},
        "weight_map": {name: final[table[name]] for name in sorted(table)},
    }
    _write_json(folder / INDEX, index)


def _tensors(
    export: Export, device: str, progress: Callable[[str], None]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield all tensors of the new folder, on the CPU, in the order of the source."""
    for file, names in export.files.items():
        for name, tensor in file.read(names):
            if tensor.is_floating_point() and not all_finite([tensor])[0]:
                raise ModelError(
                    f"'{name}' in '{file.path}' has NaN or infinite values; give a checkpoint from "
                    "before the training diverged."
                )
            parts = export.parts(name)
            if not parts:
                yield name, tensor
            for part, matrix in _split(name, parts, tensor):
                codes, scale_inv = quantize_block(
                    matrix.to(device), BLOCK, export.recipe.weights.scale_format
                )
                yield part, codes.cpu()
                yield f"{part}_scale_inv", scale_inv.cpu()
            progress(name)
    for name, scale in export.kv_scales.items():
        yield name, torch.tensor([scale], dtype=torch.float32)


def _split(
    name: str, parts: Sequence[str], tensor: torch.Tensor
) -> Iterable[tuple[str, torch.Tensor]]:
    """Return the weights in a stored tensor; none if it has no ``parts``."""
    if not parts:
        return ()
    rows = [rows for _, (rows, _) in matrices(name, parts, tensor.shape)]
    return zip(parts, tensor.reshape(-1, tensor.shape[-1]).split(rows), strict=True)


def _write_config(export: Export, folder: Path) -> None:
    """Write ``config.json`` and copy the tokenizer and whatever else describes the model."""
    quantized = {**export.config, "quantization_config": export.quantization_config()}
    _write_json(folder / "config.json", quantized)
    for file in export.copied:
        with file.open() as source, (folder / file.path.name).open("wb") as copy:
            shutil.copyfileobj(source, copy)


def _write_json(file: Path, value: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")

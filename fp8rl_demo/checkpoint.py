"""Checkpoints in folders that appear complete or not at all.

transformers and vLLM load a checkpoint folder as a model (``model.safetensors``, ``config.json``,
tokenizer). The trainer's state is in ``trainer/state.pt``, as ``torch.save`` writes it.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from fp8rl.errors import CheckpointError, sentence
from fp8rl.weight_files import flush

FORMAT = 3
_KEEP = 2
_MODEL = "model.safetensors"
_TRAINER = "trainer/state.pt"
_STATE = "state.json"
_SUMS = "SHA256SUMS"
"""Digests in the format of ``sha256sum``. On a CPU a resumed run must continue bit for bit, and
none of the files' own formats detects a changed digit or weight."""


@dataclass(frozen=True)
class Checkpoint:
    """A loaded checkpoint."""

    step: int
    """Number of steps that were finished when it was written."""
    model: dict[str, torch.Tensor]
    """Parameters and KV scales by the names that a refit uses."""
    trainer: dict[str, Any]
    """Optimizer state and other state of the run; may contain tensors."""
    identity: dict[str, Any]
    """What must be equal for a run to continue from this checkpoint."""


def save(
    folder: Path,
    step: int,
    model: Mapping[str, torch.Tensor],
    trainer: Mapping[str, Any],
    identity: Mapping[str, Any],
    model_folder: Path,
) -> Path:
    """Write ``folder/step-NNNNNN`` and delete all checkpoints but the newest two.

    The files are written to a folder that :func:`latest` ignores and synced; then the folder is
    renamed. A kill at any moment leaves the older checkpoints as they were.

    Raises:
        CheckpointError: a file cannot be written, or ``trainer`` contains something that cannot be
            stored.
    """
    target = folder / f"step-{step:06d}"
    partial = folder / f".partial-{target.name}"
    weights = {name: tensor.detach().contiguous() for name, tensor in model.items()}
    state = {"format": FORMAT, "step": step, "identity": dict(identity)}
    shutil.rmtree(partial, ignore_errors=True)
    try:
        (partial / _TRAINER).parent.mkdir(parents=True)
        for source in model_folder.iterdir():
            shutil.copy2(source, partial)
        save_file(weights, partial / _MODEL, metadata={"format": "pt"})
        _save_trainer(dict(trainer), partial / _TRAINER)
        (partial / _STATE).write_text(json.dumps(state), encoding="utf-8")
        (partial / _SUMS).write_text("".join(_sums(partial)), encoding="utf-8")
        for file in partial.rglob("*"):
            flush(file)
    except (OSError, RuntimeError, SafetensorError) as error:  # torch.save's is a RuntimeError
        shutil.rmtree(partial, ignore_errors=True)  # so that the report has room
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            f"Checkpoint {target} cannot be written ({sentence(error)}); free space on its disk, "
            "or give --settings '{\"checkpoint_every\": 0}' for none."
        ) from error
    shutil.rmtree(target, ignore_errors=True)  # an identical one, if a step is run again
    partial.rename(target)
    flush(folder)
    for old in _finished(folder)[:-_KEEP]:
        shutil.rmtree(old)
    return target


def latest(folder: Path) -> Path | None:
    """Return the newest complete checkpoint, or None."""
    found = _finished(folder)
    return found[-1] if found else None


def load(path: Path, identity: Mapping[str, Any] | None = None) -> Checkpoint:
    """Read one checkpoint.

    Raises:
        CheckpointError: a file is missing or damaged, or the format or the identity differs.
    """
    try:
        state = json.loads((path / _STATE).read_text(encoding="utf-8"))
        if isinstance(state, dict) and state.get("format") != FORMAT:
            raise CheckpointError(
                f"Checkpoint {path} has format {state.get('format')}, this release reads {FORMAT}; "
                "start a new run in another --out folder."
            )
        written, found = (path / _SUMS).read_text(encoding="utf-8"), _sums(path)
        if written != "".join(found):
            names = [line.split()[1] for line in found if line not in written]
            raise ValueError(f"{', '.join(names) or _SUMS} is not what was written")
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"Checkpoint {path} is damaged ({type(error).__name__}: {error}); delete that folder "
            "to continue from the one before."
        ) from error
    if identity is not None and state["identity"] != identity:
        keys = ", ".join(_differing(state["identity"], dict(identity)))
        raise CheckpointError(
            f"Checkpoint {path} belongs to another run ({keys} differ); use the same options or "
            "another --out folder."
        )
    trainer = torch.load(path / _TRAINER, weights_only=True, map_location="cpu")
    return Checkpoint(state["step"], load_file(path / _MODEL), trainer, state["identity"])


def _save_trainer(trainer: dict[str, Any], path: Path) -> None:
    try:
        torch.save(trainer, path)
        # As a resumed run reads it, which runs no code.
        torch.load(path, weights_only=True, map_location="cpu", mmap=True)
    except (pickle.PickleError, AttributeError, TypeError) as error:
        raise CheckpointError(
            "Cannot store this trainer state; only tensors, numbers, strings, lists, tuples and "
            f"dicts can be read back ({str(error).splitlines()[0]})."
        ) from None


def _sums(path: Path) -> list[str]:
    """Return a line with the digest of each file that :func:`load` reads."""
    lines = []
    for name in (_STATE, _MODEL, _TRAINER):
        with (path / name).open("rb") as file:
            lines.append(f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {name}\n")
    return lines


def _finished(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("step-" + "[0-9]" * 6) if path.is_dir())


def _differing(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    keys: list[str] = []
    for key in sorted({*old, *new}):
        a, b = old.get(key), new.get(key)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            keys += _differing(a, b, f"{prefix}{key}.")
        elif a != b:
            keys.append(f"{prefix}{key}")
    return keys

"""Whether an engine in BF16 holds the tensors it was given, told from its logprobs alone.

BF16 rounding before a quantization flips codes. In a small random model the noise of that is as
large as what one wrong tensor of the last layer does, so no bound on a gap tells the two apart. The
direction of the deviation does: see ``slope``.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]


def slope(actual: torch.Tensor, expected: torch.Tensor, base: torch.Tensor) -> float:
    """How much of the way from ``base`` to ``expected`` an engine goes: 1 all of it, 0 none."""
    step = (expected - base).double()
    return (((actual - base).double() @ step) / (step @ step)).item()


def wrong_tensors(given: Tensors, earlier: Tensors) -> dict[str, Tensors]:
    """What a refit with experts could have done wrong in the last layer, where it shows least."""
    numbers = [int(n) for name in given for n in re.findall(r"\.layers\.(\d+)\.", name)]
    layer = [name for name in given if f".layers.{max(numbers)}." in name]
    two = [name for name in layer if ".experts.2." in name]
    three = [name.replace(".experts.2.", ".experts.3.") for name in two]
    found = {
        f"{name} is the earlier one": {name: earlier[name]}
        for name in layer
        if (".experts." not in name or name in three) and not given[name].equal(earlier[name])
    }
    for name in layer:
        if name.endswith("e_score_correction_bias"):
            found[f"{name} is zero"] = {name: torch.zeros_like(given[name])}
    pairs = list(zip(two + three, three + two, strict=True))
    return found | {"experts 2 and 3 are swapped": {a: given[b].clone() for a, b in pairs}}


def changed_checkpoint(source: Path, folder: Path, changes: Tensors) -> Path:
    """Write a checkpoint with some other tensors, over an earlier one in ``folder``."""
    shutil.copytree(source, folder, dirs_exist_ok=True)
    file = folder / "model.safetensors"
    save_file(load_file(file) | changes, file, metadata={"format": "pt"})
    return folder


def nearer(
    actual: torch.Tensor, expected: torch.Tensor, wrong: Mapping[str, torch.Tensor]
) -> dict[str, float]:
    """What of ``wrong`` an engine lies nearer to than to the reference, and how far that way."""
    shares = {what: slope(actual, logprobs, expected) for what, logprobs in wrong.items()}
    return {what: share for what, share in shares.items() if not share < 0.5}  # a NaN too

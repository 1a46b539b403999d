"""Checkpoints once more, with other tensors or keys of their config."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

BLOCK_FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}
"""``quantization_config`` of a checkpoint as DeepSeek-V3's."""


def copied(source: Path, target: Path, tensors: dict[str, torch.Tensor], **config: Any) -> Path:
    """Write the tensors into a new folder, and the source's config with other keys."""
    target.mkdir()
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    known = json.loads((source / "config.json").read_text(encoding="utf-8"))
    (target / "config.json").write_text(json.dumps(known | config), encoding="utf-8")
    return target


def with_fused_experts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Put the experts of each layer (at most ten) into transformers' own two tensors."""
    found: dict[str, torch.Tensor] = {}
    experts: dict[tuple[str, str], list[torch.Tensor]] = {}
    for name, tensor in sorted(tensors.items()):
        one = re.fullmatch(r"(.*\.experts)\.\d\.(gate|up|down)_proj\.weight", name)
        if one is None:
            found[name] = tensor
        else:
            experts.setdefault((one[1], one[2]), []).append(tensor)
    for block in {block for block, _ in experts}:
        gate, up, down = (torch.stack(experts[block, leaf]) for leaf in ("gate", "up", "down"))
        found |= {f"{block}.gate_up_proj": torch.cat([gate, up], 1), f"{block}.down_proj": down}
    return found

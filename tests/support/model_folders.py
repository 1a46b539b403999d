"""Folders of tiny models in Hugging Face's format, as sources of an export."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

CONFIG = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 256,
    "vocab_size": 32,
}
ROWS = {"q_proj": 512, "k_proj": 256, "v_proj": 256, "gate_proj": 384, "up_proj": 384}


def weights(names: list[str], hidden: int = 256, **rows: int) -> dict[str, torch.Tensor]:
    """Random BF16 weights of modules with these names."""
    generator = torch.Generator().manual_seed(0)
    found = {}
    for name in names:
        leaf = name.split(".")[-1]
        height = (ROWS | rows).get(leaf, hidden)
        width = {"o_proj": 512, "down_proj": (ROWS | rows)["gate_proj"]}.get(leaf, hidden)
        shape = (hidden,) if "norm" in leaf else (height, width)
        found[f"{name}.weight"] = torch.randn(shape, generator=generator).bfloat16()
    return found


def model(
    folder: Path, tensors: dict[str, torch.Tensor], *, files: int = 1, **config: object
) -> Path:
    """A folder in Hugging Face's format, its tensors spread over files."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    (folder / "tokenizer.json").write_text("{}")
    if files == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    names = list(tensors)
    table = {}
    for number in range(files):
        part = {name: tensors[name] for name in names[number::files]}
        save_file(part, folder / f"part-{number}.safetensors")
        table |= dict.fromkeys(part, f"part-{number}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table}))
    return folder


def read(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder."""
    return {
        k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()
    }

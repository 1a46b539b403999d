"""Random LoRA adapters, and transformers with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from support.hf_reference import Reference

RANK, ALPHA = 8, 16
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LORA: dict[str, Any] = {"enable_lora": True, "max_lora_rank": RANK, "max_loras": 1}
"""Arguments of an engine that serves such adapters."""


def adapter(folder: Path, base: dict[str, torch.Tensor], seed: int) -> Path:
    """A random adapter of every linear layer, in the format of peft."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, weight in base.items():
        if name.split(".")[-2] in TARGETS:
            prefix = f"base_model.model.{name.removesuffix('.weight')}"
            rows, columns = weight.shape
            a = torch.randn(RANK, columns, generator=generator)
            b = torch.randn(rows, RANK, generator=generator)
            tensors |= {f"{prefix}.lora_A.weight": a / 20, f"{prefix}.lora_B.weight": b / 20}
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": TARGETS}
    (folder / "adapter_config.json").write_text(json.dumps(config | {"bias": "none"}))
    return folder


def with_adapter(reference: Reference, folder: Path) -> Reference:
    """Add the products of an adapter with the inputs before they are quantized, as peft does."""
    tensors = load_file(folder / "adapter_model.safetensors")
    for name, module in reference.model.named_modules():
        if f"base_model.model.{name}.lora_A.weight" not in tensors:
            continue
        a, b = (
            tensors[f"base_model.model.{name}.lora_{side}.weight"].to(module.weight)
            for side in "AB"
        )
        inputs = []

        def keep(module, args, inputs=inputs):
            inputs.append(args[0])

        def add(module, args, y, inputs=inputs, a=a, b=b):
            return y + ALPHA / RANK * (inputs.pop() @ a.t()) @ b.t()

        module.register_forward_pre_hook(keep, prepend=True)
        module.register_forward_hook(add)
    return reference

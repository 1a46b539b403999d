"""Run by test_gated_delta_net.py with a checkpoint and a folder, for each rank's ``RANK.pt``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from safetensors.torch import load_file
from transformers import AutoConfig

from fp8rl import Recipe
from fp8rl.recipe import KVCache
from megatron_fp8rl import convert
from megatron_fp8rl.export import export_hf, load_hf
from megatron_fp8rl.testing.cpu_shim import CpuShim
from support.launch import join
from support.megatron_delta_net import build_hybrid, delta_nets

RECIPE = Recipe(kv_cache=KVCache(dtype="auto"))
NORM = "decoder.layers.0.input_layernorm.weight"


def run(path: Path, **options: Any) -> dict[str, Any]:
    """Log-probabilities, gradients of ``in_proj`` and of a norm, and what the export returns."""
    tensors = load_file(path / "model.safetensors")
    model = build_hybrid(AutoConfig.from_pretrained(path), dtype=torch.float32, **options)
    load_hf(model, tensors)
    conversion = convert(model, RECIPE, report=lambda text: None)
    tokens = torch.randint(2, 512, (2, 16), generator=torch.Generator().manual_seed(5))
    logits = model(tokens, torch.arange(16).expand(2, -1), None)
    if options.get("tensor_model_parallel_size", 1) > 1:
        logits = gather_from_tensor_model_parallel_region(logits)
    logprobs = logits.float().log_softmax(-1).gather(2, tokens[..., None])
    logprobs.sum().backward()
    gradients = {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if name == NORM or name.endswith("in_proj.weight")
    }
    exported = dict(export_hf(model))
    off = max((exported[name] - tensor.float()).abs().max() for name, tensor in tensors.items())
    in_proj = conversion.modules["model.layers.0.linear_attn.in_proj_qkvz"]
    return {
        "logprobs": logprobs.detach(),
        "gradients": gradients,
        "off": float(off),
        "bf16_rows": gradient_of_bf16_rows(in_proj),
    }


def gradient_of_bf16_rows(linear: Any) -> dict[str, torch.Tensor]:
    """The input's gradient where only the rows in BF16 have one, and what it is made of."""
    rows = linear.fp8_state.codes.layout.rows
    generator = torch.Generator().manual_seed(1)
    whole = torch.randn(16, 2, linear.weight.shape[1], generator=generator)
    tokens = 8 if linear.sequence_parallel else 16
    x = whole[:tokens].requires_grad_()
    y = linear(x)[0][..., rows:]
    upstream = torch.randn(y.shape, generator=generator)
    (grad,) = torch.autograd.grad(y, x, upstream)
    weight = linear.weight.detach()[rows:].clone()
    return {"grad": grad, "upstream": upstream, "weight": weight}


if __name__ == "__main__":
    shim = CpuShim()
    with shim.active(), delta_nets():
        join()
        parallel_state.initialize_model_parallel(2, 1)
        model_parallel_cuda_manual_seed(1234)
        found = [
            run(Path(sys.argv[1]), tensor_model_parallel_size=2, sequence_parallel=flag)
            for flag in (False, True)
        ]
        rank = torch.distributed.get_rank()
    torch.save(found, Path(sys.argv[2], f"{rank}.pt"))

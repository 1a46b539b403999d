"""LoRA adapters over an FP8 base in vLLM: served for dense models, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fp8rl import Recipe
from fp8rl.errors import UnsupportedError
from fp8rl.recipe import Pins
from support.engine import KV_SCALE, PROMPTS, SCALES, Engine, load_tensors, same_bits
from support.hf_reference import Reference, load_reference
from support.sampled import sampled
from vllm_fp8rl.calibration import send_kv_scales
from vllm_fp8rl.refit import refit

RANK, ALPHA = 8, 16
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LORA = {"enable_lora": True, "max_lora_rank": RANK, "max_loras": 1}


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


RECIPE = Recipe(pins=Pins(last=1))
KV = dict.fromkeys(SCALES, KV_SCALE)


def differences(engine: Engine, reference: Reference, request: object) -> torch.Tensor:
    """In float64, of greedy answers: vLLM on a CPU has no prompt logprobs with adapters."""
    found, expected = [], []
    answers = sampled(engine.llm, PROMPTS, [8] * len(PROMPTS), lora_request=request)
    for prompt, (tokens, logprobs) in zip(PROMPTS, answers, strict=True):
        found += logprobs.tolist()
        wanted = reference.teacher_forced_logprobs(torch.tensor([tokens]))[0]
        expected += wanted[len(prompt) - 1 :].tolist()
    return (torch.tensor(found).double() - torch.tensor(expected).double()).abs()


def agree(engine: Engine, reference: Reference, request: object) -> bool:
    """Whether all but the positions behind a flipped code agree to float32 rounding."""
    found = differences(engine, reference, request)
    # A flip early in a prompt leaves no position of it; some CPUs flip in two of the three.
    return found.quantile(0.25).item() < 1e-5 and found.mean().item() < 2e-2


def test_adapters_over_an_fp8_base(engine, other_engine, checkpoints, tmp_path):
    """Codes of the base stay; only adapters change, each under a name of its own."""
    from vllm.lora.request import LoRARequest

    live = other_engine(checkpoints["a"], RECIPE, scaled=False, **LORA)
    send_kv_scales(live.llm, KV)
    before = {n: t for n, t in live.state().items() if "lora" not in n}
    base = load_tensors(checkpoints["a"])
    plain = load_reference(checkpoints["a"], RECIPE, kv_scales=KV)
    assert agree(live, plain, None)
    for number in (1, 2):
        folder = adapter(tmp_path / f"step-{number}", base, number)
        own = with_adapter(load_reference(checkpoints["a"], RECIPE, kv_scales=KV), folder)
        request = LoRARequest(f"step-{number}", number, str(folder))
        assert agree(live, own, request)
        assert differences(live, plain, request).median() > 0.1
    assert agree(live, plain, None)
    after = live.state()
    assert all(same_bits(after[name], tensor) for name, tensor in before.items())
    with pytest.raises(UnsupportedError, match="only adapters are exchanged"):
        refit(live.llm, base.items(), expect_kv_scales=False)
    assert agree(live, plain, None)

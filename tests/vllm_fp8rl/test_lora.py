"""LoRA adapters over an FP8 base in vLLM: served for dense models, and what is refused."""

from __future__ import annotations

import pytest
import torch

from fp8rl import Recipe
from fp8rl.errors import UnsupportedError
from fp8rl.recipe import Pins
from support.engine import KV_SCALE, PROMPTS, SCALES, Engine, load_tensors, same_bits
from support.hf_reference import Reference, load_reference
from support.lora import LORA, adapter, with_adapter
from support.sampled import sampled
from vllm_fp8rl.calibration import send_kv_scales
from vllm_fp8rl.refit import refit

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

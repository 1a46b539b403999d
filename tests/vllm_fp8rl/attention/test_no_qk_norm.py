"""FP8 KV cache under a Qwen2, whose large keys scale 1.0 clips and whose small values it loses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from fp8rl import Recipe
from support.engine import Engine
from support.gaps import gap
from support.hf_reference import load_reference
from support.teacher_forced import PROMPTS, vllm_logprobs
from vllm_fp8rl.calibration import calibrate_kv_scales, send_kv_scales

RECIPE = Recipe(rollout=False)  # the cache alone, so that nothing else is in the difference


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen2 with some large keys and biases of keys, and small values."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=128,
        max_position_embeddings=512,
        initializer_range=0.08,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    model = Qwen2ForCausalLM(config)
    for layer in model.model.layers:
        attention = layer.self_attn
        attention.q_proj.weight.data.mul_(0.1)
        # Slow frequencies of the rotary embedding, as in Qwen2.5; attention logits stay moderate.
        attention.k_proj.weight.data[56:64].mul_(250.0)
        attention.k_proj.bias.data[60:64] = 300.0
        for head in (0, 128):
            attention.q_proj.weight.data[head + 56 : head + 64].mul_(0.2)
        attention.v_proj.weight.data.mul_(2e-4)
        attention.v_proj.bias.data.zero_()
        attention.o_proj.weight.data.mul_(2500.0)
    path = tmp_path_factory.mktemp("qwen2")
    model.to(torch.bfloat16).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def started(qwen2: Path, other_engine: Callable[..., Engine]) -> Engine:
    return other_engine(qwen2, RECIPE)


def test_scale_1_spoils_what_calibrated_scales_keep(started, qwen2):
    unquantized = load_reference(qwen2, RECIPE).many(PROMPTS)
    found = calibrate_kv_scales(started.llm, PROMPTS)
    assert max(found.values()) * 448 > 900  # what scale 1.0 clips

    def error(**naive: float) -> float:
        """Mean difference from BF16's logprobs, in nats, with these scales of a role."""
        scales = {name: naive.get(name.rsplit(".")[-1], scale) for name, scale in found.items()}
        send_kv_scales(started.llm, scales)
        return gap(vllm_logprobs(started), unquantized).mean

    calibrated = error()
    assert calibrated < 0.1
    assert error(k_scale=1.0) > 4 * calibrated  # keys are clipped
    assert error(v_scale=1.0) > 10 * calibrated  # values vanish

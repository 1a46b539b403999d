"""QKV observers against what transformers' attention receives, in one process."""

from __future__ import annotations

import math

import pytest
import torch
from megatron.core.transformer.module import Float16Module
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    LlamaConfig,
    Qwen3Config,
)
from transformers.masking_utils import eager_mask
from transformers.models.qwen3.modeling_qwen3 import eager_attention_forward

from fp8rl.errors import CheckpointError, ScaleError
from megatron_fp8rl.export import load_hf
from megatron_fp8rl.kv.observers import QKVObserver
from megatron_fp8rl.testing.models import build_gpt

SIZES = {
    "vocab_size": 96,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 64,
}
CONFIGS = {"qwen3": Qwen3Config(**SIZES), "llama": LlamaConfig(**SIZES)}


def batch(seed: int = 0, length: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 96, (2, length), generator=generator)
    return ids, torch.arange(length).expand(2, -1)


@pytest.fixture
def model(mcore):
    return build_gpt(CONFIGS["qwen3"], dtype=torch.float32)


def run(model, seed: int = 0) -> torch.Tensor:
    return model(*batch(seed), None)


@pytest.mark.parametrize("name", CONFIGS)
def test_equals_what_transformers_attention_receives(mcore, name):
    seen = torch.zeros(3, 3)

    def spy(module, query, key, value, *args, **kwargs):
        for column, tensor in enumerate((query, key, value)):
            seen[module.layer_idx, column] = max(
                seen[module.layer_idx, column], tensor.abs().max().item()
            )
        return eager_attention_forward(module, query, key, value, *args, **kwargs)

    AttentionInterface.register("fp8rl_spy", spy)
    AttentionMaskInterface.register("fp8rl_spy", eager_mask)
    reference = AutoModelForCausalLM.from_config(
        CONFIGS[name], attn_implementation="fp8rl_spy", dtype=torch.float32
    )
    model = build_gpt(CONFIGS[name], dtype=torch.float32)
    load_hf(model, dict(reference.named_parameters()))
    observer = QKVObserver(model)
    with torch.no_grad():
        for seed in range(2):
            run(model, seed)
            reference(batch(seed)[0])
    assert (seen > 0).all()
    torch.testing.assert_close(observer.amax(), seen, rtol=1e-5, atol=0.0)
    scales = observer.scales(margin=1.25)
    assert len(scales) == 9
    for layer in range(3):
        for column, key in enumerate(("attn.q_scale", "k_scale", "v_scale")):
            scale = scales[f"model.layers.{layer}.self_attn.{key}"]
            exact = seen[layer, column].item() * 1.25 / 448
            around = {2.0 ** math.ceil(math.log2(exact * x)) for x in (1 - 1e-5, 1 + 1e-5)}
            assert scale.item() in around


def test_reset_and_close(mcore):
    gpt = build_gpt(CONFIGS["qwen3"])
    model = Float16Module(gpt.config, gpt)
    observer = QKVObserver(model)
    run(model)
    first = observer.amax()
    observer.reset()
    with pytest.raises(ScaleError, match=r"layers\.0\.self_attn\.attn\.q_scale' is 0"):
        observer.scales(1.05)
    run(model, seed=1)
    kept = observer.amax()
    assert not torch.equal(kept, first)
    observer.close()
    run(model)
    assert torch.equal(observer.amax(), kept)


def test_bad_activations_reach_the_error(model):
    observer = QKVObserver(model)
    run(model)
    with torch.no_grad():
        weight = model.decoder.layers[1].self_attention.linear_qkv.weight
        good = weight[-1].clone()  # the last row belongs to v of the last head
        weight[-1] = torch.nan
    run(model)
    with torch.no_grad():
        weight[-1] = good
    run(model)  # later good values must not wash it out
    assert observer.amax()[0].isfinite().all()
    assert not observer.amax()[1, 2].isfinite()
    with pytest.raises(ScaleError, match=r"layers\.1\.self_attn\.v_scale"):
        observer.scales(1.05)


def test_state_survives_a_checkpoint(model):
    observer = QKVObserver(model)
    run(model)
    state = observer.state_dict()
    resumed = QKVObserver(model)
    resumed.load_state_dict(state)
    assert torch.equal(resumed.amax(), observer.amax())
    run(model, seed=1)
    assert not torch.equal(state["amax"], observer.amax())  # a snapshot, not a view
    for bad in (torch.zeros(2, 3), state["amax"].double()):
        with pytest.raises(CheckpointError, match="must be float32"):
            resumed.load_state_dict({"amax": bad})
    assert torch.equal(resumed.amax(), observer.amax())
    # A NaN's sign, which processors set as they like, would make it the smallest integer.
    resumed.load_state_dict({"amax": -(state["amax"] * torch.nan).abs()})
    assert not resumed.state_dict()["amax"].signbit().any()

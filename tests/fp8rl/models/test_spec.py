"""What a config says about a model, and configs that no model has."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig

from fp8rl.errors import ModelError, UnsupportedError
from fp8rl.models.spec import ModelSpec
from support.configs import QWEN3_5, moonlight


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({}, None),
        (
            {"model_type": "new_dense", "num_hidden_layers": 2},
            "a dense model ('new_dense') of an unknown family",
        ),
        ({"model_type": "new", "num_experts": 8}, "an MoE model ('new') of an unknown family"),
        (
            {"model_type": "new", "kv_lora_rank": 512},
            "a model with multi-latent attention ('new') of an unknown family",
        ),
        (
            {"model_type": "qwen3_next", "num_experts": 0, "layer_types": ["linear_attention"]},
            "a model with linear attention or Mamba ('qwen3_next') of an unknown family",
        ),
        ({"model_type": "llama", "layer_types": ["sliding_attention", "full_attention"]}, None),
        (
            {"model_type": "new_vl", "vision_config": {}, "text_config": {"model_type": "new"}},
            "a multimodal model ('new') of an unknown family",
        ),
        ({"vision_config": {}, "text_config": {"model_type": "llama"}}, "a multimodal model ("),
        (
            {"model_type": "mixtral", "num_local_experts": 8},
            "a Mixtral model ('mixtral'): FP8 training does not serve experts named w1, w2 and w3",
        ),
    ],
)
def test_what_is_not_served_is_named(config: dict[str, Any], reason: str | None) -> None:
    found = ModelSpec.of(config).refused(rollout=True, training=True)
    assert found is None if reason is None else found is not None and found.startswith(reason)
    assert ModelSpec.of(config).refused(rollout=False, training=False) is None


@pytest.mark.parametrize("kind", ["apertus", "mamba"])
def test_a_dense_model_of_another_type_is_no_llama(kind: str) -> None:
    """Some have its linears and other tensors beside them, which a refit would not know."""
    config = AutoConfig.for_model(kind, num_hidden_layers=2)
    for form in (config, config.to_dict()):
        spec = ModelSpec.of(form)
        assert not spec.has_names
        reason = spec.refused(rollout=True, training=False)
        assert reason is not None and f"('{kind}') of an unknown family" in reason
        with pytest.raises(UnsupportedError, match=rf"'{kind}' are not known .known: llama, .*qw"):
            _ = spec.names


WIDTHS = {"hidden_size": 64, "vocab_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1}
LATENT = {"model_type": "deepseek_v3", "kv_lora_rank": 1, "num_hidden_layers": 1}
OF_LAYERS = QWEN3_5 | {"text_config": QWEN3_5["text_config"] | {"layer_types": "full_attention"}}


@pytest.mark.parametrize(
    ("config", "error", "match"),
    [
        (
            {"model_type": "new", "num_experts": 8, "num_hidden_layers": 1},
            UnsupportedError,
            r"'new' are not known .* add an entry to fp8rl/mod",
        ),
        (LATENT, ModelError, "no key 'n_routed_experts'; correct it"),
        (moonlight(moe_layer_freq=0), ModelError, "moe_layer_freq is 0; correct it"),
        (moonlight(first_k_dense_replace="a"), ModelError, "dense_replace is 'a'; correct it to"),
        (moonlight(n_shared_experts=-1), ModelError, "n_shared_experts is -1; correct it"),
        (moonlight(mlp_layer_types=["dense"]), ModelError, r"types is .'dense'.; correct it"),
        (OF_LAYERS, ModelError, "layer_types is 'full_attention'; correct it to a list"),
        (
            WIDTHS | {"intermediate_size": 96, "head_dim": 0},
            ModelError,
            "head_dim is 0; correct it to an integer from 1",
        ),
    ],
)
def test_configs_that_no_model_has(config: dict[str, Any], error: type, match: str) -> None:
    with pytest.raises(error, match=match):
        spec = ModelSpec.of(config)
        _ = spec.names, spec.numbers

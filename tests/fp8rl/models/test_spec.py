"""What a config says about a model, and configs that no model has."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any

import pytest
from transformers import AutoConfig

from fp8rl.errors import ModelError, UnsupportedError
from fp8rl.models import families
from fp8rl.models.families import FAMILIES
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
    ],
)
def test_models_of_unknown_families(config: dict[str, Any], reason: str | None) -> None:
    assert ModelSpec.of(config).refused(rollout=True, training=True) == reason
    assert ModelSpec.of(config).refused(rollout=False, training=False) is None


@pytest.mark.parametrize("kind", ["apertus", "vaultgemma", "gpt2", "mamba"])
def test_a_dense_model_of_another_type_is_no_llama(kind: str) -> None:
    """Some have its linears and other tensors beside them, which a refit would not know."""
    config = AutoConfig.for_model(kind, num_hidden_layers=2)
    for form in (config, config.to_dict()):
        spec = ModelSpec.of(form)
        assert not spec.has_names
        reason = spec.refused(rollout=True, training=False)
        assert reason is not None and f"('{kind}') of an unknown family" in reason
        with pytest.raises(
            UnsupportedError, match=rf"'{kind}' are not known .known: llama, .*qwen3"
        ):
            _ = spec.names


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@pytest.mark.parametrize("side", ["rollout", "training"])
def test_what_a_side_does_not_serve_is_named(family: families.Family, side: str) -> None:
    """An engine serves a family from the moment that nothing of it is missing."""
    kind = family.model_types[0]
    text = {"model_type": kind, "kv_lora_rank": 512 if family.attention.kv == "latent" else None}
    for config in (text, {"text_config": text, "vision_config": {}}):
        wanted = {"rollout": False, "training": False, side: True}
        found = ModelSpec.of(config).refused(**wanted)
        missing = family.missing.get(side)
        if config is not text and not family.wrapper:
            assert found == f"a multimodal model ('{kind}') of an unknown family"
        elif missing is None:
            assert found is None
        else:
            assert (
                found
                == f"a {family.name} model ('{kind}'): FP8 {side} does not serve {missing} yet"
            )


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
        (moonlight(n_shared_experts="2"), ModelError, "_experts is '2'; correct it to an integer"),
        (moonlight(n_shared_experts=-1), ModelError, "n_shared_experts is -1; correct it"),
        (moonlight(mlp_layer_types=["dense"]), ModelError, r"types is .'dense'.; correct it"),
        (OF_LAYERS, ModelError, "layer_types is 'full_attention'; correct it to a list"),
        (WIDTHS, ModelError, r"config\.json has no key 'intermediate_size'; corr"),
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


def test_a_description_is_frozen_and_layers_that_are_alike_are_one_object() -> None:
    spec = ModelSpec.of(moonlight(num_hidden_layers=4, num_nextn_predict_layers=2))
    with pytest.raises(FrozenInstanceError):
        spec.tied = True  # type: ignore[misc]
    assert [layer.sparse for layer in spec.layers] == [False, True, True, True]
    assert spec.layers[1] is spec.layers[3] and spec.layers[0] is not spec.layers[1]
    assert spec.mtp_layers == range(4, 6) and spec.experts == 2
    without = ModelSpec.of(moonlight(n_routed_experts=None))
    assert not any("experts" in name for name in without.names)
    numbers = ModelSpec.of({"text_config": WIDTHS | {"intermediate_size": 96}}).numbers
    assert numbers == WIDTHS | {"intermediate_size": 96}

"""Values of the wrong kind at every key that is read: an error that names the key, or no matter."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest

from fp8rl import Recipe
from fp8rl.errors import Fp8RLError, RecipeError
from nemo_rl_ext.config import drivers
from nemo_rl_ext.config.drivers import BLOCK, DRIVERS, GUARD, LOSS, MEGATRON, VLLM, check_places
from nemo_rl_ext.config.guard import GuardConfig
from nemo_rl_ext.config.keys import Sections
from nemo_rl_ext.config.merge import read
from nemo_rl_ext.config.value_kinds import _MAPPINGS as MAPPINGS
from nemo_rl_ext.config.value_kinds import KINDS
from support.nemo_rl import put

HOSTILE: tuple[Any, ...] = (
    *(3, -1, 1.5, math.nan, True, False, "yes", "false", "2", ""),
    *([], [1], [{}], {}, {"a": 1}, {1: 2}, None),
)
BLOCKS = [f"{section}.{BLOCK}" for section in (VLLM, MEGATRON, LOSS)]


def config(**changes: Any) -> dict[str, Any]:
    """A config of GRPO with every section that is read, the block at its three places, a guard."""
    value = {
        "policy": {
            "model_name": "none",
            "generation": {
                "backend": "vllm",
                "vllm_kwargs": {"additional_config": {}},
                "colocated": {},
                "vllm_cfg": {BLOCK: {}, "precision": "bfloat16"},
            },
            "megatron_cfg": {
                BLOCK: {},
                "enabled": True,
                "fp8_cfg": {},
                "peft": {},
                "model_overrides": {},
            },
            "router_replay": {},
        },
        "loss_fn": {BLOCK: {}, GUARD: {}},
        "grpo": {"async_grpo": {}},
        "ppo": {"async_ppo": {}},
        "async_rl": {"sampler": {}, "generation_fleet_health": {}},
        "data_plane": {},
    }
    for path, new in changes.items():
        put(value, path, new)
    return value


def paths_of(value: dict[str, Any], path: str = "") -> list[str]:
    found = []
    for key, inner in value.items():
        place = f"{path}.{key}" if path else key
        found += [place, *(paths_of(inner, place) if isinstance(inner, dict) else [])]
    return found


GENERATION = "policy.generation"
OTHERS = {
    "policy": "quant_cfg worker_extension_cls_fqn",
    GENERATION: "quant_cfg refit_transport worker_extension_cls_fqn backend lora_refit_mode",
    f"{GENERATION}.vllm_kwargs": "quantization kv_cache_dtype attention_backend moe_backend",
    f"{GENERATION}.vllm_kwargs.additional_config": BLOCK,
    VLLM: "kv_cache_dtype precision quantization_ignore_patterns",
    MEGATRON: "cuda_graph_impl",
    f"{MEGATRON}.fp8_cfg": "fp8 fp8_recipe fp8_param",
    f"{MEGATRON}.model_overrides": "fp8 fp8_recipe cuda_graph_impl",
    "grpo": "seq_logprob_error_threshold",
    f"{LOSS}.{GUARD}": " ".join(GuardConfig.model_fields),
    f"{LOSS}.{BLOCK}": " ".join(paths_of(Recipe().to_dict())),
    f"{LOSS}.{BLOCK}.importance_sampling.rejection": "high",
}
READ_KEYS = sorted(
    {
        *paths_of(config()),
        *(path for paths, _, _ in KINDS for path in paths),
        *MAPPINGS,
        *(f"{section}.{key}" for section, keys in OTHERS.items() for key in keys.split()),
    }
)


@pytest.mark.parametrize(("driver", "megatron"), [("grpo", True), ("single_controller", False)])
def test_no_value_of_a_key_that_is_read_ends_in_a_traceback(
    driver: str, megatron: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Naively a list in the place of a section is an AttributeError that names no key."""
    # The same names in each of thousands of configs.
    monkeypatch.setattr(drivers, "meant", functools.cache(drivers.meant))
    refused = 0
    for path in READ_KEYS:
        for value in HOSTILE:
            given = config(**{f"{MEGATRON}.enabled": megatron})
            put(given, path, value)
            if path.startswith(f"{LOSS}.{BLOCK}."):  # the three places hold one block
                for place in BLOCKS:
                    put(given, place, given["loss_fn"][BLOCK])
            try:
                check_places(given, DRIVERS[driver])
                read(Sections(given, DRIVERS[driver]))
            except Fp8RLError:
                refused += 1
            except Exception as error:
                pytest.fail(f"{path} = {value!r}: {type(error).__name__}: {error}")
    assert refused > len(READ_KEYS)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("policy", [1], r"'policy' is \[1\], not a section with keys"),
        (f"{MEGATRON}.enabled", "false", "must be true or false, not 'false'; write it without qu"),
        ("grpo.val_at_start", 2, "must be true or false, not 2; correct or remove it"),
        (f"{VLLM}.tensor_parallel_size", "2", "at least 1, not '2'; write it without quotes"),
        (f"{VLLM}.num_first_layers_in_bf16", -1, "must be a number of layers, not -1"),
        (f"{VLLM}.quantization_ignored_layer_kws", "up", r"not 'up'; write \[up\]"),
        (f"{LOSS}.truncated_importance_sampling_type", ["tis"], "must be a text"),
        (f"{LOSS}.truncated_importance_sampling_ratio", "2", "must be a number, not '2'"),
        ("ppo.async_ppo.max_trajectory_age_steps", "1", "must be a whole number of at least 0"),
        (f"{LOSS}.{BLOCK}", 3, "must be"),
        (f"{LOSS}.{GUARD}.skip_above", "2", "must be a valid number"),
    ],
)
def test_a_value_of_another_kind_is_refused_by_its_path(
    path: str, value: Any, message: str
) -> None:
    with pytest.raises(RecipeError, match=message) as raised:
        read(Sections(config(**{path: value}), DRIVERS["grpo"]))
    assert path in str(raised.value)


@pytest.mark.parametrize("path", [path for path, _, _ in KINDS])
def test_null_counts_as_absent(path: str) -> None:
    assert read(Sections(config(**{path: None}), DRIVERS["grpo"])) is not None

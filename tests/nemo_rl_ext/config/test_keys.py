"""The fp8rl keys of a NeMo RL config, on plain mappings of the shape that NeMo RL gives."""

from __future__ import annotations

import copy
import functools
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from fp8rl import Recipe
from fp8rl.errors import Fp8RLError, RecipeError, UnsupportedError
from fp8rl.models.spec import ModelSpec
from nemo_rl_ext.config import drivers
from nemo_rl_ext.config.checks import KV_BACKENDS, MOE_BACKENDS
from nemo_rl_ext.config.drivers import DRIVERS
from nemo_rl_ext.config.guard import GuardConfig
from nemo_rl_ext.config.keys import Sections
from nemo_rl_ext.config.merge import read
from nemo_rl_ext.config.model_pins import check_model
from nemo_rl_ext.config.plan import RunPlan
from nemo_rl_ext.config.upstream import announce_kv_scales, prepare
from nemo_rl_ext.config.value_kinds import KINDS
from support.hf import hf_config
from support.nemo_rl import MasterConfig, Section, put

GRPO = DRIVERS["grpo"]
GENERATION, MEGATRON, LOSS = "policy.generation.", "policy.megatron_cfg.", "loss_fn."
VLLM = f"{GENERATION}vllm_cfg."
SECTIONS = {"vllm": VLLM, "megatron": MEGATRON, "generation": GENERATION, "loss": LOSS}
PLACES = (f"{VLLM}fp8rl", f"{MEGATRON}fp8rl", "loss_fn.fp8rl")


def paths(short: str) -> list[str]:
    """Return the keys that an override sets: ``block`` stands for its three places."""
    section, _, rest = short.partition(".")
    if section == "block":
        return [f"{place}.{rest}" for place in PLACES]
    return [SECTIONS[section] + rest if section in SECTIONS else short]


def config(
    block: dict[str, Any] | None = None, overrides: str = "", **changes: Any
) -> dict[str, Any]:
    """A Megatron GRPO config: the block at all three places, overrides as on the command line."""
    vllm = {"precision": "bfloat16", "kv_cache_dtype": "auto", "async_engine": False}
    value: dict[str, Any] = {
        "policy": {
            "generation": {"backend": "vllm", "vllm_cfg": vllm},
            "megatron_cfg": {"enabled": True, "fp8_cfg": {"enabled": False, "fp8": "e4m3"}},
        },
        "loss_fn": {"use_importance_sampling_correction": True},
        "grpo": {"val_at_start": False},
    }
    for place in PLACES if block is not None else ():
        put(value, place, block)
    for part in overrides.split():
        path, equals, text = part.partition("=")
        for target in paths(path.removeprefix("~")):
            put(value, target, yaml.safe_load(text) if equals else None, out=not equals)
    value["policy"] |= changes
    return value


def recipe(block: dict[str, Any], overrides: str = "") -> Recipe:
    keys = read(Sections(config(block, overrides), GRPO))
    assert keys is not None
    return keys.recipe


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            """block.pins.layers=[3] block.pins.last=2 vllm.precision=fp8 vllm.kv_cache_dtype=fp8
            vllm.num_first_layers_in_bf16=1 vllm.num_last_layers_in_bf16=1
            vllm.pow2_weight_scaling_factors=true vllm.pow2_activation_scaling_factors=true
            vllm.quantization_ignored_layer_kws=[a_proj]
            megatron.fp8_cfg.enabled=true megatron.fp8_cfg.fp8_recipe=blockwise
            loss.truncated_importance_sampling_type=icepop
            loss.truncated_importance_sampling_ratio=5
            loss.truncated_importance_sampling_ratio_min=0.5""",
            {
                "pins": {"layers": [3], "first": 1, "last": 2, "names": ["*a_proj*"]},
                "weights": {"scale_format": "pow2"},
                "activations": {"scale_format": "pow2"},
                "importance_sampling": {"mode": "mask", "low": 0.5, "high": 5.0},
            },
        ),
        (
            "megatron.model_overrides.first_last_layers_bf16=true "
            "megatron.model_overrides.num_layers_at_start_in_bf16=2",
            {"pins": {"first": 2, "last": 1}},
        ),
        # Upstream's YAMLs have them here, where no line of NeMo RL looks.
        ("megatron.first_last_layers_bf16=true", {"pins": {"first": 1, "last": 1}}),
        (
            "loss.sequence_level_importance_ratios=true",
            {"importance_sampling": {"level": "sequence"}},
        ),
        (
            "loss.sequence_level_importance_ratios=true block.importance_sampling.level=token",
            {"importance_sampling": {"level": "token"}},
        ),
        ("vllm.expert_parallel_size=2", {}),  # every refit brings scales
        ("megatron.apply_rope_fusion=true", {"rope_dtype": "float32"}),
        ("megatron.apply_rope_fusion=true block.rope_dtype=auto", {}),
        (
            "block.training=false megatron.cuda_graph_impl=local block.kv_cache.in_training=false",
            {"training": False, "kv_cache": {"in_training": False}},
        ),
        ("policy.router_replay.enabled=true generation.vllm_kwargs.moe_backend=triton", {}),
        ("loss.fp8rl_guard.fallback=stop", {}),
    ],
)
def test_a_served_config_gives_its_recipe(overrides: str, expected: dict[str, Any]) -> None:
    keys = read(Sections(config({}, overrides), GRPO))
    assert keys is not None
    assert (keys.recipe, keys.notes) == (Recipe.from_dict(expected), ())


# A driver, overrides and a part of their error, in which {} is the path of the last override.
WRONG = """
block.weight={} | unknown key '{}'
loss.fp8rl=3 | {} must be a mapping
megatron.enabled="false" | '{}' must be true or false, not 'false'; write it without quotes
grpo.val_at_start=2 | '{}' must be true or false, not 2; correct or remove it
vllm.tensor_parallel_size="2" | '{}' must be a whole number of at least 1, not '2'; write it
vllm.num_last_layers_in_bf16=2.7 | '{}' must be a number of layers, not 2.7
vllm.num_first_layers_in_bf16=-1 | '{}' must be a number of layers, not -1
vllm.quantization_ignored_layer_kws=up | '{}' must be a list of words, not 'up'; write [up]
ppo.async_ppo.max_trajectory_age_steps="1" | '{}' must be a whole number of at least 0
loss.truncated_importance_sampling_type=[tis] | '{}' must be a text
loss.truncated_importance_sampling_ratio="2" | '{}' must be a number, not '2'
loss.fp8rl_guard=3 | '{}' must be a mapping
loss.fp8rl_guard.skip_above="2" | '{}' must be a valid number
loss.fp8rl_guard.tighten_above=3 | release_below <= tighten_above
block.kv_cache.margin=0.5
block.rollout=false vllm.precision=fp8 | '{}' asks for rollout=True
block.kv_cache.dtype=auto vllm.kv_cache_dtype=fp8_e4m3 | '{}' asks for kv_cache.dtype='fp8_e4m3'
block.weights.scale_format=fp32 vllm.pow2_weight_scaling_factors=true
block.training=false megatron.fp8_cfg.enabled=true | '{}' asks for training=True
generation.vllm_kwargs.quantization=fp8 | '{}' is 'fp8'
megatron.fp8rl.training=false |
    'policy.megatron_cfg.fp8rl' differs from 'policy.generation.vllm_cfg.fp8rl' in training
~vllm.fp8rl vllm.precision=fp8 | '{}' is fp8 without
~megatron.fp8rl megatron.fp8_cfg.enabled=true | '{}' is true without
~loss.fp8rl loss.use_importance_sampling_correction=false | set 'loss_fn.fp8rl' or '{}'
loss.fp8rl_guard.tighten=2
loss.fp8rl_guard.fallback=bf16 | '{}' must be 'stop', not 'bf16'
fp8rl_guard={} | '{}' has no effect
distillation: exact ~loss.fp8rl | exact' has no effect in run_distillation.py
~megatron.fp8rl policy.dtensor_cfg.fp8rl={} |
    'policy.dtensor_cfg.fp8rl' has no effect: 'policy.megatron_cfg.enabled' is true
block.rollout=false generation.vllm_kwargs.kv_cache_dtype=int8_per_token_head |
    kv_cache.dtype' int8_per_token_head has no effect: 'policy.generation.vllm_cfg.fp8rl.rollout' is
exact ~megatron.fp8rl
exact ~vllm.fp8rl
exact megatron.enabled=false
"""
NOT_SERVED = """
megatron.fp8_cfg.enabled=true megatron.fp8_cfg.fp8=hybrid | '{}' is 'hybrid'
megatron.fp8_cfg.enabled=true megatron.fp8_cfg.fp8_param=true | '{}' is True
megatron.fp8_cfg.enabled=true megatron.fp8_cfg.fp8_recipe=tensorwise
megatron.model_overrides.fp8=e4m3
vllm.is_mx=true
generation.quant_cfg=NVFP4
generation.backend=sglang | 'policy.generation.vllm_cfg.fp8rl' needs '{}' vllm, not 'sglang'
generation.backend=megatron ~vllm.fp8rl |
    'policy.megatron_cfg.fp8rl' needs 'policy.generation.backend' vllm, not 'megatron'
generation.nvfp4_pertoken_rollout.enabled=true | '{}' is true, which samples in NVFP4
megatron.fp4_cfg.enabled=true | '{}' is true, which trains in NVFP4
vllm.refit_with_reload_api=true | '{}' is true, by which vLLM reloads
vllm.quantization_ignore_patterns=[mtp.*] |
    write its names into 'policy.generation.vllm_cfg.fp8rl.pins.names' and remove it
generation.lora_refit_mode=native | '{}' is 'native', which sends adapters alone
policy.quant_cfg=NVFP4_DEFAULT_CFG | '{}' selects a Megatron worker
policy.worker_extension_cls_fqn=my.Worker | '{}' selects a Megatron worker in place of fp8rl's
policy.worker_extension_cls_fqn=my.Worker ~megatron.fp8rl |
    which 'policy.generation.vllm_cfg.fp8rl' needs; remove it, or the fp8rl block
generation.worker_extension_cls_fqn=my.Worker | '{}' selects a vLLM worker in place of fp8rl's
vllm.precision=nvfp4_pertoken | '{}' is 'nvfp4_pertoken'; with
vllm.refit_prequantize=true | '{}' is true, by which the trainer sends MXFP8
megatron.zero_train_gen_mismatch=true | '{}' is true, by which upstream's kernels make
megatron.peft.enabled=true megatron.peft.dim=8 |
    'policy.megatron_cfg.peft.enabled' is true, but FP8 training does not serve LoRA
generation.vllm_kwargs.enable_lora=true | '{}' is true, but NeMo RL sends merged
generation.refit_transport=nccl_reshard | '{}' is 'nccl_reshard'
loss.truncated_importance_sampling_type=seq-mask-tis | '{}' is 'seq-mask-tis'
megatron.enabled=false vllm.async_engine=true | '{}' false
megatron.enabled=false vllm.expert_parallel_size=2 | 'policy.megatron_cfg.enabled' true or '{}'
grpo.val_at_start=true vllm.expert_parallel_size=2 | 'grpo.val_at_start' false or '{}'
block.kv_cache.dtype=auto vllm.pipeline_parallel_size=2 | '{}' is 2
megatron.enabled=false vllm.async_engine=true block.kv_cache.recalibrate=grow |
    or a GRPO driver with 'policy.megatron_cfg.enabled' true
vllm.async_engine=true | 'policy.generation.vllm_cfg.fp8rl.kv_cache.recalibrate' grow or start, or
block.kv_cache.recalibrate=grow vllm.async_engine=true generation.colocated.enabled=true |
    '{}' false
block.kv_cache.recalibrate=start vllm.async_engine=true vllm.expert_parallel_size=2 |
    engines that share experts cannot pause one by one
block.kv_cache.recalibrate=grow ~megatron.fp8rl |
    'policy.generation.vllm_cfg.fp8rl.kv_cache.recalibrate' refit, or '{}'
block.importance_sampling.self_normalize=true data_plane.enabled=true |
    'loss_fn.fp8rl.importance_sampling.self_normalize' needs '{}' false
block.importance_sampling.rejection={"level":"token","high":2} data_plane.enabled=true |
    'loss_fn.fp8rl.importance_sampling.rejection.level' token
vllm.kv_cache_dtype=fp8_e5m2 | '{}' is 'fp8_e5m2'
generation.vllm_kwargs.attention_backend=FLASHMLA | '{}' is 'FLASHMLA'
block.kv_cache.dtype=int8_per_token_head generation.vllm_kwargs.attention_backend=FLASH_ATTN |
    to read a KV cache of dtype int8_per_token_head with its scales; set it to TRITON_ATTN, or
policy.router_replay.enabled=true generation.vllm_kwargs.moe_backend=flashinfer_trtllm |
    '{}' is 'flashinfer_trtllm', and 'policy.router_replay'
policy.router_replay.enabled=true megatron.model_overrides.moe_router_fusion=true | '{}' is true
block.importance_sampling.rejection.high=2 loss.force_on_policy_ratio=true |
    'loss_fn.fp8rl.importance_sampling.rejection' needs the trainer's logprobs
loss.force_on_policy_ratio=true loss.fp8rl_guard={} | '{}' needs the trainer's logprobs
~megatron.fp8rl megatron.pipeline_model_parallel_size=2 | needs 'policy.megatron_cfg.fp8rl' where
block.training=false megatron.cuda_graph_impl=local | '{}' is 'local', but a replayed graph
megatron.enabled=false block.kv_cache.in_training=true |
    in_training' needs 'policy.megatron_cfg.enabled' true
ppo: block.kv_cache.in_training=true | in_training' needs 'grpo' or the single contro
ppo: vllm.async_engine=true block.kv_cache.recalibrate=grow | cannot calibrate themselves
ppo: exact | 'run_ppo.py' sends no KV scales
exact megatron.env_vars.FP8RL_FUSED_LOGPROBS=1 | set it to "1", or
exact vllm.async_engine=true | or set it to int8_per_token_head
exact policy.precision=float16
exact policy.logprob_chunk_size=null
exact megatron.defer_fp32_logits=false
exact megatron.tensor_model_parallel_size=2
exact vllm.tensor_parallel_size=2
exact vllm.tensor_parallel_size=4 megatron.tensor_model_parallel_size=4
exact policy.router_replay.enabled=true
exact megatron.env_vars.FP8RL_FUSED_LOGPROBS='0'
exact megatron.model_overrides.should_pad_vocab=true
exact generation.temperature=0.8
exact generation.vllm_kwargs.speculative_config.method=mtp | vllm_kwargs.speculative_config'
exact grpo.val_at_start=true
automodel policy.dtensor_cfg.automodel_kwargs.force_hf=false | '{}' is false
automodel policy.dtensor_cfg.automodel_kwargs.use_liger_kernel=true | '{}' puts other modules
automodel policy.dtensor_cfg.automodel_kwargs.backend={} | '{}' puts other modules
automodel policy.dtensor_cfg.expert_parallel_size=2 | '{}' is 2
automodel policy.dtensor_cfg.lora_cfg.enabled=true | '{}' is true, and rollouts get merged weights
renamed policy.automodel_cfg.tensor_parallel_size=2 | with 'policy.automodel_cfg.fp8rl' is served
renamed policy.automodel_cfg.automodel_kwargs.force_hf=false | '{}' is false
dtensor policy.dtensor_cfg.tensor_parallel_size=2 | '{}' is 2
dtensor policy.dtensor_cfg.context_parallel_size=4 | '{}' is 4
dtensor policy.precision=float32 | '{}' is 'float32'
dtensor grpo.async_grpo.enabled=true | '{}' is true
dtensor vllm.async_engine=true | '{}' is true
dtensor data_plane.enabled=true | '{}' is true
dtensor policy.quant_cfg=X | selects a DTensor worker of another number format in place
dtensor policy.worker_extension_cls_fqn=a.B | 'policy.dtensor_cfg.fp8rl' needs; remove it
dtensor generation.backend=sglang | needs '{}' vllm
"""
EXACT = "policy.logprob_chunk_size=1024 megatron.defer_fp32_logits=true block.exact=true "
BY_DTENSOR = "megatron.enabled=false policy.dtensor_cfg.fp8rl={} policy.dtensor_cfg._v2=false "
BY_AUTOMODEL = BY_DTENSOR + "policy.dtensor_cfg._v2=true "
BY_RENAMED = "megatron.enabled=false policy.automodel_cfg.fp8rl={} "
NAMED = {
    "exact": EXACT,
    "dtensor": BY_DTENSOR,
    "automodel": BY_AUTOMODEL,
    "renamed": BY_RENAMED,
}


@pytest.mark.parametrize(
    ("kind", "row"),
    [
        (kind, row)
        for kind, rows in ((RecipeError, WRONG), (UnsupportedError, NOT_SERVED))
        for row in rows.strip().replace(" |\n    ", " | ").splitlines()
    ],
)
def test_a_wrong_config_is_refused_by_its_path(kind: type[Fp8RLError], row: str) -> None:
    given, _, part = row.partition(" | ")
    driver, _, overrides = given.rpartition(": ")
    first = overrides.partition(" ")[0]
    overrides = NAMED.get(first, first + " ") + overrides[len(first) :]
    path = paths(overrides.split()[-1].partition("=")[0].removeprefix("~"))[0]
    with pytest.raises(kind) as raised:
        read(Sections(config({}, overrides), DRIVERS[driver or "grpo"]))
    assert (part or "'{}'").replace("{}", path) in str(raised.value)
    assert part or first != "exact" or "exact" in str(raised.value)


HOSTILE: tuple[Any, ...] = (
    *(3, -1, 1.5, math.nan, True, False, "yes", "false", "2", ""),
    *([], [1], [{}], {}, {"a": 1}, {1: 2}, None),
)
EVERY_SECTION = """loss.fp8rl_guard={} policy.router_replay.enabled=true data_plane={}
grpo.async_grpo={} ppo.async_ppo={} async_rl.sampler={} generation.colocated={}
generation.vllm_kwargs.additional_config={} generation.nvfp4_pertoken_rollout={}
megatron.fp8_cfg.enabled=true megatron.fp4_cfg={} megatron.peft={} megatron.model_overrides={} """


class Recorded(dict[str, Any]):
    """A section that notes the path of each key that it has or is asked for."""

    def __init__(self, value: dict[str, Any], seen: set[str], path: str = "") -> None:
        self.seen, self.path = seen, path
        seen.update(path + key for key in value)
        inner = {
            key: Recorded(v, seen, f"{path}{key}.") if isinstance(v, dict) else v
            for key, v in value.items()
        }
        super().__init__(inner)

    def get(self, key: str, default: Any = None) -> Any:
        self.seen.add(self.path + key)
        return super().get(key, default)


@pytest.mark.parametrize(
    ("driver", "overrides"), [("grpo", ""), ("single_controller", "megatron.enabled=false")]
)
def test_no_value_of_a_key_that_is_read_ends_in_a_traceback(
    driver: str, overrides: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Naively a list in the place of a section is an AttributeError that names no key."""
    # The same names in each of thousands of configs.
    monkeypatch.setattr(drivers, "meant", functools.cache(drivers.meant))
    base, seen = config({}, EVERY_SECTION + overrides, model_name="none"), set[str]()
    Recorded({"fp8rl": Recipe().to_dict(), "fp8rl_guard": dict(GuardConfig())}, seen, "loss_fn.")
    read(Sections(Recorded(base, seen), DRIVERS[driver]))
    assert {path for path, _, _ in KINDS} <= seen
    refused = 0
    for path in sorted(seen):
        for value in HOSTILE:
            given = copy.deepcopy(base)
            put(given, path, value)
            if path.startswith("loss_fn.fp8rl."):  # the three places hold one block
                for place in PLACES:
                    put(given, place, given["loss_fn"]["fp8rl"])
            try:
                read(Sections(given, DRIVERS[driver]))
            except Fp8RLError:
                refused += 1
            except Exception as error:
                pytest.fail(f"{path} = {value!r}: {type(error).__name__}: {error}")
    assert refused > len(seen)


def test_null_counts_as_absent() -> None:
    for path, _, _ in KINDS:
        assert read(Sections(config({}, f"{path}=null"), GRPO)) is not None, path


@pytest.mark.parametrize(
    "overrides",
    [
        "",
        "block.kv_cache.dtype=int8_per_token_head grpo.val_at_start=true",
        "generation.temperature=1.0 generation.top_p=1.0 generation.top_k=-1",
        "megatron.tensor_model_parallel_size=2 megatron.sequence_parallel=true "
        "vllm.tensor_parallel_size=2",
        "vllm.async_engine=true block.kv_cache.recalibrate=grow",
        "loss.force_on_policy_ratio=true",
    ],
)
def test_what_is_exact(overrides: str, caplog: pytest.LogCaptureFixture) -> None:
    assert recipe({}, EXACT + overrides).exact
    made = MasterConfig(**config({}, EXACT + overrides, model_name="none"))
    prepared = prepare(made, GRPO, lambda key: None)
    assert prepared is not None and prepared.recipe.exact
    # Logits that vLLM 0.25 has processed are in float32, whose sums have another order.
    assert made.policy["generation"]["vllm_cfg"]["logprobs_mode"] == "raw_logprobs"
    assert "exact needs DeepGEMM" in caplog.text  # its worker would raise after Ray has started
    unseen = "whether exact holds is not checked" in caplog.text
    assert unseen == ("force_on_policy_ratio" in overrides)


MODELS: dict[str, dict[str, Any]] = {
    **{name: {"model_type": name} for name in ("qwen2", "qwen3", "llama")},
    "moe": {"model_type": "qwen3_moe", "num_experts": 4},
    "of two kinds": {
        "model_type": "qwen2_5_vl",
        "text_config": {"num_hidden_layers": 2},
        "vision_config": {},
    },
    "unknown experts": {"model_type": "new", "num_local_experts": 8},
    "latent": {"model_type": "deepseek_v3", "kv_lora_rank": 512, "n_routed_experts": 8},
}
OFF = "block.rollout=false block.training=false "
BF16_CACHE = "block.kv_cache.dtype=auto "
TWO_RANKS = "megatron.tensor_model_parallel_size=2 vllm.tensor_parallel_size=2"
PINS = r"vllm_cfg\.fp8rl\.pins\."


@pytest.mark.parametrize(
    ("model", "overrides", "message"),
    [
        ("qwen3", "block.pins.layers=[0,-2]", None),
        ("qwen3", 'block.pins={"names":["model.layers.1.mlp.*"],"kinds":["qkv_proj"]}', None),
        ("qwen3", "block.pins.layers=[1,2]", PINS + "layers: 2 matches nothing"),
        ("qwen3", EXACT, None),
        ("qwen2", EXACT, "serves models of type llama, qwen3.*, and .* of type 'qwen2'"),
        ("llama", EXACT + "block.pins.last=1", r"'model\.layers\.1\..*' is pinned to BF16"),
        ("moe", EXACT + TWO_RANKS, "has experts, but"),
        ("of two kinds", "", "a multimodal model .* remove the block"),
        ("of two kinds", OFF, None),
        ("unknown experts", OFF + "block.rollout=true", r"fp8rl' does not serve .* model"),
        ("unknown experts", OFF + "block.training=true", None),
        ("latent", "", r"fp8rl\.kv_cache\.dtype' is fp8_e4m3, but .* set it to auto"),
        ("latent", "block.kv_cache.dtype=int8_per_token_head", "no INT8 cache of latents; set it"),
        ("latent", BF16_CACHE, None),
        ("latent", BF16_CACHE + 'block.pins.fp8=["*.kv_b_proj"]', None),
    ],
)
def test_what_does_not_fit_the_model_is_refused_before_ray(
    model: str, overrides: str, message: str | None, tmp_path: Path
) -> None:
    values = {"num_hidden_layers": 2, **MODELS[model]}
    (tmp_path / "config.json").write_text(json.dumps(values))
    made = MasterConfig(**config({}, overrides, model_name=str(tmp_path)))
    if message is None:
        prepare(made, GRPO, lambda key: None)
        return
    before = copy.deepcopy(made.policy)
    with pytest.raises(Fp8RLError, match=message):
        prepare(made, GRPO, lambda key: None)
    assert made.policy == before


INT8 = "kv_cache.dtype=int8_per_token_head"
EXACT_CACHES = ("int8_per_token_head", "auto")
INT8_ENGINE = "generation.vllm_kwargs.kv_cache_dtype=int8_per_token_head"
GROW = "block.kv_cache.recalibrate=grow vllm.async_engine=true "


@pytest.mark.parametrize(
    ("driver", "overrides", "asked", "announced"),
    [
        ("grpo", GROW + "grpo.async_grpo.in_flight_weight_updates=true", "fp8_e4m3", "fp8"),
        ("single_controller", GROW, "fp8_e4m3", "fp8"),
        # The engine makes the scales, or there are none: so the driver must not ask for them.
        ("grpo", "megatron.enabled=false grpo.val_at_start=true", "fp8_e4m3", "auto"),
        ("grpo", f"block.{INT8} vllm.async_engine=true", "int8_per_token_head", "auto"),
        ("grpo", f"{INT8_ENGINE} vllm.async_engine=true", "int8_per_token_head", "auto"),
        ("grpo", "block.rollout=false", None, "auto"),
    ],
)
def test_the_engine_has_the_cache_and_the_driver_is_told_of_scales_that_are_sent(
    driver: str, overrides: str, asked: str | None, announced: str
) -> None:
    run = MasterConfig(**config({}, overrides))
    prepare(run, DRIVERS[driver], lambda key: None)
    announce_kv_scales(run.policy)
    generation = run.policy["generation"]
    assert generation["vllm_cfg"]["kv_cache_dtype"] == announced
    assert generation.get("vllm_kwargs", {}).get("kv_cache_dtype") == asked


def test_keys_of_newer_releases_that_ask_for_nothing_else_are_served() -> None:
    """A checkpoint's config names our classes where NeMo RL has a key for them."""
    ours = "nemo_rl_ext.workers"
    value = config(
        {},
        f"""policy.worker_extension_cls_fqn={ours}.megatron.Fp8MegatronPolicyWorker
        generation.worker_extension_cls_fqn={ours}.vllm.Fp8VllmGenerationWorker
        generation.nvfp4_pertoken_rollout.enabled=false megatron.fp4_cfg.enabled=false
        vllm.refit_with_reload_api=false""",
    )
    run = MasterConfig(**value)
    assert prepare(run, GRPO, lambda key: None) is not None
    assert "worker_extension_cls_fqn" not in {**run.policy, **run.policy["generation"]}
    assert run.policy["generation"]["lora_refit_mode"] == "merged"


DTENSOR = "the DTensor trainer runs in BF16; only the rollouts run in FP8."
ITSELF = "vLLM calibrates them itself"
OWN = r"attends over K and V in its own dtype.*DTensor workers"
UNTOLD = r"attends over K and V in its own dtype.*NeMo RL does not pass them back"


@pytest.mark.parametrize(
    ("driver", "overrides", "in_training", "notes"),
    [
        ("grpo", "", True, []),
        ("grpo", "block.kv_cache.dtype=auto megatron.enabled=false", False, [DTENSOR]),
        (
            "grpo",
            "megatron.enabled=false megatron.apply_rope_fusion=true",
            False,
            [DTENSOR, ITSELF, OWN],
        ),
        ("ppo", "", False, [ITSELF, UNTOLD]),
        # Of an INT8 cache nothing has to be sent, so it depends on the trainer alone.
        ("ppo", f"block.{INT8}", True, []),
        ("ppo", INT8_ENGINE, True, []),
        ("grpo", f"block.{INT8} megatron.enabled=false", False, [DTENSOR, OWN]),
        *(("ppo", EXACT + f"block.kv_cache.dtype={t}", "int8" in t, []) for t in EXACT_CACHES),
    ],
)
def test_a_trainer_attends_over_the_rollouts_cache_where_it_can_and_says_where_not(
    driver: str, overrides: str, in_training: bool, notes: list[str]
) -> None:
    keys = read(Sections(config({}, overrides), DRIVERS[driver]))
    assert keys is not None and keys.recipe.rollout and keys.recipe.rope_dtype == "auto"
    assert keys.recipe.training == (DTENSOR not in notes)
    assert keys.recipe.kv_cache.in_training is in_training
    assert keys.rounded_as == (keys.recipe.kv_cache.dtype if in_training else "auto")
    assert (keys.kv_scales == "engine") == (ITSELF in notes)
    assert len(keys.notes) == len(notes), keys.notes
    for said, expected in zip(keys.notes, notes, strict=True):
        assert re.search(expected, said)


@pytest.mark.parametrize("trainer", ["dtensor", "automodel", "renamed"])
def test_a_trainer_without_megatron_does_by_the_block_all_that_megatrons_does(trainer: str) -> None:
    overrides = NAMED[trainer] + "~megatron.fp8rl "
    plan = read(Sections(config({}, overrides), GRPO))
    assert plan is not None and plan.recipe == plan.of_trainer == Recipe()
    assert (plan.kv_scales, plan.rounded_as, plan.replaces_trainer) == ("trainer", "fp8_e4m3", True)
    assert not plan.notes
    assert RunPlan.model_validate(plan.to_dict()) == plan
    run = MasterConfig(**config({}, overrides))
    assert prepare(run, GRPO, lambda key: None) is not None
    written = {"fp8rl": plan.recipe.to_dict()}
    if trainer != "renamed":
        written["_v2"] = trainer == "automodel"
    if trainer != "dtensor":  # else Automodel prefers models of its own
        written["automodel_kwargs"] = {"force_hf": True}
    section = plan.trainer.removeprefix("policy.")
    assert section == ("automodel_cfg" if trainer == "renamed" else "dtensor_cfg")
    assert run.policy[section] == written


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_a_dtensor_trainer_serves_dense_models(kind: str) -> None:
    plan = read(Sections(config({}, BY_DTENSOR), GRPO))
    assert plan is not None
    model = ModelSpec.of(hf_config(kind))
    if kind == "llama":
        assert check_model(plan, {}, model)[0].replaces_trainer
        return
    with pytest.raises(UnsupportedError, match=f"'policy.dtensor_cfg.fp8rl' serves.*'{kind}'"):
        check_model(plan, {}, model)


@pytest.mark.parametrize(
    ("overrides", "again"),
    [
        ("block.kv_cache.dtype=auto", ""),
        ("block.kv_cache.dtype=int8_per_token_head", ""),
        ("~vllm.fp8rl", "~vllm.fp8rl"),
        ("megatron.enabled=false", "megatron.enabled=false"),
    ],
)
def test_a_block_with_every_key_is_read_again(overrides: str, again: str) -> None:
    """From the config that a checkpoint keeps, with all keys written out."""
    first = recipe({}, overrides)
    assert first.kv_cache.in_training is ("int8" in overrides), "where the cache has 8 bits"
    assert recipe(first.to_dict(), again) == first


def test_workers_get_the_merged_recipe_and_upstreams_fp8_is_off() -> None:
    value = config(
        {"pins": {"first": 1}},
        """vllm.precision=fp8 vllm.kv_cache_dtype=fp8 vllm.num_last_layers_in_bf16=2
        megatron.fp8_cfg.enabled=true
        generation.vllm_kwargs.additional_config.mine=1 generation.vllm_kwargs.seed=3""",
    )
    run = MasterConfig(**value)
    asked: list[str] = []
    plan = prepare(run, GRPO, asked.append)

    expected = Recipe.from_dict({"pins": {"first": 1, "last": 2}}).to_dict()
    vllm = run.policy["generation"]["vllm_cfg"]
    assert asked == ["policy.generation.vllm_cfg.fp8rl"]
    assert (vllm["precision"], vllm["kv_cache_dtype"]) == ("bfloat16", "auto")
    assert vllm["fp8rl"] == run.policy["megatron_cfg"]["fp8rl"] == run.loss_fn.fp8rl == expected
    assert run.policy["megatron_cfg"]["fp8_cfg"] == {"enabled": False, "fp8": "e4m3"}
    from vllm_fp8rl import engine_args

    arguments = run.policy["generation"]["vllm_kwargs"]
    ours = engine_args(Recipe.from_dict(expected))
    del ours["worker_extension_cls"]  # which the worker names
    ours["additional_config"]["mine"] = 1
    assert arguments == {**ours, "seed": 3}

    assert plan == RunPlan.of(run.policy) == RunPlan.of(run.loss_fn)
    announce_kv_scales(run.policy)
    assert vllm["kv_cache_dtype"] == "fp8"


def test_a_plan_that_no_block_asks_for_any_more_goes() -> None:
    """The config that a checkpoint keeps has the plan of its run."""
    first = MasterConfig(**config({}))
    prepare(first, GRPO, lambda key: None)
    kept = first.model_dump()
    del kept["policy"]["generation"]["vllm_kwargs"]["additional_config"]
    for section in (kept["policy"]["generation"]["vllm_cfg"], kept["policy"]["megatron_cfg"]):
        del section["fp8rl"]
    del kept["loss_fn"]["fp8rl"]
    again = MasterConfig(**kept)
    assert prepare(again, GRPO, lambda key: None) is None
    assert RunPlan.of(again.policy) is None and RunPlan.of(again.loss_fn) is None


@pytest.mark.parametrize(
    ("experts", "overrides", "warned"),
    [
        (True, "", True),  # Megatron-Bridge's default for this model
        (True, "megatron.moe_grouped_gemm=false", False),
        (False, "megatron.moe_grouped_gemm=true", True),  # the config cannot be read here
        (False, "", False),
    ],
)
def test_grouped_experts_without_deepgemm_are_warned_of_in_the_driver(
    experts: bool, overrides: str, warned: bool, tmp_path: Path, caplog: Any
) -> None:
    """Their worker would raise after Ray has started."""
    if experts:
        (tmp_path / "config.json").write_text(json.dumps(MODELS["moe"] | {"num_hidden_layers": 2}))
    given = config({"pins": {"layers": [1]}}, overrides, model_name=str(tmp_path))
    prepare(MasterConfig(**given), GRPO, lambda key: None)
    assert ("pins are checked by the workers" in caplog.text) == (not experts)
    text = " ".join(message for message in caplog.messages if "grouped experts" in message)
    assert bool(text) == warned
    for remedy in ("DeepGEMM", "'policy.megatron_cfg.moe_grouped_gemm' to false", "pins.kinds"):
        assert not warned or remedy in text


def test_the_backends_are_those_of_the_engine_plugin_and_of_vllm() -> None:
    from vllm.config import CompilationConfig
    from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend

    from vllm_fp8rl.kernels.moe import fused_moe
    from vllm_fp8rl.quantization.kv_cache import check_backend

    for name in KV_BACKENDS["fp8_e4m3"]:
        check_backend(name, CompilationConfig(cudagraph_mode="NONE"))
    assert (TritonAttentionBackend.get_name(),) == KV_BACKENDS["int8_per_token_head"]
    assert "int8_per_token_head" in TritonAttentionBackend.supported_kv_cache_dtypes
    assert set(MOE_BACKENDS) == {"auto", *fused_moe._BACKENDS}


ASYNC = "grpo.async_grpo"


@pytest.mark.parametrize(
    ("driver", "overrides", "given", "waits", "threshold"),
    [
        ("grpo", "loss.fp8rl_guard={}", None, False, None),
        ("grpo", f"{ASYNC}.enabled=false {ASYNC}.max_trajectory_age_steps=4", None, False, None),
        ("grpo", f"{ASYNC}.enabled=true {ASYNC}.max_trajectory_age_steps=4", None, True, None),
        ("single_controller", "", None, True, None),
        ("single_controller", "loss.fp8rl_guard={}", 1.5, True, 1.5),
        # It takes masks back only where the threshold is set.
        ("single_controller", "loss.fp8rl_guard={}", None, True, math.inf),
    ],
)
def test_drivers_that_train_pieces_or_batches_that_have_waited_are_known(
    driver: str, overrides: str, given: float | None, waits: bool, threshold: float | None
) -> None:
    value = config({}, f"block.kv_cache.dtype=auto {overrides}")
    grpo = Section(**value["grpo"], seq_logprob_error_threshold=given)
    made = MasterConfig(**{**value, "grpo": grpo})
    prepare(made, DRIVERS[driver], lambda key: None)
    plan = RunPlan.of(made.loss_fn)
    assert plan == RunPlan.of(made.policy) is not None
    assert plan.in_pieces is (driver == "single_controller")
    assert plan.queues_batches is waits
    assert made.grpo.seq_logprob_error_threshold == threshold

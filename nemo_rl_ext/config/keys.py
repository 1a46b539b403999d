"""The ``fp8rl`` keys of a NeMo RL config: read, compared with upstream's own keys, spread.

One block, a :class:`fp8rl.Recipe`, stands at up to three places (interpolated from one): with
``policy.generation.vllm_cfg.fp8rl`` the rollouts run by it, with ``policy.megatron_cfg.fp8rl`` the
Megatron trainer, with ``loss_fn.fp8rl`` the loss. ``loss_fn.fp8rl_guard`` is a
:class:`nemo_rl_ext.driver.mismatch_guard.GuardConfig`. :mod:`nemo_rl_ext.config.drivers` says which of them a driver has.

The block says what runs in FP8. Upstream's own keys keep their meaning and add to it where it is
silent; where both speak and differ, or where fp8rl has no counterpart, the key is refused by its
full path.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fp8rl import Recipe
from fp8rl.errors import RecipeError, UnsupportedError
from fp8rl.recipe import KVCache
from nemo_rl_ext.autoload import SWITCH, switched_off
from nemo_rl_ext.config.drivers import (
    ARGUMENTS,
    BLOCK,
    DRIVER,
    GUARD,
    LOSS,
    MAX_AGE,
    MEGATRON,
    VLLM,
    Driver,
    check_places,
)
from nemo_rl_ext.config.model_pins import check_pins
from nemo_rl_ext.config.worker_block import WorkerBlock
from nemo_rl_ext.driver.mismatch_guard import LOGGER, GuardConfig

logger = logging.getLogger(LOGGER)

READERS = {
    "rollout": (VLLM,),
    "training": (MEGATRON,),
    "weights": (VLLM, MEGATRON),
    "activations": (VLLM, MEGATRON),
    "pins": (VLLM, MEGATRON),
    "kv_cache": (VLLM,),
    "importance_sampling": (LOSS,),
}
"""Key of a recipe -> sections of which one must have the block, or nobody acts on the key."""
QUANTIZATION = "fp8rl"
"""``vllm_fp8rl.NAME``; this package must not import an engine's to read a config."""

KV_BACKENDS = ("FLASH_ATTN", "TRITON_ATTN", "CPU_ATTN", "FLASHINFER")
"""Attention backends that ``vllm_fp8rl.quantization.kv_cache.check_backend`` knows."""

_MODES = {"tis": "truncate", "icepop": "mask"}


@dataclass(frozen=True)
class Keys:
    """What a config asks for, after comparison with upstream's keys."""

    recipe: Recipe
    places: tuple[str, ...]
    """Paths at which the block stands, the first one for messages."""
    guard: GuardConfig | None
    notes: tuple[str, ...]
    """Sentences for the log."""


def read(config: Mapping[str, Any], driver: Driver) -> Keys | None:
    """Read and check the keys; nothing is changed.

    Args:
        config: NeMo RL's config as plain mappings.
        driver: whose config it is.

    Returns:
        None where the config has no ``fp8rl`` key at all.

    Raises:
        RecipeError: an unknown key, one that nobody reads, a bad value, or one that contradicts
            upstream's key.
        UnsupportedError: an upstream key that fp8rl does not serve.
    """
    check_places(config, driver)
    policy = config.get("policy") or {}
    generation = policy.get("generation") or {}
    sections = {path: _section(config, path) for path in (VLLM, MEGATRON, LOSS)}
    blocks = {path: s[BLOCK] for path, s in sections.items() if s.get(BLOCK) is not None}
    copies = {
        path: section[BLOCK]
        for path, section in (("", config), (ARGUMENTS, _section(config, ARGUMENTS)))
        if section.get(BLOCK) is not None
    }
    unused = [_key(path) for path in copies if not blocks or (path and VLLM not in blocks)]
    if not blocks and sections[LOSS].get(GUARD) is not None:
        unused.insert(0, f"{LOSS}.{GUARD}")
    if unused:
        places = " and ".join(f"'{_key(path)}'" for path in driver.serves)
        raise RecipeError(
            f"'{unused[0]}' is set, but no section uses it; "
            + (f"interpolate the recipe into {places}." if places else _not_served(driver))
        )
    if not blocks:
        return None
    first = _key(next(iter(blocks)))
    block = next(iter(blocks.values()))
    given = Recipe.from_dict(block, where=first)
    for path, other in {**blocks, **copies}.items():
        if other != block:
            Recipe.from_dict(other, where=_key(path))
            keys = sorted(k for k in {*block, *other} if block.get(k) != other.get(k))
            raise RecipeError(
                f"'{_key(path)}' differs from '{first}' in {', '.join(keys)}; interpolate all "
                "of them from one block."
            )
    _refuse_unread_settings(block, given, first, blocks, sections, driver)
    merged = _Merge(block, first)
    notes: list[str] = []
    _rollout(merged, sections, generation, VLLM in blocks, driver)
    _training(merged, sections, MEGATRON in blocks, notes)
    _loss(merged, sections[LOSS], LOSS in blocks)
    recipe = Recipe.from_dict(merged.data, where=first)
    sent = driver.sends_kv_scales and _sends_kv_scales(policy)
    if _fp8_kv(recipe) and not sent:
        notes.append("no KV scales are sent; vLLM calibrates them itself after each refit.")
    _refuse_unserved(recipe, config, sections, driver, LOSS in blocks)
    if LOSS in blocks:
        _refuse_unseen_batches(recipe, config, sections[LOSS], driver)
    guard = None
    if sections[LOSS].get(GUARD) is not None:
        if LOSS not in blocks:
            raise RecipeError(f"'{LOSS}.{GUARD}' needs '{LOSS}.{BLOCK}'; set both or neither.")
        guard = GuardConfig.from_dict(sections[LOSS][GUARD], where=f"{LOSS}.{GUARD}")
        _refuse_fixed_engines(guard, recipe, config, sections[VLLM])
    return Keys(recipe, tuple(_key(p) for p in blocks), guard, tuple(notes))


def _section(config: Mapping[str, Any], path: str) -> Mapping[str, Any]:
    found: Any = config
    for part in path.split("."):
        found = found.get(part) or {}
    return found


def _key(section: str) -> str:
    return f"{section}.{BLOCK}" if section else BLOCK


def _not_served(driver: Driver) -> str:
    return f"{driver.scripts[0]} serves none ({driver.why_not}), so remove it."


def _refuse_unread_settings(
    block: Mapping[str, Any],
    given: Recipe,
    where: str,
    blocks: Mapping[str, Any],
    sections: Mapping[str, Mapping[str, Any]],
    driver: Driver,
) -> None:
    """What the block asks for must be somebody's to do; defaults, and BF16, ask for nothing."""
    acting = set(blocks)
    if not sections[MEGATRON].get("enabled"):
        acting.discard(MEGATRON)
        if set(blocks) == {MEGATRON}:
            raise UnsupportedError(
                f"'{where}' needs '{MEGATRON}.enabled' true: DTensor workers train in BF16; set "
                "it, or remove the block."
            )
    for key, readers in READERS.items():
        value = getattr(given, key)
        asks = key in block and value != type(value)() and value != KVCache(dtype="auto")
        if not asks or acting & set(readers):
            continue
        missing = [path for path in readers if path in driver.serves]
        if MEGATRON in blocks and key == "training":
            reason = f"DTensor workers train in BF16; set it to false, or '{MEGATRON}.enabled' true"
        elif missing:
            reason = f"'{_key(missing[0])}' is not set; interpolate the block there, or remove it"
        else:
            reason = f"{driver.scripts[0]} has no use for it ({driver.why_not}); remove it"
        raise RecipeError(f"'{where}.{key}' has no effect: {reason}.")


def prepare(config: Any, driver: Driver, require: Callable[[str], None]) -> None:
    """Check a ``MasterConfig`` and turn its keys into what the workers read; in place.

    Upstream's own FP8 paths are switched off (``precision: bfloat16``, ``fp8_cfg.enabled: false``),
    the engine gets ``vllm_kwargs.quantization: fp8rl``, which an installation without the plugin
    refuses, and every block becomes the merged recipe.

    Args:
        config: a ``MasterConfig``, whose ``policy`` is a dict and whose ``loss_fn``, if it has one,
            is a model.
        driver: see :func:`read`.
        require: called with a key's path when there is a block; raises where a seam does not fit.

    Raises:
        RecipeError: also for a pin that matches nothing of the model.
        RecipeError, UnsupportedError: see :func:`read`; nothing has been changed then.
    """
    plain = config.model_dump()
    keys = read(plain, driver)
    if keys is None:
        return
    require(keys.places[0])
    check_pins(keys.recipe, keys.places[0], config.policy)
    _refuse_closed_workers(keys.recipe, config.policy)
    recipe, block = keys.recipe, keys.recipe.to_dict()
    if f"{VLLM}.{BLOCK}" in keys.places:
        generation = config.policy["generation"]
        vllm = generation["vllm_cfg"]
        vllm[BLOCK] = block
        vllm["precision"] = "bfloat16"
        vllm["kv_cache_dtype"] = "auto"  # until announce_kv_cache
        if recipe.rollout:
            arguments = generation.get("vllm_kwargs") or {}
            generation["vllm_kwargs"] = {
                **arguments,
                "quantization": QUANTIZATION,
                "kv_cache_dtype": recipe.kv_cache.dtype,
                "additional_config": {
                    **(arguments.get("additional_config") or {}),
                    BLOCK: block,
                },
            }
    if f"{MEGATRON}.{BLOCK}" in keys.places:
        megatron = config.policy["megatron_cfg"]
        megatron[BLOCK] = WorkerBlock(block)
        if megatron.get("fp8_cfg"):
            megatron["fp8_cfg"] = {**megatron["fp8_cfg"], "enabled": False}
    if f"{LOSS}.{BLOCK}" in keys.places:
        setattr(config.loss_fn, BLOCK, block)
        setattr(config.loss_fn, DRIVER, driver.name)
        setattr(config.loss_fn, MAX_AGE, _max_age(plain, driver.name))
        if driver.name == "single_controller" and _drops_sequences(keys):
            _take_masks_back(config.grpo)
    if plain.get(BLOCK) is not None:
        setattr(config, BLOCK, block)  # the copies stay equal
    logger.info("fp8rl: recipe of this run: %s", block)
    for note in keys.notes:
        logger.warning("fp8rl: %s", note)


def announce_kv_cache(policy: Mapping[str, Any]) -> None:
    """Let the driver and the policy workers send KV scales, where the recipe has an FP8 cache.

    Not where the trainer has none to send: the driver must not ask it to.
    """
    vllm = (policy.get("generation") or {}).get("vllm_cfg") or {}
    block = vllm.get(BLOCK)
    if block is None:
        return
    recipe = Recipe.from_dict(block, where=f"{VLLM}.{BLOCK}")
    if _fp8_kv(recipe) and _sends_kv_scales(policy):
        vllm["kv_cache_dtype"] = "fp8"


def rollouts_in_bf16(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of vLLM's engine like ``arguments``, with linears, experts and KV cache in BF16.

    The plugin stays, for its refits: they refuse incomplete or NaN weights in BF16 as well.
    """
    more = dict(arguments["additional_config"])
    block = more[BLOCK]
    more[BLOCK] = {**block, "rollout": False, "kv_cache": {**block["kv_cache"], "dtype": "auto"}}
    return {**arguments, "kv_cache_dtype": "auto", "additional_config": more}


def withdraw_kv_cache(policy: Mapping[str, Any]) -> None:
    """Take :func:`announce_kv_cache` back: engines in BF16 take no KV scales.

    The block stays as it is, so that a run begun from the config that checkpoints keep is the same.
    """
    policy["generation"]["vllm_cfg"]["kv_cache_dtype"] = "auto"


def _drops_sequences(keys: Keys) -> bool:
    settings = keys.recipe.importance_sampling
    return bool(settings.rejection or settings.token_veto or keys.guard)


def _take_masks_back(grpo: Any) -> None:
    """The single controller does so, after the batch hook, only where upstream's threshold is set.

    The batch hook takes an infinite one for none.
    """
    if grpo.seq_logprob_error_threshold is None:
        grpo.seq_logprob_error_threshold = math.inf


def _max_age(config: Mapping[str, Any], driver: str) -> int:
    """Steps by which a loop may lag behind its engines."""
    if driver == "single_controller":
        sampler = (config.get("async_rl") or {}).get("sampler") or {}
        return max(
            int(sampler.get(f"max_{what}_versions") or 0) for what in ("staleness", "lookahead")
        )
    loop = (config.get(driver) or {}).get(f"async_{driver}") or {}
    return int(loop.get("max_trajectory_age_steps") or 0) if loop.get("enabled") else 0


class _Merge:
    """A block, and what upstream's keys add to it."""

    def __init__(self, block: Mapping[str, Any], path: str) -> None:
        self.data: dict[str, Any] = {
            k: dict(v) if isinstance(v, Mapping) else v for k, v in block.items()
        }
        self.path = path

    def add(self, ours: str, value: Any, theirs: str) -> None:
        """Set ``ours`` (dotted) because ``theirs`` says so, unless the block says otherwise."""
        *sections, key = ours.split(".")
        place = self.data
        for section in sections:
            place = place.setdefault(section, {})
        if key in place and place[key] != value:
            raise RecipeError(
                f"'{theirs}' asks for {ours}={value!r}, but '{self.path}.{ours}' is "
                f"{place[key]!r}; remove one of them."
            )
        place[key] = value

    def extend_pins(self, key: str, value: Any) -> None:
        pins = self.data.setdefault("pins", {})
        if isinstance(value, int):
            pins[key] = max(pins.get(key, 0), value)
        else:
            pins[key] = list(dict.fromkeys([*pins.get(key, ()), *value]))


def _rollout(
    merged: _Merge,
    sections: Mapping[str, Mapping[str, Any]],
    generation: Mapping[str, Any],
    ours: bool,
    driver: Driver,
) -> None:
    vllm = sections[VLLM]
    fp8 = vllm.get("precision") == "fp8"
    if not ours:
        if fp8 and VLLM in driver.serves:
            raise RecipeError(
                f"'{VLLM}.precision' is fp8 without '{VLLM}.{BLOCK}'; rollouts and training must "
                "run by one recipe, so interpolate the block there as well."
            )
        merged.data["rollout"] = False
        return
    if generation.get("backend", "vllm") != "vllm":
        raise UnsupportedError(
            f"'{VLLM}.{BLOCK}' needs 'policy.generation.backend' vllm, not "
            f"'{generation['backend']}'."
        )
    for path, value in (
        (f"{VLLM}.is_mx", vllm.get("is_mx")),
        ("policy.generation.quant_cfg", generation.get("quant_cfg")),
    ):
        if value:
            raise UnsupportedError(
                f"'{path}' is another number format than fp8rl's; remove it or '{VLLM}.{BLOCK}'."
            )
    arguments = generation.get("vllm_kwargs") or {}
    quantization = arguments.get("quantization")
    if quantization not in (None, QUANTIZATION):
        raise RecipeError(
            f"'policy.generation.vllm_kwargs.quantization' is '{quantization}', which contradicts "
            f"'{VLLM}.{BLOCK}'; remove one of them."
        )
    if fp8:
        merged.add("rollout", True, f"{VLLM}.precision")
    for path, value in (
        (f"{VLLM}.kv_cache_dtype", vllm.get("kv_cache_dtype")),
        ("policy.generation.vllm_kwargs.kv_cache_dtype", arguments.get("kv_cache_dtype")),
    ):
        if value in ("fp8", "fp8_e4m3"):
            merged.add("kv_cache.dtype", "fp8_e4m3", path)
        elif value not in (None, "auto"):
            raise UnsupportedError(
                f"'{path}' is {value!r}; with '{VLLM}.{BLOCK}' it can only be 'fp8' (E4M3) or "
                "'auto'."
            )
    for key, target in (
        ("pow2_weight_scaling_factors", "weights.scale_format"),
        ("pow2_activation_scaling_factors", "activations.scale_format"),
    ):
        if vllm.get(key):
            merged.add(target, "pow2", f"{VLLM}.{key}")
    for key, pin in (("num_first_layers_in_bf16", "first"), ("num_last_layers_in_bf16", "last")):
        count = vllm.get(key)
        if count and type(count) is not int:
            raise RecipeError(f"'{VLLM}.{key}' must be a number of layers, not {count!r}.")
        if count:
            merged.extend_pins(pin, count)
    if vllm.get("quantization_ignored_layer_kws"):
        merged.extend_pins("names", [f"*{w}*" for w in vllm["quantization_ignored_layer_kws"]])


def _training(
    merged: _Merge,
    sections: Mapping[str, Mapping[str, Any]],
    ours: bool,
    notes: list[str],
) -> None:
    megatron = sections[MEGATRON]
    fp8 = megatron.get("fp8_cfg") or {}
    if not megatron.get("enabled"):
        merged.data["training"] = False
        notes.append("the DTensor trainer runs in BF16; only the rollouts run in FP8.")
        return
    if not ours:
        if fp8.get("enabled"):
            raise RecipeError(
                f"'{MEGATRON}.fp8_cfg.enabled' is true without '{MEGATRON}.{BLOCK}'; rollouts and "
                "training must run by one recipe, so interpolate the block there as well."
            )
        merged.data["training"] = False
        return
    overrides = megatron.get("model_overrides") or {}
    if fp8.get("enabled"):
        for key, wanted in (("fp8", "e4m3"), ("fp8_recipe", "blockwise"), ("fp8_param", False)):
            if fp8.get(key, wanted) != wanted:
                raise UnsupportedError(
                    f"'{MEGATRON}.fp8_cfg.{key}' is {fp8[key]!r}; with '{MEGATRON}.{BLOCK}' it "
                    f"can only be {wanted!r}."
                )
        merged.add("training", True, f"{MEGATRON}.fp8_cfg.enabled")
    for key in ("fp8", "fp8_recipe", "fp8_quantizer_factory"):
        if overrides.get(key) is not None:
            raise UnsupportedError(
                f"'{MEGATRON}.model_overrides.{key}' switches Transformer Engine's FP8 on beside "
                f"'{MEGATRON}.{BLOCK}'; remove one of them."
            )
    for section in (overrides, megatron):  # upstream reads the first, its YAMLs have the second too
        if section.get("first_last_layers_bf16"):
            # Megatron-Core's defaults of both numbers are 1.
            merged.extend_pins("first", int(section.get("num_layers_at_start_in_bf16", 1)))
            merged.extend_pins("last", int(section.get("num_layers_at_end_in_bf16", 1)))


def _loss(merged: _Merge, loss: Mapping[str, Any], ours: bool) -> None:
    if not ours:
        return
    kind = loss.get("truncated_importance_sampling_type")
    if kind is not None:
        theirs = f"{LOSS}.truncated_importance_sampling_type"
        if kind not in _MODES:
            raise UnsupportedError(
                f"'{theirs}' is '{kind}'; with '{LOSS}.{BLOCK}' write it as "
                "importance_sampling.rejection with level 'geometric' and remove the key."
            )
        low = loss.get("truncated_importance_sampling_ratio_min")
        mode = "clip" if kind == "tis" and low else _MODES[kind]
        merged.add("importance_sampling.mode", mode, theirs)
        for target, key in (("high", "ratio"), ("low", "ratio_min")):
            path = f"{LOSS}.truncated_importance_sampling_{key}"
            if value := loss.get(f"truncated_importance_sampling_{key}"):
                merged.add(f"importance_sampling.{target}", float(value), path)
    if loss.get("sequence_level_importance_ratios"):
        merged.add(
            "importance_sampling.level", "sequence", f"{LOSS}.sequence_level_importance_ratios"
        )


def _refuse_unserved(
    recipe: Recipe,
    config: Mapping[str, Any],
    sections: Mapping[str, Mapping[str, Any]],
    driver: Driver,
    corrected: bool,
) -> None:
    policy = config.get("policy") or {}
    loss = sections[LOSS]
    transport = (policy.get("generation") or {}).get("refit_transport")
    if recipe.rollout and transport is not None:
        raise UnsupportedError(
            f"'policy.generation.refit_transport' is '{transport}', which writes past vLLM's "
            "weight loaders; FP8 rollouts are served with null (CUDA IPC or NCCL broadcast)."
        )
    if (
        recipe.rollout
        and LOSS in driver.serves
        and not corrected
        and not loss.get("use_importance_sampling_correction")
    ):
        raise RecipeError(
            f"FP8 rollouts need a correction of their logprobs: set '{LOSS}.{BLOCK}' or "
            f"'{LOSS}.use_importance_sampling_correction'."
        )
    if recipe.rollout and sections[VLLM].get("pipeline_parallel_size", 1) > 1:
        raise UnsupportedError(
            f"'{VLLM}.pipeline_parallel_size' is {sections[VLLM]['pipeline_parallel_size']}, but "
            f"FP8 rollouts are served with 1; use '{VLLM}.tensor_parallel_size'."
        )
    if _fp8_kv(recipe):
        _refuse_fp8_kv(config, sections, driver)
    if corrected:
        _refuse_split_batches(recipe, config, driver)


def _refuse_fp8_kv(
    config: Mapping[str, Any], sections: Mapping[str, Mapping[str, Any]], driver: Driver
) -> None:
    grpo, vllm = config.get("grpo") or {}, sections[VLLM]
    sent = driver.sends_kv_scales and _sends_kv_scales(config.get("policy") or {})
    reason = None
    if (
        sent
        and sections[MEGATRON].get("pipeline_model_parallel_size", 1) > 1
        and sections[MEGATRON].get(BLOCK) is None
    ):
        reason = (
            f"'{MEGATRON}.{BLOCK}' where '{MEGATRON}.pipeline_model_parallel_size' is above 1: "
            "NeMo RL's own calibration numbers the layers of a stage from 0"
        )
    elif driver.name == "ppo":
        reason = "a GRPO driver: PPO's guards are tied to 'precision: fp8'"
    elif vllm.get("async_engine"):
        reason = f"'{VLLM}.async_engine' false: asynchronous rollouts get no KV scales"
    elif (grpo.get("async_grpo") or {}).get("enabled"):
        reason = "'grpo.async_grpo.enabled' false: its refits send no KV scales"
    elif vllm.get("expert_parallel_size", 1) > vllm.get("tensor_parallel_size", 1) and (
        not sent or grpo.get("val_at_start")
    ):
        who = "'grpo.val_at_start' false or " if sent else ""
        if driver.sends_kv_scales and not sent:
            who = f"'{MEGATRON}.enabled' true or "
        reason = (
            f"{who}'{VLLM}.expert_parallel_size' up to '{VLLM}.tensor_parallel_size': engines that "
            "share experts cannot calibrate themselves one by one"
        )
    if reason:
        raise UnsupportedError(
            f"'{VLLM}.{BLOCK}.kv_cache.dtype' fp8_e4m3 needs {reason}; or set it to auto."
        )
    arguments = ((config.get("policy") or {}).get("generation") or {}).get("vllm_kwargs") or {}
    backend = arguments.get("attention_backend")
    if backend is not None and str(backend).upper() not in KV_BACKENDS:
        raise UnsupportedError(
            f"'policy.generation.vllm_kwargs.attention_backend' is '{backend}', which is not known "
            f"to read the KV scales of each refit; choose one of {', '.join(KV_BACKENDS)}, or set "
            f"'{VLLM}.{BLOCK}.kv_cache.dtype' to auto."
        )


def _refuse_unseen_batches(
    recipe: Recipe, config: Mapping[str, Any], loss: Mapping[str, Any], driver: Driver
) -> None:
    """Without ``prev_logprobs`` the loops skip the call that shows us the whole batch."""
    threshold = (config.get("grpo") or {}).get("seq_logprob_error_threshold")
    if driver.name == "ppo" or not loss.get("force_on_policy_ratio") or threshold is not None:
        return
    settings = recipe.importance_sampling
    path = f"{LOSS}.{BLOCK}.importance_sampling"
    for key, value in (
        (f"{path}.self_normalize", settings.self_normalize),
        (f"{path}.rejection", settings.rejection),
        (f"{path}.token_veto", settings.token_veto),
        (f"{LOSS}.{GUARD}", loss.get(GUARD)),
    ):
        if value not in (None, False):
            raise UnsupportedError(
                f"'{key}' needs the trainer's logprobs of the whole batch, which "
                f"'{LOSS}.force_on_policy_ratio' leaves out; set it to false, or set "
                "'grpo.seq_logprob_error_threshold'."
            )


def _refuse_fixed_engines(
    guard: GuardConfig, recipe: Recipe, config: Mapping[str, Any], vllm: Mapping[str, Any]
) -> None:
    """Engines that cannot be started anew inside their workers."""
    if guard.fallback != "bf16" or not recipe.rollout:
        return
    health = (config.get("async_rl") or {}).get("generation_fleet_health") or {}
    reason = None
    if vllm.get("expose_http_server"):
        reason = f"'{VLLM}.expose_http_server' false: the server keeps the engine it began with"
    elif vllm.get("expert_parallel_size", 1) > vllm.get("tensor_parallel_size", 1):
        reason = (
            f"'{VLLM}.expert_parallel_size' up to '{VLLM}.tensor_parallel_size': engines that "
            "share experts cannot be started anew one by one"
        )
    elif health.get("enabled"):
        reason = (
            "'async_rl.generation_fleet_health.enabled' false: it takes workers that do not answer "
            "while their engines start for dead"
        )
    if reason:
        raise UnsupportedError(
            f"'{LOSS}.{GUARD}.fallback' bf16 needs {reason}; or set it to stop, which ends the run."
        )


def _refuse_split_batches(recipe: Recipe, config: Mapping[str, Any], driver: Driver) -> None:
    settings = recipe.importance_sampling
    path = f"{LOSS}.{BLOCK}.importance_sampling"
    data_plane = (config.get("data_plane") or {}).get("enabled")
    if not data_plane and driver.name != "single_controller":
        return
    if settings.self_normalize:
        raise UnsupportedError(
            f"'{path}.self_normalize' needs 'data_plane.enabled' false: the data plane carries no "
            "weights to the workers."
        )
    if settings.rejection is not None and settings.rejection.level == "token":
        raise UnsupportedError(
            f"'{path}.rejection.level' token needs 'data_plane.enabled' false, where single tokens "
            "cannot leave the batch; use mode 'mask', or level 'sequence' or 'geometric'."
        )


def _sends_kv_scales(policy: Mapping[str, Any]) -> bool:
    """Whether the trainer can; DTensor workers cannot."""
    return bool((policy.get("megatron_cfg") or {}).get("enabled"))


def _fp8_kv(recipe: Recipe) -> bool:
    return recipe.rollout and recipe.kv_cache.dtype != "auto"


def _refuse_closed_workers(recipe: Recipe, policy: Mapping[str, Any]) -> None:
    """Ray hands the driver's environment on.

    A vLLM worker without hooks refits unchecked, a Megatron worker trains in BF16.
    """
    for wanted, path, who in (
        (recipe.rollout, VLLM, "vLLM"),
        (recipe.training, MEGATRON, "Megatron"),
    ):
        own = _section({"policy": policy}, path).get("env_vars") or {}
        for variable, is_off in (
            (SWITCH, switched_off),
            ("TORCH_DEVICE_BACKEND_AUTOLOAD", lambda value: str(value) != "1"),  # as torch has it
        ):
            value = own.get(variable, os.environ.get(variable))
            if wanted and value is not None and is_off(value):
                raise UnsupportedError(
                    f"'{path}.{BLOCK}' needs torch's autoload in the {who} workers, which "
                    f"{variable}={value} switches off; set '{path}.env_vars.{variable}' to \"1\"."
                )

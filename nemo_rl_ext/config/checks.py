"""Checks that refuse config keys without effect, and settings that fp8rl does not support.

Each message names the key by its full path and the remedy. The checks run before Ray has started
and before anything in the config has been changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fp8rl import Recipe
from fp8rl.errors import RecipeError, UnsupportedError
from fp8rl.recipe import KVDtype
from nemo_rl_ext.config.drivers import (
    BLOCK,
    DTENSOR,
    FSDP,
    GUARD,
    LOSS,
    MEGATRON,
    VLLM,
    WORKER_KEY,
    is_our_worker,
)
from nemo_rl_ext.config.exact import refuse_inexact
from nemo_rl_ext.config.keys import READERS, Sections, block_path, has_fp8_kv, kv_dtype
from nemo_rl_ext.config.rules import OFF, Rule, refuse

KV_BACKENDS: dict[KVDtype, tuple[str, ...]] = {
    "fp8_e4m3": ("FLASH_ATTN", "TRITON_ATTN", "CPU_ATTN", "FLASHINFER"),
    "int8_per_token_head": ("TRITON_ATTN",),
}
"""Attention backends over each KV cache: those in E4M3 that
``vllm_fp8rl.quantization.kv_cache.check_backend`` knows, and vLLM's one in INT8."""

MOE_BACKENDS = ("auto", "triton", "deep_gemm")
"""Values of vLLM's ``moe_backend`` that ``vllm_fp8rl.kernels.moe.fused_moe`` serves."""

_CORRECTION = f"{LOSS}.{BLOCK}.importance_sampling"


def refuse_unread_settings(
    block: Mapping[str, Any], given: Recipe, where: str, sections: Sections
) -> None:
    """Refuse what the block asks for and no section acts on; defaults and BF16 ask for nothing."""
    blocks, driver = sections.blocks, sections.driver
    other = sections.without_megatron
    if set(blocks) & set(FSDP) and all(sections.at(path) for path in FSDP):
        raise RecipeError(
            f"{' and '.join(map(repr, FSDP))} are one section, before NeMo RL 0.8.0 and since; "
            "remove the one that yours does not read."
        )
    idle = other if sections.trainer == MEGATRON else MEGATRON
    acting = set(blocks) - {idle}
    by_other = other in driver.serves and sections.trainer == other
    unread = {*FSDP, *((idle,) if by_other else ())} - {other}
    if idle == other and other in blocks and MEGATRON not in blocks:
        raise RecipeError(
            f"'{block_path(other)}' has no effect: '{MEGATRON}.enabled' is true; move it to "
            f"'{block_path(MEGATRON)}', or remove it."
        )
    if set(blocks) == {MEGATRON} == {idle}:
        also = f", move the block to '{block_path(other)}'" if by_other else ""
        raise UnsupportedError(
            f"'{where}' needs '{MEGATRON}.enabled' true: {sections.other_trainer} workers "
            f"train in BF16; set it{also}, or remove the block."
        )
    for key, readers in READERS.items():
        value = getattr(given, key)
        asks = key in block and value not in (type(value)(), "auto")
        if key == "kv_cache" and kv_dtype(given) == "auto":
            asks = False  # no cache is rounded
        if not asks or acting & set(readers):
            continue
        missing = [p for p in readers if p in driver.serves and p not in unread]
        if MEGATRON in blocks and key == "training":
            also = f", interpolate the block into '{block_path(other)}'" if by_other else ""
            reason = (
                f"{sections.other_trainer} workers train in BF16; set it to false{also}, or set "
                f"'{MEGATRON}.enabled' to true"
            )
        elif missing:
            reason = (
                f"'{block_path(missing[0])}' is not set; interpolate the block there, or remove it"
            )
        else:
            reason = (
                f"{driver.scripts[0]} has no use for it ({driver.unsupported_reason}); remove it"
            )
        raise RecipeError(f"'{where}.{key}' has no effect: {reason}.")


def refuse_unserved(recipe: Recipe, sections: Sections) -> None:
    """Refuse upstream's settings that FP8 or the correction of whole batches cannot serve."""
    if recipe.exact:
        refuse_inexact(recipe, block_path(next(iter(sections.blocks))), sections)
    dtype = recipe.kv_cache.dtype
    if dtype == "int8_per_token_head" and VLLM in sections.blocks and not recipe.rollout:
        ours = block_path(VLLM)
        raise RecipeError(
            f"'{ours}.kv_cache.dtype' {dtype} has no effect: '{ours}.rollout' is false; set it to "
            "true, or remove the key."
        )
    refuse(_other_workers(recipe, sections), sections)
    if recipe.training and sections.trainer == MEGATRON:
        refuse(_TRAINING, sections)
    if recipe.rollout:
        refuse(_ROLLOUTS, sections)
        _require_correction(sections)
    if has_fp8_kv(recipe):
        _refuse_fp8_kv(recipe, sections)
    if kv_dtype(recipe) != "auto":
        refuse(_backends(kv_dtype(recipe)), sections)
    if recipe.kv_cache.in_training and sections.trainer == MEGATRON:
        refuse(_captured_attention(), sections)
    if sections.at("policy.router_replay").get("enabled"):
        if VLLM in sections.blocks:
            refuse(_ROUTERS_OF_ROLLOUTS, sections)
        refuse(_ROUTERS_OF_TRAINING, sections)
    if LOSS in sections.blocks:
        _refuse_split_batches(recipe, sections)
        _refuse_unseen_batches(recipe, sections)


_KWARGS = "policy.generation.vllm_kwargs"
# NeMo RL merges adapters into the weights that it sends. Rollouts in FP8 serve that, with a trainer
# in BF16.
_TRAINING: tuple[Rule, ...] = (
    (
        f"{MEGATRON}.peft.enabled",
        OFF,
        "is true, but FP8 training does not serve LoRA: rollouts get merged weights, whose FP8 "
        "codes are not those of the trainer's base weights; set "
        f"'{MEGATRON}.{BLOCK}.training' to false, or train without adapters.",
    ),
)
_ROLLOUTS: tuple[Rule, ...] = (
    (
        f"{_KWARGS}.enable_lora",
        OFF,
        "is true, but NeMo RL sends merged weights, which cannot be refitted under adapters; "
        "remove it.",
    ),
    (
        "policy.generation.refit_transport",
        (None,),
        "is '{}', which writes past vLLM's weight loaders; FP8 rollouts are served with null "
        "(CUDA IPC or NCCL broadcast).",
    ),
    (
        f"{VLLM}.refit_with_reload_api",  # newer than 7ea279a, as the next one
        OFF,
        "is true, by which vLLM reloads weights past fp8rl's checks of a refit; set it to false.",
    ),
    (
        "policy.generation.lora_refit_mode",
        (None, "merged"),
        "is '{}', which sends adapters alone, and FP8 rollouts take merged weights; set it to "
        "merged.",
    ),
    (
        f"{VLLM}.pipeline_parallel_size",
        (None, 1),
        f"is {{}}, but FP8 rollouts are served with 1; use '{VLLM}.tensor_parallel_size'.",
    ),
)
# Kernels that choose the experts themselves.
_ROUTERS_OF_ROLLOUTS: tuple[Rule, ...] = (
    (
        f"{_KWARGS}.moe_backend",
        (None, *MOE_BACKENDS),
        "is '{}', and 'policy.router_replay' needs kernels that leave the choice of experts to "
        f"vLLM's router; choose one of {', '.join(MOE_BACKENDS)}.",
    ),
)
_ROUTERS_OF_TRAINING: tuple[Rule, ...] = (
    (
        f"{MEGATRON}.model_overrides.moe_router_fusion",
        OFF,
        "is true, and the fused router would ignore the routes of 'policy.router_replay'; set it "
        "to false.",
    ),
)


def _other_workers(recipe: Recipe, sections: Sections) -> Iterator[Rule]:
    """Rules of keys by which another worker takes the place of ours, without a word."""
    text = "selects a {} in place of fp8rl's, which '{}' needs; remove it, or the fp8rl block."
    by_megatron = sections.trainer == MEGATRON
    if (recipe.rollout or recipe.training) and (by_megatron or sections.is_trainer_ours):
        ours = block_path(sections.trainer if sections.is_trainer_ours else VLLM)
        worker = "Megatron worker" if by_megatron else "DTensor worker"
        other = text.format(f"{worker} of another number format", ours)
        yield "policy.quant_cfg", (None,), other
        yield f"policy.{WORKER_KEY}", _unset_or_ours, text.format(worker, ours)
    if recipe.rollout:
        other = text.format("vLLM worker", block_path(VLLM))
        yield f"policy.generation.{WORKER_KEY}", _unset_or_ours, other


def _unset_or_ours(name: Any) -> bool:
    """Tell whether a key of worker classes may stay: a checkpoint's config may name our class."""
    return name is None or is_our_worker(name)


def _backends(dtype: KVDtype) -> Iterator[Rule]:
    """Yield the rule of attention backends, some of which do not read a KV cache of this dtype."""
    served = KV_BACKENDS[dtype]
    yield (
        f"{_KWARGS}.attention_backend",
        lambda backend: backend is None or str(backend).upper() in served,
        f"is '{{}}', which is not known to read a KV cache of dtype {dtype} with its scales; set "
        f"it to {' or '.join(served)}, or '{VLLM}.{BLOCK}.kv_cache.dtype' to auto.",
    )


def _captured_attention() -> Iterator[Rule]:
    """Rules of CUDA graphs, for a trainer that attends over K and V of the rollouts' cache."""
    from megatron_fp8rl.compat import CUDA_GRAPHS

    for section in (MEGATRON, f"{MEGATRON}.model_overrides"):
        for key in CUDA_GRAPHS:
            yield (
                f"{section}.{key}",
                lambda value: not value or value == "none",
                "is {!r}, but a replayed graph would go on without the K and V of the rollouts' "
                f"KV cache; remove it, or set '{VLLM}.{BLOCK}.kv_cache.in_training' to false.",
            )


def _require_correction(sections: Sections) -> None:
    if (
        LOSS in sections.driver.serves
        and LOSS not in sections.blocks
        and not sections.loss.get("use_importance_sampling_correction")
    ):
        raise RecipeError(
            f"FP8 rollouts need a correction of their logprobs: set '{LOSS}.{BLOCK}' or "
            f"'{LOSS}.use_importance_sampling_correction'."
        )


def _refuse_fp8_kv(recipe: Recipe, sections: Sections) -> None:
    sent, lasting = sections.sends_kv_scales, recipe.kv_cache.recalibrate != "refit"
    asynchronous = sections.vllm.get("async_engine") or any(
        sections.at(f"{loop}.async_{loop}").get("enabled") for loop in ("grpo", "ppo")
    )
    engine, key = f"'{VLLM}.async_engine'", f"'{VLLM}.{BLOCK}.kv_cache.recalibrate'"
    reason = None
    if (
        sent
        and (sections.megatron.get("pipeline_model_parallel_size") or 1) > 1
        and not sections.is_trainer_ours
    ):
        reason = (
            f"'{MEGATRON}.{BLOCK}' where '{MEGATRON}.pipeline_model_parallel_size' is above 1: "
            "NeMo RL's own calibration numbers the layers of a stage from 0"
        )
    elif asynchronous and not sent:
        reason = (
            f"{engine} false, or a GRPO driver with '{MEGATRON}.enabled' true: engines with "
            "requests in flight cannot calibrate themselves"
        )
    elif asynchronous and not lasting:
        reason = (
            f"{key} grow or start, or {engine} false: new scales with each refit would outdate "
            "what requests in flight have cached"
        )
    elif asynchronous and sections.at("policy.generation.colocated").get("enabled"):
        reason = (
            f"{engine} false, or 'policy.generation.colocated.enabled' false: asynchronous engines "
            "get KV scales by NCCL broadcasts alone"
        )
    elif asynchronous and sections.shares_experts:
        reason = (
            f"{engine} false, or '{VLLM}.expert_parallel_size' up to "
            f"'{VLLM}.tensor_parallel_size': engines that share experts cannot pause one by one"
        )
    elif lasting and not sent:
        reason = f"{key} refit: engines that calibrate themselves do so after each refit"
    elif lasting and not sections.is_trainer_ours:
        reason = (
            f"{key} refit, or '{MEGATRON}.{BLOCK}': NeMo RL's own calibration makes new scales "
            "with each refit"
        )
    elif sections.shares_experts and (not sent or sections.at("grpo").get("val_at_start")):
        who = "'grpo.val_at_start' false or " if sent else ""
        if sections.driver.sends_kv_scales and not sent:
            who = f"'{MEGATRON}.enabled' true or "
        reason = (
            f"{who}'{VLLM}.expert_parallel_size' up to '{VLLM}.tensor_parallel_size': engines that "
            "share experts cannot calibrate themselves one by one"
        )
    if reason:
        other = "int8_per_token_head" if recipe.exact else "auto"
        raise UnsupportedError(
            f"'{VLLM}.{BLOCK}.kv_cache.dtype' fp8_e4m3 needs {reason}; or set it to {other}."
        )


def refuse_in_training(block: Mapping[str, Any], where: str, sections: Sections) -> None:
    """Refuse ``kv_cache.in_training`` of a block for a trainer that cannot do it."""
    if (block.get("kv_cache") or {}).get("in_training"):
        remedy, reason = (
            f"'{MEGATRON}.enabled' true, or a block '{DTENSOR}.{BLOCK}'",
            f"the {sections.other_trainer} trainer attends over its own K and V",
        )
        if sections.megatron.get("enabled"):
            remedy = "'grpo' or the single controller as driver"
            reason = (
                "here each vLLM engine calibrates KV scales of its own, which the trainer never "
                "learns"
            )
        raise UnsupportedError(
            f"'{where}.kv_cache.in_training' needs {remedy}: {reason}; set it to false, or leave "
            "it out."
        )


def _refuse_split_batches(recipe: Recipe, sections: Sections) -> None:
    data_plane = sections.at("data_plane").get("enabled")
    if not data_plane and sections.driver.name != "single_controller":
        return
    settings = recipe.importance_sampling
    if settings.self_normalize:
        raise UnsupportedError(
            f"'{_CORRECTION}.self_normalize' needs 'data_plane.enabled' false: the data plane "
            "carries no weights to the workers."
        )
    if settings.rejection is not None and settings.rejection.level == "token":
        raise UnsupportedError(
            f"'{_CORRECTION}.rejection.level' token needs 'data_plane.enabled' false, where single "
            "tokens cannot leave the batch; use mode 'mask', or level 'sequence' or 'geometric'."
        )


def leaves_out_logprobs(sections: Sections) -> bool:
    """Tell whether the loops do not compute ``prev_logprobs``, the trainer's log-probabilities."""
    return (
        sections.driver.name != "ppo"
        and bool(sections.loss.get("force_on_policy_ratio"))
        and sections.at("grpo").get("seq_logprob_error_threshold") is None
    )


def _refuse_unseen_batches(recipe: Recipe, sections: Sections) -> None:
    """Refuse settings for whole batches where the loops do not compute ``prev_logprobs``."""
    if not leaves_out_logprobs(sections):
        return
    for key, value in (
        *(
            (f"{_CORRECTION}.{name}", getattr(recipe.importance_sampling, name))
            for name in ("self_normalize", "rejection", "token_veto")
        ),
        (f"{LOSS}.{GUARD}", sections.loss.get(GUARD)),
    ):
        if value not in (None, False):
            raise UnsupportedError(
                f"'{key}' needs the trainer's logprobs of the whole batch, which "
                f"'{LOSS}.force_on_policy_ratio' leaves out; set it to false, or set "
                "'grpo.seq_logprob_error_threshold'."
            )

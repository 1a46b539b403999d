"""The one place that writes a plan into upstream's config: what upstream's own code reads there.

Upstream's FP8 paths are switched off, since ours take their place, and vLLM is started with our
quantization. The other keys of upstream's stay as the user wrote them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

from nemo_rl_ext.config.drivers import (
    BLOCK,
    FSDP,
    LOSS,
    MEGATRON,
    PLAN,
    QUANTIZATION,
    VLLM,
    WORKER_KEY,
    Driver,
    is_our_worker,
)
from nemo_rl_ext.config.keys import Sections
from nemo_rl_ext.config.merge import read
from nemo_rl_ext.config.model_pins import check_model, model_spec
from nemo_rl_ext.config.plan import RunPlan
from nemo_rl_ext.names import LOGGER

logger = logging.getLogger(LOGGER)


def prepare(config: Any, driver: Driver, require: Callable[[str], None]) -> RunPlan | None:
    """Check a ``MasterConfig``, make its plan, and write what the workers read; in place.

    Args:
        config: a ``MasterConfig``, whose ``policy`` is a dict and whose ``loss_fn``, if it has one,
            is a model.
        require: called with a key's path when there is a block; raises where a patch does not fit.
    """
    sections = Sections(config.model_dump(), driver)
    # Of the run whose checkpoint kept this config.
    if PLAN in sections.policy:
        del config.policy[PLAN]
    if sections.loss.get(PLAN) is not None:
        setattr(config.loss_fn, PLAN, None)
    if is_our_worker(sections.policy.get(WORKER_KEY)):
        del config.policy[WORKER_KEY]
    if is_our_worker(sections.generation.get(WORKER_KEY)):
        del config.policy["generation"][WORKER_KEY]
    plan = read(sections)
    if plan is None:
        return None
    plan, _ = check_model(plan, sections.policy, model_spec(sections.policy))
    require(plan.where)
    hand_over(plan, config, by_automodel=sections.builds_by_automodel)
    if sections.config.get(BLOCK) is not None:
        setattr(config, BLOCK, plan.recipe.to_dict())  # the copies stay equal
    logger.info("fp8rl: recipe of this run: %s", plan.recipe.to_dict())
    for note in plan.notes:
        logger.warning("fp8rl: %s", note)
    return plan


def hand_over(plan: RunPlan, config: Any, *, by_automodel: bool) -> None:
    """Write the plan and its recipe into a ``MasterConfig``, and the keys that upstream reads.

    Args:
        by_automodel: whether Automodel builds the models of the trainer without Megatron.
    """
    recipe, block = plan.recipe, plan.recipe.to_dict()
    policy, sections = config.policy, plan.sections
    policy[PLAN] = plan.to_dict()
    if VLLM in sections:
        generation = policy["generation"]
        vllm = generation["vllm_cfg"]
        vllm[BLOCK] = block
        vllm["precision"] = "bfloat16"
        vllm["kv_cache_dtype"] = "auto"  # until announce_kv_scales
        if recipe.exact:
            # At temperature 1 "processed" logits are the same numbers, but in float32 up to vLLM
            # 0.25, which the sampler's kernel adds up in another order.
            vllm["logprobs_mode"] = "raw_logprobs"
        if recipe.rollout:
            # The trainer merges adapters; without the key, newer than 7ea279a, it sends them alone.
            generation["lora_refit_mode"] = "merged"
            # An installation without the plugin refuses this quantization.
            arguments = generation.get("vllm_kwargs") or {}
            more = {**(arguments.get("additional_config") or {}), BLOCK: block}
            generation["vllm_kwargs"] = {
                **arguments,
                "quantization": QUANTIZATION,
                "kv_cache_dtype": recipe.kv_cache.dtype,
                "additional_config": more,
            }
    if MEGATRON in sections:
        megatron = policy["megatron_cfg"]
        megatron[BLOCK] = block
        if megatron.get("fp8_cfg"):
            megatron["fp8_cfg"] = {**megatron["fp8_cfg"], "enabled": False}
    for section in (each for each in FSDP if each in sections):
        trainer = policy[section.removeprefix("policy.")]
        trainer[BLOCK] = block
        if by_automodel:
            # Of some families Automodel has models of its own, which it prefers to transformers'.
            given = trainer.get("automodel_kwargs") or {}
            trainer["automodel_kwargs"] = {**given, "force_hf": True}
    if LOSS in sections:
        setattr(config.loss_fn, BLOCK, block)
        setattr(config.loss_fn, PLAN, plan.to_dict())
        settings = recipe.importance_sampling
        drops = settings.rejection or settings.token_veto or plan.guard
        if plan.in_pieces and drops and config.grpo.seq_logprob_error_threshold is None:
            # The single controller takes masks back from the batch hook only where the threshold
            # is set; the hook takes an infinite one for none.
            config.grpo.seq_logprob_error_threshold = math.inf


def announce_kv_scales(policy: Any) -> None:
    """Let upstream's driver and policy workers send KV scales, where the trainer makes them.

    Upstream reads ``kv_cache_dtype`` for it, and its drivers' guards, which tie the key to
    upstream's own FP8 rollouts, must have been passed.
    """
    plan = RunPlan.of(policy)
    if plan is not None and plan.kv_scales == "trainer":
        policy["generation"]["vllm_cfg"]["kv_cache_dtype"] = "fp8"

"""What ``exact`` needs of NeMo RL's other keys; the workers check model and engine themselves."""

from __future__ import annotations

import json
from typing import Any

from fp8rl import Recipe
from fp8rl.errors import RecipeError, UnsupportedError
from fp8rl.kernels import EXACT_MODELS, EXACT_RANKS, require_fp8_linears
from fp8rl.models.pins import PinPolicy
from fp8rl.models.spec import ModelSpec
from nemo_rl_ext.config.drivers import BLOCK, LOSS, MEGATRON, VLLM
from nemo_rl_ext.config.keys import Sections, has_fp8_kv
from nemo_rl_ext.config.plan import RunPlan
from nemo_rl_ext.config.rules import broken
from nemo_rl_ext.names import FUSED_ENV

_GENERATION = "policy.generation"
_LOGPROBS = "log-probabilities are computed elsewhere"
_FILTERED = "the trainer's log-probabilities are of the whole vocabulary at temperature 1"
_WHOLE = "a sequence and an expert are on one GPU as a whole"
_TRAINER_RANKS = f"{MEGATRON}.tensor_model_parallel_size"
_ROLLOUT_RANKS = f"{VLLM}.tensor_parallel_size"
_NEEDED: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("policy.precision", ("bfloat16", None), "the engines compute in it"),
    (f"{MEGATRON}.context_parallel_size", (1, None), _WHOLE),
    (f"{MEGATRON}.expert_model_parallel_size", (1, None), _WHOLE),
    (f"{VLLM}.expert_parallel_size", (1, None), _WHOLE),
    ("policy.router_replay.enabled", (False, None), "both engines choose the same experts"),
    (f"{MEGATRON}.defer_fp32_logits", (True,), "the sampler sees logits in bfloat16"),
    (f"{MEGATRON}.use_fused_linear_logprobs", (False, None), _LOGPROBS),
    (f"{MEGATRON}.env_vars.{FUSED_ENV}", ("1", None), _LOGPROBS),
    (
        f"{MEGATRON}.model_overrides.should_pad_vocab",
        (False, None),
        "columns that pad the vocabulary would be in the sum",
    ),
    (
        f"{MEGATRON}.bias_activation_fusion",
        (True, None),
        "the SwiGLU of the rollouts is rounded once",
    ),
    (f"{_GENERATION}.temperature", (1, None), _FILTERED),
    (f"{_GENERATION}.top_p", (1, None), _FILTERED),
    (f"{_GENERATION}.top_k", (None, -1), _FILTERED),
    (
        f"{_GENERATION}.vllm_kwargs.speculative_config",
        (None,),
        "tokens that were drafted are scored in other batches",
    ),
)
"""Path of a key, what it may be (the first is the remedy; None: left out), and why."""


def require_both_sections(where: str, sections: Sections) -> None:
    """Raise RecipeError unless the blocks of rollouts and Megatron trainer both say ``exact``.

    Also where the driver compares no log-probabilities of the two.
    """
    driver = sections.driver
    if LOSS not in driver.serves:
        raise RecipeError(
            f"'{where}.exact' has no effect in {driver.scripts[0]}, which compares no "
            "log-probabilities of rollouts and trainer; remove the key."
        )
    for section in (VLLM, MEGATRON):
        if section not in sections.blocks:
            raise RecipeError(
                f"'{where}.exact' needs '{section}.{BLOCK}', because both engines must compute the "
                "same; interpolate the block there, or remove the key."
            )
    if not sections.megatron.get("enabled"):
        raise RecipeError(
            f"'{where}.exact' needs '{MEGATRON}.enabled' true, because "
            f"{sections.other_trainer} workers have none of its kernels; set it, or remove the key."
        )


def refuse_inexact(recipe: Recipe, where: str, sections: Sections) -> None:
    """Raise UnsupportedError for a key by which trainer and rollouts would not be equal."""
    for path, value, served, why in broken(_NEEDED, sections):
        first = served[0]
        remedy = "remove it" if first is None else f"set it to {json.dumps(first)}"
        told = json.dumps(value, default=str)  # with quotes: a text 1 is no number 1
        raise _refusal(f"'{path}' is {told}", where, why, remedy)
    _refuse_ranks(where, sections)
    if sections.policy.get("logprob_chunk_size") is None:
        raise _refusal(
            "'policy.logprob_chunk_size' is null",
            where,
            "fp8rl computes the log-probabilities that NeMo RL computes in chunks",
            "set it to 1024",
        )
    if has_fp8_kv(recipe) and not recipe.kv_cache.in_training:
        raise _refusal(
            f"'{sections.driver.scripts[0]}' sends no KV scales",
            where,
            "the trainer attends over the keys and values of the rollouts' cache",
            f"set '{where}.kv_cache.dtype' to int8_per_token_head",
        )
    own_scales = has_fp8_kv(recipe) and not sections.vllm.get("async_engine")
    if own_scales and sections.at("grpo").get("val_at_start"):
        raise _refusal(
            "'grpo.val_at_start' is true",
            where,
            "the rollouts of the first step would have KV scales that vLLM has calibrated and the "
            "trainer never learns",
            f"set it to false, or '{where}.kv_cache.dtype' to int8_per_token_head",
        )


def _refuse_ranks(where: str, sections: Sections) -> None:
    """Raise UnsupportedError for tensor parallel sizes by which sums would not be equal."""
    trainer = sections.megatron.get("tensor_model_parallel_size") or 1
    rollout = sections.vllm.get("tensor_parallel_size") or 1
    remedy = f"give both the same size, {' or '.join(map(str, EXACT_RANKS))}"
    for path, ranks in ((_TRAINER_RANKS, trainer), (_ROLLOUT_RANKS, rollout)):
        if ranks not in EXACT_RANKS:
            told = json.dumps(ranks, default=str)
            why = "sums over more ranks have no order that both engines share"
            raise _refusal(f"'{path}' is {told}", where, why, remedy)
    if trainer != rollout:
        raise _refusal(
            f"'{_TRAINER_RANKS}' is {trainer} and '{_ROLLOUT_RANKS}' is {rollout}",
            where,
            "each rank rounds its part of a sum",
            remedy,
        )


def refuse_inexact_model(
    plan: RunPlan, model: ModelSpec | None, pins: PinPolicy | None, *, ranks: int
) -> None:
    """Raise UnsupportedError for a model, as far as it is known here, that is not served."""
    where, name = plan.where, plan.model
    kind = None if model is None else model.model_type
    if kind is not None and kind not in EXACT_MODELS:
        raise UnsupportedError(
            f"'{where}.exact' serves models of type {', '.join(EXACT_MODELS)}, and '{name}' is "
            f"of type '{kind}'; remove the key, or choose another model."
        )
    if model is not None and model.experts and ranks > 1:
        raise _refusal(
            f"'{_TRAINER_RANKS}' is {ranks} and '{name}' has experts",
            where,
            "an expert is on one rank as a whole",
            f"set it and '{_ROLLOUT_RANKS}' to 1",
        )
    if pins is not None:
        require_fp8_linears(pins)


def _refusal(what: str, where: str, why: str, remedy: str) -> UnsupportedError:
    return UnsupportedError(
        f"{what}, but '{where}.exact' does not serve that: {why}; {remedy}, or remove the key "
        "'exact'."
    )

"""Micro-batches of the trainer so small that the GPU waits for the host: FP8 gains less there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fp8rl.errors import Fp8RLError
from fp8rl.estimate import Model, find_gpu, smallest_micro_batch
from fp8rl.pinning import PinRow
from nemo_rl_ext.config.drivers import LOSS
from nemo_rl_ext.config.keys import Sections
from nemo_rl_ext.doctor.memory import gpus_of, ranks_of

_GPU = "h100"
"""The slowest GPU that was measured: a faster one waits for the host even more."""
_PHASES = (
    ("log-probabilities", "logprob_batch_size", "logprob_mb_tokens", False),
    ("training", "train_micro_batch_size", "train_mb_tokens", True),
)
"""Each with its keys below ``policy``: sequences, and tokens of batches that are packed or made by
length (below ``sequence_packing`` or ``dynamic_batching``)."""


def small_micro_batches(
    sections: Sections, model: Mapping[str, Any], rows: Sequence[PinRow]
) -> Iterator[str]:
    """Yield a sentence for each phase of a Megatron trainer in FP8 whose micro-batch is too small.

    Nothing is said of a model whose layers were not measured, and where a rank has no more tokens.

    Args:
        sections: the config, with ``policy.megatron_cfg.enabled``.
        model: values of the model's ``config.json``.
        rows: resolved table of the model's modules.
    """
    megatron, policy = sections.megatron, sections.policy
    length = policy.get("max_total_sequence_length")
    # Drivers without that loss compute no log-probabilities in micro-batches of a key of their own.
    if LOSS not in sections.driver.serves or not isinstance(length, int):
        return
    tensor, context, pipeline = (
        ranks_of(megatron, kind) for kind in ("tensor_model", "context", "pipeline_model")
    )
    try:
        shapes = Model(model, rows, tensor, ranks_of(megatron, "expert_model"))
    except Fp8RLError:  # an attention or a split that was not measured
        return
    replicas = max(gpus_of(sections).training // (tensor * context * pipeline), 1)
    whole = policy.get("train_global_batch_size")
    most = whole // replicas * length if isinstance(whole, int) else None
    roomy = policy.get("logprob_chunk_size") and megatron.get("defer_fp32_logits")
    room = (
        ""
        if roomy
        else "; policy.logprob_chunk_size and policy.megatron_cfg.defer_fp32_logits make room"
    )
    waits = "waits longer than it works" if shapes.expert_layers else "waits for launches"
    gpu = find_gpu(_GPU)
    for phase, sequences, packed, training in _PHASES:
        tokens, key = _tokens(policy, sequences, packed, length)
        least = context * smallest_micro_batch(gpu, shapes, length, training=training)
        if tokens is not None and tokens < least and (most is None or tokens < most):
            yield (
                f"A micro-batch of {phase} has at most {tokens:,} tokens ({key}). On a host like "
                f"the one that was measured the GPU {waits} below about {least:,} (H100; more on "
                "a faster GPU), and FP8 gains less there. Make it larger"
                f"{room} (docs/nemo_rl.md)."
            )


def _tokens(
    policy: Mapping[str, Any], sequences: str, packed: str, length: int
) -> tuple[int | None, str]:
    """Return the most tokens of a micro-batch, None if no key says, and the keys that say so."""
    for section in ("sequence_packing", "dynamic_batching"):
        settings = policy.get(section) or {}
        if settings.get("enabled"):
            tokens = settings.get(packed)
            return tokens if isinstance(tokens, int) else None, f"policy.{section}.{packed}"
    count = policy.get(sequences)
    key = f"policy.{sequences} x policy.max_total_sequence_length"
    return count * length if isinstance(count, int) else None, key

"""Micro-batches of the trainer so small that the GPU waits for the host: FP8 gains little there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fp8rl.errors import Fp8RLError
from fp8rl.estimate import Model, find_gpu, smallest_micro_batch
from fp8rl.pinning import PinRow
from nemo_rl_ext.config.keys import Sections

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

    Args:
        sections: the config, with ``policy.megatron_cfg.enabled``.
        model: values of the model's ``config.json``.
        rows: resolved table of the model's modules.
    """
    megatron, policy = sections.megatron, sections.policy
    length = policy.get("max_total_sequence_length")
    ranks = int(megatron.get("context_parallel_size") or 1)
    try:
        shapes = Model(model, rows, int(megatron.get("tensor_model_parallel_size") or 1))
    except Fp8RLError:  # an attention or a split that was not measured: nothing is known
        return
    for phase, sequences, packed, training in _PHASES:
        found = _tokens(policy, sequences, packed, length)
        if found is None or not isinstance(length, int):
            continue
        tokens, key = found
        least = ranks * smallest_micro_batch(
            find_gpu(_GPU), shapes, length, True, training=training
        )
        if tokens < least:
            yield (
                f"A micro-batch of {phase} has at most {tokens:,} tokens ({key}). On a host like "
                f"the one that was measured the GPU waits for launches below about {least:,} "
                f"(H100; more on a faster GPU), and FP8 gains little there. Raise it; "
                "policy.logprob_chunk_size with policy.megatron_cfg.defer_fp32_logits makes room "
                "(docs/estimate.md)."
            )


def _tokens(
    policy: Mapping[str, Any], sequences: str, packed: str, length: Any
) -> tuple[int, str] | None:
    """Return the most tokens of a micro-batch, and the keys that say so; None if none do."""
    for section in ("sequence_packing", "dynamic_batching"):
        settings = policy.get(section) or {}
        if settings.get("enabled"):
            tokens = settings.get(packed)
            key = f"policy.{section}.{packed}"
            return (tokens, key) if isinstance(tokens, int) else None
    count = policy.get(sequences)
    if not isinstance(count, int) or not isinstance(length, int):
        return None
    return count * length, f"policy.{sequences} x policy.max_total_sequence_length"

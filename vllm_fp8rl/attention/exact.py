"""Attention of an engine whose bits do not depend on the batch, and are the trainer's."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from fp8rl.errors import UnsupportedError
from vllm_fp8rl.attention.split_batch import Prompts
from vllm_fp8rl.engine.names import uses_fp8rl


class ExactAttention:
    """Attention of batches, by the kernels that the trainer calls too.

    Args:
        cache: dtype of the cache's elements.
        processors: number of SMs of the GPU.
    """

    def __init__(self, cache: torch.dtype, processors: int) -> None:
        from fp8rl.kernels import attention, paged  # need Triton

        self._paged, self._attend = paged, attention.attend
        self._ones = paged.ones_like_codes(torch.empty(0, dtype=cache, device="cuda"))
        self._processors = processors

    def restore(self) -> None:
        """Write the ones again: a level-2 sleep discards them with the weights."""
        self._ones.copy_(self._paged.ones_like_codes(self._ones))

    def attend_batch(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        decodes: int,
        prompts: list[Prompts],
        *,
        softmax_scale: float,
        k_scale: torch.Tensor | None,
        v_scale: torch.Tensor | None,
        out: torch.Tensor,
    ) -> torch.Tensor:
        """Compute attention of a batch, as ``vllm_fp8rl.attention.hopper.attend_batch``.

        Over a cache in bfloat16 the scales are None.
        """
        if decodes:
            self._paged.decode(
                query[:decodes],
                key_cache,
                value_cache,
                block_table,
                seq_lens,
                softmax_scale=softmax_scale,
                k_scale=k_scale,
                v_scale=v_scale,
                out=out[:decodes],
                splits=self._paged.splits_for(
                    decodes, key_cache.shape[2], self._processors, exact=True
                ),
                ones=self._ones,
            )
        for group in prompts:
            copy = self._paged.copy_pages(
                key_cache,
                value_cache,
                block_table[group.requests],
                seq_lens[group.requests],
                keys=group.keys,
                longest=group.longest,
                k_scale=k_scale,
                v_scale=v_scale,
            )
            self._attend(
                query[group.tokens],
                copy,
                group.query_starts,
                longest_query=group.longest_query,
                softmax_scale=softmax_scale,
                out=out[group.tokens],
            )
        return out


def is_exact(engine: Any) -> bool:
    """Return whether the recipe of an engine, a ``VllmConfig`` or None, says ``exact``."""
    return uses_fp8rl(engine) and engine.quant_config.resolve().recipe.exact


def require_served(engine: Any, served: bool) -> None:
    """Raise UnsupportedError for an attention layer that is exact by the recipe and not served."""
    if not served and is_exact(engine):
        raise UnsupportedError(
            "exact needs attention of a decoder without windows, soft caps, sinks or ALiBi (on a "
            "GPU by FLASH_ATTN or, over an INT8 KV cache, TRITON_ATTN, where FlashAttention 3 "
            "runs), without VLLM_BATCH_INVARIANT and kv_sharing_fast_prefill, and a layer of this "
            "engine has another; change the setting, choose another model or attention backend, "
            "or set exact to false in the recipe."
        )


def raise_not_split() -> NoReturn:
    """Raise UnsupportedError for a batch that FlashAttention 3 would compute in one."""
    raise UnsupportedError(
        "exact computes decodes and prompts apart, and a batch is not causal or vLLM does not know "
        "on the host how many keys its requests have; use a vLLM that docs/versions.md names, or "
        "set exact to false in the recipe."
    )

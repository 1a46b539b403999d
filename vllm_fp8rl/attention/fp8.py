"""FlashAttention over an FP8 KV cache without rounding queries to E4M3, for Hopper GPUs.

With ``exact`` other kernels compute all of it (:mod:`vllm_fp8rl.attention.exact`), also over a
cache of 16 bits.

:mod:`vllm_fp8rl.attention.hopper` splits each step into decodes and prompts, and computes both with
16-bit queries. The backend is registered as ``FLASH_ATTN``, so vLLM chooses it where it would
choose its own.

Two kinds of engines quantize queries to E4M3 by the layer's ``q_scale``, as vLLM does, in a step
with several tokens of a request: those with speculative decoding, which would copy the whole cache
in every step, and those with ``kv_sharing_fast_prefill``, whose batches the host does not know. So
does a batch whose lengths the host does not know. An engine without ``quantization="fp8rl"``, a
cache that is not FP8 (nor exact) and a layer that the kernels do not serve (``_served``) keep
vLLM's behaviour altogether. Upstream:
``vllm/v1/attention/backends/flash_attn.py``. This file can be removed once FlashAttention reads FP8
caches with 16-bit queries, as fast as BF16 ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm import _custom_ops as ops
from vllm.config import VllmConfig, get_current_vllm_config_or_none
from vllm.utils.torch_utils import (
    canonicalize_singleton_dim_strides,  # FA3 needs aligned strides even for one KV head
)
from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)

from fp8rl.numerics import FP8_DTYPE
from vllm_fp8rl.attention.exact import is_exact, raise_not_split, require_served
from vllm_fp8rl.attention.hopper import (
    SplitAttentionImpl,
    SplitMetadata,
    SplitMetadataBuilder,
    kernels_compute,
)
from vllm_fp8rl.compat import keys_and_values
from vllm_fp8rl.engine.guard import PLAIN_KV_DTYPES
from vllm_fp8rl.engine.names import uses_fp8rl
from vllm_fp8rl.quantization.kv_cache import check_kv_cache_dtype


class Fp8RLFlashBackend(FlashAttentionBackend):
    """The backend: ``FLASH_ATTN`` with the implementation and metadata builder below."""

    @staticmethod
    def get_impl_cls() -> type[FlashAttentionImpl]:
        return Fp8RLFlashImpl

    @staticmethod
    def get_builder_cls() -> type[FlashAttentionMetadataBuilder]:
        return Fp8RLFlashMetadataBuilder


@dataclass
class Fp8RLFlashMetadata(SplitMetadata, FlashAttentionMetadata):
    """vLLM's metadata of a batch with prompts, and how it is split."""


class Fp8RLFlashMetadataBuilder(SplitMetadataBuilder, FlashAttentionMetadataBuilder):
    """Builds vLLM's metadata, split where the engine's batches are."""

    metadata = Fp8RLFlashMetadata

    def _splits(self) -> bool:
        return _splits_batches(self.vllm_config)

    @classmethod
    def _decodes(cls, engine: VllmConfig) -> bool:
        return _decodes(engine)

    def use_cascade_attention(self, *args: Any, **kwargs: Any) -> bool:
        return not _decodes(self.vllm_config) and super().use_cascade_attention(*args, **kwargs)


class Fp8RLFlashImpl(SplitAttentionImpl, FlashAttentionImpl):
    """Attention of one layer."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        engine = get_current_vllm_config_or_none()
        self.ours = self._served(engine)
        self.requires_q_scale = self.ours and self.kv_cache_dtype not in PLAIN_KV_DTYPES
        """Whether the cache is FP8. A refit then brings a ``q_scale``, which batches that are not
        split need."""
        self._exact = is_exact(engine)
        require_served(engine, self.ours and _splits_batches(engine))
        if self.ours:
            # Otherwise the layer rounds every query to E4M3.
            self.supports_quant_query_input = False
            dtype = FP8_DTYPE if self.requires_q_scale else torch.bfloat16
            self._prepare(engine, dtype, splits=_splits_batches(engine))

    def _served(self, engine: VllmConfig | None) -> bool:
        return (
            _reads(engine, self.kv_cache_dtype)
            and self.vllm_flash_attn_version == 3
            and kernels_compute(self)
            and not self.batch_invariant_enabled  # splits depend on the batch size
        )

    def _cache(
        self, layer: Any, kv_cache: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        fp8 = self.requires_q_scale
        held = kv_cache.view(FP8_DTYPE) if fp8 else kv_cache
        keys, values = keys_and_values(held, self.num_kv_heads, self.head_size)
        return keys, values, layer._k_scale if fp8 else None, layer._v_scale if fp8 else None

    def _attend_unsplit(
        self,
        layer: Any,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: FlashAttentionMetadata,
        output: torch.Tensor,
    ) -> torch.Tensor:
        """Compute attention of any batch as upstream, with queries in E4M3; raise if exact."""
        if self._exact:
            raise_not_split()
        tokens = attn_metadata.num_actual_tokens
        keys, values, _, _ = self._cache(layer, kv_cache)
        starts = attn_metadata.query_start_loc
        scales = (starts.shape[0] - 1, self.num_kv_heads)
        codes, _ = ops.scaled_fp8_quant(query[:tokens].flatten(1), layer._q_scale)
        flash_attn_varlen_func(
            q=codes.view(tokens, self.num_heads, self.head_size),
            k=canonicalize_singleton_dim_strides(keys),
            v=canonicalize_singleton_dim_strides(values),
            out=output[:tokens],
            cu_seqlens_q=starts,
            max_seqlen_q=attn_metadata.max_query_len,
            seqused_k=attn_metadata.seq_lens,
            max_seqlen_k=attn_metadata.max_seq_len,
            softmax_scale=self.scale,
            causal=attn_metadata.causal,
            block_table=attn_metadata.block_table,
            scheduler_metadata=attn_metadata.scheduler_metadata,
            num_splits=attn_metadata.max_num_splits,
            fa_version=3,
            q_descale=layer._q_scale.expand(scales),
            k_descale=layer._k_scale.expand(scales),
            v_descale=layer._v_scale.expand(scales),
        )
        return output


def _decodes(engine: VllmConfig) -> bool:
    """Return whether the CUDA graphs of an engine may contain the decode kernel."""
    return _reads(engine, engine.cache_config.cache_dtype)


def _reads(engine: VllmConfig | None, kv_cache_dtype: str) -> bool:
    """Return whether the kernels read a cache of this dtype in an engine."""
    return uses_fp8rl(engine) and (
        check_kv_cache_dtype(kv_cache_dtype)
        or (kv_cache_dtype in PLAIN_KV_DTYPES and is_exact(engine))
    )


def _splits_batches(engine: VllmConfig) -> bool:
    """Return whether an engine's batches are split into decodes and prompts."""
    return (
        _decodes(engine)
        and engine.speculative_config is None
        and not engine.cache_config.kv_sharing_fast_prefill
    )

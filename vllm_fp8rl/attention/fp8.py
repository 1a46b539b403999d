"""FlashAttention over an FP8 KV cache without rounding queries to E4M3, for Hopper GPUs.

With ``exact`` other kernels compute all of it (:mod:`vllm_fp8rl.attention.exact`), also over a
cache of 16 bits.

A step has requests that decode, with one token each, and prompts. Decodes run in
:mod:`vllm_fp8rl.attention.decode`. Prompts run in FlashAttention 3 with 16-bit queries over a
16-bit copy of their keys and values (:mod:`vllm_fp8rl.attention.pages.dequantize`), those of
earlier chunks and cached prefixes included. The backend is registered as ``FLASH_ATTN``, so vLLM
chooses it where it would choose its own.

Two kinds of engines quantize queries to E4M3 by the layer's ``q_scale``, as vLLM does, in a step
with several tokens of a request: those with speculative decoding, which would copy the whole cache
in every step, and those with ``kv_sharing_fast_prefill``, whose batches the host does not know. So
does a batch whose lengths the host does not know (:func:`split_batch`). An engine without
``quantization="fp8rl"``, a cache that is not FP8 (nor exact) and a layer that the kernels do not
serve (``_served``) keep vLLM's behaviour altogether. Upstream:
``vllm/v1/attention/backends/flash_attn.py``. This file can be removed once FlashAttention reads FP8
caches with 16-bit queries, as fast as BF16 ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from vllm import _custom_ops as ops
from vllm.config import VllmConfig, get_current_vllm_config_or_none
from vllm.utils.torch_utils import (
    canonicalize_singleton_dim_strides,  # FA3 needs aligned strides even for one KV head
)
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionType,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.kv_cache_interface import AttentionSpec

from fp8rl.numerics import FP8_DTYPE
from vllm_fp8rl.attention.decode import paged_decode, splits_for
from vllm_fp8rl.attention.exact import ExactAttention, is_exact, raise_not_split, require_served
from vllm_fp8rl.attention.pages.dequantize import dequantize_pages
from vllm_fp8rl.attention.split_batch import Prompts, extended, most_keys, split_batch
from vllm_fp8rl.compat import keys_and_values
from vllm_fp8rl.engine.guard import PLAIN_KV_DTYPES
from vllm_fp8rl.engine.names import uses_fp8rl
from vllm_fp8rl.quantization.kv_cache import check_kv_cache_dtype

HEAD_SIZES = (64, 128, 256)
"""Head sizes of the kernels, powers of two."""


class Fp8RLFlashBackend(FlashAttentionBackend):
    """The backend: ``FLASH_ATTN`` with the implementation and metadata builder below."""

    @staticmethod
    def get_impl_cls() -> type[FlashAttentionImpl]:
        return Fp8RLFlashImpl

    @staticmethod
    def get_builder_cls() -> type[FlashAttentionMetadataBuilder]:
        return Fp8RLFlashMetadataBuilder


@dataclass
class Fp8RLFlashMetadata(FlashAttentionMetadata):
    """vLLM's metadata of a batch with prompts, and how it is split."""

    decodes: int = 0
    """Number of requests at the start of the batch that decode."""
    prompts: list[Prompts] = field(default_factory=list)


class Fp8RLFlashMetadataBuilder(FlashAttentionMetadataBuilder):
    """Builds vLLM's metadata, with full CUDA graphs for decoding only.

    A graph captured with single tokens contains the decode kernel, which cannot run the mixed
    batches that FlashAttention 3 would replay the graph for.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._splits_batches = _splits_batches(self.vllm_config)
        if self._splits_batches:
            self.reorder_batch_threshold = 1  # vLLM's first model runner puts decodes first then

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> FlashAttentionMetadata:
        stock = super().build(common_prefix_len, common_attn_metadata, fast_build)
        if not self._splits_batches or stock.max_query_len == 1 or stock.causal is not True:
            return stock
        split = split_batch(common_attn_metadata, most_keys(self.vllm_config))
        if split is None:
            return stock
        decodes, prompts = split
        return extended(Fp8RLFlashMetadata, stock, decodes=decodes, prompts=prompts)

    @classmethod
    def get_cudagraph_support(
        cls, vllm_config: VllmConfig, kv_cache_spec: AttentionSpec, *args: Any, **kwargs: Any
    ) -> AttentionCGSupport:
        if _decodes(vllm_config):
            return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
        return super().get_cudagraph_support(vllm_config, kv_cache_spec, *args, **kwargs)

    def use_cascade_attention(self, *args: Any, **kwargs: Any) -> bool:
        return not _decodes(self.vllm_config) and super().use_cascade_attention(*args, **kwargs)


class Fp8RLFlashImpl(FlashAttentionImpl):
    """Attention of one layer."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        engine = get_current_vllm_config_or_none()
        self.ours = self._served(engine)
        """Whether this class computes the layer's attention."""
        self.requires_q_scale = self.ours and self.kv_cache_dtype not in PLAIN_KV_DTYPES
        """Whether the cache is FP8. A refit then brings a ``q_scale``, which batches that are not
        split need."""
        self._exact = is_exact(engine)
        require_served(engine, self.ours and _splits_batches(engine))
        if self.ours:
            # Otherwise the layer rounds every query to E4M3.
            self.supports_quant_query_input = False
            dtype = FP8_DTYPE if self.requires_q_scale else torch.bfloat16
            self._attend_batch = batch_attention(engine, dtype)
            self._most_keys = most_keys(engine) if _splits_batches(engine) else 0

    def _served(self, engine: VllmConfig | None) -> bool:
        return (
            _reads(engine, self.kv_cache_dtype)
            and self.vllm_flash_attn_version == 3
            and kernels_compute(self)
            and not self.batch_invariant_enabled  # splits depend on the batch size
        )

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        attend = self._attend if self.ours else super().forward
        return attend(*args, **kwargs)

    def _attend(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: FlashAttentionMetadata,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute attention as upstream; ``query`` ``[tokens, heads, head_size]`` has 16 bits."""
        if attn_metadata is None:
            # vLLM measures memory in such a run: take what the copy of the longest prompts takes.
            query.new_empty(2, self._most_keys, self.num_kv_heads, self.head_size)
            return super().forward(
                layer,
                query,
                key,
                value,
                kv_cache,
                attn_metadata,
                output,
                output_scale,
                output_block_scale,
            )
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("FlashAttention does not quantize its output.")
        fp8 = self.requires_q_scale
        held = kv_cache.view(FP8_DTYPE) if fp8 else kv_cache
        cache = keys_and_values(held, self.num_kv_heads, self.head_size)
        decodes, prompts = attn_metadata.seq_lens.shape[0], []
        if attn_metadata.max_query_len > 1:
            if not isinstance(attn_metadata, Fp8RLFlashMetadata):
                if self._exact:
                    raise_not_split()
                return self._attend_in_fp8(layer, query, cache, attn_metadata, output)
            decodes, prompts = attn_metadata.decodes, attn_metadata.prompts
        return self._attend_batch(
            query,
            *cache,
            attn_metadata.block_table,
            attn_metadata.seq_lens,
            decodes,
            prompts,
            softmax_scale=self.scale,
            k_scale=layer._k_scale if fp8 else None,
            v_scale=layer._v_scale if fp8 else None,
            out=output,
        )

    def _attend_in_fp8(
        self,
        layer: Any,
        query: torch.Tensor,
        cache: tuple[torch.Tensor, ...],
        attn_metadata: FlashAttentionMetadata,
        output: torch.Tensor,
    ) -> torch.Tensor:
        """Compute attention of any batch as upstream, with queries in E4M3."""
        tokens = attn_metadata.num_actual_tokens
        keys, values = cache
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


def batch_attention(engine: VllmConfig, cache: torch.dtype) -> Callable[..., torch.Tensor]:
    """Return what computes the attention of a batch: :func:`attend_batch`, or the exact one.

    Args:
        engine: configuration of the engine.
        cache: dtype of the cache's elements.
    """
    processors = torch.cuda.get_device_properties().multi_processor_count
    if is_exact(engine):
        return ExactAttention(cache, processors).attend_batch
    return partial(attend_batch, processors=processors)


def kernels_compute(impl: Any) -> bool:
    """Return whether a layer's attention, an object of vLLM's, is what the kernels compute."""
    return (
        impl.attn_type == AttentionType.DECODER
        and impl.head_size in HEAD_SIZES
        and impl.sliding_window == (-1, -1)
        and not impl.logits_soft_cap
        and impl.alibi_slopes is None
        and impl.sinks is None
        and impl.dcp_world_size == 1
    )


def attend_batch(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    decodes: int,
    prompts: list[Prompts],
    *,
    softmax_scale: float,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    out: torch.Tensor,
    processors: int,
) -> torch.Tensor:
    """Compute attention of a batch: decodes over the codes, prompts over a copy of 16 bits.

    Args:
        query, key_cache, value_cache, block_table, softmax_scale, k_scale, v_scale, out: see
            :func:`attend_prompts`.
        seq_lens: int32 ``[requests]``.
        decodes: number of requests at the start, with one token each.
        prompts: the rest.
        processors: number of SMs of the GPU.

    Returns:
        ``out``.
    """
    scales: dict[str, Any] = {
        "softmax_scale": softmax_scale,
        "k_scale": k_scale,
        "v_scale": v_scale,
    }
    if decodes:
        paged_decode(
            query[:decodes],
            key_cache,
            value_cache,
            block_table,
            seq_lens,
            out=out[:decodes],
            splits=splits_for(decodes, key_cache.shape[2], processors),
            **scales,
        )
    for group in prompts:
        attend_prompts(query, key_cache, value_cache, block_table, group, out=out, **scales)
    return out


def attend_prompts(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    prompts: Prompts,
    *,
    softmax_scale: float,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Compute attention of a batch's prompts over a 16-bit copy of their keys and values.

    Args:
        query: the batch's queries ``[tokens, heads, head_size]``, bfloat16 or float16.
        key_cache, value_cache: codes ``[pages, page_size, kv_heads, head_size]`` as
            :func:`~vllm_fp8rl.attention.decode.paged_decode` takes them.
        block_table: int32 ``[requests, pages of the longest]`` of the batch.
        prompts: those of the batch to compute.
        softmax_scale: factor of the scores.
        k_scale, v_scale: float32, one element or one for each token and head.
        out: like ``query``; only the rows of ``prompts`` are written.
    """
    keys, values = dequantize_pages(
        key_cache,
        value_cache,
        block_table[prompts.requests],
        prompts.key_starts,
        tokens=prompts.keys,
        longest=prompts.longest,
        k_scale=k_scale,
        v_scale=v_scale,
        dtype=query.dtype,
    )
    flash_attn_varlen_func(
        q=query[prompts.tokens],
        k=keys,
        v=values,
        out=out[prompts.tokens],
        cu_seqlens_q=prompts.query_starts,
        max_seqlen_q=prompts.longest_query,
        cu_seqlens_k=prompts.key_starts,
        max_seqlen_k=prompts.longest,
        softmax_scale=softmax_scale,
        causal=True,
        fa_version=3,
    )


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

"""What attention over an FP8 and over an INT8 KV cache have in common on Hopper GPUs.

A step has requests that decode, with one token each, and prompts. The metadata builder splits them.
Decodes run in :func:`fp8rl.kernels.paged.decode`, prompts in FlashAttention 3 over a 16-bit copy of
their keys and values (:func:`fp8rl.kernels.paged.dequantize_pages`), those of earlier chunks and
cached prefixes included. :mod:`vllm_fp8rl.attention.fp8` and :mod:`vllm_fp8rl.attention.int8` join
these classes with vLLM's own of a backend.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func
from vllm.v1.kv_cache_interface import AttentionSpec

from fp8rl.kernels.paged import decode, dequantize_pages, splits_for
from vllm_fp8rl.attention.exact import ExactAttention, is_exact
from vllm_fp8rl.attention.split_batch import Prompts, extended, most_keys, split_batch

HEAD_SIZES = (64, 128, 256)
"""Head sizes of the kernels, powers of two."""


@dataclass
class SplitMetadata:
    """What is added to vLLM's metadata of a batch with prompts: how it is split."""

    decodes: int = 0
    """Number of requests at the start of the batch that decode."""
    prompts: list[Prompts] = field(default_factory=list)


class SplitMetadataBuilder(AttentionMetadataBuilder):
    """Builds the metadata of vLLM's builder, a base class after this one, and splits batches.

    Full CUDA graphs are for decoding only. A graph captured with single tokens contains the decode
    kernel, which cannot run the mixed batches that vLLM's own kernel would replay the graph for.
    """

    metadata: ClassVar[type[Any]]
    """vLLM's metadata with :class:`SplitMetadata`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._splits_batches = self._splits()
        if self._splits_batches:
            self.reorder_batch_threshold = 1  # vLLM's first model runner puts decodes first then

    def _splits(self) -> bool:
        """Return whether batches of these layers are split into decodes and prompts."""
        raise NotImplementedError

    @classmethod
    def _decodes(cls, engine: VllmConfig) -> bool:
        """Return whether the CUDA graphs of an engine may contain the decode kernel."""
        raise NotImplementedError

    def _split(self, batch: CommonAttentionMetadata) -> tuple[int, list[Prompts]] | None:
        return split_batch(batch, most_keys(self.vllm_config))

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> Any:
        stock = super().build(common_prefix_len, common_attn_metadata, fast_build)
        if not self._splits_batches or stock.max_query_len == 1 or stock.causal is not True:
            return stock
        split = self._split(common_attn_metadata)
        if split is None:
            return stock
        decodes, prompts = split
        return extended(self.metadata, stock, decodes=decodes, prompts=prompts)

    @classmethod
    def get_cudagraph_support(
        cls, vllm_config: VllmConfig, kv_cache_spec: AttentionSpec, *args: Any, **kwargs: Any
    ) -> AttentionCGSupport:
        if cls._decodes(vllm_config):
            return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
        return super().get_cudagraph_support(vllm_config, kv_cache_spec, *args, **kwargs)


class SplitAttentionImpl(AttentionImpl):
    """Attention of one layer, by our kernels or by vLLM's class, a base class after this one."""

    ours: bool
    """Whether our kernels compute the layer's attention."""
    exact_attention: ExactAttention | None = None
    """What computes it where the recipe says ``exact``."""

    def _prepare(self, engine: VllmConfig, cache: torch.dtype, *, splits: bool) -> None:
        """Take what the kernels need: the dtype of the cache, and whether batches are split."""
        processors = torch.cuda.get_device_properties().multi_processor_count
        if is_exact(engine):
            self.exact_attention = ExactAttention(cache, processors)
            self._attend_batch: Callable[..., torch.Tensor] = self.exact_attention.attend_batch
        else:
            self._attend_batch = partial(attend_batch, processors=processors)
        self._most_keys = most_keys(engine) if splits else 0

    def restore(self) -> None:
        """Write again what a level-2 sleep discards beside weights; vLLM keeps buffers alone."""
        if self.exact_attention is not None:
            self.exact_attention.restore()

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
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute attention as upstream; ``query`` ``[tokens, heads, head_size]`` has 16 bits."""
        if attn_metadata is None:
            # vLLM measures memory in such a run: take what the copy of the longest prompts takes.
            query.new_empty(2, self._most_keys, self.num_kv_heads, self.head_size)
            return output.fill_(0)
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("fp8rl's attention on a GPU does not quantize its output.")
        decodes, prompts = attn_metadata.seq_lens.shape[0], []
        if attn_metadata.max_query_len > 1:
            if not isinstance(attn_metadata, SplitMetadata):
                return self._attend_unsplit(layer, query, kv_cache, attn_metadata, output)
            decodes, prompts = attn_metadata.decodes, attn_metadata.prompts
        keys, values, k_scale, v_scale = self._cache(layer, kv_cache)
        return self._attend_batch(
            query,
            keys,
            values,
            attn_metadata.block_table,
            attn_metadata.seq_lens,
            decodes,
            prompts,
            softmax_scale=self.scale,
            k_scale=k_scale,
            v_scale=v_scale,
            out=output,
        )

    def _cache(
        self, layer: Any, kv_cache: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Return keys, values ``[pages, page_size, kv_heads, head_size]`` and their scales."""
        raise NotImplementedError

    def _attend_unsplit(
        self,
        layer: Any,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
    ) -> torch.Tensor:
        """Compute attention of a batch with several tokens of a request that is not split."""
        raise NotImplementedError


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
    """Compute attention of a batch: ``decodes`` over the codes, prompts over a copy of 16 bits.

    The others are arguments of :func:`attend_prompts` and :func:`fp8rl.kernels.paged.decode`;
    ``processors`` are the SMs of the GPU.
    """
    scales: dict[str, Any] = {
        "softmax_scale": softmax_scale,
        "k_scale": k_scale,
        "v_scale": v_scale,
    }
    if decodes:
        decode(
            query[:decodes],
            key_cache,
            value_cache,
            block_table,
            seq_lens,
            out=out[:decodes],
            splits=splits_for(decodes, key_cache.shape[2], processors, exact=False),
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
            :func:`fp8rl.kernels.paged.decode` takes them.
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

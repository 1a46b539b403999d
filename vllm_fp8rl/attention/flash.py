"""FlashAttention with a faster decode step over an FP8 KV cache, for Hopper GPUs.

A batch of single tokens runs in :mod:`vllm_fp8rl.attention.paged_decode`. Every other batch runs in
FlashAttention 3 as in vLLM, with the query quantized by the layer's ``q_scale``. The backend is
registered as ``FLASH_ATTN``, so vLLM chooses it where it would choose its own. An engine without
``quantization="fp8rl"``, a cache that is not FP8 and a layer that the kernel does not serve
(``_served``) keep vLLM's behaviour. Upstream: ``vllm/v1/attention/backends/flash_attn.py``. This
file can be removed once FlashAttention reads FP8 caches as fast as BF16 ones.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm import _custom_ops as ops
from vllm.config import VllmConfig, get_current_vllm_config_or_none
from vllm.utils.torch_utils import (
    canonicalize_singleton_dim_strides,  # FA3 needs aligned strides even for one KV head
)
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType
from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.kv_cache_interface import AttentionSpec, is_quantized_kv_cache

from fp8rl.numerics import FP8_DTYPE
from vllm_fp8rl.attention.paged_decode import paged_decode, splits_for
from vllm_fp8rl.compat import keys_and_values
from vllm_fp8rl.names import uses_fp8rl
from vllm_fp8rl.quantization.kv_cache import check_kv_cache_dtype

_HEAD_SIZES = (64, 128, 256)


class Fp8RLFlashBackend(FlashAttentionBackend):
    """The backend: ``FLASH_ATTN`` with the implementation and metadata builder below."""

    @staticmethod
    def get_impl_cls() -> type[FlashAttentionImpl]:
        return Fp8RLFlashImpl

    @staticmethod
    def get_builder_cls() -> type[FlashAttentionMetadataBuilder]:
        return Fp8RLFlashMetadataBuilder


class Fp8RLFlashMetadataBuilder(FlashAttentionMetadataBuilder):
    """Builds vLLM's metadata, with full CUDA graphs for decoding only.

    A graph captured with single tokens contains the decode kernel, which cannot run the mixed
    batches that FlashAttention 3 would replay the graph for.
    """

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
        self.quantizes_queries = self._served()
        """Whether single tokens run in the decode kernel, and only queries of prompts in FP8."""
        if self.quantizes_queries:
            # Otherwise the layer rounds every query to E4M3, which decoding does not need.
            self.supports_quant_query_input = False
            self._processors = torch.cuda.get_device_properties().multi_processor_count

    def _served(self) -> bool:
        return (
            uses_fp8rl(get_current_vllm_config_or_none())
            and check_kv_cache_dtype(self.kv_cache_dtype)
            and self.vllm_flash_attn_version == 3
            and self.attn_type == AttentionType.DECODER
            and self.head_size in _HEAD_SIZES
            and self.sliding_window == (-1, -1)
            and not self.logits_soft_cap
            and self.alibi_slopes is None
            and self.sinks is None
            and self.dcp_world_size == 1
            and not self.batch_invariant_enabled  # splits depend on the batch size
        )

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        attend = self._attend if self.quantizes_queries else super().forward
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
        keys, values = keys_and_values(kv_cache.view(FP8_DTYPE), self.num_kv_heads, self.head_size)
        tokens = attn_metadata.num_actual_tokens
        if attn_metadata.max_query_len == 1:
            sequences = attn_metadata.seq_lens.shape[0]
            paged_decode(
                query[:sequences],
                keys,
                values,
                attn_metadata.block_table,
                attn_metadata.seq_lens,
                softmax_scale=self.scale,
                k_scale=layer._k_scale,
                v_scale=layer._v_scale,
                out=output[:sequences],
                splits=splits_for(sequences, self.num_kv_heads, self._processors),
            )
            return output
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
    return uses_fp8rl(engine) and is_quantized_kv_cache(engine.cache_config.cache_dtype)

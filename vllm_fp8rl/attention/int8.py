"""Attention over a KV cache in INT8 with a scale for each token and head, for Hopper GPUs.

vLLM has the format, ``kv_cache_dtype="int8_per_token_head"``, in its Triton backend, whose kernel
takes three to eight times as long as FlashAttention over BF16 (``docs/measurements/kernels.md``).
Here decodes run in :mod:`vllm_fp8rl.attention.decode`, as fast as over E4M3, and prompts in
FlashAttention 3 over a 16-bit copy of their keys and values, as in
:mod:`vllm_fp8rl.attention.fp8`. The cache's pages have another order of bytes than vLLM's
(:mod:`vllm_fp8rl.attention.pages.int8_layout`). The backend is registered as ``TRITON_ATTN``, the
only one that vLLM chooses for this format.

An engine that is not served (``_serves``), one without ``quantization="fp8rl"`` and one with a
cache of another format keep vLLM's behaviour altogether; a layer that is not (``_served``) keeps
vLLM's kernels and pages, but not its CUDA graphs of mixed batches. Upstream:
``vllm/v1/attention/backends/triton_attn.py``. This file can be removed once vLLM reads its INT8
cache as fast as an FP8 one.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from vllm import envs
from vllm.config import VllmConfig, get_current_vllm_config_or_none
from vllm.logger import init_logger
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.attention.backends.fa_utils import get_flash_attn_version
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadata,
    TritonAttentionMetadataBuilder,
)
from vllm.v1.kv_cache_interface import AttentionSpec

from fp8rl.errors import UnsupportedError
from vllm_fp8rl.attention.exact import require_served
from vllm_fp8rl.attention.fp8 import HEAD_SIZES, batch_attention, kernels_compute
from vllm_fp8rl.attention.pages.int8_layout import int8_pages
from vllm_fp8rl.attention.pages.int8_write import write_int8
from vllm_fp8rl.attention.split_batch import Prompts, extended, most_keys, split_batch
from vllm_fp8rl.engine.names import uses_fp8rl
from vllm_fp8rl.quantization.kv_cache import INT8_KV_DTYPE

logger = init_logger("vllm.fp8rl")


class Fp8RLTritonBackend(TritonAttentionBackend):
    """The backend: ``TRITON_ATTN`` with the implementation and metadata builder below."""

    @staticmethod
    def get_impl_cls() -> type[TritonAttentionImpl]:
        return Fp8RLTritonImpl

    @staticmethod
    def get_builder_cls() -> type[TritonAttentionMetadataBuilder]:
        return Fp8RLTritonMetadataBuilder


@dataclass
class Fp8RLTritonMetadata(TritonAttentionMetadata):
    """vLLM's metadata of a batch with prompts, and how it is split."""

    decodes: int = 0
    """Number of requests at the start of the batch that decode."""
    prompts: list[Prompts] = field(default_factory=list)


class Fp8RLTritonMetadataBuilder(TritonAttentionMetadataBuilder):
    """Builds vLLM's metadata, with full CUDA graphs for decoding only."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        layers = self.vllm_config.compilation_config.static_forward_context
        self._splits_batches = _serves(self.vllm_config) and any(
            layers[name].impl.ours for name in self.layer_names
        )
        if self._splits_batches:
            self.reorder_batch_threshold = 1  # vLLM's first model runner puts decodes first then

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> TritonAttentionMetadata:
        stock = super().build(common_prefix_len, common_attn_metadata, fast_build)
        if not self._splits_batches or stock.max_query_len == 1 or stock.causal is not True:
            return stock
        split = split_batch(common_attn_metadata, most_keys(self.vllm_config))
        if split is None:  # the host does not know the lengths, so it waits for those of the GPU
            known = {"seq_lens_cpu_upper_bound": common_attn_metadata.seq_lens.cpu()}
            split = split_batch(replace(common_attn_metadata, **known), most_keys(self.vllm_config))
            assert split is not None
        decodes, prompts = split
        return extended(Fp8RLTritonMetadata, stock, decodes=decodes, prompts=prompts)

    @classmethod
    def get_cudagraph_support(
        cls, vllm_config: VllmConfig, kv_cache_spec: AttentionSpec, *args: Any, **kwargs: Any
    ) -> AttentionCGSupport:
        if _serves(vllm_config):
            return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
        return super().get_cudagraph_support(vllm_config, kv_cache_spec, *args, **kwargs)


class Fp8RLTritonImpl(TritonAttentionImpl):
    """Attention of one layer.

    A step raises UnsupportedError for pages whose bytes are apart, and for a batch that is not
    causal.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        engine = get_current_vllm_config_or_none()
        self.ours = _serves(engine) and self._served()
        """Whether this class writes and reads the layer's cache."""
        require_served(engine, self.ours)
        if self.ours:
            self._attend_batch = batch_attention(engine, torch.uint8)
            self._most_keys = most_keys(engine)
        elif uses_fp8rl(engine) and self.kv_cache_dtype == INT8_KV_DTYPE:
            logger.warning_once(
                "fp8rl: vLLM's own Triton kernel reads the INT8 KV cache in some or all layers of "
                "this engine, which takes several times as long as over a BF16 cache; docs/vllm.md "
                "says where fp8rl's kernel runs."
            )

    def _served(self) -> bool:
        return (
            self.kv_cache_dtype == INT8_KV_DTYPE
            and kernels_compute(self)
            and self.chunk_lookback < 0
        )

    def fused_output_quant_supported(self, *args: Any, **kwargs: Any) -> bool:
        return not self.ours and super().fused_output_quant_supported(*args, **kwargs)

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        if not self.ours:
            super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
            return
        pages = int8_pages(kv_cache, self.num_kv_heads, self.head_size)
        write_int8(key, value, pages, slot_mapping)

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
        attn_metadata: TritonAttentionMetadata,
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
            raise NotImplementedError("Attention over an INT8 cache does not quantize its output.")
        decodes, prompts = attn_metadata.seq_lens.shape[0], []
        if attn_metadata.max_query_len > 1:
            if not isinstance(attn_metadata, Fp8RLTritonMetadata):
                raise UnsupportedError(
                    "A batch is not causal, which fp8rl's attention over an INT8 cache does not "
                    "serve; set kv_cache.dtype to auto, and kv_cache_dtype of the engine too."
                )
            decodes, prompts = attn_metadata.decodes, attn_metadata.prompts
        pages = int8_pages(kv_cache, self.num_kv_heads, self.head_size)
        return self._attend_batch(
            query,
            pages.keys,
            pages.values,
            attn_metadata.block_table,
            attn_metadata.seq_lens,
            decodes,
            prompts,
            softmax_scale=self.scale,
            k_scale=pages.key_scales,
            v_scale=pages.value_scales,
            out=output,
        )


def _serves(engine: VllmConfig | None) -> bool:
    """Return whether the kernels run in an engine, in all layers that they serve.

    Speculative decoding would copy the whole cache in every step, and with
    ``kv_sharing_fast_prefill`` the host does not know the batches. How requests are split over
    programs depends on the batch. Layers with a sliding window may share memory with others, where
    vLLM writes scales in its own order of bytes.
    """
    return (
        engine is not None
        and uses_fp8rl(engine)
        and engine.cache_config.cache_dtype == INT8_KV_DTYPE
        and engine.model_config.dtype.itemsize == 2
        and engine.model_config.get_sliding_window() is None
        and engine.model_config.get_head_size() in HEAD_SIZES
        and get_flash_attn_version(head_size=engine.model_config.get_head_size()) == 3
        and engine.speculative_config is None
        and not engine.cache_config.kv_sharing_fast_prefill
        and not engine.model_config.is_mm_prefix_lm
        and engine.model_config.rswa_window is None
        and not envs.VLLM_BATCH_INVARIANT
    )

"""Attention over a KV cache in INT8 with a scale for each token and head, for Hopper GPUs.

vLLM has the format, ``kv_cache_dtype="int8_per_token_head"``, in its Triton backend, whose kernel
takes three to eight times as long as FlashAttention over BF16 (``docs/measurements/attention.md``).
Here :mod:`vllm_fp8rl.attention.hopper` computes it, decodes as fast as over E4M3. The cache's pages
have another order of bytes than vLLM's (:mod:`vllm_fp8rl.attention.pages.int8_layout`). The backend
is registered as ``TRITON_ATTN``, the only one that vLLM chooses for this format.

An engine that is not served (``_serves``), one without ``quantization="fp8rl"`` and one with a
cache of another format keep vLLM's behaviour altogether; a layer that is not (``_served``) keeps
vLLM's kernels and pages, but not its CUDA graphs of mixed batches. Upstream:
``vllm/v1/attention/backends/triton_attn.py``. This file can be removed once vLLM reads its INT8
cache as fast as an FP8 one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from vllm import envs
from vllm.config import VllmConfig, get_current_vllm_config_or_none
from vllm.logger import init_logger
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.fa_utils import get_flash_attn_version
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadata,
    TritonAttentionMetadataBuilder,
)

from fp8rl.errors import UnsupportedError
from vllm_fp8rl.attention.exact import require_served
from vllm_fp8rl.attention.hopper import (
    HEAD_SIZES,
    SplitAttentionImpl,
    SplitMetadata,
    SplitMetadataBuilder,
    kernels_compute,
)
from vllm_fp8rl.attention.pages.int8_layout import int8_pages
from vllm_fp8rl.attention.pages.int8_write import write_int8
from vllm_fp8rl.attention.split_batch import Prompts
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
class Fp8RLTritonMetadata(SplitMetadata, TritonAttentionMetadata):
    """vLLM's metadata of a batch with prompts, and how it is split."""


class Fp8RLTritonMetadataBuilder(SplitMetadataBuilder, TritonAttentionMetadataBuilder):
    """Builds vLLM's metadata, split where the kernels serve a layer."""

    metadata = Fp8RLTritonMetadata

    def _splits(self) -> bool:
        layers = self.vllm_config.compilation_config.static_forward_context
        return _serves(self.vllm_config) and any(
            layers[name].impl.ours for name in self.layer_names
        )

    @classmethod
    def _decodes(cls, engine: VllmConfig) -> bool:
        return _serves(engine)

    def _split(self, batch: CommonAttentionMetadata) -> tuple[int, list[Prompts]]:
        split = super()._split(batch)
        if split is None:  # the host does not know the lengths, so it waits for those of the GPU
            split = super()._split(replace(batch, seq_lens_cpu_upper_bound=batch.seq_lens.cpu()))
            assert split is not None
        return split


class Fp8RLTritonImpl(SplitAttentionImpl, TritonAttentionImpl):
    """Attention of one layer.

    A step raises UnsupportedError for pages whose bytes are apart, and for a batch that is not
    causal.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        engine = get_current_vllm_config_or_none()
        self.ours = _serves(engine) and self._served()
        require_served(engine, self.ours)
        if self.ours:
            self._prepare(engine, torch.uint8, splits=True)
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

    def _cache(
        self, layer: Any, kv_cache: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        pages = int8_pages(kv_cache, self.num_kv_heads, self.head_size)
        return pages.keys, pages.values, pages.key_scales, pages.value_scales

    def _attend_unsplit(self, *args: Any) -> torch.Tensor:
        raise UnsupportedError(
            "A batch is not causal, which fp8rl's attention over an INT8 cache does not "
            "serve; set kv_cache.dtype to auto, and kv_cache_dtype of the engine too."
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

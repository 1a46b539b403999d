"""K and V rounded to an FP8 or INT8 KV cache, for vLLM's CPU attention backend.

vLLM's own FP8 cache on a CPU needs AVX-512 or AMX, and it has none in INT8. This backend rounds
keys and values as a cache of 8 bits does (:func:`fp8rl.numerics.fake_quantize_kv`,
:func:`fp8rl.numerics.fake_quantize_int8_kv`: what trainers call too) and keeps them in the model's
dtype, in vLLM's cache for that, over which vLLM's kernel attends. So a laptop and a server hold the
same values; the cache takes as much memory as one in the model's dtype.

With ``exact`` each request is computed alone, by what the trainer calls, so that bits do not depend
on the batch. An engine without ``quantization="fp8rl"`` keeps vLLM's behaviour. Metadata and
implementation: ``vllm/v1/attention/backends/cpu_attn.py``.
"""

from __future__ import annotations

import copy
from inspect import signature
from itertools import pairwise
from typing import Any

import torch
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.kv_cache_interface import AttentionSpec

from fp8rl.errors import UnsupportedError
from fp8rl.kernels.reference import attend
from fp8rl.numerics import fake_quantize_int8_kv, fake_quantize_kv
from vllm_fp8rl.attention.exact import is_exact, require_served
from vllm_fp8rl.engine.names import uses_fp8rl
from vllm_fp8rl.quantization.kv_cache import INT8_KV_DTYPE, check_kv_cache_dtype

_CONSTRUCTOR = signature(CPUAttentionBackendImpl.__init__)


class Fp8RLCpuBackend(CPUAttentionBackend):
    """The backend, registered as ``CPU_ATTN``: vLLM's CPU platform uses that name only."""

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        return Fp8RLCpuImpl

    @staticmethod
    def get_builder_cls() -> type[CPUAttentionMetadataBuilder]:
        return Fp8RLCpuMetadataBuilder


class Fp8RLCpuMetadataBuilder(CPUAttentionMetadataBuilder):
    """Plans vLLM's kernel for a cache in the model's dtype."""

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        if uses_fp8rl(vllm_config):
            vllm_config = copy.copy(vllm_config)
            vllm_config.cache_config = copy.copy(vllm_config.cache_config)
            vllm_config.cache_config.cache_dtype = "auto"
        super().__init__(kv_cache_spec, layer_names, vllm_config, device, *args, **kwargs)


class Fp8RLCpuImpl(CPUAttentionBackendImpl):
    """Attention of one layer.

    Raises:
        UnsupportedError: the engine runs ``fp8rl`` and vLLM's CPU kernels do not have the head
            size; or the cache is quantized in another format, or the attention is not that of a
            decoder.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = _CONSTRUCTOR.bind(self, *args, **kwargs)
        dtype = given.arguments["kv_cache_dtype"]
        engine = get_current_vllm_config()
        ours = uses_fp8rl(engine)
        if ours:
            given.arguments["kv_cache_dtype"] = "auto"
        super().__init__(*given.args[1:], **given.kwargs)
        self.exact = is_exact(engine)
        self.rounds: str | None = None
        """Dtype of the cache to whose values K and V are rounded; None: they stay as they are."""
        if ours:
            sizes = Fp8RLCpuBackend.get_supported_head_sizes()
            if self.head_size not in sizes:
                raise UnsupportedError(
                    f"Head size {self.head_size} has no attention kernel in vLLM on a CPU; use a "
                    f"model with a head size of {', '.join(map(str, sizes))}."
                )
            self.rounds = dtype if check_kv_cache_dtype(dtype) or dtype == INT8_KV_DTYPE else None
        if self.rounds and self.attn_type != AttentionType.DECODER:
            raise UnsupportedError(
                f"fp8rl has no FP8 or INT8 KV cache for attention of type '{self.attn_type}'; set "
                "kv_cache_dtype to 'auto'."
            )
        plain = (self.alibi_slopes, self.sinks, self.sliding_window, self.logits_soft_cap)
        decoder = self.attn_type == AttentionType.DECODER
        require_served(engine, decoder and plain == (None, None, -1, 0))

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write ``key`` and ``value`` ``[tokens, kv_heads, head_size]`` into their slots."""
        if self.rounds is not None:
            key, value = (x[: slot_mapping.numel()] for x in (key, value))
            if self.rounds == INT8_KV_DTYPE:
                key, value = fake_quantize_int8_kv(key, value)
            else:
                scales = torch.tensor((layer._k_scale_float, layer._v_scale_float))
                clipped = torch.zeros(2, dtype=torch.int64)
                key, value = fake_quantize_kv(key, value, scales, clipped)
        if not self.exact:
            super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
            return
        used = slot_mapping >= 0  # the rest is padding
        pair = torch.stack((key, value), 1)[: slot_mapping.numel()][used]
        self._token_rows(kv_cache)[slot_mapping[used].long()] = pair.flatten(1)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        attn_metadata: CPUAttentionMetadata | None,
        output: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        if self.rounds is not None:
            key = value = None  # or vLLM 0.25.1 writes them as they are
        if not self.exact or attn_metadata is None:
            return super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs
            )
        rows, size = self._token_rows(kv_cache), kv_cache.shape[-2]
        for request, (first, end) in enumerate(pairwise(attn_metadata.query_start_loc.tolist())):
            token = torch.arange(int(attn_metadata.seq_lens[request]))
            block = attn_metadata.block_table[request, token // size].long()
            pair = rows[block * size + token % size].view(len(token), 2, self.num_kv_heads, -1)
            output[first:end] = attend(query[first:end], pair[:, 0], pair[:, 1], self.scale)
        return output

    def _token_rows(self, kv_cache: torch.Tensor) -> torch.Tensor:
        """View the cache as ``[slots, 2 * kv_heads * head_size]``: K, then V, of a token."""
        return kv_cache.view(-1, 2 * self.num_kv_heads * self.head_size)

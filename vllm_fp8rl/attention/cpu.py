"""FP8 KV cache for vLLM's CPU attention backend.

vLLM's own FP8 cache on a CPU needs AVX-512 or AMX. This backend stores one-byte E4M3 codes on any
CPU and computes the same way on all of them, so that a laptop and a server write the same codes and
read the same values. It therefore does not use vLLM's own FP8 cache even where that exists.

* Write: ``codes = clamp(x / scale, -448, 448)`` in float32, with the layer's current scales.
* Read: the pages in use are decoded to a compact copy in the model's dtype, which vLLM's own
  attention kernel then reads. The copy holds the values of the codes (exact even in bfloat16).
  k_scale is multiplied into the softmax scale and v_scale into the output, as in FP8 attention
  kernels on a GPU.

An engine without ``quantization="fp8rl"`` and a cache that is not FP8 keep vLLM's behaviour. Layout
and metadata: ``vllm/v1/attention/backends/cpu_attn.py``.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from vllm import _custom_ops as ops
from vllm.config import VllmConfig, get_current_vllm_config, get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.kv_cache_interface import AttentionSpec

from fp8rl.errors import UnsupportedError
from fp8rl.numerics import E4M3_MAX, FP8_DTYPE
from vllm_fp8rl.attention.cpu_exact import Int8Cache, attend_requests
from vllm_fp8rl.attention.exact import is_exact, require_served
from vllm_fp8rl.attention.split_batch import extended
from vllm_fp8rl.compat import attention_isa, int8_pages_have_scales
from vllm_fp8rl.engine.names import uses_fp8rl
from vllm_fp8rl.quantization.kv_cache import INT8_KV_DTYPE, check_kv_cache_dtype

_CONSTRUCTOR = signature(CPUAttentionBackendImpl.__init__)
_PAGE = 32
"""Tokens in a page of the compact copy: the smallest number that every vLLM kernel takes."""
_CHUNK = 1 << 18
"""Number of codes decoded at a time: their float32 copy stays in a core's cache."""
_HALF = 256.0
"""An E4M3 bit pattern shifted left by 7 bits is code / 256 in float16 (exponent biases 7, 15)."""


class Fp8RLCpuBackend(CPUAttentionBackend):
    """The backend, registered as ``CPU_ATTN``: vLLM's CPU platform uses that name only."""

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        return Fp8RLCpuImpl

    @staticmethod
    def get_builder_cls() -> type[CPUAttentionMetadataBuilder]:
        return Fp8RLCpuMetadataBuilder


class Scratch:
    """Named buffers that grow and are reused: fresh memory costs more time than the decoding."""

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised tensor, valid until the next call with this name."""
        size = math.prod(shape)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size or buffer.dtype != dtype:
            buffer = self._buffers[name] = torch.empty(size, dtype=dtype)
        return buffer[:size].view(shape)


@dataclass
class CompactPages:
    """The pages of the cache that one step reads; the layers of a group share them."""

    used: torch.Tensor
    """int64 ``[pages]``: page numbers in the cache, without duplicates."""
    block_table: torch.Tensor
    """int32 ``[requests, max pages]``: indices into ``used``."""
    slots: torch.Tensor
    """int64 ``[pages * page_size]``: 0, 1, 2, ..."""
    page_size: int
    seq_lens: torch.Tensor
    """Number of tokens of each request."""
    scratch: Scratch

    def unread(self) -> torch.Tensor:
        """Return bool ``[pages, page_size]``, true for slots after the last token of a request."""
        first = torch.arange(self.block_table.shape[1]) * self.page_size
        inside = (self.seq_lens[:, None] - first).clamp(0, self.page_size).long()
        tokens = torch.zeros(self.used.numel(), dtype=torch.int64)
        tokens.scatter_reduce_(0, self.block_table.long().flatten(), inside.flatten(), "amax")
        return torch.arange(self.page_size) >= tokens[:, None]


@dataclass
class Fp8RLCpuMetadata(CPUAttentionMetadata):
    """vLLM's metadata with the pages to decode."""

    pages: CompactPages | None = None


class Fp8RLCpuMetadataBuilder(CPUAttentionMetadataBuilder):
    """Plans, once per step, what the layers of a group decode."""

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
            # The kernel reads the decoded copy, so vLLM plans it for a cache that is not FP8.
            vllm_config = copy.copy(vllm_config)
            vllm_config.cache_config = copy.copy(vllm_config.cache_config)
            vllm_config.cache_config.cache_dtype = "auto"
        super().__init__(kv_cache_spec, layer_names, vllm_config, device, *args, **kwargs)
        # Some releases before 0.32 take the model's, which is another one beside gated delta nets.
        self.block_size = kv_cache_spec.block_size
        layers = get_layers_from_vllm_config(vllm_config, Attention, layer_names).values()
        self._quantized = [
            layer
            for layer in layers
            if isinstance(layer.impl, Fp8RLCpuImpl) and (layer.impl.stores_fp8 or layer.impl.exact)
        ]
        self._scratch = Scratch()

    def build(self, *args: Any, **kwargs: Any) -> CPUAttentionMetadata:
        stock = super().build(*args, **kwargs)
        if not self._quantized:
            return stock
        pages = self._plan(stock.block_table, stock.seq_lens)
        return extended(Fp8RLCpuMetadata, stock, pages=pages)

    def _plan(self, block_table: torch.Tensor, seq_lens: torch.Tensor) -> CompactPages:
        # Smaller pages than vLLM's blocks: a block of 128 tokens is mostly empty at first.
        size = _PAGE if self.block_size % _PAGE == 0 else self.block_size
        per_block = self.block_size // size
        counts = (seq_lens + (size - 1)) // size
        column = torch.arange(int(counts.max()))
        page = block_table[:, column // per_block].long() * per_block + column % per_block
        reads = column < counts[:, None]
        used, row = torch.unique(page[reads], return_inverse=True)  # shared prefixes: once
        table = torch.zeros(page.shape, dtype=torch.int32)
        table[reads] = row.int()
        slots = torch.arange(used.numel() * size)
        return CompactPages(used, table, slots, size, seq_lens, self._scratch)


class Fp8RLCpuImpl(CPUAttentionBackendImpl):
    """Attention of one layer.

    Raises:
        UnsupportedError: the engine runs ``fp8rl`` and vLLM's CPU kernels do not have the head
            size; or the cache is quantized and its format is not E4M3, or the attention is not that
            of a decoder.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = _CONSTRUCTOR.bind(self, *args, **kwargs)
        dtype = given.arguments["kv_cache_dtype"]
        engine = get_current_vllm_config()
        ours = uses_fp8rl(engine)
        self.exact = is_exact(engine)
        if ours:
            if dtype == INT8_KV_DTYPE and not self.exact:
                raise UnsupportedError(
                    f"There is no KV cache of dtype '{dtype}' on a CPU without exact; set "
                    "kv_cache_dtype to 'fp8' or 'auto'."
                )
            if dtype == INT8_KV_DTYPE and int8_pages_have_scales():
                raise UnsupportedError(
                    f"vLLM before 0.28 has no KV cache of dtype '{dtype}' on a CPU; install a "
                    "later one, or set kv_cache.dtype to fp8_e4m3."
                )
            # The kernel reads the decoded copy. For a cache in FP8 vLLM before 0.29 chooses it
            # here, and asks for AVX-512.
            given.arguments["kv_cache_dtype"] = "auto"
        super().__init__(*given.args[1:], **given.kwargs)
        self.stores_fp8 = False
        if ours:
            self._check_head_size()
            self.kv_cache_dtype = dtype
            self.stores_fp8 = check_kv_cache_dtype(dtype)
        if self.stores_fp8 and self.attn_type != AttentionType.DECODER:
            raise UnsupportedError(
                f"fp8rl has no FP8 KV cache for attention of type '{self.attn_type}'; set "
                "kv_cache_dtype to 'auto'."
            )
        self._int8 = Int8Cache() if self.exact and dtype == INT8_KV_DTYPE else None
        plain = (self.alibi_slopes, self.sinks, self.sliding_window, self.logits_soft_cap)
        decoder = self.attn_type == AttentionType.DECODER
        require_served(engine, decoder and plain == (None, None, -1, 0))

    def _check_head_size(self) -> None:
        sizes = Fp8RLCpuBackend.get_supported_head_sizes()
        if self.head_size not in sizes:
            raise UnsupportedError(
                f"Head size {self.head_size} has no attention kernel in vLLM on a CPU; use a model "
                f"with a head size of {', '.join(map(str, sizes))}."
            )

    def do_kv_cache_update(self, *args: Any, **kwargs: Any) -> None:
        ours = self.stores_fp8 or self.exact
        (self._store if ours else super().do_kv_cache_update)(*args, **kwargs)

    def _store(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write ``key`` and ``value`` ``[tokens, kv_heads, head_size]`` into their slots."""
        rows = self._token_rows(kv_cache)
        if self._int8 is not None:
            self._int8.store(rows, slot_mapping, key, value)
            return
        tokens = slot_mapping.numel()
        if self.stores_fp8:
            shape = (tokens, 2, self.num_kv_heads, self.head_size)
            pair = torch.empty(shape, dtype=torch.float32)
            pair[:, 0].copy_(key[:tokens]).div_(layer._k_scale_float)
            pair[:, 1].copy_(value[:tokens]).div_(layer._v_scale_float)
            pair = pair.clamp_(-E4M3_MAX, E4M3_MAX).to(FP8_DTYPE).view(torch.uint8)
        else:
            pair = torch.stack((key[:tokens], value[:tokens]), 1)
        padding = slot_mapping < 0
        if padding.any():
            pair, slot_mapping = pair[~padding], slot_mapping[~padding]
        rows.index_copy_(0, slot_mapping.long(), pair.flatten(1))

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        attend = self._attend if self.stores_fp8 or self.exact else super().forward
        return attend(*args, **kwargs)

    def _attend(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: CPUAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute attention of ``query`` ``[tokens, heads, head_size]`` over the decoded cache."""
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
            raise UnsupportedError(
                "Attention on a CPU cannot quantize its output; switch off that fusion pass."
            )
        assert isinstance(attn_metadata, Fp8RLCpuMetadata)
        assert attn_metadata.pages is not None
        if self.exact:
            attend_requests(
                query,
                self._token_rows(kv_cache),
                attn_metadata,
                kv_heads=self.num_kv_heads,
                softmax_scale=self.scale,
                scales=(layer._k_scale_float, layer._v_scale_float),
                int8=self._int8,
                out=output,
            )
            return output
        key_cache, value_cache = self._decode(
            self._token_rows(kv_cache), attn_metadata.pages, query.dtype, attention_isa(layer, self)
        )
        tokens = attn_metadata.num_actual_tokens
        ops.cpu_attention_with_kv_cache(
            query=query[:tokens],
            key_cache=key_cache,
            value_cache=value_cache,
            output=output[:tokens],
            query_start_loc=attn_metadata.query_start_loc,
            seq_lens=attn_metadata.seq_lens,
            scale=self.scale * layer._k_scale_float * _HALF,
            causal=attn_metadata.causal,
            alibi_slopes=self.alibi_slopes,
            sliding_window=self.sliding_window,
            block_table=attn_metadata.pages.block_table,
            softcap=self.logits_soft_cap,
            scheduler_metadata=attn_metadata.scheduler_metadata,
            s_aux=self.sinks,
            dynamic_causal=attn_metadata.dynamic_causal,
        )
        output[:tokens].mul_(layer._v_scale_float * _HALF)
        return output

    def _token_rows(self, kv_cache: torch.Tensor) -> torch.Tensor:
        """View the cache as ``[slots, 2 * kv_heads * head_size]``, codes as uint8.

        A row is K, then V, of a token.
        """
        if not kv_cache.is_contiguous():
            raise UnsupportedError(
                "fp8rl needs a KV cache whose blocks lie next to each other, but this model mixes "
                "layers with blocks of different sizes; set kv_cache_dtype to 'auto'."
            )
        codes = self.stores_fp8 or self._int8 is not None
        held = kv_cache.view(torch.uint8) if codes else kv_cache
        return held.view(-1, 2 * self.num_kv_heads * self.head_size)

    def _decode(
        self, rows: torch.Tensor, pages: CompactPages, dtype: torch.dtype, isa: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V of the pages in use, as codes / 256 in the layout of vLLM's kernel."""
        heads, size, step = self.num_kv_heads, self.head_size, pages.page_size
        page_rows = rows.view(-1, step * rows.shape[1])
        packed = pages.scratch.take("packed", (pages.used.numel(), heads, 2 * step, size), dtype)
        key_cache, value_cache = packed.chunk(2, dim=2)
        chunk = max(1, _CHUNK // page_rows.shape[1])
        for start in range(0, pages.used.numel(), chunk):
            part = pages.used[start : start + chunk]
            codes = pages.scratch.take("codes", (part.numel(), page_rows.shape[1]), torch.uint8)
            torch.index_select(page_rows, 0, part, out=codes)
            values = _codes_to_float(codes, dtype, pages.scratch)
            if values is None:
                # The kernel multiplies the slots after a request's last token by 0: a NaN that an
                # earlier request has left there would stay NaN.
                codes.view(-1, step, rows.shape[1])[pages.unread()[start : start + len(part)]] = 0
                values = codes.view(FP8_DTYPE).float().div_(_HALF).to(dtype)
            pair = values.view(-1, 2, heads, size)
            slots = pages.slots[start * step : start * step + pair.shape[0]]
            ops.cpu_attn_reshape_and_cache(
                pair[:, 0], pair[:, 1], key_cache, value_cache, slots, isa
            )
        return key_cache, value_cache


def _codes_to_float(
    codes: torch.Tensor, dtype: torch.dtype, scratch: Scratch
) -> torch.Tensor | None:
    """Convert E4M3 codes, uint8 of any shape, to code / 256 in ``dtype``, exactly.

    Returns None if a code is NaN. torch's own conversion goes element by element and takes ten
    times as long.
    """
    masked = scratch.take("masked", tuple(codes.shape), torch.uint8)
    if int(torch.bitwise_and(codes, 0x7F, out=masked).max()) == 0x7F:  # E4M3's NaN
        return None
    values = scratch.take("values", tuple(codes.shape), dtype)
    bits = scratch.take("bits", tuple(codes.shape), torch.int16)
    bits.copy_(codes.view(torch.int8))  # sign-extended
    bits.bitwise_left_shift_(7).bitwise_and_(-0x4001)  # clears bit 14, a copy of the sign
    return values.copy_(bits.view(torch.float16))

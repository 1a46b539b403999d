"""Batches of decodes and prompts over a paged cache of 8 bits, through fp8rl's attention.

On a GPU everything is real but the engine: vLLM's builder is replaced by the metadata that it would
return. On a CPU :func:`load_flash` and :func:`load_int8` put plain torch in place of
FlashAttention, and of the Triton kernels too where there is no triton (``TRITON_INTERPRET=1`` runs
the real ones): what is tested there is how a batch is split and which tensors each kernel gets.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import MISSING, dataclass, fields
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from fp8rl.numerics import FP8_DTYPE

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
CLOSE = 0.02 if os.environ.get("TRITON_INTERPRET") == "1" else 0.006
"""Relative error of INT8's batches: Triton's interpreter truncates to bfloat16."""
_HOPPER = "vllm_fp8rl.attention.hopper"
_FLASH = "vllm_fp8rl.attention.fp8"
_INT8 = "vllm_fp8rl.attention.int8"

Requests = Sequence[tuple[int, int]]
"""Number of tokens in the cache before this step, and of those in this step, by request."""

BATCHES: dict[str, Requests] = {
    "decodes": [(69, 1), (0, 1), (32, 1), (499, 1)],
    "prompts": [(0, 40), (0, 7), (0, 129)],
    "a prompt": [(0, 65)],
    "decodes and prompts": [(69, 1), (31, 1), (499, 1), (0, 40), (0, 130)],
    "a later chunk": [(64, 1), (128, 64)],
    "a later chunk with an end of one token": [(200, 1), (64, 1), (0, 33)],
    "cached prefixes": [(12, 1), (48, 3), (48, 16), (480, 2), (0, 64)],
    "a prompt of one token": [(17, 1), (0, 1), (0, 20)],
    "one token behind a prompt": [(17, 1), (0, 20), (90, 1), (33, 4), (5, 1)],
}


@dataclass
class Batch:
    """A step of an engine over random queries and pages; slots that no request has are NaN."""

    requests: Requests
    heads: int = 8
    kv_heads: int = 2
    size: int = 128
    page: int = 16
    layout: str = "NHD"
    """``NHD`` or ``HND`` of vLLM 0.25.1, or ``packed``, the layout since 0.26."""
    padding: int = 0
    """Requests without tokens at the end."""
    limit: int = 512
    """Keys of prompts that are copied together."""
    scales: tuple[float, float] = (2.0**-6, 2.0**-5)
    slack: int = 0
    """Keys that the host counts too many, by request."""

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(len(self.requests) + self.page)
        counts = [count for _, count in self.requests] + [0] * self.padding
        lengths = [sum(request) for request in self.requests] + [0] * self.padding
        most = -(-max(lengths) // self.page)
        pages = len(lengths) * most
        table = torch.randperm(pages, generator=generator).view(len(lengths), most)
        shape = (pages, 2, self.page, self.kv_heads, self.size)
        codes = torch.randn(shape, generator=generator).mul(40).clamp(-448, 448).to(FP8_DTYPE)
        for row, length in zip(table, lengths, strict=True):
            for slot in range(length, most * self.page):
                codes.view(torch.uint8)[row[slot // self.page], :, slot % self.page] = 0x7F
        self._codes, self._table = codes, table
        self.cache = _laid_out(codes.view(torch.uint8), self.layout).to(DEVICE)
        starts = torch.tensor([0, *counts]).cumsum(0).int()
        tokens = int(starts[-1])
        shape = (tokens, self.heads, self.size)
        self.query = (torch.randn(shape, generator=generator) * 2).bfloat16().to(DEVICE)
        self.common = CommonAttentionMetadata(
            query_start_loc=starts.to(DEVICE),
            query_start_loc_cpu=starts,
            seq_lens=torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
            seq_lens_cpu_upper_bound=torch.tensor(lengths, dtype=torch.int32) + self.slack,
            num_reqs=len(lengths),
            num_actual_tokens=tokens,
            max_query_len=max(counts),
            max_seq_len=max(lengths),
            block_table_tensor=table.int().to(DEVICE),
            slot_mapping=torch.empty(0),
        )
        k_scale, v_scale = (torch.tensor(scale, device=DEVICE) for scale in self.scales)
        self.layer = SimpleNamespace(
            _q_scale=torch.tensor(8 / 448, device=DEVICE), _k_scale=k_scale, _v_scale=v_scale
        )

    def attend(self, flash: Any, *, splits: bool = True, exact: bool = False) -> torch.Tensor:
        """Attention ``[tokens, heads, size]``; ``splits=False`` as vLLM does."""
        metadata = self._metadata(
            flash.Fp8RLFlashMetadataBuilder, flash.FlashAttentionMetadata, splits
        )
        impl = self._impl(flash.Fp8RLFlashImpl)
        impl.ours = impl.requires_q_scale = True
        impl._exact = exact
        output = torch.full_like(self.query, 7.0)
        return impl.forward(self.layer, self.query, None, None, self.cache, metadata, output)

    def _metadata(self, builder: type, kind: type, splits: bool) -> Any:
        """What a builder of fp8rl makes of vLLM's metadata of the batch, of class ``kind``."""
        made: Any = object.__new__(builder)
        made._splits_batches = splits
        made.vllm_config = SimpleNamespace(
            scheduler_config=SimpleNamespace(max_num_batched_tokens=self.limit),
            model_config=SimpleNamespace(max_model_len=0),
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                builder.__bases__[-1], "build", lambda _, prefix, common, fast: _stock(kind, common)
            )
            return made.build(0, self.common)

    def _impl(self, kind: type) -> Any:
        """An implementation of fp8rl without its constructor, which asks for an engine."""
        impl: Any = object.__new__(kind)
        impl.num_heads, impl.num_kv_heads, impl.head_size = self.heads, self.kv_heads, self.size
        impl.scale = self.size**-0.5
        hopper = sys.modules[_HOPPER]  # imported by now, over stand-ins without a GPU
        impl._attend_batch = partial(hopper.attend_batch, processors=132)
        return impl

    def expected(self) -> torch.Tensor:
        """Return attention in float64 over the dequantized pages."""
        parts = []
        queries = self.query.cpu().double().split([count for _, count in self.requests])
        for row, (context, count), query in zip(self._table, self.requests, queries, strict=False):
            pages = self._codes[row].float().double().transpose(0, 1).flatten(1, 2)
            keys, values = (
                x[: context + count].repeat_interleave(self.heads // self.kv_heads, 1) * scale
                for x, scale in zip(pages, self.scales, strict=True)
            )
            parts.append(_attention(query, keys, values, self.size**-0.5))
        return torch.cat(parts)

    def errors(self, found: torch.Tensor) -> torch.Tensor:
        """Return the relative error of each request."""
        counts = [count for _, count in self.requests]
        pairs = zip(found.cpu().double().split(counts), self.expected().split(counts), strict=True)
        return torch.stack([(a - b).norm() / b.norm() for a, b in pairs])


class Int8Batch(Batch):
    """The same over INT8 that the backend wrote; ``packed`` is the shape since vLLM 0.30."""

    def __post_init__(self) -> None:
        super().__post_init__()
        generator = torch.Generator().manual_seed(self.page)
        pages = self._codes.shape[0]
        shape = (pages, 2, self.page, self.kv_heads, self.size)
        by_row = torch.rand(*shape[:-1], 1, generator=generator).mul(9).sub(8).exp2()
        self._rows = (torch.randn(shape, generator=generator) * by_row).bfloat16()
        width = self.size + 4
        cache = torch.full((pages, 2 * self.page * self.kv_heads * width), -1, dtype=torch.int8)
        if self.layout == "packed":
            self.cache = cache.view(pages, self.kv_heads, self.page, 2 * width).to(DEVICE)
        else:
            self.cache = cache.view(pages, 2, self.page, self.kv_heads, width).to(DEVICE)
        lengths = [sum(request) for request in self.requests]
        slots = [
            int(row[token // self.page]) * self.page + token % self.page
            for row, length in zip(self._table, lengths, strict=False)
            for token in range(length)
        ]
        self.slots = torch.tensor([*slots, -1])

    def attend(self, int8: Any, *, splits: bool = True) -> torch.Tensor:
        """Write the cache and compute attention ``[tokens, heads, size]``."""
        metadata = self._metadata(
            int8.Fp8RLTritonMetadataBuilder, int8.TritonAttentionMetadata, splits
        )
        impl = self._impl(int8.Fp8RLTritonImpl)
        impl.ours = True
        rows = self._rows.transpose(0, 1).flatten(1, 2)[:, self.slots.clamp(min=0)]
        key, value = rows.to(DEVICE).unbind()
        impl.do_kv_cache_update(self.layer, key, value, self.cache, self.slots.to(DEVICE))
        output = torch.full_like(self.query, 7.0)
        return impl.forward(self.layer, self.query, key, value, self.cache, metadata, output)

    def expected(self) -> torch.Tensor:
        """Return attention in float64 over rows that are rounded to 127 steps each way."""
        rows = self._rows.double()
        steps = rows.abs().amax(-1, keepdim=True) / 127
        self._codes, scales = torch.round(rows / steps) * steps, self.scales
        self.scales = (1.0, 1.0)
        found = super().expected()
        self.scales = scales
        return found


def load_flash() -> AbstractContextManager[Any]:
    """Yield ``vllm_fp8rl.attention.fp8``, on a CPU with stand-ins for what needs a GPU."""
    return _load(_FLASH)


def load_int8() -> AbstractContextManager[Any]:
    """Yield ``vllm_fp8rl.attention.int8``, in the same way."""
    return _load(_INT8)


@contextmanager
def _load(path: str) -> Iterator[Any]:
    if ON_GPU:
        yield import_module(path)
        return
    from vllm.v1.attention.backends import fa_utils

    stand_ins = {
        "fp8rl.kernels.paged": [decode, splits_for, dequantize_pages],
        "vllm_fp8rl.attention.pages.int8_write": [write_int8],
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fa_utils, "flash_attn_varlen_func", flash_attn_varlen_func, raising=False)
        if find_spec("triton") is None:
            for name, functions in stand_ins.items():
                module: Any = ModuleType(name)
                for function in functions:
                    setattr(module, function.__name__, function)
                patch.setitem(sys.modules, name, module)
        yield import_module(path)
        for name in (_HOPPER, path):
            del sys.modules[name]


def decode(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    softmax_scale: float,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    out: torch.Tensor,
    splits: int,
) -> torch.Tensor:
    assert len(query) == len(out) <= len(block_table)
    for row, length in enumerate(seq_lens[: len(query)].tolist()):
        keys, values = (
            _values(cache, scale, block_table[row])[:length]
            for cache, scale in ((key_cache, k_scale), (value_cache, v_scale))
        )
        repeats = query.shape[1] // keys.shape[1]
        both = (x.double().repeat_interleave(repeats, 1) for x in (keys, values))
        out[row] = _attention(query[row, None].double(), *both, softmax_scale)[0]
    return out


def _values(codes: torch.Tensor, scale: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    """Return ``[tokens, kv_heads, head_size]`` in float32."""
    held = codes[pages.long()].float().flatten(0, 1)
    if codes.dtype == torch.uint8:
        held -= 128
        scale = scale[pages.long()].flatten(0, 1)[..., None]
    return held * scale


def write_int8(
    key: torch.Tensor, value: torch.Tensor, pages: Any, slot_mapping: torch.Tensor
) -> None:
    page = pages.keys.shape[1]
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            at = slot // page, slot % page
            for row, codes, scales in (
                (key[token], pages.keys, pages.key_scales),
                (value[token], pages.values, pages.value_scales),
            ):
                scales[at] = row.float().abs().amax(-1) / 127
                codes[at] = (torch.round(row.float() / scales[at][:, None]) + 128).byte()


def splits_for(sequences: int, kv_heads: int, processors: int, *, exact: bool) -> int:
    assert not exact
    return 1


def dequantize_pages(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    starts: torch.Tensor,
    *,
    tokens: int,
    longest: int,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, ...]:
    assert starts[-1] <= tokens and starts.diff().max() <= longest
    copies = []
    for cache, scale in ((key_cache, k_scale), (value_cache, v_scale)):
        copy = torch.full((tokens, *cache.shape[2:]), torch.nan, dtype=dtype)
        for row, (start, end) in enumerate(pairwise(starts.tolist())):
            copy[start:end] = _values(cache, scale, block_table[row])[: end - start]
        copies.append(copy)
    return tuple(copies)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    max_seqlen_q: int,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_k: int,
    cu_seqlens_k: torch.Tensor,
    softmax_scale: float,
    causal: bool,
    out: torch.Tensor,
    fa_version: int,
) -> torch.Tensor:
    assert causal and fa_version == 3 and q.dtype == k.dtype == v.dtype
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert cu_seqlens_q[-1] == len(q) and cu_seqlens_k[-1] <= len(k)
    assert cu_seqlens_q.diff().max() <= max_seqlen_q and cu_seqlens_k.diff().max() <= max_seqlen_k
    repeats = q.shape[1] // k.shape[1]
    for row in range(len(cu_seqlens_q) - 1):
        queries = slice(*cu_seqlens_q[row : row + 2].tolist())
        keys = slice(*cu_seqlens_k[row : row + 2].tolist())
        both = (x[keys].double().repeat_interleave(repeats, 1) for x in (k, v))
        out[queries] = _attention(q[queries].double(), *both, softmax_scale).to(out.dtype)
    return out


def _attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> torch.Tensor:
    """Attention ``[queries, heads, size]``; the last query sees every key."""
    scores = torch.einsum("qhd,nhd->hqn", query, keys) * scale
    unseen = torch.ones(scores.shape[1:], dtype=torch.bool).triu(len(keys) - len(query) + 1)
    weights = scores.masked_fill(unseen, -torch.inf).softmax(-1)
    return torch.einsum("hqn,nhd->qhd", weights, values)


def _stock(kind: type, common: CommonAttentionMetadata) -> Any:
    """Return vLLM's metadata as its builder makes it of a batch, in any release."""
    values = vars(common) | {
        "block_table": common.block_table_tensor,
        "scheduler_metadata": None,
        "max_num_splits": 0,
    }
    names = [f.name for f in fields(kind) if f.name in values or f.default is MISSING]
    return kind(**{name: values.get(name) for name in names})


def _laid_out(codes: torch.Tensor, layout: str) -> torch.Tensor:
    """Return a cache ``[pages, 2, page, kv_heads, size]`` as vLLM lays it out in memory."""
    if layout == "HND":
        return codes.transpose(2, 3).contiguous().transpose(2, 3)
    if layout == "packed":
        return torch.cat(codes.transpose(2, 3).unbind(1), -1).contiguous()
    return codes

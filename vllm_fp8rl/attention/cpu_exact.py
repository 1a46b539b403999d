"""Attention of vLLM's CPU engine whose bits do not depend on the batch, and are the trainer's.

Each request is computed alone, over keys and values as :func:`fp8rl.numerics.fake_quantize_kv` and
:func:`fp8rl.numerics.fake_quantize_int8_kv` round them in the trainer, or as they are.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

from fp8rl.kernels.reference import attend
from fp8rl.numerics import FP8_DTYPE
from fp8rl.numerics.reference import dequantize_int8, quantize_int8


class Int8Cache:
    """Codes of one layer's cache with a scale for each token, KV head, and K or V.

    The scales lie beside the cache, whose pages vLLM makes for codes alone on a CPU.
    """

    def __init__(self) -> None:
        self._scales = torch.empty(0)

    def store(
        self, rows: torch.Tensor, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Write tokens ``[tokens, kv_heads, head_size]`` into their slots; -1 is padding.

        Args:
            rows: the cache, uint8 ``[slots, 2 * kv_heads * head_size]``.
            slots: integers ``[tokens]``.
            key, value: tokens to write.
        """
        if len(self._scales) != len(rows):
            self._scales = torch.zeros(len(rows), 2, key.shape[1], 1)
        inside = slots >= 0
        codes, scales = quantize_int8(torch.stack((key, value), 1)[: len(slots)][inside])
        rows[slots[inside]] = codes.flatten(1)
        self._scales[slots[inside]] = scales

    def read(self, pair: torch.Tensor, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the values of the codes ``pair`` of some slots."""
        return dequantize_int8(pair, self._scales[slots], dtype)


def attend_requests(
    query: torch.Tensor,
    rows: torch.Tensor,
    metadata: Any,
    *,
    kv_heads: int,
    softmax_scale: float,
    scales: tuple[float, float],
    int8: Int8Cache | None,
    out: torch.Tensor,
) -> None:
    """Compute causal attention of a batch.

    Args:
        query: ``[tokens, heads, head_size]``.
        rows: the cache ``[slots, 2 * kv_heads * head_size]``, K, then V, of a token: codes in
            uint8, or the numbers themselves in the dtype of ``query``.
        metadata: :class:`vllm_fp8rl.attention.cpu.Fp8RLCpuMetadata` of the batch.
        kv_heads: number of KV heads.
        softmax_scale: factor of the scores.
        scales: of K and of V in E4M3.
        int8: where the scales are if the cache is in INT8; else None.
        out: like ``query``; written.
    """
    pages, size = metadata.pages, metadata.pages.page_size
    for request, (first, end) in enumerate(pairwise(metadata.query_start_loc.tolist())):
        token = torch.arange(int(metadata.seq_lens[request]))
        slots = pages.used[pages.block_table[request, token // size].long()] * size + token % size
        pair = rows[slots].view(len(slots), 2, kv_heads, -1)
        if int8 is not None:
            pair = int8.read(pair, slots, query.dtype)
        elif pair.dtype == torch.uint8:
            pair = pair.view(FP8_DTYPE).float() * torch.tensor(scales).view(2, 1, 1)
        key, value = pair.to(query.dtype).unbind(1)
        out[first:end] = attend(query[first:end], key, value, softmax_scale)

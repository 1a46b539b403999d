"""Measure the kernels of a decode step that fp8rl replaces, beside vLLM's, on one GPU.

    python benchmarks/decode_kernels.py [--out FILE.json]

Attention: one token per request over a paged cache with 32 query and 8 KV heads of size 128;
FlashAttention 3 over BF16 and over E4M3, fp8rl over E4M3 and INT8, and vLLM's Triton kernel over
INT8; single launches with a cold L2 cache.
Mixed batches: requests that decode beside prompts, chunks and cached prefixes, over the same cache;
FlashAttention 3 with all queries in E4M3, and fp8rl with queries of 16 bits, all its kernels.
Quantization: SiLU or RMS norm with the quantization after it; vLLM's fused kernels and fp8rl's;
twenty launches in a CUDA graph, as in a decode step. All times are medians. GB/s count what must be
read and written once; the share is relative to a device-to-device copy in the same run.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from facts import versions
from profiles import cold_ms, copy_bandwidth, graph_ms
from vllm import _custom_ops as ops
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.ops.triton_unified_attention import unified_attention
from vllm.v1.kv_cache_interface import KVQuantMode
from vllm.vllm_flash_attn import flash_attn_varlen_func

from fp8rl.kernels.norm import rms_norm_quantize
from fp8rl.numerics import FP8_DTYPE, GROUP
from fp8rl.numerics.triton.activations import quantize_rows
from vllm_fp8rl.attention.batch import split_batch
from vllm_fp8rl.attention.flash import attend_batch
from vllm_fp8rl.attention.int8_pages import SCALE_BYTES, int8_pages
from vllm_fp8rl.attention.paged_decode import paged_decode, splits_for

HEADS, KV_HEADS, SIZE, PAGE = 32, 8, 128, 16
REPEATS = 20
ATTENTION = ((256, 1024), (64, 3500), (16, 3000))  # requests, longest context
MIXED = {
    "256 decodes of 1500, 16 prompts of 512": [(1500, 1)] * 256 + [(0, 512)] * 16,
    "256 decodes of 1500, 1 prompt of 512": [(1500, 1)] * 256 + [(0, 512)],
    "16 prompts of 512": [(0, 512)] * 16,
    "4 prompts of 2048": [(0, 2048)] * 4,
    "8192 tokens after 8192": [(8192, 8192)],
    "512 tokens after 15872": [(15872, 512)],
    "256 requests of 16 tokens after 496": [(496, 16)] * 256,
}
"""Tokens in the cache and tokens of this step, by request."""
LIMIT = 16384  # keys that are copied together
HIDDEN, INNER = 4096, 12288


def cold(run: Callable[[], Any]) -> float:
    """Return the median microseconds of a single launch with a cold L2 cache."""
    return cold_ms(run, REPEATS) * 1e3


def in_graph(run: Callable[[], Any]) -> float:
    """Return the median microseconds of a launch in a CUDA graph of twenty."""
    return graph_ms(run, 20, REPEATS) * 1e3


def attention(requests: int, longest: int) -> dict[str, tuple[float, int]]:
    """Return microseconds and bytes read from the cache, by kernel."""
    torch.manual_seed(0)
    lengths = (longest * (1 - 0.2 * torch.rand(requests))).int().cuda()
    pages = -(-longest // PAGE)
    shape = (requests * pages, 2, PAGE, KV_HEADS, SIZE)
    plain = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    cache = plain.mul(40).clamp(-448, 448).to(FP8_DTYPE)
    table = torch.randperm(requests * pages).view(requests, pages).int().cuda()
    query = torch.randn(requests, HEADS, SIZE, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(query)
    scale = torch.tensor(0.02, device="cuda")
    starts = torch.arange(requests + 1, device="cuda", dtype=torch.int32)

    def flash(q: torch.Tensor, kv: torch.Tensor, descale: torch.Tensor | None) -> Any:
        return flash_attn_varlen_func(
            q=q,
            k=kv[:, 0],
            v=kv[:, 1],
            out=out,
            cu_seqlens_q=starts,
            max_seqlen_q=1,
            seqused_k=lengths,
            max_seqlen_k=longest,
            softmax_scale=SIZE**-0.5,
            causal=True,
            block_table=table,
            fa_version=3,
            q_descale=descale,
            k_descale=descale,
            v_descale=descale,
        )

    processors = torch.cuda.get_device_properties().multi_processor_count

    def ours(
        keys: torch.Tensor, values: torch.Tensor, k_scale: torch.Tensor, v_scale: torch.Tensor
    ) -> torch.Tensor:
        return paged_decode(
            query,
            keys,
            values,
            table,
            lengths,
            softmax_scale=SIZE**-0.5,
            k_scale=k_scale,
            v_scale=v_scale,
            out=out,
            splits=splits_for(requests, KV_HEADS, processors),
        )

    rows = (*shape[:-1], SIZE + SCALE_BYTES)
    quantized = torch.empty(rows, device="cuda", dtype=torch.int8)
    quantized.random_(-127, 128).view(torch.float32)[..., -1] = 0.02  # vLLM's own order of bytes
    pages = int8_pages(quantized.clone().random_(-127, 128), KV_HEADS, SIZE)
    for part in (pages.key_scales, pages.value_scales):
        part.fill_(0.02)

    def vllm_int8() -> None:
        held, scales = quantized[..., :SIZE], quantized.view(torch.float32)[..., -1]
        unified_attention(
            q=query,
            k=held[:, 0],
            v=held[:, 1],
            out=out,
            cu_seqlens_q=starts,
            max_seqlen_q=1,
            seqused_k=lengths,
            max_seqlen_k=longest,
            softmax_scale=SIZE**-0.5,
            causal=True,
            window_size=(-1, -1),
            block_table=table,
            softcap=0,
            q_descale=None,
            k_descale=None,
            v_descale=None,
            kv_quant_mode=KVQuantMode.INT8_PER_TOKEN_HEAD,
            k_scale_cache=scales[:, 0],
            v_scale_cache=scales[:, 1],
        )

    codes = query.to(FP8_DTYPE)
    expanded = scale.expand(requests, KV_HEADS)
    elements = int(lengths.sum()) * 2 * KV_HEADS * SIZE
    return {
        "FlashAttention 3, BF16": (cold(lambda: flash(query, plain, None)), 2 * elements),
        "FlashAttention 3, E4M3": (cold(lambda: flash(codes, cache, expanded)), elements),
        "fp8rl, E4M3": (cold(lambda: ours(*cache.unbind(1), scale, scale)), elements),
        "vLLM's Triton kernel, INT8": (cold(vllm_int8), elements + elements // SIZE * SCALE_BYTES),
        "fp8rl, INT8": (cold(lambda: ours(*pages)), elements + elements // SIZE * SCALE_BYTES),
    }


def mixed(requests: list[tuple[int, int]]) -> dict[str, tuple[float, int]]:
    """Return microseconds and bytes of the cache, by way, for a batch of any requests."""
    torch.manual_seed(0)
    counts = torch.tensor([count for _, count in requests], dtype=torch.int32)
    lengths = torch.tensor([sum(request) for request in requests], dtype=torch.int32)
    starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int()
    tokens, longest = int(starts[-1]), int(lengths.max())
    pages = -(-longest // PAGE)
    shape = (len(requests) * pages, 2, PAGE, KV_HEADS, SIZE)
    cache = torch.randn(shape, device="cuda", dtype=torch.bfloat16).mul(40).to(FP8_DTYPE)
    keys, values = cache.unbind(1)
    table = torch.randperm(len(requests) * pages).view(len(requests), pages).int().cuda()
    query = torch.randn(tokens, HEADS, SIZE, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(query)
    scale = torch.tensor(2.0**-6, device="cuda")
    batch = CommonAttentionMetadata(
        query_start_loc=starts.cuda(),
        query_start_loc_cpu=starts,
        seq_lens=lengths.cuda(),
        seq_lens_cpu_upper_bound=lengths,
        num_reqs=len(requests),
        num_actual_tokens=tokens,
        max_query_len=int(counts.max()),
        max_seq_len=longest,
        block_table_tensor=table,
        slot_mapping=torch.empty(0),
    )
    split = split_batch(batch, LIMIT)
    assert split is not None
    decodes, prompts = split
    processors = torch.cuda.get_device_properties().multi_processor_count
    scales = {"k_scale": scale, "v_scale": scale}
    descales = dict.fromkeys(("q_descale", "k_descale", "v_descale"), scale)

    def in_e4m3() -> None:
        codes, _ = ops.scaled_fp8_quant(query.flatten(1), scale)
        flash_attn_varlen_func(
            q=codes.view_as(query),
            k=keys,
            v=values,
            out=out,
            cu_seqlens_q=batch.query_start_loc,
            max_seqlen_q=batch.max_query_len,
            seqused_k=batch.seq_lens,
            max_seqlen_k=longest,
            softmax_scale=SIZE**-0.5,
            causal=True,
            block_table=table,
            fa_version=3,
            **{name: x.expand(len(requests), KV_HEADS) for name, x in descales.items()},
        )

    def ours() -> None:
        attend_batch(
            query,
            keys,
            values,
            table,
            batch.seq_lens,
            decodes,
            prompts,
            softmax_scale=SIZE**-0.5,
            out=out,
            processors=processors,
            **scales,
        )

    elements = int(lengths.sum()) * 2 * KV_HEADS * SIZE
    return {
        "FlashAttention 3, E4M3": (cold(in_e4m3), elements),
        "fp8rl, 16-bit queries": (cold(ours), elements),
    }


def quantization(rows: int) -> dict[str, tuple[float, int]]:
    """Return microseconds and bytes read and written, by kernel."""
    gate_up = torch.randn(rows, 2 * INNER, device="cuda", dtype=torch.bfloat16)
    x, residual = (torch.randn(rows, HIDDEN, device="cuda").bfloat16() for _ in range(2))
    weight = torch.ones(HIDDEN, device="cuda", dtype=torch.bfloat16)
    silu_bytes = gate_up.nbytes + rows * INNER + rows * INNER // GROUP * 4
    norm_bytes = 3 * x.nbytes + rows * HIDDEN + rows * HIDDEN // GROUP * 4
    return {
        "SiLU, vLLM": (
            in_graph(
                lambda: ops.silu_and_mul_per_block_quant(
                    gate_up, GROUP, FP8_DTYPE, is_scale_transposed=True
                )
            ),
            silu_bytes,
        ),
        "SiLU, fp8rl": (
            in_graph(lambda: quantize_rows(gate_up, "fp32", silu_and_mul=True)),
            silu_bytes,
        ),
        "norm, vLLM": (
            in_graph(
                lambda: ops.rms_norm_per_block_quant(
                    x, weight, 1e-6, FP8_DTYPE, [1, GROUP], None, residual, True
                )
            ),
            norm_bytes,
        ),
        "norm, fp8rl": (
            in_graph(lambda: rms_norm_quantize(x, residual, weight, 1e-6, "fp32")),
            norm_bytes,
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Kernels of a decode step")
    parser.add_argument("--out", type=Path, default=Path("decode_kernels.json"))
    options = parser.parse_args()
    copied = copy_bandwidth(REPEATS)
    measured: dict[str, Any] = {}
    for requests, longest in ATTENTION:
        measured[f"attention {requests} x {longest}"] = attention(requests, longest)
    for name, requests in MIXED.items():
        measured[name] = mixed(requests)
    for rows in (64, 256):
        measured[f"quantization {rows} rows"] = quantization(rows)
    table = {
        case: {
            kernel: {"us": us, "gb_s": count / us / 1e3, "share": count / us / 1e3 / copied}
            for kernel, (us, count) in kernels.items()
        }
        for case, kernels in measured.items()
    }
    result = {
        "gpu": torch.cuda.get_device_name(),
        "versions": versions(),
        "copy_gb_s": copied,
        "cases": table,
    }
    options.out.write_text(json.dumps(result, indent=1))
    for case, kernels in table.items():
        for kernel, row in kernels.items():
            line = f"{row['us']:8.1f} us {row['gb_s']:6.0f} GB/s ({row['share']:.0%})"
            sys.stdout.write(f"{case:40} {kernel:24} {line}\n")


if __name__ == "__main__":
    main()

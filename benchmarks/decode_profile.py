"""Profile one decode step on a GPU by kernel, against the memory roofline.

    python benchmarks/decode_profile.py [--variants fp8rl-kv,stock-kv,bf16] [--out FILE.json]

Engines as in ``benchmarks/rollout.py`` (Qwen3-8B shape, dummy weights, one process each). After
``--steps`` decode steps, torch's profiler records ten more; times are GPU time per step. The
roofline of a part is the bytes that it must read (the weights once, the KV cache of each request
once) divided by the GPU's peak bandwidth. Arithmetic takes less at these batch sizes, see
``flops_us``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from facts import versions
from processes import in_process
from rollout import KV_SCALE, QWEN3_8B, VARIANTS, engine_arguments, give_weights

PARTS = {  # a kernel belongs to the first part with a pattern that is in its name
    "attention": ("flash::", "_attend", "_combine", "unified_attention"),
    "cache write and query": ("reshape_and_cache", "scaled_fp8_quant"),
    "quantization, norm, SiLU": (
        "_rows_kernel",
        "_norm_kernel",
        "per_block_quant",
        "per_token_group",
        "rms_norm",
        "silu",
    ),
    "linears": ("deep_gemm", "cutlass", "nvjet", "gemm", "w8a8"),
    "sampler": ("gumbel", "ArgMax", "softmax", "direct_copy_kernel"),
}
PROFILED = 10
PEAK_BANDWIDTH = {"H100 80GB HBM3": 3.35e12, "H200": 4.8e12}  # bytes/s, data sheets
PEAK_FP8 = 1.979e15


def part_of(kernel: str) -> str:
    for part, patterns in PARTS.items():
        if any(pattern in kernel for pattern in patterns):
            return part
    return "other"


def bounds(variant: str, requests: int, context: float, bandwidth: float) -> dict[str, float]:
    """Return the shortest possible microseconds of a step's parts at a GPU's peak."""
    shape = QWEN3_8B
    hidden, inner, head = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    heads, kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
    weights = hidden * head * (2 * heads + 2 * kv_heads) + 3 * hidden * inner
    vocabulary = shape["vocab_size"] * hidden
    width = 2 if variant == "bf16" else 1
    cached = shape["num_hidden_layers"] * 2 * kv_heads * head * (1 if "kv" in variant else 2)
    linears = shape["num_hidden_layers"] * weights * width + vocabulary * 2
    flops = 2 * requests * (shape["num_hidden_layers"] * weights + vocabulary)
    return {
        "attention": requests * context * cached / bandwidth * 1e6,
        "linears": linears / bandwidth * 1e6,
        "flops_us": flops * width / PEAK_FP8 * 1e6,
    }


def run_variant(variant: str, options: argparse.Namespace) -> dict[str, Any]:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    import torch
    from torch.profiler import ProfilerActivity, profile
    from vllm import LLM, SamplingParams

    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(QWEN3_8B))
    llm = LLM(
        str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=options.input + 2 * options.steps,
        max_num_seqs=options.prompts,
        enable_prefix_caching=False,
        seed=0,
        **engine_arguments(variant, options.recipe),
    )
    engine = llm.llm_engine
    model = engine.model_executor.driver_worker.worker.model_runner.get_model()
    if variant == "fp8rl-kv":
        from vllm_fp8rl.calibration import set_uncalibrated_kv_scales

        set_uncalibrated_kv_scales(model, KV_SCALE)
    give_weights(model, codes=variant.startswith("stock"))

    def add(tokens: int) -> None:
        sampling = SamplingParams(max_tokens=tokens, ignore_eos=True, detokenize=False)
        for i in range(options.prompts):
            ids = [(i * 7919 + j * 104729) % 150000 for j in range(options.input)]
            engine.add_request(f"{time.time()}-{i}", {"prompt_token_ids": ids}, sampling)

    add(16)
    while engine.has_unfinished_requests():
        engine.step()
    torch.cuda.synchronize()
    add(options.steps + 3 * PROFILED)
    # The last prompt's first token marks the first step that only decodes.
    prefill = -(
        -options.prompts
        * options.input
        // engine.vllm_config.scheduler_config.max_num_batched_tokens
    )
    wall: list[float] = []
    recording: Any = None
    while engine.has_unfinished_requests():
        step = len(wall) - prefill
        if step == options.steps:
            torch.cuda.synchronize()
            recording = profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU])
            recording.__enter__()
        began = time.perf_counter()
        engine.step()
        wall.append(time.perf_counter() - began)
        if step == options.steps + PROFILED - 1:
            torch.cuda.synchronize()
            recording.__exit__(None, None, None)
    kernels: dict[str, float] = defaultdict(float)
    ends = []
    for event in recording.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            kernels[event.name] += (event.time_range.end - event.time_range.start) / PROFILED
            ends += [event.time_range.start, event.time_range.end]
    parts: dict[str, float] = defaultdict(float)
    for kernel, microseconds in kernels.items():
        parts[part_of(kernel)] += microseconds
    name = torch.cuda.get_device_name()
    bandwidth = next((b for gpu, b in PEAK_BANDWIDTH.items() if gpu in name), 3.35e12)
    context = options.input + options.steps + PROFILED / 2
    before = wall[prefill + options.steps - 2 * PROFILED : prefill + options.steps]
    return {
        "variant": variant,
        "gpu": name,
        "requests": options.prompts,
        "context": context,
        "step_us": statistics.median(before) * 1e6,
        "gpu_span_us": (max(ends) - min(ends)) / PROFILED,
        "gpu_busy_us": sum(kernels.values()),
        "parts_us": dict(sorted(parts.items(), key=lambda pair: -pair[1])),
        "bounds_us": bounds(variant, options.prompts, context, bandwidth),
        "kernels_us": dict(sorted(kernels.items(), key=lambda pair: -pair[1])[:20]),
    }


def table(results: list[dict[str, Any]]) -> str:
    """Return a Markdown table: microseconds per step by part, and the share of the roofline."""
    measured = [result for result in results if "parts_us" in result]
    lines = ["| part | " + " | ".join(result["variant"] for result in measured) + " |"]
    lines.append("| --- |" + " --- |" * len(measured))
    for part in [*PARTS, "other"]:
        cells = []
        for result in measured:
            took, bound = result["parts_us"].get(part, 0.0), result["bounds_us"].get(part)
            share = f" ({bound / took:.0%})" if bound and took else ""
            cells.append(f"{took:.0f}{share}")
        lines.append(f"| {part} | " + " | ".join(cells) + " |")
    for key in ("gpu_busy_us", "step_us"):
        lines.append(f"| {key} | " + " | ".join(f"{r[key]:.0f}" for r in measured) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="GPU time of a decode step by kernel")
    parser.add_argument("--variants", default="fp8rl-kv,stock-kv,bf16")
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--input", type=int, default=512)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument(
        "--recipe", type=json.loads, default="{}", help="keys for fp8rl's variants, as JSON"
    )
    parser.add_argument("--out", type=Path, default=Path("decode_profile.json"))
    parser.add_argument("--child", choices=VARIANTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        options.out.write_text(json.dumps(run_variant(options.child, options)))
        return
    results = [
        in_process(variant, VLLM_DEEP_GEMM_WARMUP="skip") for variant in options.variants.split(",")
    ]
    options.out.write_text(json.dumps({"versions": versions(), "results": results}, indent=1))
    sys.stdout.write(table(results) + "\n")


if __name__ == "__main__":
    main()

"""The GPU time of a decode step by kernel, against the memory roofline (``rollout.py --kernels``).

After half of the answers' tokens torch's profiler records ten steps; times are GPU time per step.
The roofline of a part is the bytes that it must read (the weights once, the KV cache of each
request once) divided by the GPU's peak bandwidth. Arithmetic takes less at these batch sizes, see
``flops_us``.
"""

from __future__ import annotations

import re
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from fp8rl.models.sizes import Sizes
from fp8rl.models.spec import ModelSpec
from fp8rl_bench.rollouts import prompts
from fp8rl_bench.variants import cache_of

PARTS = {  # a kernel belongs to the first part with a pattern that is in its name
    "attention": (
        "flash::",
        "flash_fwd",
        "_attend",
        "_decode_kernel",
        "_combine",
        "unified_attention",
        "_fwd_grouped_kernel",
    ),
    "cache write and query": ("reshape_and_cache", "scaled_fp8_quant", "concat_and_cache"),
    "quantization, norm, SiLU": (
        "_rows_kernel",
        "_rotate_kernel",
        "_norm_kernel",
        "per_block_quant",
        "per_token_group",
        "rms_norm",
        "silu",
        "act_and_mul",
    ),
    "log-probabilities": ("_topk_log_softmax", "_ranks_kernel"),
    # and _GROUPED
    "experts": ("fused_moe", "moe_", "topk", "topK", "Topk", "expert", "ep_scatter", "ep_gather"),
    "linears": ("deep_gemm", "cutlass", "nvjet", "gemm", "w8a8"),
    "sampler": ("gumbel", "ArgMax", "softmax", "direct_copy_kernel"),
}
# Products of experts have DeepGEMM's kernels of plain products; their fifth parameter is the number
# of experts (impls/sm90_fp8_gemm_1d2d.cuh).
_GROUPED = re.compile(r"deep_gemm::\w+_impl<\([\w:]+\)\d+, (\d+u?, ){3}(?!1u?,)")
PROFILED = 10
LEAST_TOKENS = 8 * PROFILED  # out: half of them go before; twice PROFILED steps have room behind
PEAK_BANDWIDTH = {"H100 80GB HBM3": 3.35e12, "H200": 4.8e12}  # bytes/s, data sheets
PEAK_FP8 = 1.979e15


def part_of(kernel: str) -> str:
    """Return the part of a step to which a kernel belongs."""
    if _GROUPED.search(kernel):
        return "experts"
    for part, patterns in PARTS.items():
        if any(pattern in kernel for pattern in patterns):
            return part
    return "other"


def weight_sizes(model: Any) -> dict[str, tuple[int, int]]:
    """Return the bytes and the number of the weights that a step reads.

    Args:
        model: vLLM's model; a step reads one row a request of its embedding, which is left out.
    """
    sizes = {"linears": (0, 0), "experts": (0, 0)}
    for name, parameter in model.named_parameters():
        if "embed_tokens" in name:
            continue
        part = "experts" if ".experts." in name else "linears"
        held, count = sizes[part]
        scales = "scale" in name.rpartition(".")[2]
        sizes[part] = held + parameter.nbytes, count + (0 if scales else parameter.numel())
    return sizes


def bounds(
    shape: Mapping[str, Any],
    variant: str,
    sizes: Mapping[str, tuple[int, int]],
    requests: int,
    context: float,
    bandwidth: float,
) -> dict[str, float]:
    """Return the shortest possible microseconds of a step's parts at a GPU's peak.

    Args:
        shape: the model's ``config.json``.
        variant: of ``rollout.py``.
        sizes: what :func:`weight_sizes` returned.
        requests: sequences of the step.
        context: tokens of each in the cache.
        bandwidth: bytes a second.
    """
    spec = ModelSpec.of(shape)
    cached = Sizes(spec, 1).kv_per_token(2, cache_of(variant))
    chosen = spec.value("num_experts_per_tok", 1) / (spec.experts or 1)
    flops = 2 * requests * (sizes["linears"][1] + chosen * sizes["experts"][1])
    return {
        "attention": requests * context * cached / bandwidth * 1e6,
        "linears": sizes["linears"][0] / bandwidth * 1e6,
        "experts": sizes["experts"][0] / bandwidth * 1e6,
        "flops_us": flops * (2 if variant == "bf16" else 1) / PEAK_FP8 * 1e6,
    }


def profile_decode(
    llm: Any,
    variant: str,
    shape: Mapping[str, Any],
    load: tuple[int, int, int],
    logprobs: bool = False,
    samples: int = 1,
) -> dict[str, Any]:
    """Profile decode steps of a running engine in this process.

    The host's functions are those of PROFILED steps more, under Python's profiler, which makes them
    slower. A GPU that works for less than ``step_us`` waits for the host.

    Args:
        llm: vLLM's ``LLM`` that has served this load before.
        variant: of ``rollout.py``.
        shape: the model's ``config.json``.
        load: requests, tokens in and tokens out of each.
        logprobs: ask for the log-probability of each token.
        samples: requests with the same prompt.
    """
    import torch
    from profiles import by_function
    from torch.profiler import ProfilerActivity, profile
    from vllm import SamplingParams

    engine, (requests, tokens_in, tokens_out) = llm.llm_engine, load
    steps = tokens_out // 2
    sampling = SamplingParams(
        max_tokens=steps + 4 * PROFILED,
        ignore_eos=True,
        detokenize=False,
        logprobs=0 if logprobs else None,
    )
    if samples > 1:
        llm.reset_prefix_cache()
    for i, prompt in enumerate(prompts(requests, tokens_in, samples)):
        engine.add_request(f"{time.time()}-{i}", prompt, sampling)
    decoding: list[float] = []
    recording: Any = None
    host: dict[str, list[float]] = {}

    def several() -> None:
        for _ in range(PROFILED):
            engine.step()

    while engine.has_unfinished_requests():
        if recording is None and len(decoding) == steps:
            torch.cuda.synchronize()
            recording = profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU])
            recording.__enter__()
        began = time.perf_counter()
        outputs = engine.step()
        took = time.perf_counter() - began
        if len(outputs) < requests:  # some prompts are still computed
            continue
        decoding.append(took)
        if len(decoding) == steps + PROFILED:
            torch.cuda.synchronize()
            recording.__exit__(None, None, None)
            host = by_function(several)
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
    context = tokens_in + steps + PROFILED / 2
    (sizes,) = llm.apply_model(weight_sizes)
    return {
        "requests": requests,
        "context": context,
        "step_us": statistics.median(decoding[steps - 2 * PROFILED : steps]) * 1e6,
        "gpu_span_us": (max(ends) - min(ends)) / PROFILED,
        "gpu_busy_us": sum(kernels.values()),
        "parts_us": dict(sorted(parts.items(), key=lambda pair: -pair[1])),
        "bounds_us": bounds(shape, variant, sizes, requests, context, bandwidth),
        "kernels_us": dict(sorted(kernels.items(), key=lambda pair: -pair[1])[:30]),
        "host_ms_profiled": {
            name: [round(each / PROFILED, 3) for each in taken] for name, taken in host.items()
        },
    }


def table(steps: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a Markdown table: microseconds of a step by part, and the share of the roofline.

    Args:
        steps: what :func:`profile_decode` returned for each variant.
    """
    lines = ["| part | " + " | ".join(steps) + " |", "| --- |" + " --- |" * len(steps)]
    for part in [*PARTS, "other"]:
        cells = []
        for step in steps.values():
            took, bound = step["parts_us"].get(part, 0.0), step["bounds_us"].get(part)
            share = f" ({bound / took:.0%})" if bound and took else ""
            cells.append(f"{took:.0f}{share}")
        lines.append(_row(part, cells))
    for key in ("gpu_busy_us", "step_us"):
        lines.append(_row(key, [f"{step[key]:.0f}" for step in steps.values()]))
    return "\n".join(lines)


def _row(head: str, cells: Sequence[str]) -> str:
    return f"| {head} | " + " | ".join(cells) + " |"

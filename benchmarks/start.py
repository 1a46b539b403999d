"""Measure cold starts of vLLM on one GPU: BF16, vLLM's own block FP8, and fp8rl.

    python benchmarks/start.py [--variants bf16,stock,fp8rl] [--warmup relax] [--again]
                               [--prompts 256] [--input 512] [--out FILE.json]

Each variant has its own caches (vLLM's, inductor's, Triton's, DeepGEMM's), empty at first;
``--again`` starts it a second time with the caches of the first start. The model has the shape of
Qwen3-8B and random weights (``load_format="dummy"``). The result has the seconds from the call of
``LLM`` and from the start of the process, the times of vLLM's log lines, the number of DeepGEMM
kernels in the cache when ``LLM`` returned and after the first steps, the Triton kernels that the
process compiled, inductor's among them, and the seconds of the first step of each kind beside the
median of three further ones: a step that compiles is slow.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from processes import in_process, save
from rollout import QWEN3_8B

from fp8rl_bench.facts import versions
from fp8rl_bench.variants import KV_SCALE, VARIANTS, engine_arguments, needs_scales

CACHES = ("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "DG_JIT_CACHE_DIR")
MARKS = (
    "Initializing a V1",
    "Loading model",
    "Model loading took",
    "Dynamo bytecode",
    "Compiling a graph",
    "saved AOT",
    "torch.compile took",
    "Initial profiling",
    "KV cache size",
    "Graph capturing finished",
    "JIT monitor activated",
    "DeepGEMM kernels",
    "init engine",
)


class Timeline:
    """Records when the log lines that mark a phase appear, in seconds from now.

    It replaces the factory of log records, because vLLM 0.32 replaces the handlers of its loggers.
    """

    def __init__(self) -> None:
        self.marks: list[tuple[float, str]] = []
        self._began = time.time()
        self._make = logging.getLogRecordFactory()
        logging.setLogRecordFactory(self._record)

    def _record(self, *args: Any, **kwargs: Any) -> logging.LogRecord:
        record = self._make(*args, **kwargs)
        text = record.getMessage()
        if any(mark in text for mark in MARKS):
            self.marks.append((round(record.created - self._began, 1), text[:90]))
        return record


class TritonKernels:
    """Notes each Triton kernel that this process compiles: name, start and length in seconds."""

    def __init__(self) -> None:
        from triton import knobs

        self.compiled: list[tuple[str, float, float]] = []
        self._began = time.time()
        knobs.compilation.listener = self._listen

    def _listen(self, *, src: Any, times: Any, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            seconds = times.total / 1e6
            ended = time.time() - self._began
            self.compiled.append((src.name, round(ended - seconds, 1), round(seconds, 2)))


def deep_gemm_kernels() -> int:
    return len(list(Path(os.environ["DG_JIT_CACHE_DIR"]).glob("cache/kernel.*")))


def run_variant(options: argparse.Namespace) -> dict[str, Any]:
    """Measure one start and the first steps after it."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    began = time.perf_counter()
    import torch
    from vllm import LLM, SamplingParams

    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(QWEN3_8B | options.shape))
    timeline, triton_kernels = Timeline(), TritonKernels()
    called = time.perf_counter()
    llm = LLM(
        str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=options.input + 1024,
        max_num_seqs=options.prompts,
        gpu_memory_utilization=options.memory,
        enable_prefix_caching=False,
        seed=0,
        **engine_arguments(options.child),
    )
    ready = time.perf_counter()
    if needs_scales(options.child):
        from vllm_fp8rl.calibration import set_uncalibrated_kv_scales

        worker = llm.llm_engine.model_executor.driver_worker.worker
        set_uncalibrated_kv_scales(worker.model_runner.get_model(), KV_SCALE)
    result: dict[str, Any] = {
        "variant": options.child,
        "gpu": torch.cuda.get_device_name(),
        "warmup": options.warmup,
        "start_seconds": ready - called,
        "with_imports_seconds": ready - began,
        "deep_gemm_kernels": deep_gemm_kernels(),
    }

    def step(prompts: int, tokens: int, generated: int) -> float:
        texts = [
            {"prompt_token_ids": [(i * 7919 + j * 104729) % 150000 for j in range(tokens)]}
            for i in range(prompts)
        ]
        sampling = SamplingParams(max_tokens=generated, ignore_eos=True, detokenize=False)
        began = time.perf_counter()
        llm.generate(texts, sampling, use_tqdm=False)
        return time.perf_counter() - began

    kinds = {
        "one_prompt": (1, 37, 2),
        "full_prefill": (options.prompts, options.input, 1),
        "full_decode": (options.prompts, 2, 8),
    }
    result["steps"] = {}
    for name, sizes in kinds.items():
        first, *later = [step(*sizes) for _ in range(4)]
        result["steps"][name] = {"first": first, "later": statistics.median(later)}
    result["deep_gemm_kernels_after_steps"] = deep_gemm_kernels()
    result["timeline"] = timeline.marks
    result["triton_kernels"] = triton_kernels.compiled
    return result


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Cold start on one GPU")
    parser.add_argument("--variants", default="bf16,stock,fp8rl")
    parser.add_argument("--warmup", choices=("skip", "relax", "full"), default="relax")
    parser.add_argument("--again", action="store_true", help="a second start with warm caches")
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--input", type=int, default=512)
    parser.add_argument("--memory", type=float, default=0.9, help="gpu_memory_utilization")
    parser.add_argument("--shape", type=json.loads, default={}, help="JSON; changes config.json")
    parser.add_argument("--out", type=Path, default=Path("start.json"))
    parser.add_argument("--child", choices=tuple(VARIANTS), help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    options = parse()
    if options.child:
        options.out.write_text(json.dumps(run_variant(options)))
        return
    results: list[dict[str, Any]] = []
    found = {"versions": versions(), "results": results}
    for variant in options.variants.split(","):
        with tempfile.TemporaryDirectory() as caches:
            folders = {name: f"{caches}/{name}" for name in CACHES}
            for number in range(2 if options.again else 1):
                result = in_process(variant, **folders, VLLM_DEEP_GEMM_WARMUP=options.warmup)
                results.append(result | {"cold": number == 0})
                save(found, options.out, results[-1])
                if "failed" in result:
                    break


if __name__ == "__main__":
    main()

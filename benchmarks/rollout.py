"""Rollout speed, start and refit of vLLM on one GPU: BF16, vLLM's own block FP8, and fp8rl.

    python benchmarks/rollout.py [--variants fp8rl-kv,stock-kv,bf16] [--repeats 1,3] [--refits 50]
                                 [--loads 64x1024x5000,256x512x1024] [--out FILE.json]
    python benchmarks/rollout.py --shape benchmarks/shapes/moonlight_16b_a3b.json \
                                 --variants fp8rl,stock,bf16

The model has the shape of Qwen3-8B or that of ``--shape``, and random weights
(``load_format="dummy"``), so that nothing is downloaded; each variant runs in a process of its own.
A load is requests x tokens in x tokens out; tokens per second count output tokens of one
``generate`` call, after a shorter one of the same shape, and the median of ``--repeats`` calls (a
number for each load, the last for the rest) is given. With ``--after`` the last load is measured
again after the refits. A refit sends every tensor of the model, already on the GPU, through
``vllm_fp8rl.refit.refit``; the sender's tensors take the size of the BF16 model, for which
``--memory`` must leave room. ``--warmup skip`` leaves out vLLM's DeepGEMM warm-up in all variants:
kernels are then compiled when first met, here before anything is timed. ``--ranks 2`` splits the
model over two GPUs, its experts whole on one of them each; refits, whose sender is this process,
are then left out. ``--apart engine`` gives vLLM's engine a process of its own, as vLLM has it by
default and NeMo RL's synchronous worker does not; ``--apart worker`` the model alone
(``distributed_executor_backend="mp"``). The host's part of a step, which limits small models with
many requests, is then shared by two processes. Refits are left out too. ``--logprobs`` asks for the
log-probability of each token, as NeMo RL does, and ``--samples 16`` gives so many requests the same
prompt, which is then computed once.
``--kernels`` tells where the time of a decode step of the last load goes
(``decode_profile.py``), and what the first refit's host does, which makes that one refit slower.

``--turn I/N:FOLDER`` is for N of these that start side by side on one GPU and are timed one after
the other, which saves the time of N - 1 starts: the I-th (from 0) goes on when all have started and
those before it have ended. ``--cache GIB`` gives each engine a cache of that size, since engines
that start side by side cannot measure the memory that is left.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from decode_profile import LEAST_TOKENS, profile_decode, table
from processes import host_loop, in_process, save

from fp8rl_bench.facts import versions
from fp8rl_bench.rollouts import (
    Load,
    give_scales,
    give_weights,
    required_shapes,
    tokens_per_second,
)
from fp8rl_bench.variants import KV_SCALE, VARIANTS, engine_arguments, needs_scales

QWEN3_8B: dict[str, Any] = json.loads(
    Path(__file__).with_name("shapes").joinpath("qwen3_8b.json").read_text(encoding="utf-8")
)


def stream(model: Any, *, with_scales: bool) -> Iterator[tuple[str, Any]]:
    """Every HF tensor of the model, each in memory of its own, as a refit requires."""
    import torch

    from vllm_fp8rl.kv.scales import required_kv_scales

    for name, shape in required_shapes(model).items():
        made = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
        yield name, made.uniform_(-1e-3, 1e-3) if made.ndim > 1 else made.fill_(1.0)
    if with_scales:
        for name in sorted(required_kv_scales(model)):
            yield name, torch.tensor(KV_SCALE, device="cuda")


def parse_turn(turn: str) -> tuple[int, int, Path]:
    """The parts of ``I/N:FOLDER``."""
    number, _, rest = turn.partition("/")
    count, _, folder = rest.partition(":")
    return int(number), int(count), Path(folder)


def wait_for_turn(number: int, count: int, place: Path) -> None:
    """Wait until all engines of ``I/N:FOLDER`` have started and those before have ended."""
    (place / f"started{number}").touch()
    needed = [place / f"started{i}" for i in range(count)]
    needed += [place / f"ended{i}" for i in range(number)]
    while not all(file.exists() for file in needed):
        time.sleep(0.2)


def measure_refits(
    llm: Any, count: int, *, with_scales: bool, profile_first: bool
) -> dict[str, Any]:
    """Seconds of each refit and the memory that one takes beside the sender's tensors.

    ``refit_cpu_seconds`` are those in which this thread ran, which it also does while it waits for
    the GPU: far fewer than the wall's mean that others had its core. ``host_loop_ms`` are a fixed
    loop's, one before each refit: more than on another machine mean a slower host. One refit more
    tells the GPU's part, and another the host's, under a profiler.
    """
    import torch
    from profiles import by_function, by_kernel, compiled_kernels

    from vllm_fp8rl.refit import refit

    model = llm.llm_engine.model_executor.driver_worker.worker.model_runner.get_model()
    needed = sum(2 * math.prod(shape) for shape in required_shapes(model).values())
    free = torch.cuda.mem_get_info()[0]
    if needed > free:
        raise SystemExit(
            f"The tensors of a refit take {needed / 2**30:.1f} GiB and {free / 2**30:.1f} are "
            "free; make the engine's share smaller (--memory or --cache), or take --refits 0."
        )
    tensors = list(stream(model, with_scales=with_scales))
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    seconds, cpu, loop = [], [], []

    def one() -> None:
        seconds.append(refit(llm, tensors, expect_kv_scales=with_scales).seconds)

    found: dict[str, Any] = {}
    for _ in range(count):
        loop.append(host_loop())
        began = time.thread_time()
        with compiled_kernels() as compiled:
            if profile_first and not seconds:
                found["first_refit_host_ms_profiled"] = by_function(one)
            else:
                one()
        cpu.append(time.thread_time() - began)
        found.setdefault("first_refit_compiled", compiled)
    torch.cuda.synchronize()
    growth = torch.cuda.memory_allocated() - held
    peak = torch.cuda.max_memory_allocated() - held
    return found | {
        "refit_seconds": list(seconds),
        "refit_seconds_median": statistics.median(seconds),
        "refit_cpu_seconds": cpu,
        "refit_cpu_seconds_median": statistics.median(cpu),
        "host_loop_ms": loop,
        "refit_memory_growth_mib": growth / 2**20,
        "refit_peak_extra_mib": peak / 2**20,
        "refit_gpu_ms": by_kernel(one),
        "refit_host_ms_profiled": by_function(one),
        "refit_bytes": sum(tensor.nbytes for _, tensor in tensors),
    }


def time_probes() -> list[float]:
    """Return a list that takes the seconds of each run of fp8rl's probes while an engine starts."""
    from vllm_fp8rl.patches import probes

    seconds: list[float] = []
    require = probes.require

    def timed(features: Any) -> None:
        began = time.perf_counter()
        require(features)
        seconds.append(time.perf_counter() - began)

    probes.require = timed
    return seconds


def run_variant(variant: str, options: argparse.Namespace) -> dict[str, Any]:
    """One engine, from start to the last refit."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1" if options.apart == "engine" else "0"
    here = options.ranks == 1 and options.apart is None
    if not here:  # for a function that is sent to the workers
        os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    import torch
    from vllm import LLM

    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(options.shape))
    probes = time_probes() if variant.startswith("fp8rl") else []
    began = time.perf_counter()
    llm = LLM(
        str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=max(i + o for _, i, o in options.loads),
        max_num_seqs=max(count for count, _, _ in options.loads),
        gpu_memory_utilization=options.memory,
        kv_cache_memory_bytes=int(options.cache * 2**30) if options.cache else None,
        enable_prefix_caching=options.samples > 1,
        tensor_parallel_size=options.ranks,
        distributed_executor_backend="mp" if options.apart == "worker" else None,
        enable_expert_parallel=options.ranks > 1,
        seed=0,
        **engine_arguments(variant, options.recipe),
    )
    result: dict[str, Any] = {"variant": variant, "start_seconds": time.perf_counter() - began}
    result["probe_seconds"] = sum(probes)
    result["gpu"] = torch.cuda.get_device_name()
    fp8rl = variant.startswith("fp8rl")
    if needs_scales(variant):
        llm.apply_model(give_scales)
    llm.apply_model(partial(give_weights, codes=variant.startswith("stock")))

    if options.turn:
        wait_for_turn(*options.turn)

    def generate(load: Load, tokens: int) -> float:
        asked: Any = {"samples": options.samples, "logprobs": options.logprobs}
        return tokens_per_second(llm, load, tokens, **asked)

    result["loads"] = {}
    for index, load in enumerate(options.loads):
        repeats = options.repeats[min(index, len(options.repeats) - 1)]
        began = time.perf_counter()
        generate(load, options.warm)
        warm = time.perf_counter() - began
        speeds = [generate(load, load[2]) for _ in range(repeats)]
        result["loads"]["x".join(map(str, load))] = {
            "warm_seconds": warm,
            "tokens_per_second": speeds,
            "median": statistics.median(speeds),
        }
    if options.kernels:
        load, logprobs = options.loads[-1], options.logprobs
        result["decode_step"] = profile_decode(
            llm, variant, options.shape, load, logprobs, options.samples
        )
    if fp8rl and options.refits and here:
        options.out.write_text(json.dumps(result))  # which a refit that fails must not take away
        result |= measure_refits(
            llm,
            options.refits,
            with_scales=needs_scales(variant),
            profile_first=options.kernels,
        )
        if options.after:
            # The load that ran just before: a GPU that has warmed up is slower than a cold one.
            speeds = [generate(load, load[2]) for _ in range(repeats)]
            result["tokens_per_second_after_refits"] = speeds
    return result


def parse_load(text: str) -> Load:
    count, length, tokens = (int(part) for part in text.split("x"))
    return count, length, tokens


def parse_shape(text: str) -> dict[str, Any]:
    """Changes of Qwen3-8B's config as JSON, or the file of another model's whole config."""
    if text.lstrip().startswith("{"):
        return QWEN3_8B | json.loads(text)
    return json.loads(Path(text).read_text(encoding="utf-8"))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Rollout speed on one GPU")
    parser.add_argument("--variants", default="fp8rl-kv,stock-kv,bf16")
    parser.add_argument(
        "--loads", default="256x512x1024", help="requests x tokens in x tokens out, comma separated"
    )
    parser.add_argument("--warm", type=int, default=64, help="output tokens of the warm-up")
    parser.add_argument("--repeats", default="1")
    parser.add_argument("--refits", type=int, default=5)
    parser.add_argument("--kernels", action="store_true", help="profile a decode step, see above")
    parser.add_argument("--after", action="store_true", help="measure speed again after refits")
    parser.add_argument("--memory", type=float, default=0.9, help="gpu_memory_utilization")
    parser.add_argument("--warmup", choices=("skip", "relax", "full"), default="skip")
    parser.add_argument(
        "--shape", type=parse_shape, default="{}", help="changes as JSON, or the file of a config"
    )
    parser.add_argument("--out", type=Path, default=Path("rollout.json"))
    parser.add_argument(
        "--recipe", type=json.loads, default="{}", help="keys for fp8rl's variants, as JSON"
    )
    parser.add_argument("--ranks", type=int, default=1, help="GPUs of the engine")
    parser.add_argument("--apart", choices=("engine", "worker"), help="see above")
    parser.add_argument("--logprobs", action="store_true", help="see above")
    parser.add_argument("--samples", type=int, default=1, help="requests with the same prompt")
    parser.add_argument("--cache", type=float, help="GiB of the KV cache, in place of --memory")
    parser.add_argument("--turn", type=parse_turn, help="I/N:FOLDER, see above")
    parser.add_argument("--child", choices=tuple(VARIANTS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.repeats = [int(text) for text in options.repeats.split(",")]
    options.loads = [parse_load(text) for text in options.loads.split(",")]
    if options.apart and options.ranks > 1:
        parser.error("--apart needs --ranks 1: more ranks have processes of their own anyway")
    if options.samples < 1:
        parser.error("--samples must be 1 or more")
    if options.kernels and (options.ranks > 1 or options.apart):
        parser.error(
            "--kernels needs --ranks 1 and no --apart: kernels of other processes are not seen"
        )
    if options.kernels and options.loads[-1][2] < LEAST_TOKENS:
        parser.error(f"--kernels needs {LEAST_TOKENS} tokens out or more in the last of --loads")
    return options


def main() -> None:
    options = parse()
    if options.child:
        options.out.write_text(json.dumps(run_variant(options.child, options)))
        return
    results: list[dict[str, Any]] = []
    found = {"versions": versions(), "results": results}
    for variant in options.variants.split(","):
        results.append(in_process(variant, VLLM_DEEP_GEMM_WARMUP=options.warmup))
        save(found, options.out, results[-1])
    steps = {each["variant"]: each["decode_step"] for each in results if "decode_step" in each}
    if steps:
        sys.stdout.write(table(steps) + "\n")
    if options.turn:
        number, _, place = options.turn
        for kind in ("started", "ended"):  # nobody waits for a start that failed
            (place / f"{kind}{number}").touch()


if __name__ == "__main__":
    main()

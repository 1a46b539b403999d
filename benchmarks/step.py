"""A training step of a model of Qwen3-1.7B's shape on one Hopper GPU: forward, backward, optimizer.

    python benchmarks/step.py [--layers 28] [--micro-batches 2] [--steps 6] [--out FILE]

megatron-core's own GPTModel (local spec), DistributedDataParallel with float32 gradients and
distributed optimizer (Adam), random weights and tokens, 8,192 tokens a micro-batch; in BF16, and
converted by ``megatron_fp8rl``, each in its turn.

- Memory: what is held between steps, and with the parameters offloaded as DDP does, over the BF16
  model in units of the linear layers' BF16 weights; and the peak of a step.
- Host: the time until a forward, or a backward, of a micro-batch is enqueued on an idle GPU. Where
  that is near a micro-batch's share of the step the host limits it. It includes waits for the GPU
  once a thousand launches are queued, so of a backward it may be too much. Codes that are kept are
  there already, as in all micro-batches of a step but the first.
- Allocator: calls of cudaMalloc, and retries after freeing what was cached, in the timed steps.
- Calibration: steps with and without observers of |q|, |k| and |v| take turns, in pairs of
  alternating order; the difference is the median of the pairs', with a standard error from their
  median deviation, so that a few stalls of the host count little. What that does not resolve: the
  GPU time of the observers' kernels, replayed as a graph, and their host time.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from megatron_common import QWEN3_1_7B
from rich.console import Console
from rich.table import Table

from fp8rl import PluginManager, Recipe
from fp8rl_bench.facts import versions
from fp8rl_bench.layers import build, interleaved
from megatron_fp8rl import convert
from megatron_fp8rl.kv.observers import QKVObserver
from megatron_fp8rl.testing.exact_replay import alone

GPU = torch.device("cuda")
MODES = ("BF16", "fp8rl", "fp8rl, codes kept")


class Trainer:
    """One model with DDP and optimizer; times the parts of a step."""

    def __init__(self, shape: SimpleNamespace, options: argparse.Namespace, mode: str) -> None:
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
        )
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.transformer.module import Float16Module

        self.options = options
        self.shape = shape
        model = build(shape)
        config = model.config
        self.ddp = DistributedDataParallel(
            config=config,
            ddp_config=DistributedDataParallelConfig(
                grad_reduce_in_fp32=True, use_distributed_optimizer=True
            ),
            module=Float16Module(config, model),
        )
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=1e-5,
                weight_decay=0.0,
                bf16=True,
                params_dtype=torch.bfloat16,
                use_distributed_optimizer=True,
                clip_grad=1.0,
            ),
            [self.ddp],
            use_gloo_process_groups=False,
        )
        self.keeping = contextlib.ExitStack()
        self.linear_bytes = sum(
            p.numel() * p.element_size() for n, p in model.named_parameters() if ".linear_" in n
        )
        if mode != "BF16":
            conversion = convert(self.ddp, Recipe(), plugins=PluginManager(discover=False))
            if mode.endswith("codes kept"):
                self.keeping.enter_context(conversion.keeping_codes())
        generator = torch.Generator().manual_seed(0)
        rows = options.tokens // options.sequence
        size = (options.micro_batches, rows, options.sequence + 1)
        self.batches = torch.randint(0, shape.vocab_size, size, generator=generator).to(GPU)
        self.positions = torch.arange(options.sequence, device=GPU).expand(rows, -1)

    def step(self) -> dict[str, float]:
        """Milliseconds of each part, and the loss."""
        marks: list[tuple[str, Any]] = []

        def mark(name: str) -> None:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            marks.append((name, event))

        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        mark("start")
        loss = torch.zeros((), device=GPU)
        for batch in self.batches:
            losses = self.ddp(
                batch[:, :-1].contiguous(), self.positions, None, labels=batch[:, 1:].contiguous()
            )
            mean = losses.float().mean() / len(self.batches)
            mark("forward")
            mean.backward()
            mark("backward")
            loss += mean.detach()
        self.ddp.finish_grad_sync()
        self.optimizer.step()
        mark("optimizer")
        torch.cuda.synchronize()
        parts: dict[str, float] = {}
        for (_, begun), (name, ended) in itertools.pairwise(marks):
            parts[name] = parts.get(name, 0.0) + begun.elapsed_time(ended)
        return {**parts, "total": sum(parts.values()), "loss": loss.item()}

    def host_forward(self) -> tuple[torch.Tensor, float]:
        """Loss of a micro-batch, and the milliseconds the host takes to enqueue its forward."""
        tokens, labels = self.batches[0, :, :-1].contiguous(), self.batches[0, :, 1:].contiguous()
        torch.cuda.synchronize()
        start = time.perf_counter()
        loss = self.ddp(tokens, self.positions, None, labels=labels).float().mean()
        return loss, 1e3 * (time.perf_counter() - start)

    def host_times(self) -> dict[str, float]:
        """Milliseconds the host takes to enqueue a forward and a backward, on an idle GPU each."""
        times: dict[str, list[float]] = {"forward": [], "backward": []}
        for _ in range(self.options.host_repeats):
            self.ddp.zero_grad_buffer()
            loss, forward = self.host_forward()
            torch.cuda.synchronize()
            start = time.perf_counter()
            loss.backward()
            times["backward"].append(1e3 * (time.perf_counter() - start))
            times["forward"].append(forward)
        return {name: statistics.median(values) for name, values in times.items()}

    def offloaded_bytes(self) -> int:
        """What the GPU holds while DDP has its parameters on the host."""
        self.ddp.eval()
        for buffer in self.ddp.buffers:
            buffer.offload_to_cpu(move_params=True, move_grads=False)
        torch.cuda.synchronize()
        held = torch.cuda.memory_allocated()
        for buffer in self.ddp.buffers:
            buffer.reload_from_cpu(move_params=True, move_grads=False)
        self.ddp.train()
        return held


def measure(shape: SimpleNamespace, options: argparse.Namespace, mode: str) -> dict[str, Any]:
    torch.manual_seed(0)
    trainer = Trainer(shape, options, mode)
    for _ in range(2):
        trainer.step()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()
    steps = [trainer.step() for _ in range(options.steps)]
    after = torch.cuda.memory_stats()
    keys = ("forward", "backward", "optimizer", "total")
    row = {
        "milliseconds": {key: statistics.median(step[key] for step in steps) for key in keys},
        "losses": [step["loss"] for step in steps],
        "forward_of_each_step": [step["forward"] for step in steps],
        "resident_bytes": torch.cuda.memory_allocated(),
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "linear_weight_bytes": trainer.linear_bytes,
        "allocator": {
            key: after.get(key, 0) - before.get(key, 0)
            for key in ("num_device_alloc", "num_alloc_retries")
        },
    }
    if mode == "fp8rl":
        row["calibration"] = calibration(trainer)
    row["host_milliseconds"] = trainer.host_times()
    row["offloaded_bytes"] = trainer.offloaded_bytes()
    return row


def calibration(trainer: Trainer) -> dict[str, float]:
    """What observing every micro-batch adds to a step, in milliseconds and as a share of it."""

    def step(observed: bool) -> float:
        with observing(trainer, observed):
            return trainer.step()["total"]

    step(True)
    pairs = []
    for number in range(trainer.options.pairs):
        first = number % 2 == 0
        times = {observed: step(observed) for observed in (first, not first)}
        pairs.append((times[False], times[True]))
    plain = statistics.median(off for off, _ in pairs)
    differences = [on - off for off, on in pairs]
    added = statistics.median(differences)
    # Of a median, where the differences are normal but for outliers.
    deviation = 1.4826 * statistics.median(abs(one - added) for one in differences)
    host = added_host(trainer)
    kernels = len(trainer.batches) * observer_kernels(trainer)
    return {
        "step_milliseconds": plain,
        "pairs": len(pairs),
        "added_milliseconds": added,
        "standard_error": 1.2533 * deviation / len(differences) ** 0.5,
        "host_microseconds_a_layer": host,
        "kernel_milliseconds": kernels,
        "added_share": added / plain,
        "kernel_share": kernels / plain,
    }


@contextlib.contextmanager
def observing(trainer: Trainer, observed: bool) -> Iterator[None]:
    """Observe the forwards inside the block, or not."""
    observer = QKVObserver(trainer.ddp) if observed else None
    try:
        yield
    finally:
        if observer is not None:
            observer.close()


def added_host(trainer: Trainer) -> float:
    """Microseconds the host takes for the hook of one layer."""

    def forward(observed: bool) -> float:
        with observing(trainer, observed):
            return trainer.host_forward()[1]

    pairs = [(forward(False), forward(True)) for _ in range(trainer.options.pairs)]
    added = statistics.median(on - off for off, on in pairs)
    return 1e3 * added / trainer.shape.num_hidden_layers


def observer_kernels(trainer: Trainer) -> float:
    """GPU milliseconds of what an observer runs in one forward, without waits for the host."""
    observer = QKVObserver(trainer.ddp)
    observer.close()  # of the model; its hooks are called here
    heads = (trainer.shape.num_attention_heads, *[trainer.shape.num_key_value_heads] * 2)
    rows = trainer.options.tokens // trainer.options.sequence
    size = (trainer.options.sequence, rows)
    layers = range(trainer.shape.num_hidden_layers)
    # Of several layers, so that the L2 cache does not hold them.
    inputs = [
        tuple(torch.randn(*size, h, 128, device=GPU, dtype=torch.bfloat16) for h in heads)
        for _ in range(4)
    ]
    hooks = [observer._hook(layer) for layer in layers]

    def forward() -> None:
        for layer, hook in zip(layers, hooks, strict=True):
            hook(None, inputs[layer % len(inputs)])

    forward()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        forward()
    return interleaved({"observers": graph.replay}, 5, 5)["observers"]


def main() -> None:
    here = Path(__file__).parent
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, default=QWEN3_1_7B.num_hidden_layers)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--micro-batches", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--pairs", type=int, default=24, help="of steps with and without observers")
    parser.add_argument("--host-repeats", type=int, default=10, help="of the host's times")
    parser.add_argument("--no-keep", dest="keep", action="store_false", help="leave that mode out")
    parser.add_argument("--out", type=Path, default=here / "results" / "step.json")
    options = parser.parse_args()
    shape = SimpleNamespace(**{**vars(QWEN3_1_7B), "num_hidden_layers": options.layers})

    rows = {}
    with alone("cuda"):
        for mode in MODES[: 3 if options.keep else 2]:
            rows[mode] = measure(shape, options, mode)
            gc.collect()
            torch.cuda.empty_cache()
    base = rows["BF16"]
    for row in rows.values():
        row["speedup"] = {
            key: base["milliseconds"][key] / value for key, value in row["milliseconds"].items()
        }
        extra = row["resident_bytes"] - base["resident_bytes"]
        row["linear_weights_over_bf16"] = 1 + extra / base["linear_weight_bytes"]
        row["offloaded_over_bf16_bytes"] = row["offloaded_bytes"] - base["offloaded_bytes"]

    report = {
        "device": torch.cuda.get_device_name(),
        "versions": versions(),
        "layers": options.layers,
        "tokens": options.tokens,
        "sequence": options.sequence,
        "micro_batches": options.micro_batches,
        "rows": rows,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    table = Table(
        "mode",
        "forward",
        "backward",
        "optimizer",
        "step ms",
        "over BF16",
        "host ms forward / backward",
        "weights",
        "peak GiB",
    )
    for mode, row in rows.items():
        parts = [f"{value:.1f}" for value in row["milliseconds"].values()]
        table.add_row(
            mode,
            *parts,
            f"{row['speedup']['total']:.2f}",
            " / ".join(f"{value:.1f}" for value in row["host_milliseconds"].values()),
            f"{row['linear_weights_over_bf16']:.2f}",
            f"{row['peak_bytes'] / 2**30:.1f}",
        )
    console = Console(width=130)
    console.print(table, {mode: row["losses"][-1] for mode, row in rows.items()})
    extra = {mode: row["offloaded_over_bf16_bytes"] / 2**20 for mode, row in rows.items()}
    console.print("MiB over BF16 while offloaded:", extra)
    console.print("allocator:", {mode: row["allocator"] for mode, row in rows.items()})
    cost = rows["fp8rl"]["calibration"]
    step = cost["step_milliseconds"]
    console.print(
        f"observers: {cost['added_share']:+.2%} of a step of {step:.1f} ms (standard error "
        f"{cost['standard_error'] / step:.2%}), kernels alone {cost['kernel_share']:.2%}; host "
        f"{cost['host_microseconds_a_layer']:.0f} us a layer"
    )


if __name__ == "__main__":
    main()

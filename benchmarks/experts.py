"""Experts of one mixture-of-experts layer, forward and backward, on one Hopper GPU.

    python benchmarks/experts.py [--experts 128] [--hidden 2048] [--intermediate 768]
        [--tokens 8192] [--top 8] [--rounds 9] [--out FILE.json]

The two grouped linears of a layer of Qwen3-30B-A3B (gate and up, down), without what lies between
them: in BF16 as one grouped product (``torch._grouped_mm``), in FP8 as one grouped linear. FP8
times include the quantization of activations, gradients and weights; with "codes kept" that of the
weights is left out. All add weight gradients to a float32 ``main_grad`` in one buffer, last expert
first, as megatron's DDP has them. Tokens are shared out unevenly, the same for all. "Host" is the
time in which a call is enqueued: where it is near the call's own, the host is what limits it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from megatron_common import enqueue_ms, profiled
from rich.console import Console
from rich.table import Table

from fp8rl import PluginManager
from fp8rl.gemm import BackendChoice
from fp8rl.numerics import LastExpertRows
from fp8rl.training.grouped import grouped_linear
from fp8rl.training.layout import plain_layout
from fp8rl.training.linear import Fp8State
from fp8rl.training.weight_codes import KeepingCodes, WeightCodes, WeightEpoch
from fp8rl_bench.facts import versions
from fp8rl_bench.layers import interleaved

GPU = torch.device("cuda")
Forward = Callable[[torch.Tensor], torch.Tensor]


class Linear:
    """Weights of one grouped linear, shared by all variants, with an input and a gradient."""

    def __init__(self, splits: Sequence[int], out_features: int, in_features: int) -> None:
        experts, tokens = len(splits), sum(splits)
        self.splits = tuple(splits)
        like = {"device": GPU, "dtype": torch.bfloat16}
        self.stack = (
            torch.randn(experts, out_features, in_features, **like) * 0.02
        ).requires_grad_()
        self.weights = [torch.nn.Parameter(w.detach()) for w in self.stack.detach().unbind()]
        self.main_grad = torch.zeros_like(self.stack, dtype=torch.float32)
        self.keeping = contextlib.ExitStack()
        self.x = torch.randn(tokens, in_features, **like).requires_grad_()
        self.grad = torch.randn(tokens, out_features, **like) * 1e-3
        self.ends = torch.tensor(splits, device=GPU).cumsum(0).int()
        for i, weight in enumerate(self.weights):
            weight.main_grad = self.main_grad[experts - 1 - i]  # type: ignore[attr-defined]

    def state(self, backends: BackendChoice, keep: bool) -> Fp8State:
        layout = plain_layout("x", self.stack.shape[1])
        epoch = WeightEpoch()
        if keep:
            self.keeping.enter_context(KeepingCodes([epoch]))
        codes = WeightCodes(layout, "fp32", epoch, stacked=True)
        names = tuple(f"experts.{i}" for i in range(len(self.weights)))
        return Fp8State("experts", codes, backends, "fp32", names)

    def bf16_grouped(self, x: torch.Tensor) -> torch.Tensor:
        return torch._grouped_mm(x, self.stack.mT, offs=self.ends)

    def fp8_grouped(self, x: torch.Tensor, state: Fp8State) -> torch.Tensor:
        return grouped_linear(x, self.splits, self.weights, None, state, fusion=True)

    def add_up(self) -> None:
        """What DDP adds to ``main_grad`` where the linear did not."""
        if self.stack.grad is not None:
            self.main_grad.add_(self.stack.grad)
        self.x.grad = self.stack.grad = None


def step(linears: Sequence[Linear], forwards: Sequence[Forward]) -> None:
    """All forwards, then one backward pass, as in training."""
    made = [forward(linear.x) for linear, forward in zip(linears, forwards, strict=True)]
    torch.autograd.backward(made, [linear.grad for linear in linears])
    for linear in linears:
        linear.add_up()


def shares(experts: int, tokens: int) -> list[int]:
    """Tokens of each expert, from a router that likes some more than others (seeded)."""
    torch.manual_seed(0)
    chosen = torch.multinomial(torch.randn(experts).mul(0.3).exp(), tokens, replacement=True)
    return chosen.bincount(minlength=experts).tolist()


def variants(linears: Sequence[Linear], backends: BackendChoice) -> dict[str, Callable[[], None]]:
    def grouped(keep: bool) -> Callable[[], None]:
        states = [x.state(backends, keep) for x in linears]

        def call() -> None:
            last_rows = LastExpertRows()  # of one layer: the next one gets other tokens
            own = [replace(state, last_rows=last_rows) for state in states]
            pairs = zip(linears, own, strict=True)
            step(linears, [partial(x.fp8_grouped, state=state) for x, state in pairs])

        return call

    return {
        "BF16, torch._grouped_mm": lambda: step(linears, [x.bf16_grouped for x in linears]),
        "fp8rl, grouped": grouped(keep=False),
        "fp8rl, grouped, codes kept": grouped(keep=True),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--intermediate", type=int, default=768)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--top", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()

    splits = shares(options.experts, options.tokens * options.top)
    linears = [
        Linear(splits, 2 * options.intermediate, options.hidden),
        Linear(splits, options.hidden, options.intermediate),
    ]
    backends = BackendChoice(PluginManager(discover=False).gemm_backends(), ["fp32"])
    calls = variants(linears, backends)
    times = interleaved(calls, options.rounds, calls=2)
    host = {name: enqueue_ms(call, options.rounds) for name, call in calls.items()}
    console = Console(width=110)
    table = Table("experts, forward + backward", "ms", "over torch._grouped_mm", "host ms")
    first = next(iter(times.values()))
    for name, milliseconds in times.items():
        ratio = f"{first / milliseconds:.2f}x"
        table.add_row(name, f"{milliseconds:.2f}", ratio, f"{host[name]:.2f}")
    console.print(table)
    if options.profile:
        for name in ("fp8rl, grouped", "BF16, torch._grouped_mm"):
            with profiled(name):
                calls[name]()
    if options.out:
        facts = {
            "gpu": torch.cuda.get_device_name(),
            "versions": versions(),
            "splits": {"smallest": min(splits), "largest": max(splits), "sum": sum(splits)},
            "options": {k: v for k, v in vars(options).items() if k != "out"},
            "milliseconds": times,
            "host_milliseconds": host,
        }
        options.out.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()

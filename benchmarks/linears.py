"""The linear layers of one Qwen3-8B layer, forward and backward, on one Hopper GPU.

    python benchmarks/linears.py [--tokens 8192] [--rounds 25] [--out FILE.json]

Real megatron-core layers: as they are (BF16), converted by ``megatron_fp8rl`` with each GEMM
backend and by the table, and TransformerEngine's with its blockwise recipe where it can be
imported. Every FP8 time includes the quantization of activations and gradients; with "weights
each time" that of the weights too, as in a step of one micro-batch. ``--profile`` adds the GPU time
by kernel of one pass.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from megatron_common import PEAK_TFLOPS, QWEN3_8B, profiled
from profiles import cold_ms, copy_bandwidth
from rich.console import Console
from rich.table import Table

from fp8rl import PluginManager, Recipe
from fp8rl.gemm import GemmShape
from fp8rl.gemm.table import DIRECTIONS
from fp8rl.numerics import quantize_operand, quantize_weight
from fp8rl_bench.facts import versions
from fp8rl_bench.layers import LinearsPass, build, interleaved, linears
from megatron_fp8rl import convert
from megatron_fp8rl.testing.exact_replay import alone

GPU = torch.device("cuda")
SHAPES = {  # out and in features
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate_up": (24576, 4096),
    "down": (4096, 12288),
}


def te_variants(tokens: int) -> dict[str, Callable[[], None]]:
    """TransformerEngine's Linear with blockwise FP8; empty where it is not installed."""
    try:
        import transformer_engine.pytorch as te
        from transformer_engine.common.recipe import Float8BlockScaling
    except (ImportError, OSError) as error:
        Console().print(f"TransformerEngine is left out: {type(error).__name__}: {error}")
        return {}
    recipe = Float8BlockScaling()
    modules = [
        te.Linear(k, n, bias=False, params_dtype=torch.bfloat16, device="cuda")
        for n, k in SHAPES.values()
    ]

    class First:
        """Linear layers that quantize their weights in this pass, or keep the codes."""

        def __init__(self, module: Any, first: bool) -> None:
            self.module, self.first, self.weight = module, first, module.weight

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return self.module(x, is_first_microbatch=self.first)

    every = LinearsPass([First(m, True) for m in modules], tokens)
    cached = LinearsPass([First(m, False) for m in modules], tokens, like=every)

    def run(call: LinearsPass) -> None:
        with te.fp8_autocast(enabled=True, fp8_recipe=recipe):
            call()

    run(every)
    return {
        "TransformerEngine, weights each time": lambda: run(every),
        "TransformerEngine, weights cached": lambda: run(cached),
    }


def variants(tokens: int, backends: list[str | None]) -> dict[str, LinearsPass]:
    bf16 = LinearsPass(linears(build(QWEN3_8B)), tokens)
    calls: dict[str, LinearsPass] = {"BF16": bf16}

    def add(label: str, name: str | None, keep_codes: bool, accumulate: bool = False) -> None:
        model = build(QWEN3_8B)
        conversion = convert(
            model, Recipe(), plugins=PluginManager(discover=False), gemm_backend=name
        )
        calls[label] = LinearsPass(linears(model), tokens, like=bf16)
        if keep_codes:
            calls[label].keeping.enter_context(conversion.keeping_codes())
        if accumulate:
            calls[label].accumulate()

    for name in backends:
        add(f"fp8rl {name or 'by the table'}, weights each time", name, False)
        if name is None:
            add("fp8rl by the table, weights cached", None, True)
            add("fp8rl by the table, weights each time, main_grad", None, False, True)
            calls["BF16, main_grad"] = LinearsPass(
                linears(build(QWEN3_8B)), tokens, bf16
            ).accumulate()
    return calls


def quantize_rows(tokens: int, bandwidth: float) -> list[dict]:
    """Milliseconds and share of copy bandwidth of what one pass quantizes."""
    rows = []
    sources = [("operand", (tokens, width)) for width in (4096, 6144, 12288, 24576)]
    sources += [("weight", shape) for shape in SHAPES.values()]
    for kind, shape in sources:
        x = torch.randn(shape, device=GPU, dtype=torch.bfloat16)
        function = quantize_operand if kind == "operand" else quantize_weight
        result = function(x)
        sides = [side for side in result if side is not None]
        moved = sum(t.numel() * t.element_size() for t in (x, *(t for s in sides for t in s)))
        ms = cold_ms(lambda x=x, function=function: function(x))
        rows.append(
            {
                "kind": kind,
                "shape": list(shape),
                "milliseconds": ms,
                "gigabytes_per_second": moved / ms / 1e6,
                "share_of_copy": moved / ms / 1e6 / bandwidth,
            }
        )
    return rows


def gemm_rows(tokens: int) -> list[dict]:
    """TFLOPS of each backend, shape and direction, and of BF16."""
    backends = list(PluginManager(discover=False).gemm_backends().values())
    rows = []
    for name, (n, k) in SHAPES.items():
        shape = GemmShape(tokens, n, k)
        x, w, g = (
            torch.randn(s, device=GPU, dtype=torch.bfloat16)
            for s in ((tokens, k), (n, k), (tokens, n))
        )
        total = torch.zeros(n, k, device=GPU)
        x8, w8, g8 = quantize_operand(x), quantize_weight(w), quantize_operand(g)
        plain = {
            "fprop": lambda x=x, w=w: x @ w.t(),
            "dgrad": lambda g=g, w=w: g @ w,
            "wgrad": lambda g=g, x=x: g.t() @ x,
            "wgrad_add": lambda g=g, x=x, total=total: total.add_(g.t() @ x),
        }
        usable = [
            b for b in backends if b.name != "reference" and b.supports(GPU, shape, "fp32") is None
        ]

        def fp8(backend: Any, direction: str, x8=x8, w8=w8, g8=g8, total=total) -> Any:
            if direction == "fprop":
                return lambda: backend.fprop(x8.rowwise, w8.rowwise, torch.bfloat16)
            if direction == "dgrad":
                return lambda: backend.dgrad(g8.rowwise, w8.columnwise, torch.bfloat16)
            dtype, out = (torch.bfloat16, None) if direction == "wgrad" else (torch.float32, total)
            return lambda: backend.wgrad(g8.columnwise, x8.columnwise, dtype, out)

        for direction in DIRECTIONS:
            products = {backend.name: fp8(backend, direction) for backend in usable}
            times = interleaved({**products, "BF16": plain[direction]}, 7, 5)
            for backend, ms in times.items():
                tflops = 2 * tokens * n * k / ms / 1e9
                rows.append(
                    {
                        "linear": name,
                        "direction": direction,
                        "backend": backend,
                        "milliseconds": ms,
                        "tflops": tflops,
                        "share_of_peak": tflops / PEAK_TFLOPS,
                    }
                )
    return rows


def main() -> None:
    here = Path(__file__).parent
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--backends", default="scaled_mm,deep_gemm,table")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--out", type=Path, default=here / "results" / "linears.json")
    options = parser.parse_args()

    names = [None if n == "table" else n for n in options.backends.split(",")]
    with alone("cuda"):
        torch.manual_seed(0)
        bandwidth = copy_bandwidth()
        gemms = gemm_rows(options.tokens)
        quantize = quantize_rows(options.tokens, bandwidth)
        calls = {**variants(options.tokens, names), **te_variants(options.tokens)}
        medians = interleaved(calls, options.rounds, 3)
        if options.profile:
            for label, call in calls.items():
                with profiled(label):
                    call()

    report = {
        "device": torch.cuda.get_device_name(),
        "versions": versions(),
        "tokens": options.tokens,
        "rounds": options.rounds,
        "copy_gigabytes_per_second": bandwidth,
        "milliseconds": medians,
        "speedup_over_bf16": {
            name: medians["BF16, main_grad" if "main_grad" in name else "BF16"] / ms
            for name, ms in medians.items()
        },
        "gemms": gemms,
        "quantize": quantize,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    show(report)


def show(report: dict) -> None:
    console = Console(width=110)
    table = Table("variant", "ms", "over BF16", title=f"{report['device']}, forward + backward")
    for name, ms in report["milliseconds"].items():
        table.add_row(name, f"{ms:.2f}", f"{report['speedup_over_bf16'][name]:.2f}")
    console.print(table)
    table = Table("linear", "direction", "backend", "ms", "TFLOPS", "of peak")
    for row in report["gemms"]:
        table.add_row(
            row["linear"],
            row["direction"],
            row["backend"],
            f"{row['milliseconds']:.3f}",
            f"{row['tflops']:.0f}",
            f"{row['share_of_peak']:.0%}",
        )
    console.print(table)
    table = Table("quantize", "shape", "us", "GB/s", "of copy")
    for row in report["quantize"]:
        table.add_row(
            row["kind"],
            "x".join(map(str, row["shape"])),
            f"{row['milliseconds'] * 1e3:.0f}",
            f"{row['gigabytes_per_second']:.0f}",
            f"{row['share_of_copy']:.0%}",
        )
    console.print(table)


if __name__ == "__main__":
    main()

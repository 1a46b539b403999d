"""Quantization speed on a GPU: the torch reference, torch.compile of it, and the Triton kernels.

    python benchmarks/quantize.py [--out FILE.json]

Shapes are the linear layers of Qwen3-8B (BF16), and its keys and values: K as a tensor of its own,
V as a slice of the packed projection. Each time is the median of single calls with a cold
L2 cache. Bandwidth counts one read of the input and one write of codes and scales, and is compared
with that of a device-to-device copy measured in the same run.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from profiles import cold_ms, copy_bandwidth
from rich.console import Console
from rich.progress import track
from rich.table import Table

from fp8rl.numerics import BLOCK, GROUP, Quantized, reference
from fp8rl.numerics.triton import kv_cache as kv_cache_kernel
from fp8rl.numerics.triton import quantize as triton_kernels
from fp8rl_bench.facts import versions

WEIGHTS = {
    "qkv_proj": (6144, 4096),
    "o_proj": (4096, 4096),
    "gate_up_proj": (24576, 4096),
    "down_proj": (4096, 12288),
}
ACTIVATIONS = {"hidden, 8192 tokens": (8192, 4096), "mlp, 8192 tokens": (8192, 12288)}


def equal(a: Quantized, b: Quantized) -> bool:
    """Same codes and scales, bit for bit."""
    pairs = zip(a, b, strict=True)
    return all(torch.equal(x.cpu().view(torch.uint8), y.cpu().view(torch.uint8)) for x, y in pairs)


def cases() -> list[tuple[str, str, tuple[int, int], str]]:
    """(operation, name, shape, scale format)."""
    shapes = [("quantize_block", *item) for item in WEIGHTS.items()]
    shapes += [("quantize_group", *item) for item in ACTIVATIONS.items()]
    shapes += [("quantize_group transposed", *item) for item in ACTIVATIONS.items()]
    return [(*shape, scale_format) for shape in shapes for scale_format in ("fp32", "pow2")]


def measure(case: tuple[str, str, tuple[int, int], str]) -> list[dict]:
    """One row per implementation."""
    operation, name, shape, scale_format = case
    function, _, transposed = operation.partition(" ")
    tile = BLOCK if function == "quantize_block" else GROUP
    x = torch.randn(shape, device="cuda").bfloat16()
    x = x.t() if transposed else x
    eager = getattr(reference, function)
    functions = {
        "reference": eager,
        "torch.compile": torch.compile(eager, dynamic=False),
        "triton": getattr(triton_kernels, function),
    }
    expected = eager(x.cpu(), tile, scale_format)
    rows = []
    for implementation, call in functions.items():
        result = call(x, tile, scale_format)
        moved = sum(t.numel() * t.element_size() for t in (x, *result))
        ms = cold_ms(lambda call=call: call(x, tile, scale_format))
        rows.append(
            {
                "operation": operation,
                "name": name,
                "shape": list(x.shape),
                "scale_format": scale_format,
                "implementation": implementation,
                "milliseconds": ms,
                "gigabytes_per_second": moved / ms / 1e6,
                "equal_to_cpu_reference": equal(result, expected),
            }
        )
    return rows


def measure_kv(tokens: int) -> list[dict]:
    """One row per implementation of K and V as an FP8 KV cache holds them, and as an INT8 one."""
    groups, ratio, head = 8, 4, 128
    packed = torch.randn(tokens, 1, groups, (ratio + 2) * head, device="cuda").bfloat16()
    k, v = packed[..., -2 * head : -head].contiguous(), packed[..., -head:]
    scales = torch.tensor([0.012, 0.01], device="cuda")  # randn's amax, with a margin
    counts = torch.zeros(2, dtype=torch.int64, device="cuda")
    return [
        *_kv_rows("fake_quantize_kv", (k, v, scales, counts)),
        *_kv_rows("fake_quantize_int8_kv", (k, v)),
    ]


def _kv_rows(operation: str, args: tuple[torch.Tensor, ...]) -> list[dict]:
    k, v = args[:2]
    tokens = len(k)
    eager = getattr(reference, operation)
    functions = {
        "reference": eager,
        "torch.compile": torch.compile(eager, dynamic=False),
        "triton": getattr(kv_cache_kernel, operation),
    }
    expected = eager(*(x.cpu() for x in args))
    rows = []
    for implementation, call in functions.items():
        result = call(*args)
        moved = sum(2 * x.numel() * x.element_size() for x in (k, v))
        ms = cold_ms(lambda call=call: call(*args))
        same = all(torch.equal(x.cpu(), y) for x, y in zip(result, expected, strict=True))
        rows.append(
            {
                "operation": operation,
                "name": f"K and V, {tokens} tokens",
                "shape": [2, *k.shape],
                "scale_format": "fp32",
                "implementation": implementation,
                "milliseconds": ms,
                "gigabytes_per_second": moved / ms / 1e6,
                "equal_to_cpu_reference": same,
            }
        )
    return rows


def main() -> None:
    here = Path(__file__).parent
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=here / "results" / "quantize.json")
    options = parser.parse_args()

    torch.manual_seed(0)
    copy = copy_bandwidth()
    rows = []
    for case in track(cases(), "Quantizing", console=Console(stderr=True)):
        rows += measure(case)
        torch.compiler.reset()
    rows += measure_kv(8192)
    for row in rows:
        row["share_of_copy"] = row["gigabytes_per_second"] / copy

    report = {
        "device": torch.cuda.get_device_name(),
        "versions": versions(),
        "copy_gigabytes_per_second": copy,
        "rows": rows,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")

    table = Table(title=f"{report['device']}, copy {copy:.0f} GB/s")
    for column in (
        "operation",
        "case",
        "scale",
        "implementation",
        "ms",
        "GB/s",
        "of copy",
        "equal",
    ):
        table.add_column(column, no_wrap=True)
    for row in rows:
        table.add_row(
            row["operation"],
            row["name"],
            row["scale_format"],
            row["implementation"],
            f"{row['milliseconds']:.4f}",
            f"{row['gigabytes_per_second']:.0f}",
            f"{row['share_of_copy']:.0%}",
            "yes" if row["equal_to_cpu_reference"] else "no",
        )
    Console(width=130).print(table)


if __name__ == "__main__":
    main()

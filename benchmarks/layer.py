"""One whole transformer layer of Qwen3-8B's shape, forward and backward, on one Hopper GPU.

    python benchmarks/layer.py [--tokens 8192] [--sequence 4096] [--rounds 25] [--out F]

A real megatron-core ``TransformerLayer`` of the local spec (no TransformerEngine), flash attention
through torch on both sides: in BF16, and converted by ``megatron_fp8rl``. Weights are quantized in
every pass. SwiGLU is computed by the kernels that quantize it, or "apart" as megatron compiles it.
With "FP8 K and V" attention sees them as an FP8 KV cache holds them (``kv_cache.in_training``),
"exact" does so with the rollout's bits (``exact``). For these and for BF16 the forward pass alone
is timed too, without gradients, as log-probabilities are computed. Of a norm and the quantization
behind it two kernels are compared with the one that TransformerEngine's spec has there.
Gradients go to ``.grad``, or with ``main_grad`` to a float32 buffer, as under DDP. ``--profile``
adds the GPU time by kernel of one pass.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
from megatron_common import QWEN3_8B, profiled
from rich.console import Console
from rich.table import Table

from fp8rl import PluginManager, Recipe
from fp8rl.kv_scales import scale_names
from fp8rl.numerics import quantize_operand
from fp8rl_bench.facts import versions
from fp8rl_bench.layers import LayerPass, build, interleaved
from fp8rl_bench.trainer import LAYERS as FORWARD
from megatron_fp8rl import convert
from megatron_fp8rl.kv.cache import KVCacheInTraining
from megatron_fp8rl.testing.exact_replay import alone

GPU = torch.device("cuda")
LABELS = (
    "BF16",
    "fp8rl",
    "fp8rl, SwiGLU apart",
    "fp8rl, FP8 K and V",
    "fp8rl, exact",
    "BF16, main_grad",
    "fp8rl, main_grad",
    "fp8rl, SwiGLU apart, main_grad",
)


def norm_calls(tokens: int) -> dict[str, Callable[[], object]]:
    """Return the norm of hidden states and its quantization, in two kernels and in one."""
    from fp8rl.kernels.norm import rms_norm, rms_norm_quantize

    x = torch.randn(tokens, QWEN3_8B.hidden_size, device=GPU, dtype=torch.bfloat16)
    weight, epsilon = torch.ones_like(x[0]), QWEN3_8B.rms_norm_eps
    return {
        "two kernels": lambda: quantize_operand(rms_norm(x, weight, epsilon), columnwise=False),
        "one kernel": lambda: rms_norm_quantize(x, None, weight, epsilon, "fp32"),
    }


def main() -> None:
    here = Path(__file__).parent
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--out", type=Path, default=here / "results" / "layer.json")
    options = parser.parse_args()

    calls, peaks = {}, {}
    with alone("cuda"):
        torch.manual_seed(0)
        for label in LABELS:
            model = build(QWEN3_8B)
            if label.startswith("fp8rl"):
                recipe = Recipe(exact="exact" in label)
                convert(model, recipe, plugins=PluginManager(discover=False))
            if "apart" in label:
                model.decoder.layers[0].mlp.give_back()
            if "K and V" in label or "exact" in label:
                KVCacheInTraining(model).set(dict.fromkeys(scale_names(1), 0.02))
            call = LayerPass(model, options.tokens, options.sequence, "main_grad" in label)
            call()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            call()
            peaks[label] = torch.cuda.max_memory_allocated() - before
            calls[label] = call
        medians = interleaved(calls, options.rounds, 3)
        forward = {label: calls[label].forward for label in FORWARD}
        forwards = interleaved(forward, options.rounds, 3)
        norms = interleaved(norm_calls(options.tokens), options.rounds, 3)
        if options.profile:
            for label in ("BF16", "fp8rl", "fp8rl, exact"):
                with profiled(label):
                    calls[label]()

    report = {
        "device": torch.cuda.get_device_name(),
        "versions": versions(),
        "tokens": options.tokens,
        "sequence": options.sequence,
        "rounds": options.rounds,
        "milliseconds": medians,
        "forward_milliseconds": forwards,
        "norm_and_quantization_milliseconds": norms,
        "speedup_over_bf16": {
            label: medians["BF16, main_grad" if "main_grad" in label else "BF16"] / ms
            for label, ms in medians.items()
        },
        "cost_of_fp8_k_and_v": medians["fp8rl, FP8 K and V"] / medians["fp8rl"] - 1,
        "cost_of_exact": {
            "forward": forwards["fp8rl, exact"] / forwards["fp8rl, FP8 K and V"] - 1,
            "forward and backward": medians["fp8rl, exact"] / medians["fp8rl, FP8 K and V"] - 1,
        },
        "peak_bytes_of_a_pass": peaks,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    heads = ("variant", "ms", "over BF16", "forward ms", "peak MiB of a pass")
    table = Table(*heads, title=report["device"])
    for label, ms in medians.items():
        speedup = f"{report['speedup_over_bf16'][label]:.2f}"
        forward = f"{forwards[label]:.2f}" if label in forwards else ""
        table.add_row(label, f"{ms:.2f}", speedup, forward, f"{peaks[label] / 2**20:.0f}")
    console = Console(width=100)
    console.print(table)
    console.print("norm and quantization, ms:", norms)


if __name__ == "__main__":
    main()

"""Figures measured on a GPU, which the report shows beside the times of this CPU."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Figure:
    """One measurement of FP8 against BF16."""

    what: str
    bf16: str
    own: str
    """With vLLM's own FP8."""
    fp8: str
    gain: str
    conditions: str
    source: str
    """Path of the raw data in fp8rl's repository."""


GPU_FIGURES = (
    Figure(
        "rollouts",
        "10,236 tokens/s",
        "13,905 tokens/s (1.36x)",
        "17,382 tokens/s",
        "1.70x",
        "shape of Qwen3-8B, random weights, 256 requests of 512 prompt and 1,024 output tokens, "
        "FP8 weights and KV cache; H100, vLLM 0.25.1",
        "benchmarks/results/rollout_h100.json",
    ),
    Figure(
        "training linears",
        "13.6 ms",
        "",
        "9.9 ms",
        "1.38x",
        "forward and backward of the four linears of a layer of Qwen3-8B's shape, random weights, "
        "8,192 tokens, weights quantized each time; H100, torch 2.11",
        "benchmarks/results/megatron_linears_h100.json",
    ),
    Figure(
        "refit",
        "",
        "",
        "20 ms",
        "",
        "all weights of the shape of Qwen3-8B, random, 16.4 GB of BF16 on the same GPU, into a "
        "live engine before its first generation; H100, vLLM 0.25.1",
        "benchmarks/results/refit_gpu_h100.json",
    ),
)
SIMULATED = (
    "A CPU has no FP8 units, so it simulates FP8: weights and activations are quantized, "
    "dequantized and multiplied in float32. FP8 therefore takes longer here than BF16."
)

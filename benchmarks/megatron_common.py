"""What the megatron benchmarks share: one process, models of Qwen3's shape, fair timing."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import torch
from rich.console import Console

PEAK_TFLOPS = 1979.0  # FP8 without sparsity, H100 SXM data sheet
QWEN3_8B = SimpleNamespace(
    model_type="qwen3",
    vocab_size=1024,  # of no interest here, and 151,936 would only take memory
    hidden_size=4096,
    intermediate_size=12288,
    num_hidden_layers=1,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    hidden_act="silu",
    max_position_embeddings=40960,
    initializer_range=0.02,
    rms_norm_eps=1e-6,
    rope_theta=1_000_000.0,
    tie_word_embeddings=False,
)
QWEN3_1_7B = SimpleNamespace(
    **{
        **vars(QWEN3_8B),
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    }
)


def enqueue_ms(call: Callable[[], object], repeats: int) -> float:
    """Median milliseconds that the host takes to enqueue a call on an idle GPU."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - began))
    torch.cuda.synchronize()
    return statistics.median(times)


@contextmanager
def profiled(label: str) -> Iterator[None]:
    """Print the GPU time by kernel of what runs inside."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        yield
        torch.cuda.synchronize()
    console = Console(width=130)
    console.print(label)
    for event in sorted(profile.key_averages(), key=lambda e: -e.self_device_time_total)[:30]:
        console.print(
            f"  {event.self_device_time_total / 1e3:8.3f} ms {event.count:4d}x {event.key[:90]}"
        )

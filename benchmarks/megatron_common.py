"""What the megatron benchmarks share: one process, models of Qwen3's shape, fair timing."""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from rich.console import Console
from torch.utils.benchmark import Timer

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


@contextmanager
def single_process() -> Iterator[None]:
    """A world of one with megatron's parallel state, on GPU 0."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    torch.cuda.set_device(0)
    with tempfile.TemporaryDirectory() as folder:
        store = torch.distributed.FileStore(f"{folder}/store", 1)
        torch.distributed.init_process_group("nccl", store=store, rank=0, world_size=1)
        parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
        model_parallel_cuda_manual_seed(1234)
        try:
            yield
        finally:
            parallel_state.destroy_model_parallel()
            torch.distributed.destroy_process_group()


def build(shape: SimpleNamespace, **overrides: Any) -> Any:
    """A GPTModel on the GPU, local spec, flash attention through torch's SDPA."""
    from megatron_fp8rl.testing.models import build_gpt

    options = {
        "use_cpu_initialization": False,
        "bias_activation_fusion": True,
        "masked_softmax_fusion": False,
    }
    model = build_gpt(shape, **{**options, **overrides}).cuda()
    for layer in model.decoder.layers:
        layer.self_attention.core_attention = FlashAttention()
    return model


class FlashAttention(torch.nn.Module):
    """Causal attention; megatron's own needs TransformerEngine to be more than three kernels."""

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """``[s, b, heads, d]`` to ``[s, b, heads * d]``."""
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=True
        )
        return out.permute(2, 0, 1, 3).flatten(2)


def interleaved(
    variants: Mapping[str, Callable[[], object]], rounds: int, calls: int
) -> dict[str, float]:
    """Median milliseconds of one call of each variant.

    The variants take turns, ``calls`` at a time after one that does not count, in another order
    each round. So a GPU that gets warm slows down for all of them, and the clock that the power of
    one variant leaves to the next is not always that of the same.
    """
    times: dict[str, list[float]] = {name: [] for name in variants}
    for call in variants.values():
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    shuffled = random.Random(0)
    for _ in range(rounds):
        for name, call in shuffled.sample(list(variants.items()), len(variants)):
            call()
            timer = Timer("call()", globals={"call": call})  # which waits for the GPU
            times[name].append(1e3 * timer.timeit(calls).mean)
    return {name: statistics.median(values) for name, values in times.items()}


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

"""Attention of mixed batches over an FP8 cache, in kernels and in engines.

With ``TRITON_INTERPRET=1`` and triton installed the Triton kernels run on a CPU, with a stand-in
for FlashAttention. Engines need a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from support.triton_device import INTERPRETED

pytest.importorskip("vllm")

from fp8rl import Recipe
from support.gpu_engine import (
    PROMPTS,
    QUICK,
    GpuEngine,
    Rollout,
    refit_tensors,
    start_engine,
)
from support.mixed_batch import BATCHES, Batch, load_flash
from vllm_fp8rl.refit import refit

needs_a_gpu = pytest.mark.skipif(INTERPRETED, reason="needs a CUDA GPU")


@pytest.fixture(scope="module")
def flash() -> Iterator[Any]:
    with load_flash() as module:
        yield module


# Kernels.


@pytest.mark.parametrize(("layout", "page"), [("NHD", 16), ("HND", 48), ("packed", 128)])
def test_the_copy_has_exactly_the_values_of_the_cache(layout: str, page: int) -> None:
    from fp8rl.kernels.paged import dequantize_pages
    from vllm_fp8rl.compat import keys_and_values

    batch = Batch([(0, 70), (100, 30), (0, 1), (5, 2)], size=64, page=page, layout=layout)
    lengths = batch.common.seq_lens
    starts = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).int()
    cache = keys_and_values(batch.cache.view(torch.float8_e4m3fn), batch.kv_heads, batch.size)
    copies = dequantize_pages(
        *cache,
        batch.common.block_table_tensor,
        starts,
        tokens=int(starts[-1]) + 3,  # the host's number may be larger
        longest=int(lengths.max()) + 100,
        k_scale=batch.layer._k_scale,
        v_scale=batch.layer._v_scale,
        dtype=torch.bfloat16,
    )
    for copy, codes, scale in zip(copies, cache, batch.scales, strict=True):
        for row, length in enumerate(lengths.tolist()):
            pages = codes[batch.common.block_table_tensor[row].long()].float().flatten(0, 1)
            start = int(starts[row])
            assert torch.equal(copy[start : start + length].float(), pages[:length] * scale)


@pytest.mark.parametrize(
    ("heads", "size"), [((4, 4), 64), ((8, 1), 128), ((32, 2), 256), ((6, 2), 128)]
)
def test_heads_and_their_sizes(flash, heads: tuple[int, int], size: int) -> None:
    batch = Batch(BATCHES["cached prefixes"], *heads, size)
    assert batch.errors(batch.attend(flash)).max() < 0.005


@needs_a_gpu  # the interpreter truncates to bfloat16
def test_scales_that_are_no_powers_of_two_round_once_more(flash) -> None:
    batch = Batch(BATCHES["decodes and prompts"], scales=(0.0131, 0.0217))
    assert batch.errors(batch.attend(flash)).max() < 0.005


@needs_a_gpu
def test_the_host_does_not_wait_for_the_gpu(flash) -> None:
    batch = Batch(BATCHES["cached prefixes"], limit=100)
    batch.attend(flash)  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        batch.attend(flash)
    finally:
        torch.cuda.set_sync_debug_mode("default")


# Engines. Linear layers in BF16, so that nothing else rounds much.

RECIPE = Recipe.from_dict({"rollout": False})


def split(engine: GpuEngine, on: bool) -> None:
    """Split batches into decodes and prompts, or run them with queries in E4M3 as vLLM does."""
    runner = engine.llm.llm_engine.model_executor.driver_worker.worker.model_runner
    for group in (group for groups in runner.attn_groups for group in groups):
        assert group.get_metadata_builder(0).reorder_batch_threshold == 1
        group.get_metadata_builder(0)._splits_batches = on


@needs_a_gpu
def test_sampling_and_scoring_the_same_tokens_agree(checkpoints: dict[str, Path]) -> None:
    """Nearer than with queries in E4M3, as vLLM computes prompts."""
    # Few tokens a step: prompts come in several chunks, beside requests that decode.
    engine = start_engine(checkpoints["a"], RECIPE, max_num_batched_tokens=128, **QUICK)
    try:
        tensors = refit_tensors(checkpoints["a"], RECIPE)
        refit(engine.llm, tensors.items(), expect_kv_scales=True)
        rollout = engine.rollout()
        found = []
        for on in (True, False):
            split(engine, on)
            engine.llm.reset_prefix_cache()
            found.append((scored(engine, rollout) - rollout.logprobs).abs().mean().item())
        assert found[0] < 0.5 * found[1], found
    finally:
        engine.llm.llm_engine.engine_core.shutdown()


def scored(engine: GpuEngine, rollout: Rollout) -> torch.Tensor:
    """Logprobs of a rollout's tokens, given as prompts."""
    from vllm import SamplingParams

    outputs = engine.llm.generate(
        [{"prompt_token_ids": p + t} for p, t in zip(PROMPTS, rollout.tokens, strict=True)],
        SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False),
        use_tqdm=False,
    )
    return torch.tensor(
        [
            output.prompt_logprobs[place][token].logprob
            for output, prompt, tokens in zip(outputs, PROMPTS, rollout.tokens, strict=True)
            for place, token in enumerate(tokens, len(prompt))
        ]
    )

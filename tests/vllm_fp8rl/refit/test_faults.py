"""What fails in the middle of a refit: the old weights, or a clear refusal, never a mixture.

A rank that dies: tp_refit.py. Any fault at any place of a stream: tests/fuzz/test_refit_streams.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fp8rl.errors import RefitError
from support.engine import PROMPTS, SCALES
from vllm_fp8rl.refit import refit
from vllm_fp8rl.refit.transport import Sender, place
from vllm_fp8rl.storage import block_grid as grid_module

pytestmark = pytest.mark.usefixtures("restored")


def exhausted(*args: object, **options: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")


@pytest.mark.parametrize("place_of_it", ["checks", "first write", "later write"])
def test_out_of_memory(engine, intact, b, monkeypatch, place_of_it):
    """A GPU allocates where tensors come from the host or are strided: here, by a failure there."""
    quantize, left = grid_module.quantize_blocks, [3 if place_of_it == "later write" else 0]

    def failing(*args: Any) -> None:
        if not left[0]:
            exhausted()
        left[0] -= 1
        quantize(*args)

    with monkeypatch.context() as patch:
        if place_of_it == "checks":
            patch.setattr("vllm_fp8rl.refit.receiver.session.start_finite_check", exhausted)
        else:
            patch.setattr(grid_module, "quantize_blocks", failing)
        with pytest.raises(RefitError, match=r"No memory was left .*2\.00 MiB.*smaller batches"):
            refit(engine.llm, (b | SCALES).items(), expect_kv_scales=True, batch_bytes=1 << 17)
    if place_of_it == "checks":
        assert intact()
    else:
        engine.refuses(RefitError, "half-updated.*refit the engine")


def test_out_of_memory_at_staging_names_the_remedy(monkeypatch):
    """A sender stages GPU tensors for workers in other processes, before it sends any."""
    monkeypatch.setattr("vllm_fp8rl.refit.transport.torch.empty", exhausted)
    with pytest.raises(RefitError, match=r"on cpu for a staging buffer of 256 MiB, .*smaller"):
        Sender([place()], 256 << 20)._make_staging(torch.device("cpu"))


def test_a_prefix_cache_that_cannot_be_reset_leaves_a_refusal(engine, b, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(engine.llm, "reset_prefix_cache", lambda **options: False)
        with pytest.raises(RefitError, match="could not reset its prefix cache"):
            refit(engine.llm, b.items(), expect_kv_scales=False)
    engine.refuses(RefitError, "half-updated")


def test_requests_in_flight_are_refused_before_a_worker_hears_of_the_refit(
    engine, intact, b, monkeypatch
):
    live = engine.llm.llm_engine
    own = live.add_request
    with monkeypatch.context() as patch:
        patch.setattr(live, "add_request", own)  # as of somebody who counts requests
        patch.setattr(live, "has_unfinished_requests", lambda: True)
        with pytest.raises(RefitError, match="has requests in flight"):
            refit(engine.llm, b.items(), expect_kv_scales=True)
        assert vars(live)["add_request"] is own
    assert intact()
    assert engine.greedy(PROMPTS[:1], 1)

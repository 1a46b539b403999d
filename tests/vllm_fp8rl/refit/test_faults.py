"""What fails in the middle of a refit: the old weights, or a clear refusal, never a mixture.

A rank that dies: tp_refit.py. Any fault at any place of a stream: tests/fuzz/test_refit_streams.py.
Streams that are refused before a write: test_refusals.py.
"""

from __future__ import annotations

import re

import pytest
import torch

from fp8rl.errors import RefitError
from support.engine import PROMPTS, SCALES, Engine, same_state
from vllm_fp8rl.refit import RefitSession, drop_requests, refit
from vllm_fp8rl.refit.transport import Sender, place
from vllm_fp8rl.storage import block_grid as grid_module

UP = "model.layers.0.mlp.up_proj.weight"
pytestmark = pytest.mark.usefixtures("restored")


@pytest.fixture(scope="module")
def a(a: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return a | SCALES


@pytest.fixture(scope="module")
def b(b: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return b | SCALES


def serves(engine: Engine) -> bool:
    """Whether it generates; what refuses must say what to do."""
    try:
        engine.greedy(PROMPTS)
    except RefitError as error:
        assert re.search("half-updated", str(error)) and "refit the engine" in str(error)
        drop_requests(engine.llm)
        return False
    return True


@pytest.mark.parametrize("call", [0, 3])
def test_out_of_memory_while_loading(engine, a, b, monkeypatch, call):
    """A GPU allocates where tensors come from the host or are strided: here, by a failure there."""
    tokens = engine.greedy(PROMPTS)
    quantize, calls = grid_module.quantize_blocks, []

    def failing(*args):
        calls.append(1)
        if len(calls) > call:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")
        quantize(*args)

    with monkeypatch.context() as patch:
        patch.setattr(grid_module, "quantize_blocks", failing)
        with pytest.raises(RefitError, match=r"No memory was left .*2\.00 MiB.*smaller batches"):
            refit(engine.llm, b.items(), expect_kv_scales=True, batch_bytes=1 << 17)
    assert not serves(engine)
    refit(engine.llm, a.items(), expect_kv_scales=True)
    assert engine.greedy(PROMPTS) == tokens


def test_out_of_memory_in_the_checks_leaves_the_old_weights(engine, b, monkeypatch):
    tokens, before = engine.greedy(PROMPTS), engine.state()

    def failing(*args):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    with monkeypatch.context() as patch:
        patch.setattr("vllm_fp8rl.refit.receiver.session.start_finite_check", failing)
        with pytest.raises(RefitError, match="No memory was left"):
            refit(engine.llm, b.items(), expect_kv_scales=True)
    assert same_state(before, engine.state())
    assert engine.greedy(PROMPTS) == tokens


def test_out_of_memory_at_staging_names_the_remedy(monkeypatch):
    """A sender stages GPU tensors for workers in other processes, before it sends any."""

    def failing(*shape, **options):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr("vllm_fp8rl.refit.transport.torch.empty", failing)
    with pytest.raises(RefitError, match=r"on cpu for a staging buffer of 256 MiB, .*smaller"):
        Sender([place()], 256 << 20)._make_staging(torch.device("cpu"))


def test_codes_that_were_refused_may_come_in_bf16(engine, a, b):
    """As the error says, in the same refit."""
    codes = torch.ones(512, 256).to(torch.float8_e4m3fn)
    with RefitSession(engine.model, expect_kv_scales=True) as session:
        with pytest.raises(RefitError, match="infinite"):
            session.load([(UP, codes), (f"{UP}_scale_inv", torch.full((4, 2), torch.inf))])
        session.load(list(b.items()))
    assert serves(engine)

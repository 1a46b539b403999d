"""What fails in the middle of a refit: the old weights, or a clear refusal, never a mixture.

A rank that dies is in tp_refit.py; NaN, missing and repeated tensors are in test_refit.py too.
"""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fp8rl.errors import Fp8RLError, RefitError
from support.engine import PROMPTS, SCALES, Engine, same_state
from vllm_fp8rl.refit import RefitSession, drop_requests, refit, refit_from_files
from vllm_fp8rl.refit.transport import Sender, place
from vllm_fp8rl.refit.worker import STEPS, read_answer
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
        patch.setattr("vllm_fp8rl.refit.session.start_finite_check", failing)
        with pytest.raises(RefitError, match="No memory was left"):
            refit(engine.llm, b.items(), expect_kv_scales=True)
    assert same_state(before, engine.state())
    assert engine.greedy(PROMPTS) == tokens


def test_out_of_memory_at_staging_leaves_the_old_weights(engine, b, monkeypatch):
    """A sender stages GPU tensors for workers in other processes: here, those of a CPU."""
    tokens, before = engine.greedy(PROMPTS), engine.state()
    name, tensor = next(iter(b.items()))

    def staging(session, tensors, batch_bytes, held):
        with Sender([place()], 256 << 20) as sender:
            sender._stage(torch.device("cpu"), [(name, tensor)], {"tensors": {}, "storages": []})
        yield from ()

    def failing(*shape, **options):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    with monkeypatch.context() as patch:
        patch.setattr("vllm_fp8rl.refit.synchronous.send", staging)
        patch.setattr("vllm_fp8rl.refit.transport.torch.empty", failing)
        with pytest.raises(RefitError, match=r"on cpu for a staging buffer of 256 MiB, .*smaller"):
            refit(engine.llm, b.items(), expect_kv_scales=True)
    assert same_state(before, engine.state())
    assert engine.greedy(PROMPTS) == tokens


def test_a_truncated_file(engine, checkpoints, tmp_path):
    whole = (checkpoints["b"] / "model.safetensors").read_bytes()
    path = tmp_path / "model.safetensors"
    path.write_bytes(whole[: len(whole) * 2 // 3])
    tokens = engine.greedy(PROMPTS)
    with pytest.raises(RefitError, match=rf"'{path}' is not a whole safetensors file"):
        refit_from_files(engine.llm, str(path), expect_kv_scales=False)
    assert engine.greedy(PROMPTS) == tokens  # refused before anything was read


FAULTS = ["nan", "huge", "truncated", "repeated", "unknown", "dies", "shape", "None", "overwritten"]


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_fault_anywhere_leaves_the_old_weights_or_a_refusal(engine, a, b, data):
    """Bad values, a truncated stream, a repeated or unknown tensor, a sender that dies, ..."""
    refit(engine.llm, a.items(), expect_kv_scales=True)
    before = engine.state()
    stream = data.draw(st.permutations(list(b.items())))
    place = data.draw(st.integers(0, len(stream) - 1))
    name, tensor = stream[place]
    # One number is read at once: what comes into its memory later does no harm.
    faults = [fault for fault in FAULTS if fault != "overwritten" or tensor.numel() > 1]
    fault = data.draw(st.sampled_from(faults))

    def broken():
        for number, item in enumerate(stream):
            if number != place:
                yield item
            elif fault == "nan":
                yield name, torch.full_like(tensor, torch.nan)
            elif fault == "huge":
                value = 3.4e38 if tensor.numel() > 1 else torch.nan  # a KV scale
                yield name, torch.full_like(tensor, value, dtype=torch.float32)
            elif fault == "None":
                yield name, None
            elif fault == "overwritten":
                kept = tensor.clone()
                yield name, kept
                kept.zero_()
            elif fault == "truncated":
                return
            elif fault == "repeated":
                yield from (item, item)
            elif fault == "unknown":
                yield f"{name}.more", tensor
            elif fault == "dies":
                raise ConnectionError("trainer gone")
            else:
                yield name, torch.ones(3, 5, 7)

    # A tensor that is read at once, its sender may overwrite.
    sizes = [1 << 30] if fault == "overwritten" else [1, 1 << 17, 1 << 30]
    size = data.draw(st.sampled_from(sizes))
    with pytest.raises((Fp8RLError, ConnectionError)):
        refit(engine.llm, broken(), expect_kv_scales=True, batch_bytes=size)
    if serves(engine):
        assert same_state(before, engine.state())
    refit(engine.llm, b.items(), expect_kv_scales=True)
    assert serves(engine)


def test_a_session_that_is_garbage_leaves_a_refusal(engine, b):
    """A framework's own code may lose the session after an error of its own."""
    session = RefitSession(engine.model, expect_kv_scales=True)
    session.__enter__()
    session.load(list(b.items())[:4])
    with pytest.raises(RefitError, match="under way"):
        engine.greedy(PROMPTS)
    drop_requests(engine.llm)
    session.abandon("lost")
    assert not serves(engine)


@pytest.mark.parametrize("kind", [list, iter])
def test_a_plain_load_that_breaks_off_closes_the_model_until_all_has_come(engine, a, b, kind):
    """NeMo RL and others call ``model.load_weights`` alone, with nobody to say it is complete."""
    tokens = engine.greedy(PROMPTS)
    first, second = (f"model.layers.{i}.mlp.up_proj.weight" for i in (0, 1))
    value = b[first]
    with pytest.raises(RefitError):
        engine.model.load_weights(kind([(second, torch.ones(3, 5)), (first, value)]))
    assert engine.greedy(PROMPTS) == tokens  # nothing had been written
    with pytest.raises(RefitError):
        engine.model.load_weights(kind([(first, value), (second, torch.ones(3, 5))]))
    assert not serves(engine)
    items = list(a.items())
    engine.model.load_weights(kind(items[:7]))
    assert not serves(engine)
    engine.model.load_weights(kind(items[7:]))
    assert engine.greedy(PROMPTS) == tokens


@pytest.mark.parametrize("kind", [list, iter])
def test_nan_among_codes_of_a_plain_load(engine, kind):
    name, tokens = "model.layers.0.mlp.up_proj.weight", engine.greedy(PROMPTS)
    codes = torch.zeros(512, 256, dtype=torch.uint8)
    codes[3, 4] = 0x7F
    pair = [(name, codes.view(torch.float8_e4m3fn)), (f"{name}_scale_inv", torch.ones(4, 2))]
    with pytest.raises(RefitError, match=f"'{name}' has NaN"):
        engine.model.load_weights(kind(pair))
    assert engine.greedy(PROMPTS) == tokens or kind is iter


@pytest.mark.parametrize("kind", [KeyboardInterrupt, torch.OutOfMemoryError])
def test_a_plain_load_that_ends_in_the_middle_of_its_first_tensor(engine, a, b, monkeypatch, kind):
    name = "model.layers.0.mlp.up_proj.weight"
    quantize = grid_module.quantize_blocks

    def ending(*args):
        quantize(*args)
        raise kind

    for way in (iter, list):  # by vLLM's walk, then by the inventory
        with monkeypatch.context() as patch, pytest.raises(kind):
            patch.setattr(grid_module, "quantize_blocks", ending)
            engine.model.load_weights(way([(name, b[name])]))
        assert not serves(engine)
        engine.model.load_weights(list(a.items()))
        assert serves(engine)


def test_a_plain_load_while_a_refit_waits_for_tensors(engine, a, b):
    """The session knows nothing of it: what it brings is looked at, and what it leaves is told."""
    tokens = engine.greedy(PROMPTS)
    first, second = (f"model.layers.{i}.mlp.up_proj.weight" for i in (0, 1))
    session = RefitSession(engine.model, expect_kv_scales=True).__enter__()
    with pytest.raises(RefitError, match="NaN"):
        engine.model.load_weights([(first, torch.full_like(b[first], torch.nan))])
    assert engine.greedy(PROMPTS) == tokens
    with pytest.raises(RefitError):
        engine.model.load_weights([(first, b[first]), (second, torch.ones(3, 5))])
    session.abandon("nothing came")
    assert not serves(engine)


def test_a_session_that_was_aborted_ends_no_other(engine, a, b):
    """A sender that goes on after somebody else has ended its refit and begun one."""
    late = RefitSession(engine.model, expect_kv_scales=True, name="late").__enter__()
    late.load(list(b.items()))
    late.abandon("by somebody else")
    with RefitSession(engine.model, expect_kv_scales=True, name="new") as session:
        session.load(list(a.items())[:5])
        with pytest.raises(RefitError, match=r"The refit 'late' is not open.* begin a new one"):
            late.__exit__(None, None, None)
        late.abandon("once more")
        with pytest.raises(RefitError, match="under way"):
            engine.greedy(PROMPTS)
        drop_requests(engine.llm)
        session.load(list(a.items())[5:])
    assert serves(engine)


@pytest.mark.parametrize("way", ["session", "plain", "steps"])
def test_a_mixture_is_mended_by_any_complete_way(engine, a, b, way):
    """An ``LLM`` whose refit broke off learns of what came to its workers otherwise."""
    tokens = engine.greedy(PROMPTS)
    with pytest.raises(RefitError, match="lacks"):
        refit(engine.llm, list(b.items())[:5], expect_kv_scales=True)
    assert not serves(engine)
    if way == "session":
        with RefitSession(engine.model, expect_kv_scales=True) as session:
            session.load(a.items())
    elif way == "steps":
        for step, *args in (["begin", True], ["load_batch", list(a.items())], ["finish"]):
            answers = engine.llm.collective_rpc(STEPS[f"fp8rl_refit_{step}"], args=("steps", *args))
            read_answer(answers[0])
        engine.llm.reset_prefix_cache()
    else:
        with pytest.raises(RefitError):  # or nobody knows that plain loads shall mend it
            engine.model.load_weights([*list(a.items())[:3], (UP, torch.ones(3, 5))])
        engine.model.load_weights(list(a.items()))
    assert engine.greedy(PROMPTS) == tokens


def test_codes_that_were_refused_may_come_in_bf16(engine, a, b):
    """As the error says, in the same refit."""
    name = "model.layers.0.mlp.up_proj.weight"
    codes = torch.ones(512, 256).to(torch.float8_e4m3fn)
    with RefitSession(engine.model, expect_kv_scales=True) as session:
        with pytest.raises(RefitError, match="infinite"):
            session.load([(name, codes), (f"{name}_scale_inv", torch.full((4, 2), torch.inf))])
        session.load(list(b.items()))
    assert serves(engine)

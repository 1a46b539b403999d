"""An engine that calibrates itself after refits without KV scales: a real vLLM on a CPU."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm")
from fp8rl import Recipe
from fp8rl.errors import ScaleError
from fp8rl.kv_scales import scale_names
from nemo_rl_ext.names import LOGGER
from nemo_rl_ext.workers import self_calibration
from nemo_rl_ext.workers.refit import StreamedRefit, kv_codes_outdated, may_run
from nemo_rl_ext.workers.self_calibration import SEQUENCES, TOKENS, CalibratingLLM
from support.engine import LAYERS, Engine, load_tensors, make_checkpoint, start_engine
from vllm_fp8rl.calibration import calibrate_kv_scales
from vllm_fp8rl.kv.scales import forget_kv_scales, kv_scale_state, missing_kv_scales

PROMPTS = [[(31 * i + 7 * j * j) % 500 + 5 for j in range(150 + 9 * i)] for i in range(4)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def live(folder: Path) -> Iterator[Engine]:
    started = start_engine(make_checkpoint(folder / "a", 0), Recipe(), enable_prefix_caching=True)
    yield started
    started.llm.llm_engine.engine_core.shutdown()


@pytest.fixture
def engine(live: Engine) -> Engine:
    forget_kv_scales(live.model)
    return Engine(CalibratingLLM(live.llm), live.recipe)


def send(engine: Engine, path: Path, scale: float | None = None) -> None:
    scales = [] if scale is None else [(n, torch.full((1,), scale)) for n in scale_names(LAYERS)]
    with StreamedRefit(engine.model, True) as session:
        session.load([*load_tensors(path).items(), *scales])
        session.finish()


def refit(engine: Engine, path: Path, scale: float | None = None) -> None:
    send(engine, path, scale)
    engine.llm.reset_prefix_cache()


def test_once_for_each_refit_without_scales(
    engine: Engine, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    first = engine.greedy(PROMPTS)
    assert engine.greedy(PROMPTS) == first
    told = [m for m in caplog.messages if "calibrated" in m]
    assert len(told) == 1
    assert "from 4 prompts (654 tokens) in " in told[0]
    before = kv_scale_state(engine.model)

    refit(engine, make_checkpoint(folder / "b", 1))
    assert missing_kv_scales(engine.model)
    second = engine.greedy(PROMPTS)
    assert second != first
    found = kv_scale_state(engine.model)
    assert found.keys() == before.keys()
    assert None not in found.values()
    told = [m for m in caplog.messages if "calibrated" in m]
    assert len(told) == 2
    tokens = 2 * sum(len(p) + 12 for p in PROMPTS)
    assert f"from 8 sequences of the latest rollouts ({tokens} tokens)" in told[1]

    # Truth: a calibration from nothing, over the same whole sequences.
    whole = [prompt + response for prompt, response in zip(PROMPTS, first, strict=True)]
    truth = calibrate_kv_scales(engine.llm, whole)
    kept = [found[layer, role] for layer in range(LAYERS) for role in ("k", "v")]  # type: ignore[index]
    assert kept == pytest.approx(list(truth.values()), rel=0.02)

    refit(engine, folder / "a", 0.0625)
    engine.greedy(PROMPTS)
    assert set(kv_scale_state(engine.model).values()) == {0.0625}  # scales that came are kept
    refit(engine, folder / "a", 1.0)  # what NeMo RL sends where it has none
    assert missing_kv_scales(engine.model)
    engine.greedy(PROMPTS)
    assert 1.0 not in kv_scale_state(engine.model).values()


def test_a_calibration_that_fails_generates_nothing(engine: Engine) -> None:
    engine.llm._self_seen.append((1,) * 999)  # longer than the engine takes
    with pytest.raises(ScaleError, match=r"could not calibrate.*kv_cache\.dtype' to auto"):
        engine.greedy(PROMPTS)
    assert missing_kv_scales(engine.model)
    engine.llm._self_seen.clear()
    assert engine.greedy(PROMPTS)


def test_whole_sequences_leave_room_for_one_token(engine: Engine) -> None:
    longest = [list(range(5, 255))]  # of 256 tokens that the engine takes
    engine.greedy(longest, tokens=6)
    assert [len(s) for s in engine.llm._self_seen] == [255]
    forget_kv_scales(engine.model)
    engine.greedy(PROMPTS)


def test_a_worker_tells_whether_its_engine_may_run_and_whether_codes_are_outdated(
    engine: Engine, folder: Path
) -> None:
    """Of which in_flight.py asks."""
    refit(engine, folder / "a", 0.0625)
    engine.greedy(PROMPTS)
    for scale, changed in ((0.0625, False), (0.25, True)):
        send(engine, folder / "a", scale)
        assert (may_run(engine.model), kv_codes_outdated(engine.model)) == (not changed, changed)
    engine.llm.reset_prefix_cache()
    assert may_run(engine.model) and not kv_codes_outdated(engine.model)
    with pytest.raises(OSError), StreamedRefit(engine.model, True) as session:
        session.load([*load_tensors(folder / "a").items()][:3])
        raise OSError
    assert not may_run(engine.model)
    refit(engine, folder / "a", 0.25)
    assert may_run(engine.model)


def test_few_sequences_from_all_over_a_batch_within_a_budget_of_tokens() -> None:
    chosen = self_calibration._spread([i // 16, 7] for i in range(16 * 200))
    assert len(chosen) <= SEQUENCES
    assert chosen == [(i, 7) for i in range(0, 200, 4)]
    half = (1,) * (TOKENS // 2)
    assert len(self_calibration._within_budget([half, half, half])) == 2
    assert len(self_calibration._within_budget([half * 3, half])) == 1

"""Our subclass of NeMo RL's vLLM worker extension on a live vLLM: test_nemo_rl.py runs this."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from support.engine import LAYERS, Engine, load_tensors, make_checkpoint, start_engine
from support.nemo_rl import extension

pytest.importorskip("nemo_rl.models.generation.vllm.vllm_backend", exc_type=ImportError)
from nemo_rl.models.generation.vllm.vllm_backend import VllmInternalWorkerExtension

from fp8rl import Recipe
from fp8rl.errors import RefitError
from fp8rl.kv_scales import scale_names
from nemo_rl_ext.workers.rollout_engine import UPSTREAM_EXTENSION
from nemo_rl_ext.workers.vllm_extension import Fp8VllmWorkerExtension
from vllm_fp8rl.engine.rank_state import state_of

PROMPTS = [[5, 9, 13, 200], [7, 7, 300, 41, 2]]
SCALE = 0.05


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    started = start_engine(make_checkpoint(folder / "a", 0), Recipe(), load_format="dummy")
    yield started
    started.llm.llm_engine.engine_core.shutdown()


def stream(path: Path, scale: float = SCALE) -> list[tuple[str, torch.Tensor]]:
    """What a policy worker sends: HF tensors, then float32 scales of one element."""
    scales = [(name, torch.full((1,), scale)) for name in scale_names(LAYERS)]
    return [*load_tensors(path).items(), *scales]


def refit(engine: Engine, tensors: list[tuple[str, torch.Tensor]], size: int = 3) -> None:
    worker = extension(engine)
    with worker._weight_update_lifecycle("collective") as finalize:
        for start in range(0, len(tensors), size):
            worker._load_weights(tensors[start : start + size])
        finalize()
    engine.llm.reset_prefix_cache()


def test_a_refit_through_the_extension_is_a_refit(engine: Engine, folder: Path) -> None:
    refit(engine, stream(folder / "a"))
    first = engine.greedy(PROMPTS)
    other = make_checkpoint(folder / "b", 1)
    refit(engine, stream(other))
    second = engine.greedy(PROMPTS)
    assert second != first
    refit(engine, stream(folder / "a"), size=7)
    assert engine.greedy(PROMPTS) == first


def test_a_refit_that_is_broken_off_or_incomplete_leaves_the_engine_closed_until_a_whole_one(
    engine: Engine, folder: Path
) -> None:
    worker = extension(engine)
    tensors = stream(folder / "a")
    with pytest.raises(OSError, match="gone"), worker._weight_update_lifecycle("ipc"):
        worker._load_weights(tensors[:3])
        raise OSError("gone")
    assert state_of(engine.model).guard.closed
    with pytest.raises(RefitError):
        refit(engine, [t for t in tensors if not t[0].endswith("k_scale")])
    refit(engine, tensors)
    assert engine.greedy(PROMPTS)


def test_weights_outside_a_refit_are_refused(engine: Engine, folder: Path) -> None:
    with pytest.raises(RefitError, match=r"outside a refit.*'policy\.generation\.refit_transport'"):
        extension(engine)._load_hf_weights(stream(folder / "a"))


def test_the_extension_adds_no_name_that_vllms_workers_have() -> None:
    """vLLM asserts it when an engine starts. Upstream's own names are for an older vLLM."""
    from vllm.v1.worker.gpu_worker import Worker

    added = set(dir(Fp8VllmWorkerExtension)) - set(dir(VllmInternalWorkerExtension))
    assert added == {"_fp8rl_refit", "kv_codes_outdated", "may_run"}
    assert not any(hasattr(Worker, name) for name in added)


def test_upstreams_plain_extension_has_the_name_that_is_replaced() -> None:
    upstream = VllmInternalWorkerExtension
    assert f"{upstream.__module__}.{upstream.__qualname__}" == UPSTREAM_EXTENSION

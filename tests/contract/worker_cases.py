"""Our subclasses of NeMo RL's vLLM worker and of its extension, on a CPU, around one engine.

test_nemo_rl.py runs this file.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from support.engine import SETTINGS, Engine, load_tensors, make_checkpoint

pytest.importorskip("nemo_rl.models.generation.vllm.vllm_worker", exc_type=ImportError)
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.models.generation.vllm.vllm_backend import VllmInternalWorkerExtension
from nemo_rl.models.generation.vllm.vllm_worker import VllmGenerationWorkerImpl
from nemo_rl.models.generation.vllm.vllm_worker_async import VllmAsyncGenerationWorkerImpl
from ray import cloudpickle
from vllm import SamplingParams

import vllm_fp8rl
from fp8rl import Recipe
from fp8rl.errors import RefitError
from fp8rl.kv_scales import scale_name
from nemo_rl_ext.workers.in_flight import RefitInFlight
from nemo_rl_ext.workers.rollout_engine import UPSTREAM_EXTENSION
from nemo_rl_ext.workers.vllm import (
    Fp8VllmAsyncGenerationWorkerImpl,
    Fp8VllmGenerationWorker,
    Fp8VllmGenerationWorkerImpl,
)
from nemo_rl_ext.workers.vllm_extension import Fp8VllmWorkerExtension
from support.nemo_rl import extension
from vllm_fp8rl.engine.rank_state import state_of
from vllm_fp8rl.kv.scales import kv_scale_state, missing_kv_scales

PROMPTS = [[5, 9, 13, 200], [7, 7, 300, 41, 2, 44], [5, 9, 13, 200]]
TOKENS = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


class Extension:
    """Stands for upstream's, which was written for vLLM 0.25.1 and conflicts with newer workers."""


@pytest.fixture(scope="module")
def worker(folder: Path) -> Iterator[Any]:
    """The class that Ray makes an actor of; its engine as `_load_model` makes it, but for a CPU."""
    actor_class = Fp8VllmGenerationWorker.__ray_metadata__.modified_class
    made = object.__new__(actor_class)
    made.worker_extension = f"{__name__}.{Extension.__name__}"
    made.cfg = {
        "vllm_cfg": {"async_engine": False, "use_tqdm": False},
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": None,
        "max_new_tokens": TOKENS,
        "stop_token_ids": None,
        "ignore_eos": True,
        "_pad_token_id": 0,
    }
    made.SamplingParams = SamplingParams
    made.routed_experts_dtype = torch.int16
    made._create_engine(
        {
            "model": str(make_checkpoint(folder / "a", 0)),
            "load_format": "dummy",
            "enable_prefix_caching": True,
            **SETTINGS,
            **vllm_fp8rl.engine_args(Recipe()),
            "worker_extension_cls": UPSTREAM_EXTENSION,
        }
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda.nvtx, "range_push", lambda name: None)
        patch.setattr(torch.cuda.nvtx, "range_pop", lambda: None)
        yield made
    made.llm.llm_engine.engine_core.shutdown()


def model(worker: Any) -> torch.nn.Module:
    return worker.llm.llm_engine.model_executor.driver_worker.worker.model_runner.model


def extended(worker: Any) -> Any:
    return extension(Engine(worker.llm, Recipe()))


def refit(worker: Any, path: Path, scales: dict[str, float] | None = None) -> None:
    """As a transport does it in vLLM's worker."""
    sent = [(name, torch.full((1,), value)) for name, value in (scales or {}).items()]
    tensors = [*load_tensors(path).items(), *sent]
    mixed = extended(worker)
    with mixed._weight_update_lifecycle("collective") as finalize:
        for start in range(0, len(tensors), 5):
            mixed._load_weights(tensors[start : start + 5])
        finalize()
    worker.llm.llm_engine.reset_prefix_cache()


def batch() -> Any:
    longest = max(map(len, PROMPTS))
    ids = torch.tensor([p + [0] * (longest - len(p)) for p in PROMPTS])
    return BatchedDataDict(
        {"input_ids": ids, "input_lengths": torch.tensor([len(p) for p in PROMPTS])}
    )


def generate(worker: Any) -> torch.Tensor:
    """Greedy; (prompts, tokens) with padding."""
    return worker.generate(batch(), greedy=True)["output_ids"]


def teacher_forced(worker: Any) -> list[float]:
    """Log-probabilities of given tokens, each after the right ones."""
    outputs = worker.llm.generate(
        [{"prompt_token_ids": list(range(5, 105))}],
        SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False),
        use_tqdm=False,
    )
    return [
        entry[token].logprob
        for token, entry in zip(range(6, 105), outputs[0].prompt_logprobs[1:], strict=True)
    ]


def scales_of(worker: Any) -> dict[str, float]:
    return {scale_name(*key): value for key, value in kv_scale_state(model(worker)).items()}


def test_generation_is_as_with_the_same_scales_from_a_trainer(worker: Any, folder: Path) -> None:
    """By scales that the engine has found itself; test_self_calibration.py has how it does."""
    refit(worker, folder / "a")
    assert missing_kv_scales(model(worker))
    tokens, logprobs, found = generate(worker), teacher_forced(worker), scales_of(worker)
    assert not missing_kv_scales(model(worker))
    refit(worker, folder / "a", found)
    assert scales_of(worker) == found
    assert torch.equal(generate(worker), tokens)
    assert teacher_forced(worker) == logprobs
    refit(worker, folder / "a", {name: 16 * scale for name, scale in found.items()})
    assert teacher_forced(worker) != logprobs
    refit(worker, make_checkpoint(folder / "b", 1), found)
    assert not torch.equal(generate(worker), tokens)


def test_a_refit_that_is_broken_off_or_incomplete_leaves_the_engine_closed_until_a_whole_one(
    worker: Any, folder: Path
) -> None:
    mixed, tensors = extended(worker), [*load_tensors(folder / "a").items()]
    for sent, error in ((tensors[:3], OSError), (tensors[1:], RefitError)):
        with pytest.raises(error), mixed._weight_update_lifecycle("ipc") as finalize:
            mixed._load_weights(sent)
            if error is OSError:
                raise OSError("gone")
            finalize()
        assert state_of(model(worker)).guard.closed
    refit(worker, folder / "a")
    assert generate(worker).numel()


def test_weights_outside_a_refit_are_refused(worker: Any, folder: Path) -> None:
    with pytest.raises(RefitError, match=r"outside a refit.*'policy\.generation\.refit_transport'"):
        extended(worker)._load_hf_weights([*load_tensors(folder / "a").items()])


def test_a_rollout_is_upstreams_to_the_bit(worker: Any, folder: Path) -> None:
    """Ours writes log-probabilities a sequence at a time, upstream one by one."""
    refit(worker, folder / "a")
    generate(worker)  # which calibrates
    llm = worker.llm
    ours = worker.generate(batch(), greedy=True)
    assert worker.llm is llm
    theirs = VllmGenerationWorkerImpl.generate(worker, batch(), greedy=True)
    assert ours.keys() == theirs.keys()
    for key in theirs:
        assert torch.equal(ours[key], theirs[key]), key
    sampled = ours["logprobs"] != 0
    assert sampled.sum() == TOKENS * len(PROMPTS)


def test_the_engines_workers_get_our_extension_in_the_place_of_upstreams_plain_one() -> None:
    upstream = VllmInternalWorkerExtension
    assert f"{upstream.__module__}.{upstream.__qualname__}" == UPSTREAM_EXTENSION
    named = Fp8VllmGenerationWorkerImpl.worker_extension.rpartition(".")
    assert named[::2] == (Fp8VllmWorkerExtension.__module__, Fp8VllmWorkerExtension.__name__)


def test_the_extension_adds_no_name_that_vllms_workers_have() -> None:
    """vLLM asserts it when an engine starts. Upstream's own names are for an older vLLM."""
    from vllm.v1.worker.gpu_worker import Worker

    added = set(dir(Fp8VllmWorkerExtension)) - set(dir(VllmInternalWorkerExtension))
    assert added == {"_fp8rl_refit", "kv_codes_outdated", "may_run"}
    assert not any(hasattr(Worker, name) for name in added)


@pytest.mark.parametrize("transport", ["via_ipc_zmq", "from_collective"])
def test_refits_of_asynchronous_workers_pause_the_engine(transport: str) -> None:
    name = f"update_weights_{transport}_async"
    ours = Fp8VllmAsyncGenerationWorkerImpl
    owners = [cls for cls in ours.__mro__ if name in vars(cls)]
    assert owners == [RefitInFlight, VllmAsyncGenerationWorkerImpl]


def test_ray_pickles_the_actors_class_with_bases_by_name(worker: Any) -> None:
    made = cloudpickle.loads(cloudpickle.dumps(type(worker)))
    assert Fp8VllmGenerationWorkerImpl in made.__mro__
    assert made.__name__ == "Fp8VllmGenerationWorker"
    assert VllmGenerationWorkerImpl in made.__mro__

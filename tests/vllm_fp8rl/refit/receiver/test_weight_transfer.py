"""vLLM's own ways to change weights: its weight-transfer API and ``reload_weights``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fp8rl import Recipe
from fp8rl.errors import RefitError, UnsupportedError
from support.engine import PROMPTS, SCALES, Engine, load_tensors
from vllm_fp8rl import WEIGHT_TRANSFER_BACKENDS
from vllm_fp8rl.refit.transport import pack

UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def receiver(other_engine: Callable[..., Engine], checkpoints: dict[str, Path]) -> Engine:
    from vllm.config import WeightTransferConfig

    started = other_engine(
        checkpoints["a"], Recipe(), weight_transfer_config=WeightTransferConfig(backend="fp8rl")
    )
    started.llm.init_weight_transfer_engine({"init_info": {}})
    return started


def update(engine: Engine, **update_info: Any) -> None:
    engine.llm.update_weights({"update_info": update_info})


def finish(engine: Engine) -> None:
    engine.llm.finish_weight_update()
    engine.llm.reset_prefix_cache()


def test_update_from_files_and_from_payloads(receiver, checkpoints, tokens):
    before = receiver.pointers()
    receiver.llm.start_weight_update()
    update(receiver, path=str(checkpoints["b"]))
    finish(receiver)
    assert receiver.greedy(PROMPTS) == tokens["b"]
    receiver.llm.start_weight_update()
    for item in (load_tensors(checkpoints["a"]) | SCALES).items():
        update(receiver, payload=pack([item]))
    finish(receiver)
    assert receiver.greedy(PROMPTS) == tokens["a"]
    assert receiver.pointers() == before


def test_incomplete_update_is_an_error_and_closes_the_engine(receiver, checkpoints, tokens):
    a, b = (load_tensors(checkpoints[name]) for name in "ab")
    lacking = [(name, tensor) for name, tensor in b.items() if name != UP]
    receiver.llm.start_weight_update()
    update(receiver, payload=pack(lacking))
    with pytest.raises(RefitError, match=f"lacks 1 .*'{UP}'"):
        finish(receiver)
    receiver.refuses(RefitError, "half-updated")
    with pytest.raises(RefitError, match="send all of it again"):
        finish(receiver)
    # vLLM holds the update for active still: the second attempt goes on from there.
    update(receiver, payload=pack(a.items()))
    finish(receiver)
    assert receiver.greedy(PROMPTS) == tokens["a"]


def test_one_source_for_an_update(receiver):
    receiver.llm.start_weight_update()
    with pytest.raises(ValueError, match="either 'path' or 'payload'"):
        update(receiver)
    assert len(receiver.greedy(PROMPTS)) == len(PROMPTS)  # nothing was written


@pytest.mark.parametrize("backend", ["nccl", "ipc", "sparse_nccl"])
def test_engines_that_would_serve_a_mixture_are_refused_at_the_start(
    other_engine, checkpoints, backend
):
    from vllm.config import WeightTransferConfig

    with pytest.raises(UnsupportedError, match=f"'{backend}' takes an incomplete update"):
        other_engine(
            checkpoints["a"], Recipe(), weight_transfer_config=WeightTransferConfig(backend=backend)
        )


def test_backends_are_registered_in_vllm():
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    assert WEIGHT_TRANSFER_BACKENDS.keys() <= WeightTransferEngineFactory._registry.keys()

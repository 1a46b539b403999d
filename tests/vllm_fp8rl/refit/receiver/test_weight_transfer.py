"""vLLM's weight-transfer API: updates from files, payloads, and vLLM's own trainers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import WeightTransferConfig
from vllm.distributed import weight_transfer

from fp8rl import Recipe
from fp8rl.errors import RefitError
from support.engine import KV_SCALE, PROMPTS, SCALES, Engine, in_fp8, load_tensors, same_state
from vllm_fp8rl.refit import refit
from vllm_fp8rl.refit.transport import pack

UP = "model.layers.1.mlp.up_proj.weight"
Items = list[tuple[str, torch.Tensor]]


@pytest.fixture(scope="module")
def engine_of(other_engine, checkpoints) -> Callable[[str], Engine]:
    """``engine_of(backend)``: a new engine of ``a``."""
    return lambda backend: other_engine(
        checkpoints["a"],
        Recipe(),
        weight_transfer_config=WeightTransferConfig(backend=backend),
    )


@pytest.fixture(scope="module")
def receiver(engine_of: Callable[[str], Engine]) -> Engine:
    started = engine_of("fp8rl")
    started.llm.init_weight_transfer_engine({"init_info": {}})
    return started


def update(engine: Engine, **update_info: Any) -> None:
    engine.llm.update_weights({"update_info": update_info})


def finish(engine: Engine, **options: Any) -> None:
    engine.llm.finish_weight_update(**options)
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


def test_an_update_that_lacks_a_source_or_whose_sender_died(receiver):
    receiver.llm.start_weight_update()
    with pytest.raises(RefitError, match=r"under way; finish it, or end it by .*\{\"end\": true\}"):
        receiver.llm.start_weight_update()
    for sent, error in (({"end": True}, "'end'"), ({}, "either 'path' or 'payload'")):
        with pytest.raises(RefitError, match=error):
            update(receiver, **sent)
        receiver.llm.start_weight_update()
    for error in ("lacks", "No weight update is under way"):
        with pytest.raises(RefitError, match=error):
            finish(receiver)
    assert len(receiver.greedy(PROMPTS)) == len(PROMPTS)  # nothing was written


def test_an_update_that_is_refused_leaves_the_weight_version(receiver, a, tokens):
    llm = receiver.llm
    if not hasattr(llm, "get_weight_version"):
        pytest.skip("vLLM had no weight versions before 0.31")
    llm.start_weight_update()
    update(receiver, payload=pack(a.items()))
    finish(receiver, weight_version="step 1")
    llm.start_weight_update()
    with pytest.raises(RefitError, match="lacks"):
        finish(receiver, weight_version="step 2")
    assert llm.get_weight_version() == "step 1"
    assert receiver.greedy(PROMPTS) == tokens["a"]


class Pushed:
    """An engine that vLLM's trainer of a transport sends into."""

    def __init__(self, engine: Engine, transport: str) -> None:
        self.engine, self.transport = engine, transport

    def trainer(self, items: Items) -> Any:
        from support.weight_transfer import trainer

        options: dict[str, Any] = {}
        if self.transport == "nccl":
            options = {"master_address": "", "master_port": 1, "world_size": 2, "packed": False}
        return trainer(self.engine.llm, self.transport, items, **options)

    def send(self, items: Items) -> None:
        self.trainer(items).send_weights()
        self.engine.llm.reset_prefix_cache()


@pytest.fixture(scope="module")
def pushed(request: pytest.FixtureRequest, engine_of: Callable[[str], Engine]) -> Iterator[Pushed]:
    if not hasattr(weight_transfer, "WeightTransferTrainerFactory"):
        pytest.skip("vLLM had no class for the trainer's side before 0.28")
    from support.weight_transfer import stand_in_for_gpus

    with pytest.MonkeyPatch.context() as patch:
        engine = engine_of(f"fp8rl_{request.param}")
        stand_in_for_gpus(patch)
        yield Pushed(engine, request.param)


@pytest.fixture(scope="module")
def fresh(engine, a, b) -> dict[str, dict[str, torch.Tensor]]:
    """What the session's engine holds: as loaded, and after a refit."""
    held = {"a": engine.state()}
    refit(engine.llm, b.items(), expect_kv_scales=False)
    held["b"] = engine.state()
    refit(engine.llm, a.items(), expect_kv_scales=False)
    return held


@pytest.mark.parametrize("pushed", ["nccl", "ipc"], indirect=True)
@pytest.mark.parametrize("form", [dict, in_fp8], ids=["bf16", "codes"])
def test_vllms_trainers_leave_what_a_fresh_engine_loads(pushed, fresh, a, b, form):
    before = pushed.engine.pointers()
    items = list((form(a) | SCALES).items())
    trainer = pushed.trainer(items)
    for name, tensors in (("b", b), ("a", a)):
        items[:] = (form(tensors) | SCALES).items()
        trainer.send_weights()
        pushed.engine.llm.reset_prefix_cache()
        assert same_state(fresh[name], pushed.engine.state())
        assert {round(s, 6) for s in pushed.engine.kv_scales().values()} == {KV_SCALE}
    assert pushed.engine.pointers() == before


def with_up(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Items], Items]:
    return lambda items: [(n, change(t) if n == UP else t) for n, t in items]


def with_a_hole(items: Items) -> Items:
    return [*items[:-1], (items[-1][0], torch.full_like(items[-1][1], torch.nan))]


REFUSED: dict[str, tuple[Callable[[Items], Items], str, set[str]]] = {
    "missing": (
        lambda items: [i for i in items if i[0] != UP],
        f"lacks 1 .*'{UP}'",
        {"nccl", "ipc"},
    ),
    "shape": (with_up(lambda tensor: tensor[1:]), f"'{UP}' has shape", set()),
    # Values are seen in each batch: what came over NCCL before has been written.
    "NaN": (with_a_hole, "has NaN", {"nccl"}),
}
"""By what is wrong: a change of what is sent, the error, transports that leave it closed."""


@pytest.mark.parametrize("pushed", ["nccl", "ipc"], indirect=True)
@pytest.mark.parametrize("wrong", REFUSED)
def test_trainers_are_told_what_is_wrong(pushed, a, b, tokens, wrong):
    change, error, closed = REFUSED[wrong]
    with pytest.raises(RefitError, match=error):
        pushed.send(change(list(b.items())))
    if pushed.transport in closed:
        pushed.engine.refuses(RefitError, "half-updated")
        pushed.send(list(a.items()))
    assert pushed.engine.greedy(PROMPTS) == tokens["a"]


@pytest.mark.parametrize("pushed", ["nccl"], indirect=True)
def test_the_guides_lines(pushed, fresh, a, b, monkeypatch):
    """With the address of no server, and no ``packed``, which needs CUDA's streams."""
    from vllm.distributed.weight_transfer import clients, nccl_engine

    from support.weight_transfer import LocalClient

    page = (Path(__file__).parents[4] / "docs" / "trainer.md").read_text(encoding="utf-8")
    code = page.split("<!-- test: weight-transfer -->\n```python\n")[1].split("```")[0]
    llm, info = pushed.engine.llm, nccl_engine.NCCLTrainerInitInfo
    monkeypatch.setattr(clients, "HTTPVLLMWeightSyncClient", lambda server: LocalClient(llm))
    monkeypatch.setattr(nccl_engine, "NCCLTrainerInitInfo", partial(info, packed=False))
    exec(code, {"rank": 0, "model": SimpleNamespace(named_parameters=b.items)})
    assert same_state(fresh["b"], pushed.engine.state())
    pushed.send(list(a.items()))

"""Every way in by which weights reach an engine, in BF16 and as FP8 codes.

Each begins with a mixture, and must leave what a refit in BF16 leaves, in place, and be served.
That a refit's tokens are those of a fresh engine: receiver/test_session.py. vLLM's weight-transfer
API: receiver/test_weight_transfer.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from vllm.model_executor.layers.quantization.fp8 import Fp8Config

from fp8rl.errors import RefitError
from support.engine import Engine, in_fp8, load_tensors, same_state
from support.reloads import layerwise, reload
from vllm_fp8rl.refit import drop_requests, refit, refit_from_files
from vllm_fp8rl.refit.receiver.worker import STEPS, read_answer

EXAMPLES = Path(__file__).parents[3] / "examples"
NORM = "model.norm.weight"
Tensors = dict[str, torch.Tensor]


def by_steps(engine: Engine, tensors: Tensors, folder: Path) -> None:
    """As a client of a server calls them."""
    for step, *args in (["begin", False], ["load_batch", list(tensors.items())], ["finish"]):
        answers = engine.llm.collective_rpc(STEPS[f"fp8rl_refit_{step}"], args=("steps", *args))
        read_answer(answers[0])


def as_trl(engine: Engine, tensors: Tensors, folder: Path) -> None:
    """trl/scripts/vllm_serve.py, ``update_named_param``: into memory that it then frees."""

    def update_named_param(worker: Any, name: str, sent: torch.Tensor) -> None:
        weight = sent.clone()
        worker.model_runner.model.load_weights(weights=[(name, weight)])
        weight.view(torch.uint8).fill_(0xFF)

    for item in tensors.items():
        engine.llm.collective_rpc(update_named_param, args=item)


def as_verl(engine: Engine, tensors: Tensors, folder: Path) -> None:
    """verl/workers/rollout/vllm_rollout/utils.py, ``update_weights_from_ipc``."""
    from vllm_extension import BucketExtension

    # Where this holds, verl quantizes on its own and renames the scales.
    assert not isinstance(engine.llm.llm_engine.vllm_config.quant_config, Fp8Config)
    bucket = torch.empty(300_000, dtype=torch.uint8)
    places: dict[str, tuple[torch.Size, torch.dtype, int]] = {}
    used = 0

    def flush() -> None:
        update = BucketExtension.update_weights_from_bucket
        engine.llm.collective_rpc(update, args=(bucket, places))
        bucket.fill_(0xFF)  # the trainer fills it once more
        places.clear()

    for name, weight in tensors.items():
        if used + weight.nbytes > bucket.numel():
            flush()
            used = 0
        places[name] = (weight.shape, weight.dtype, used)
        bucket[used : used + weight.nbytes].copy_(weight.reshape(-1).view(torch.uint8))
        used += weight.nbytes
    flush()


WAYS: dict[str, Callable[[Engine, Tensors, Path], object]] = {
    "refit": lambda e, t, path: refit(e.llm, t.items(), expect_kv_scales=False),
    "load_weights of a stream from behind": lambda e, t, path: e.model.load_weights(
        iter(sorted(t.items(), key=lambda item: item[0][::-1]))
    ),
    "reload_weights": lambda e, t, path: reload(e, t.items()),
    "files": lambda e, t, path: refit_from_files(e.llm, str(path), expect_kv_scales=False),
    "steps": by_steps,
    "load_weights": lambda e, t, path: e.model.load_weights(list(t.items())),
    "reload_weights of a folder": lambda e, t, path: reload(e, weights_path=str(path)),
    "layerwise reload": lambda e, t, path: layerwise(
        e, [list(t.items())[:5], iter(list(t.items())[5:6]), list(t.items())[6:]]
    ),
    "TRL": as_trl,
    "verl": as_verl,
}
CASES = [("dense", way) for way in WAYS] + [
    ("experts", way)  # what differs from model to model
    for way in ("refit", "load_weights of a stream from behind", "reload_weights")
]


class Live:
    """An engine of one kind of model, what it has after a refit with ``b``, and ``b`` as files."""

    def __init__(self, engine: Engine, paths: dict[str, Path], root: Path) -> None:
        self.engine, self.root = engine, root
        self.a, self.b = (load_tensors(paths[name]) for name in "ab")
        refit(engine.llm, self.b.items(), expect_kv_scales=False)
        self.state, self.pointers = engine.state(), engine.pointers()
        self.tokens = engine.greedy([[5, 6, 7, 8]], 3)

    def wire(self, kind: str) -> tuple[Tensors, Path]:
        """Tensors of ``b`` as they are sent, and a folder with them."""
        tensors = in_fp8(self.b) if kind == "codes" else self.b
        folder = self.root / kind
        folder.mkdir(exist_ok=True)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return tensors, folder


@pytest.fixture(scope="module")
def live_of(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Live]:
    get = request.getfixturevalue

    @functools.cache
    def of(name: str) -> Live:
        root = tmp_path_factory.mktemp("ways")
        if name == "dense":
            return Live(get("engine"), get("checkpoints"), root)
        get("moe_engine")
        return Live(get("shared_engine")("experts"), get("expert_checkpoints"), root)

    return of


@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize("kind", ["BF16", "codes"])
@pytest.mark.parametrize(("name", "way"), CASES)
def test_any_way_mends_a_mixture_in_place(live_of, monkeypatch, name, way, kind):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    live = live_of(name)
    engine, first = live.engine, list(live.a.items())[:3]
    with pytest.raises(RefitError, match="lacks"):
        refit(engine.llm, first, expect_kv_scales=False)
    engine.refuses(RefitError, "half-updated")
    with pytest.raises(RefitError):  # or nobody knows that plain loads shall mend it
        engine.model.load_weights(iter([*first, (NORM, torch.ones(3, 5))]))
    WAYS[way](engine, *live.wire(kind))
    drop_requests(engine.llm)
    engine.llm.reset_prefix_cache()
    assert same_state(live.state, engine.state())
    assert engine.pointers() == live.pointers
    assert engine.greedy([[5, 6, 7, 8]], 3) == live.tokens

"""A new optional parameter of a patched function reaches it, on functions made for the test."""

from __future__ import annotations

import math
from types import ModuleType, SimpleNamespace
from typing import Any

from nemo_rl_ext.patches import batch_correction, skip_step, worker_classes

FINDER: Any = SimpleNamespace(run=SimpleNamespace(correction=None, plan=None))


def masking(
    train_data: Any, rewards: Any, seq_logprob_error_threshold: Any = None, *, new: int = 0
) -> dict[str, Any]:
    return {"seen": (train_data, rewards, seq_logprob_error_threshold, new)}


class Policy:
    def train_from_meta(self, meta: Any, loss_fn: Any, eval_mode: bool = False) -> None: ...

    def finish_train_step(self, timer: Any = None) -> dict[str, Any]:
        return {"timer": timer}

    def abort_train_step(self) -> None: ...


def choose(default_cls: str, config: Any, role: str = "") -> str:
    return f"{default_cls} {role}"


def test_of_the_batch_hook() -> None:
    module: Any = ModuleType(batch_correction.UPSTREAM[0].module)
    setattr(module, batch_correction.UPSTREAM[0].name, masking)
    batch_correction.apply(module, FINDER)
    patched = getattr(module, batch_correction.UPSTREAM[0].name)
    assert patched("data", "rewards", math.inf, new=5) == {"seen": ("data", "rewards", None, 5)}
    assert patched("data", rewards="rewards") == {"seen": ("data", "rewards", None, 0)}


def test_of_the_end_of_a_step() -> None:
    module: Any = ModuleType("nemo_rl.models.policy.tq_policy")
    module.TQPolicy = type("TQPolicy", (), dict(vars(Policy)))
    skip_step.apply(module, FINDER)
    assert module.TQPolicy().finish_train_step(timer=3) == {"timer": 3}


def test_of_the_choice_of_a_worker() -> None:
    upstream = worker_classes.UPSTREAM[0]
    module: Any = ModuleType(upstream.module)
    setattr(module, upstream.name, choose)
    worker_classes.apply(module, FINDER)
    assert getattr(module, upstream.name)("worker", {}, role="teacher") == "worker teacher"

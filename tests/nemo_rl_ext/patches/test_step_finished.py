"""The hook ``step_finished``, on a class shaped like upstream's ``Logger``."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from fp8rl import PluginManager, Recipe, hookimpl
from nemo_rl_ext.config.plan import RunPlan
from nemo_rl_ext.patch_finder import PatchFinder
from nemo_rl_ext.patches import step_finished


class Logger:
    def __init__(self) -> None:
        self.logged: list[tuple[Any, ...]] = []

    def log_metrics(
        self, metrics: dict[str, Any], step: int, prefix: str | None = "", more: bool = False
    ) -> None:
        self.logged.append((metrics, step, prefix, more))


def test_plugins_hear_of_each_step_when_its_metrics_are_logged() -> None:
    module: Any = ModuleType("nemo_rl.utils.logger")
    module.Logger = type("Logger", (Logger,), dict(vars(Logger)))
    finder, seen = PatchFinder(), []

    @hookimpl
    def hears(step: int, metrics: Mapping[str, float]) -> None:
        seen.append((step, dict(metrics)))

    finder.run.plugins = PluginManager(discover=False)
    finder.run.plugins.register(SimpleNamespace(step_finished=hears))
    step_finished.apply(module, finder)
    logger = module.Logger()
    metrics = {
        "loss": np.array([0.5], dtype=np.float32),
        "fp8rl/kl_k3": 1e-4,
        "steps": np.int64(2),
        "lengths": [3, 4],
        "image": "x.png",
    }
    logger.log_metrics(metrics, 1, prefix="train")
    assert seen == [], "a run without our keys"

    finder.run.plan = RunPlan(driver="grpo", recipe=Recipe(), sections=("loss_fn",))
    logger.log_metrics(metrics, 1, prefix="train", more=True)
    logger.log_metrics({"mean_gen_tokens_per_sample": 3.0}, 2, "train")  # of a rollout alone
    logger.log_metrics({"loss": 1.0}, 2, prefix="validation")
    logger.log_metrics({"loss": 2.0}, step=2, prefix="train")
    numbers = {"loss": 0.5, "fp8rl/kl_k3": 1e-4, "steps": 2.0}
    assert seen == [(0, numbers), (1, {"loss": 2.0})]
    assert len(logger.logged) == 5
    assert logger.logged[1] == (metrics, 1, "train", True)

"""``Logger.log_metrics``: plugins hear of every training step (hook ``step_finished``).

Why: a loop has all metrics of a step in one place alone, where it logs them.
How: wraps the method. All loops log a step's metrics with prefix ``train`` and its ``loss`` among
them; what they log under that prefix about a rollout that is not trained on yet has none. Upstream
counts steps from 1 there.
Upstream: ``nemo_rl/utils/logger.py``.
Until: NeMo RL calls back after a step.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import numpy as np

from nemo_rl_ext.patch_finder import PatchFinder
from nemo_rl_ext.patches.upstream import Upstream, resolve

UPSTREAM = (Upstream("nemo_rl.utils.logger", "Logger.log_metrics", "self, metrics, step, prefix"),)


def apply(module: ModuleType, finder: PatchFinder) -> None:
    log = resolve(module, UPSTREAM[0])

    @functools.wraps(log)
    def telling(*args: Any, **kwargs: Any) -> Any:
        result = log(*args, **kwargs)
        if finder.run.plan is not None:
            given = inspect.signature(log).bind(*args, **kwargs).arguments
            if given.get("prefix") == "train" and "loss" in given["metrics"]:
                finder.run.plugins.hook.step_finished(
                    step=given["step"] - 1, metrics=numbers(given["metrics"])
                )
        return result

    module.Logger.log_metrics = telling  # type: ignore[attr-defined]


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics that are single numbers, which upstream has in arrays too, as floats."""
    return {
        name: float(np.asarray(value).item())
        for name, value in metrics.items()
        if isinstance(value, int | float | np.generic | np.ndarray) and np.size(value) == 1
    }

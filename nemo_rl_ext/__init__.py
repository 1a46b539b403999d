"""nemo_rl_ext: GRPO corrected for the rollout engine's policy, usable with plain tensors.

Names load on first use: this package is imported at the start of every process that imports torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nemo_rl_ext.grpo.advantages import group_relative_advantages
    from nemo_rl_ext.grpo.importance_sampling import Correction, correct, resolve_corrector
    from nemo_rl_ext.grpo.loss import GRPOConfig, GRPOLoss, merge_metrics
    from nemo_rl_ext.grpo.rejection import RejectionResult, reject

_HOME = {
    "Correction": "grpo.importance_sampling",
    "GRPOConfig": "grpo.loss",
    "GRPOLoss": "grpo.loss",
    "RejectionResult": "grpo.rejection",
    "correct": "grpo.importance_sampling",
    "group_relative_advantages": "grpo.advantages",
    "merge_metrics": "grpo.loss",
    "reject": "grpo.rejection",
    "resolve_corrector": "grpo.importance_sampling",
}

__all__ = [
    "Correction",
    "GRPOConfig",
    "GRPOLoss",
    "RejectionResult",
    "correct",
    "group_relative_advantages",
    "merge_metrics",
    "reject",
    "resolve_corrector",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

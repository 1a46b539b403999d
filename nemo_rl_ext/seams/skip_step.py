"""``Policy.train``: a step that the guard skips runs without the optimizer.

Why: masking every token would still move the weights, by momentum and weight decay.
How: wraps the method that trains and sets upstream's own ``eval_mode``.
Upstream: ``nemo_rl/models/policy/{lm_policy,tq_policy}.py``.
Goes: when the drivers can leave a step out.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
import wrapt

from nemo_rl_ext.activation import Seams
from nemo_rl_ext.seams.upstream import Upstream, resolve

UPSTREAM = (
    Upstream(
        "nemo_rl.models.policy.lm_policy",
        "Policy.train",
        (
            "self",
            "data",
            "loss_fn",
            "eval_mode",
            "gbs",
            "mbs",
            "timer",
            "check_dim_skip_keys",
        ),
    ),
    Upstream(
        "nemo_rl.models.policy.tq_policy",
        "TQPolicy.train_from_meta",
        ("self", "meta", "loss_fn", "eval_mode", "gbs", "mbs", "timer", "train_fields"),
    ),
)


def apply(module: ModuleType, seams: Seams) -> None:
    upstream = next(u for u in UPSTREAM if u.module == module.__name__)
    train = resolve(module, upstream)

    @wrapt.decorator
    def skipping(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        if seams.run is not None and len(args) < 3 and seams.run.skips:
            result = wrapped(*args, **{**kwargs, "eval_mode": True})
            if result.get("grad_norm") is None:  # DTensor workers; the driver logs it as a tensor
                result["grad_norm"] = torch.zeros(1)
            return result
        return wrapped(*args, **kwargs)

    owner, method = upstream.name.split(".")
    setattr(getattr(module, owner), method, skipping(train))

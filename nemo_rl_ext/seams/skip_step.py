"""``Policy.train``: a step that the guard skips runs without the optimizer.

Why: masking every token would still move the weights, by momentum and weight decay.
How: wraps the method that trains and sets upstream's own ``eval_mode``; where a step is trained in
pieces (single controller), it ends with upstream's ``abort_train_step``, which drops gradients.
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
    Upstream("nemo_rl.models.policy.tq_policy", "TQPolicy.finish_train_step", ("self",)),
    Upstream("nemo_rl.models.policy.tq_policy", "TQPolicy.abort_train_step", ("self",)),
)


def apply(module: ModuleType, seams: Seams) -> None:
    found = {u.name: resolve(module, u) for u in UPSTREAM if u.module == module.__name__}

    @wrapt.decorator
    def skipping(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        if seams.run is not None and len(args) < 3 and seams.run.skips:
            result = wrapped(*args, **{**kwargs, "eval_mode": True})
            if result.get("grad_norm") is None:  # DTensor workers; the driver logs it as a tensor
                result["grad_norm"] = torch.zeros(1)
            return result
        return wrapped(*args, **kwargs)

    @wrapt.decorator
    def ending(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        if seams.run is not None and seams.run.in_pieces and seams.run.end_step():
            instance.abort_train_step()
            return {"loss": torch.zeros(1), "grad_norm": torch.zeros(1), "all_mb_metrics": {}}
        return wrapped(*args, **kwargs)

    wrappers = {"train": skipping, "train_from_meta": skipping, "finish_train_step": ending}
    for name, method in found.items():
        owner, attribute = name.split(".")
        if attribute in wrappers:
            setattr(getattr(module, owner), attribute, wrappers[attribute](method))

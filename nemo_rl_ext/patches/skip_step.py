"""``Policy.train``: a step that the guard skips runs without the optimizer.

Why: masking every token would still move the weights, by momentum and weight decay.
How: wraps the method that trains and sets upstream's own ``eval_mode``; where a step is trained in
pieces (single controller), it ends with upstream's ``abort_train_step``, which drops gradients; and
the metrics of its pieces go with the step's own, the only ones that controller logs.
Upstream: ``nemo_rl/models/policy/{lm_policy,tq_policy}.py``.
Until: the drivers can leave a step out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from nemo_rl_ext.patch_finder import PatchFinder
from nemo_rl_ext.patches.upstream import Upstream, resolve

UPSTREAM = (
    Upstream(
        "nemo_rl.models.policy.lm_policy", "Policy.train", "self, data, loss_fn, eval_mode=..."
    ),
    Upstream(
        "nemo_rl.models.policy.tq_policy",
        "TQPolicy.train_from_meta",
        "self, meta, loss_fn, eval_mode=...",
    ),
    Upstream("nemo_rl.models.policy.tq_policy", "TQPolicy.finish_train_step", "self"),
    Upstream("nemo_rl.models.policy.tq_policy", "TQPolicy.abort_train_step", "self"),
)


def apply(module: ModuleType, finder: PatchFinder) -> None:
    found = {u.name: resolve(module, u) for u in UPSTREAM if u.module == module.__name__}

    def skipping(train: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(train)
        def skip(*args: Any, **kwargs: Any) -> Any:
            correction = finder.run.correction
            if correction is None or len(args) > 3 or not correction.skips:
                return train(*args, **kwargs)
            result = train(*args, **{**kwargs, "eval_mode": True})
            if result.get("grad_norm") is None:  # DTensor workers; the driver logs it as a tensor
                result["grad_norm"] = torch.zeros(1)
            return result

        return skip

    def ending(finish: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(finish)
        def end(policy: Any, *args: Any, **kwargs: Any) -> Any:
            correction = finder.run.correction
            if correction is None or not correction.in_pieces:
                return finish(policy, *args, **kwargs)
            skips, metrics = correction.end_step()
            result: dict[str, Any]
            if skips:
                policy.abort_train_step()
                result = {"loss": torch.zeros(1), "grad_norm": torch.zeros(1), "all_mb_metrics": {}}
            else:
                result = finish(policy, *args, **kwargs)
            # The controller drops what the batch hook returns, and logs sums of these lists.
            result["all_mb_metrics"].update({name: [value] for name, value in metrics.items()})
            return result

        return end

    wrappers = {"train": skipping, "train_from_meta": skipping, "finish_train_step": ending}
    for name, method in found.items():
        owner, attribute = name.split(".")
        if attribute in wrappers:
            setattr(getattr(module, owner), attribute, wrappers[attribute](method))

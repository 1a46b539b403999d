"""The call that refits: where the guard asks for it, engines in BF16 come first.

Why: upstream's engines keep their quantization for a whole run.
How: wraps ``refit_policy_generation``, by which GRPO's loops refit, and ``sync_weights``, by which
the single controller does; both are called in the process that corrects batches and know the
trainer and the engines (:mod:`nemo_rl_ext.fallback`).
Upstream: ``nemo_rl/algorithms/grpo.py``,
``nemo_rl/weight_sync/{ipc,collective}_weight_synchronizer.py``.
Goes: when a generation interface can be given another engine.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import wrapt

from nemo_rl_ext.activation import Seams
from nemo_rl_ext.seams.upstream import Upstream, resolve

UPSTREAM = (
    Upstream(
        "nemo_rl.algorithms.grpo",
        "refit_policy_generation",
        (
            "policy",
            "policy_generation",
            "colocated_inference",
            "_refit_buffer_size_gb",
            "timer",
            "kv_scales",
        ),
    ),
    Upstream(
        "nemo_rl.weight_sync.ipc_weight_synchronizer",
        "IPCWeightSynchronizer.sync_weights",
        ("self", "timer", "kv_scales"),
    ),
    Upstream(
        "nemo_rl.weight_sync.collective_weight_synchronizer",
        "CollectiveWeightSynchronizer.sync_weights",
        ("self", "timer", "kv_scales"),
    ),
)


def apply(module: ModuleType, seams: Seams) -> None:
    upstream = next(u for u in UPSTREAM if u.module == module.__name__)
    refit = resolve(module, upstream)
    *owner, name = upstream.name.split(".")

    @wrapt.decorator
    def falling_back(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        if seams.run is not None and seams.run.fallback_due:
            from nemo_rl_ext.fallback import fall_back

            if owner:
                fall_back(instance._policy, instance._generation, instance)
            else:
                fall_back(*sides(*args, **kwargs))
            seams.run.fallback_due = False
        return wrapped(*args, **kwargs)

    def sides(policy: Any, policy_generation: Any, *_: Any, **__: Any) -> tuple[Any, Any]:
        return policy, policy_generation

    setattr(getattr(module, owner[0]) if owner else module, name, falling_back(refit))

"""The call that refits: where the guard asks for it, BF16 engines are started first.

Why: upstream's engines keep their quantization for a whole run.
How: wraps ``refit_policy_generation``, by which GRPO's loops refit, and ``sync_weights``, by which
the single controller does. Both are called in the process that corrects batches and know the
trainer and the engines (:mod:`nemo_rl_ext.driver.fallback`). Requests that arrive meanwhile wait
until the refit has succeeded, because the new engines have no weights before it.
Upstream: ``nemo_rl/algorithms/grpo.py``,
``nemo_rl/weight_sync/{factory,ipc_weight_synchronizer,collective_weight_synchronizer}.py``,
``nemo_rl/models/generation/vllm/vllm_generation.py``, ``nemo_rl/models/policy/lm_policy.py``.
Until: a generation interface can be given another engine.
"""

from __future__ import annotations

import functools
import inspect
from types import ModuleType
from typing import Any

from nemo_rl_ext.patch_finder import PatchFinder
from nemo_rl_ext.patches.upstream import Upstream, resolve

_VLLM = "nemo_rl.models.generation.vllm"
UPSTREAM = (
    Upstream(
        "nemo_rl.algorithms.grpo",
        "refit_policy_generation",
        "policy, policy_generation, colocated_inference",
    ),
    Upstream(
        "nemo_rl.weight_sync.ipc_weight_synchronizer",
        "IPCWeightSynchronizer.sync_weights",
        "self",
    ),
    Upstream(
        "nemo_rl.weight_sync.collective_weight_synchronizer",
        "CollectiveWeightSynchronizer.sync_weights",
        "self",
    ),
    # What nemo_rl_ext.driver.fallback calls.
    Upstream(
        "nemo_rl.weight_sync.factory",
        "create_weight_synchronizer",
        "policy, generation, *, generation_backend, colocated, train_cluster, inference_cluster",
    ),
    Upstream(f"{_VLLM}.vllm_generation", "VllmGeneration._post_init", "self"),
    Upstream(f"{_VLLM}.vllm_generation", "VllmGeneration.finish_generation", "self"),
    Upstream("nemo_rl.models.policy.lm_policy", "Policy.offload_after_refit", "self"),
    Upstream("nemo_rl.models.policy.lm_policy", "Policy.prepare_for_lp_inference", "self"),
)


def apply(module: ModuleType, finder: PatchFinder) -> None:
    upstream = next(u for u in UPSTREAM if u.module == module.__name__)
    refit = resolve(module, upstream)
    *owner, name = upstream.name.split(".")

    @functools.wraps(refit)
    def falling_back(*args: Any, **kwargs: Any) -> Any:
        correction = finder.run.correction
        guard = None if correction is None else correction.guard
        if guard is None or guard.level != "bf16":
            return refit(*args, **kwargs)
        from nemo_rl_ext.driver.fallback import fall_back, release

        if owner:
            synchronizer = args[0]
            policy, generation = synchronizer._policy, synchronizer._generation
        else:
            given = inspect.signature(refit).bind(*args, **kwargs).arguments
            synchronizer = None
            policy, generation = given["policy"], given["policy_generation"]
        fall_back(policy, generation, synchronizer)
        guard.fell_back()
        result = refit(*args, **kwargs)
        release(generation)
        return result

    setattr(getattr(module, owner[0]) if owner else module, name, falling_back)

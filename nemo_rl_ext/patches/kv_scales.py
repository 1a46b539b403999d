"""KV scales from the forwards of the step, in the place of a forward of their own.

Why: upstream runs one more forward over the whole batch each step, with a device synchronisation
per layer and micro-batch, and calls layers by their local numbers, so that it refuses pipeline
parallelism.
How: replaces the worker's ``calibrate_qkv_fp8_scales``: the observers' maximum if they have seen
tokens since the last call, else one forward over the given batch with the observers on; nothing
once the guard has withdrawn the FP8 cache, since the driver goes on asking. Ray has
copied the method into the class that it makes an actor of by the time the module is imported, so it
is replaced there as well; under upstream's name, by which Ray sends it to the actor's process.
Upstream: ``nemo_rl/models/policy/workers/megatron_policy_worker.py``.
Goes: when the method of calibration is a key.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from nemo_rl_ext.patches.ledger import Seams
from nemo_rl_ext.patches.upstream import Upstream, resolve

_MODULE = "nemo_rl.models.policy.workers.megatron_policy_worker"
UPSTREAM = (
    Upstream(
        _MODULE,
        "MegatronPolicyWorkerImpl.calibrate_qkv_fp8_scales",
        ("self", "data", "micro_batch_size", "percentile", "margin", "include_q"),
    ),
)


def apply(module: ModuleType, seams: Seams) -> None:
    calibrate = resolve(module, UPSTREAM[0])
    actor_class = module.MegatronPolicyWorker.__ray_metadata__.modified_class

    @functools.wraps(calibrate)
    def observing(worker: Any, **kwargs: Any) -> Any:
        from nemo_rl_ext.workers import training

        kwargs.pop("_ray_trace_ctx", None)  # comes with Ray's tracing
        if training.kv_scales_withdrawn(worker.cfg):
            return {"layers": {}}
        recipe = training.recipe_of(worker.cfg)
        if recipe is None:
            return calibrate(worker, **kwargs)
        return training.kv_scales(worker, recipe, **kwargs)

    for owner in (module.MegatronPolicyWorkerImpl, actor_class):
        owner.calibrate_qkv_fp8_scales = observing

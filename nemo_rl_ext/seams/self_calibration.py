"""Synchronous vLLM workers: the engine calibrates its KV scales where a refit has brought none.

Why: DTensor workers send no KV scales, and neither does the refit before ``grpo.val_at_start``;
upstream has no FP8 KV cache there.
How: the ``LLM`` that ``_create_engine`` makes is put into a
:class:`~nemo_rl_ext.self_calibration.CalibratingLLM`, where it runs with fp8rl and an FP8 cache.
Ray copies the method into the class that it makes an actor of, so it is replaced there as well;
under upstream's name, by which Ray sends it to the actor's process.
Upstream: ``nemo_rl/models/generation/vllm/vllm_worker.py``.
Goes: when every trainer sends KV scales with every refit.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from nemo_rl_ext.activation import Seams
from nemo_rl_ext.seams.upstream import Upstream, resolve

UPSTREAM = (
    Upstream(
        "nemo_rl.models.generation.vllm.vllm_worker",
        "VllmGenerationWorkerImpl._create_engine",
        ("self", "llm_kwargs"),
    ),
)


def apply(module: ModuleType, seams: Seams) -> None:
    create = resolve(module, UPSTREAM[0])
    actor_class = module.VllmGenerationWorker.__ray_metadata__.modified_class

    @functools.wraps(create)
    def calibrating(worker: Any, llm_kwargs: dict[str, Any], **tracing: Any) -> None:
        from nemo_rl_ext.rollout import has_fp8_kv, is_ours

        create(worker, llm_kwargs)
        engine = worker.llm.llm_engine.vllm_config
        if is_ours(engine) and has_fp8_kv(engine):
            from nemo_rl_ext.self_calibration import CalibratingLLM

            worker.llm = CalibratingLLM(worker.llm)

    for owner in (module.VllmGenerationWorkerImpl, actor_class):
        owner._create_engine = calibrating

"""vLLM workers: what fp8rl adds to the engine that a worker has made.

Why: DTensor workers send no KV scales, and neither does the refit before ``grpo.val_at_start``;
upstream has no FP8 KV cache there. And an engine that the guard gives up must be made again.
How: wraps ``_create_engine`` (:func:`nemo_rl_ext.workers.rollout_engine.create_engine`). Ray copies the
method into the class that it makes an actor of, so it is replaced there as well; under upstream's
name, by which Ray sends it to the actor's process.
Upstream: ``nemo_rl/models/generation/vllm/{vllm_worker,vllm_worker_async}.py``.
Goes: when every trainer sends KV scales with every refit, and workers can be given another engine.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from nemo_rl_ext.patches.ledger import Seams
from nemo_rl_ext.patches.upstream import Upstream, resolve

_FOLDER = "nemo_rl.models.generation.vllm"
UPSTREAM = (
    Upstream(
        f"{_FOLDER}.vllm_worker",
        "VllmGenerationWorkerImpl._create_engine",
        ("self", "llm_kwargs"),
    ),
    Upstream(
        f"{_FOLDER}.vllm_worker_async",
        "VllmAsyncGenerationWorkerImpl._create_engine",
        ("self", "llm_kwargs"),
    ),
)


def apply(module: ModuleType, seams: Seams) -> None:
    upstream = next(u for u in UPSTREAM if u.module == module.__name__)
    create = resolve(module, upstream)
    implementation = upstream.name.split(".")[0]
    actor = getattr(module, implementation.removesuffix("Impl"))

    @functools.wraps(create)
    def creating(worker: Any, llm_kwargs: dict[str, Any], **tracing: Any) -> None:
        from nemo_rl_ext.workers.rollout_engine import create_engine

        create_engine(worker, create, llm_kwargs)

    for owner in (getattr(module, implementation), actor.__ray_metadata__.modified_class):
        owner._create_engine = creating

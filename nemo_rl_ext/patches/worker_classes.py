"""The classes of the workers: where a config asks for fp8rl, Ray gets our subclasses.

Why: ``Policy`` and ``VllmGeneration`` choose their worker classes from a fixed table.
How: wraps ``resolve_policy_worker_cls`` and ``resolve_generation_worker_cls`` where the two classes
call them, in the driver. The subclass runs in the Python environment of the class that it stands
for. Without our keys both functions answer as before. ``Policy(worker_extension_cls_fqn=...)``
replaces the resolved class afterwards, so the wrapped constructor refuses it where ours was needed.
Upstream: ``nemo_rl/models/policy/{lm_policy,utils}.py``,
``nemo_rl/models/generation/vllm/{vllm_generation,utils}.py``,
``nemo_rl/distributed/ray_actor_environment_registry.py``, ``nemo_rl/utils/venvs.py``; for the
subclasses ``vllm_worker.py``, ``vllm_worker_async.py`` and ``vllm_backend.py`` in
``nemo_rl/models/generation/vllm``, ``nemo_rl/models/policy/workers/megatron_policy_worker.py`` and
``nemo_rl/models/megatron/setup.py``.
Until: NeMo RL has a registry of worker classes (docs/upstream/worker_registry.md).
"""

from __future__ import annotations

import functools
import inspect
from types import ModuleType
from typing import Any

from fp8rl.errors import UnsupportedError
from nemo_rl_ext.config.drivers import BLOCK, MEGATRON, QUANTIZATION, VLLM
from nemo_rl_ext.config.plan import RunPlan
from nemo_rl_ext.patch_finder import PatchFinder
from nemo_rl_ext.patches.upstream import Upstream, resolve

_VLLM = "nemo_rl.models.generation.vllm"
_MEGATRON = "nemo_rl.models.policy.workers.megatron_policy_worker"
_REGISTRY = "nemo_rl.distributed.ray_actor_environment_registry"

STANDS_FOR = {
    f"{_VLLM}.vllm_worker.VllmGenerationWorker": "nemo_rl_ext.workers.vllm.Fp8VllmGenerationWorker",
    f"{_VLLM}.vllm_worker_async.VllmAsyncGenerationWorker": (
        "nemo_rl_ext.workers.vllm.Fp8VllmAsyncGenerationWorker"
    ),
    f"{_MEGATRON}.MegatronPolicyWorker": "nemo_rl_ext.workers.megatron.Fp8MegatronPolicyWorker",
}
"""Upstream's actor class -> ours. DTensor workers stay upstream's: they train in BF16."""

_POLICY = Upstream(
    "nemo_rl.models.policy.lm_policy",
    "Policy.__init__",
    "self, cluster, config, tokenizer, *, worker_extension_cls_fqn=...",
)

UPSTREAM = (
    Upstream(f"{_VLLM}.vllm_generation", "resolve_generation_worker_cls", "default_cls, config"),
    Upstream("nemo_rl.models.policy.lm_policy", "resolve_policy_worker_cls", "default_cls, config"),
    _POLICY,
    # What is called here.
    Upstream(_REGISTRY, "get_actor_python_env", "actor_class_fqn"),
    Upstream(_REGISTRY, "ACTOR_ENVIRONMENT_REGISTRY"),
    Upstream("nemo_rl.utils.venvs", "create_local_venv_on_each_node", "py_executable, venv_name"),
    # What the subclasses of nemo_rl_ext.workers override or call.
    Upstream(
        f"{_VLLM}.vllm_worker",
        "VllmGenerationWorkerImpl._create_engine",
        "self, llm_kwargs",
        replaced=True,
    ),
    Upstream(f"{_VLLM}.vllm_worker", "VllmGenerationWorkerImpl.generate", "self, data"),
    Upstream(
        f"{_VLLM}.vllm_worker_async",
        "VllmAsyncGenerationWorkerImpl._create_engine",
        "self, llm_kwargs",
        replaced=True,
    ),
    Upstream(
        f"{_VLLM}.vllm_worker_async",
        "VllmAsyncGenerationWorkerImpl.update_weights_via_ipc_zmq_async",
        "self",
        replaced=True,
    ),
    Upstream(
        f"{_VLLM}.vllm_worker_async",
        "VllmAsyncGenerationWorkerImpl.update_weights_from_collective_async",
        "self",
        replaced=True,
    ),
    Upstream(
        f"{_VLLM}.vllm_backend",
        "VllmInternalWorkerExtension._weight_update_lifecycle",
        "self, transport",
        replaced=True,
    ),
    Upstream(
        f"{_VLLM}.vllm_backend",
        "VllmInternalWorkerExtension._load_hf_weights",
        "self, policy_weights",
        replaced=True,
    ),
    Upstream(f"{_VLLM}.vllm_backend", "VllmInternalWorkerExtension._uses_fp8_kv_cache", "self"),
    Upstream(
        "nemo_rl.models.megatron.setup",
        "setup_model_and_optimizer",
        "policy_cfg, megatron_cfg, load_optimizer, *, additional_pre_wrap_hooks=...",
    ),
    Upstream(
        _MEGATRON,
        "MegatronPolicyWorkerImpl.__init__",
        "self, config, *, tokenizer, weights_path=..., worker_sharding_annotations",
    ),
    Upstream(_MEGATRON, "MegatronPolicyWorkerImpl.save_checkpoint", "self, *, weights_path"),
    Upstream(
        _MEGATRON,
        "MegatronPolicyWorkerImpl.calibrate_qkv_fp8_scales",
        "self, *, data, micro_batch_size=..., percentile=..., margin=..., include_q=...",
        replaced=True,
    ),
    Upstream(
        _MEGATRON,
        "MegatronPolicyWorkerImpl.stream_weights_via_ipc_zmq",
        "self, *, buffer_size_bytes=..., kv_scales=...",
    ),
    Upstream(
        _MEGATRON,
        "MegatronPolicyWorkerImpl.broadcast_weights_for_collective",
        "self, *, kv_scales=...",
    ),
    Upstream(
        _MEGATRON,
        "MegatronPolicyWorkerImpl.get_logprobs",
        "self, *, data, micro_batch_size=..., require_router_replay=...",
    ),
    Upstream(_MEGATRON, "MegatronPolicyWorkerImpl.train", "self, data, *, loss_fn, eval_mode=..."),
    Upstream(_MEGATRON, "MegatronPolicyWorkerImpl.train_microbatch", "self, data"),
    Upstream(_MEGATRON, "MegatronPolicyWorkerImpl.finish_train_step"),
)


def apply(module: ModuleType, finder: PatchFinder) -> None:
    upstream = next(u for u in UPSTREAM if u.module == module.__name__)
    choose = resolve(module, upstream)
    asks = _rollouts_ask if "generation" in upstream.name else _trainer_asks

    @functools.wraps(choose)
    def choosing(default_cls: str, config: Any, *args: Any, **kwargs: Any) -> str:
        chosen = choose(default_cls, config, *args, **kwargs)
        if chosen not in STANDS_FOR or not asks(config):
            return chosen
        return register(chosen)

    setattr(module, upstream.name, choosing)
    if module.__name__ == _POLICY.module:
        _refuse_extensions(module.Policy, resolve(module, _POLICY))


def _refuse_extensions(policy: Any, construct: Any) -> None:
    """Wrap the constructor of ``Policy``, which replaces the class that was chosen above."""

    @functools.wraps(construct)
    def __init__(*args: Any, **kwargs: Any) -> None:
        given = inspect.signature(construct).bind(*args, **kwargs).arguments
        extension = given.get("worker_extension_cls_fqn")
        plan = RunPlan.of(given["config"])
        if extension is not None and plan is not None and plan.replaces_trainer:
            section = VLLM if plan.of_trainer is None else MEGATRON
            raise UnsupportedError(
                f"Policy(worker_extension_cls_fqn='{extension}') replaces the Megatron worker that "
                f"'{section}.{BLOCK}' needs; leave the argument out, or remove the block."
            )
        construct(*args, **kwargs)

    policy.__init__ = __init__


def register(upstream: str) -> str:
    """Enter our subclass of a worker into upstream's table of Python environments.

    Upstream makes one virtual environment per class name. Ours is the environment of the class that
    it stands for, where this distribution has been installed.

    Args:
        upstream: full name of upstream's actor class.

    Returns:
        Full name of ours.
    """
    from nemo_rl.distributed.ray_actor_environment_registry import (
        ACTOR_ENVIRONMENT_REGISTRY,
        get_actor_python_env,
    )

    python = get_actor_python_env(upstream)
    if python.startswith("uv"):
        from nemo_rl.utils.venvs import create_local_venv_on_each_node

        python = create_local_venv_on_each_node(python, upstream)
    ACTOR_ENVIRONMENT_REGISTRY[STANDS_FOR[upstream]] = python
    return STANDS_FOR[upstream]


def _trainer_asks(policy: Any) -> bool:
    plan = RunPlan.of(policy)
    return plan is not None and plan.replaces_trainer


def _rollouts_ask(generation: Any) -> bool:
    return (generation.get("vllm_kwargs") or {}).get("quantization") == QUANTIZATION

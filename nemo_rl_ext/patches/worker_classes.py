"""The classes of the workers: where a config asks for fp8rl, Ray gets our subclasses.

Why: ``Policy`` and ``VllmGeneration`` choose their worker classes from a fixed table.
How: where the config has the key ``worker_extension_cls_fqn`` (newer than 7ea279a), wraps the
constructors of both classes, which write ours into it. Elsewhere wraps
``resolve_policy_worker_cls`` and ``resolve_generation_worker_cls`` where the two classes call them.
All of it in the driver and the single controller; without our keys nothing changes. The subclass
runs in the Python environment of the class that it stands for. The key, and
``Policy(worker_extension_cls_fqn=...)``, replace the resolved class afterwards, so the wrapped
constructors refuse another class there where ours is needed.
Upstream: ``nemo_rl/models/policy/{lm_policy,utils}.py``,
``nemo_rl/models/generation/vllm/{vllm_generation,utils}.py``,
``nemo_rl/distributed/ray_actor_environment_registry.py``, ``nemo_rl/utils/venvs.py``; for the
subclasses ``vllm_worker.py``, ``vllm_worker_async.py`` and ``vllm_backend.py`` in
``nemo_rl/models/generation/vllm``, ``megatron_policy_worker.py``, ``dtensor_policy_worker.py``,
``dtensor_policy_worker_v2.py`` and since 0.8.0 ``automodel_policy_worker.py`` in
``nemo_rl/models/policy/workers`` and ``nemo_rl/models/megatron/setup.py``.
Until: NeMo RL has a registry of worker classes (docs/upstream/worker_registry.md).
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from fp8rl.errors import UnsupportedError
from nemo_rl_ext.config.drivers import (
    AUTOMODEL,
    BLOCK,
    QUANTIZATION,
    VLLM,
    WORKER_KEY,
    is_our_worker,
)
from nemo_rl_ext.config.plan import RunPlan
from nemo_rl_ext.patch_finder import PatchFinder
from nemo_rl_ext.patches.upstream import Upstream, find_source, resolve

_VLLM = "nemo_rl.models.generation.vllm"
_MEGATRON = "nemo_rl.models.policy.workers.megatron_policy_worker"
_DTENSOR = "nemo_rl.models.policy.workers.dtensor_policy_worker"
_SECOND = f"{_DTENSOR}_v2"
_AUTOMODEL = "nemo_rl.models.policy.workers.automodel_policy_worker"
_REGISTRY = "nemo_rl.distributed.ray_actor_environment_registry"

STANDS_FOR = {
    f"{_VLLM}.vllm_worker.VllmGenerationWorker": "nemo_rl_ext.workers.vllm.Fp8VllmGenerationWorker",
    f"{_VLLM}.vllm_worker_async.VllmAsyncGenerationWorker": (
        "nemo_rl_ext.workers.vllm.Fp8VllmAsyncGenerationWorker"
    ),
    f"{_MEGATRON}.MegatronPolicyWorker": "nemo_rl_ext.workers.megatron.Fp8MegatronPolicyWorker",
    f"{_DTENSOR}.DTensorPolicyWorker": "nemo_rl_ext.workers.dtensor.Fp8DTensorPolicyWorker",
    f"{_SECOND}.DTensorPolicyWorkerV2": "nemo_rl_ext.workers.automodel.Fp8AutomodelPolicyWorker",
    f"{_AUTOMODEL}.AutomodelPolicyWorker": "nemo_rl_ext.workers.automodel.Fp8AutomodelPolicyWorker",
}
"""Upstream's actor class -> ours; the last one is the one before it, since 0.8.0."""
_SYNCHRONOUS, _ASYNCHRONOUS, *_TRAINERS = STANDS_FOR

_POLICY = Upstream(
    "nemo_rl.models.policy.lm_policy",
    "Policy.__init__",
    "self, cluster, config, tokenizer, *, worker_extension_cls_fqn=...",
)
_GENERATION = Upstream(
    f"{_VLLM}.vllm_generation", "VllmGeneration.__init__", "self, cluster, config"
)

_BY_KEY = ("nemo_rl.models.policy", f"PolicyConfig.{WORKER_KEY}")
_OLD, _NEW = (_SECOND, "DTensorPolicyWorkerV2Impl"), (_AUTOMODEL, "AutomodelPolicyWorkerImpl")

_OF_TRAINERS = (
    ("save_checkpoint", "self, *, weights_path", False),
    (
        "calibrate_qkv_fp8_scales",
        "self, *, data, micro_batch_size=..., percentile=..., margin=..., include_q=...",
        True,
    ),
    ("stream_weights_via_ipc_zmq", "self, *, buffer_size_bytes=..., kv_scales=...", False),
    ("broadcast_weights_for_collective", "self, *, kv_scales=...", False),
    ("train", "self, data, *, loss_fn, eval_mode=...", False),
)
"""Of all trainers' classes: name, parameters, whether ours takes its place."""


def _methods(
    path: str, *methods: tuple[str, str | None, bool], unless: tuple[str, str] | None = None
) -> list[Upstream]:
    module, _, owner = path.rpartition(".")
    return [
        Upstream(module, f"{owner}.{name}", taken, replaced, unless)
        for name, taken, replaced in methods
    ]


UPSTREAM = (
    Upstream(
        _GENERATION.module,
        "resolve_generation_worker_cls",
        "default_cls, config",
        unless=(f"{_VLLM}.config", f"VllmConfig.{WORKER_KEY}"),
    ),
    Upstream(_POLICY.module, "resolve_policy_worker_cls", "default_cls, config", unless=_BY_KEY),
    _POLICY,
    _GENERATION,
    # What is called here.
    Upstream(_REGISTRY, "get_actor_python_env", "actor_class_fqn"),
    Upstream(_REGISTRY, "ACTOR_ENVIRONMENT_REGISTRY"),
    Upstream("nemo_rl.utils.venvs", "create_local_venv_on_each_node", "py_executable, venv_name"),
    # What the subclasses of nemo_rl_ext.workers override or call.
    *_methods(
        f"{_VLLM}.vllm_worker.VllmGenerationWorkerImpl",
        ("generate", "self, data", False),
        ("_create_engine", "self, llm_kwargs", True),
    ),
    *_methods(
        f"{_VLLM}.vllm_worker_async.VllmAsyncGenerationWorkerImpl",
        ("_create_engine", "self, llm_kwargs", True),
        ("update_weights_via_ipc_zmq_async", "self", True),
        ("update_weights_from_collective_async", "self", True),
    ),
    *_methods(
        f"{_VLLM}.vllm_backend.VllmInternalWorkerExtension",
        ("_weight_update_lifecycle", "self, transport", True),
        ("_load_hf_weights", "self, policy_weights", True),
        ("_uses_fp8_kv_cache", "self", False),
    ),
    Upstream(
        "nemo_rl.models.megatron.setup",
        "setup_model_and_optimizer",
        "policy_cfg, megatron_cfg, load_optimizer, *, additional_pre_wrap_hooks=...",
    ),
    *_methods(
        f"{_MEGATRON}.MegatronPolicyWorkerImpl",
        (
            "__init__",
            "self, config, *, tokenizer, weights_path=..., worker_sharding_annotations",
            False,
        ),
        *_OF_TRAINERS,
        ("get_logprobs", "self, *, data, micro_batch_size=..., require_router_replay=...", False),
        ("train_microbatch", "self, data", False),
        ("finish_train_step", None, False),
    ),
    *(
        entry
        for path, taken, unless in (
            (f"{_DTENSOR}.DTensorPolicyWorkerImpl", "tokenizer, weights_path=...", _NEW),
            (f"{_SECOND}.DTensorPolicyWorkerV2Impl", "weights_path=...", _NEW),
            (f"{_AUTOMODEL}.AutomodelPolicyWorkerImpl", "weights_path=...", _OLD),
        )
        for entry in _methods(
            path,
            ("__init__", f"self, config, *, {taken}, init_optimizer=...", False),
            *_OF_TRAINERS,
            ("prepare_refit_info", "self", False),
            ("get_logprobs", "self, *, data, micro_batch_size=...", False),
            unless=unless,
        )
    ),
)


def apply(module: ModuleType, finder: PatchFinder) -> None:
    upstream = next(u for u in UPSTREAM if u.module == module.__name__)
    constructor = _POLICY if module.__name__ == _POLICY.module else _GENERATION
    asks = _trainer_asks if constructor is _POLICY else _rollouts_ask
    if _exists(upstream.unless):
        _wrap_constructor(module, constructor, asks, by_key=True)
        return
    choose = resolve(module, upstream)

    @functools.wraps(choose)
    def choosing(default_cls: str, config: Any, *args: Any, **kwargs: Any) -> str:
        chosen = choose(default_cls, config, *args, **kwargs)
        if chosen not in STANDS_FOR or not asks(config):
            return chosen
        return register(chosen)

    setattr(module, upstream.name, choosing)
    if constructor is _POLICY:
        _wrap_constructor(module, constructor, asks, by_key=False)


def _exists(newer: tuple[str, str] | None) -> bool:
    """Tell whether the imported NeMo RL defines a name, by its source."""
    package = sys.modules.get("nemo_rl")
    if package is None or newer is None:
        return False
    return find_source(package.__path__[0], *newer) is not None


def _wrap_constructor(
    module: ModuleType, constructor: Upstream, asks: Callable[[Any], bool], *, by_key: bool
) -> None:
    """Wrap the constructor of ``Policy`` or ``VllmGeneration``, which starts the workers."""
    construct = resolve(module, constructor)

    @functools.wraps(construct)
    def __init__(*args: Any, **kwargs: Any) -> None:
        given = inspect.signature(construct).bind(*args, **kwargs).arguments
        config = given["config"]
        if asks(config):
            _refuse_another(given.get(WORKER_KEY), config, f"Policy({WORKER_KEY}={{!r}})")
            if by_key:
                section = "policy" if constructor is _POLICY else "policy.generation"
                _refuse_another(config.get(WORKER_KEY), config, f"{section}.{WORKER_KEY}={{!r}}")
                config[WORKER_KEY] = register(_replaced(config))
        construct(*args, **kwargs)

    getattr(module, constructor.name.partition(".")[0]).__init__ = __init__


def _refuse_another(extension: str | None, config: Any, place: str) -> None:
    """Refuse another class in the place of ours."""
    if extension is None or is_our_worker(extension):
        return
    plan = RunPlan.of(config)
    section = VLLM if plan is None or plan.of_trainer is None else plan.trainer
    kind = "vLLM" if plan is None else "Megatron" if plan.megatron else "DTensor"
    raise UnsupportedError(
        f"{place.format(extension)} replaces the {kind} worker that '{section}.{BLOCK}' needs; "
        "leave it out, or remove the block."
    )


def _replaced(config: Any) -> str:
    """Return upstream's class that a config would start, without our keys."""
    plan = RunPlan.of(config)
    if plan is not None:
        megatron, first, second, automodel = _TRAINERS
        if plan.megatron:
            return megatron
        if plan.trainer == AUTOMODEL:
            return automodel
        return second if config["dtensor_cfg"].get("_v2") else first
    return _ASYNCHRONOUS if config["vllm_cfg"]["async_engine"] else _SYNCHRONOUS


def register(upstream: str) -> str:
    """Enter our subclass of a worker into upstream's table of Python environments.

    Upstream makes one virtual environment per class name. Ours is the environment of the class that
    it stands for, where this distribution has been installed.
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

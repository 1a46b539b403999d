"""Ray actor: NeMo RL's Automodel policy worker with FP8 linear layers and observed KV scales.

As :mod:`nemo_rl_ext.workers.dtensor`, for the models of transformers that Automodel builds.
"""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import Any

import ray
from nemo_rl.models.policy.utils import get_runtime_env_for_policy_worker

from nemo_rl_ext.workers.dtensor_training import Fp8DTensorTraining

_WORKERS = "nemo_rl.models.policy.workers"
_SINCE_080 = find_spec(f"{_WORKERS}.automodel_policy_worker") is not None
_MODULE = "automodel_policy_worker" if _SINCE_080 else "dtensor_policy_worker_v2"
_CLASS = "AutomodelPolicyWorkerImpl" if _SINCE_080 else "DTensorPolicyWorkerV2Impl"
_Upstream: Any = getattr(importlib.import_module(f"{_WORKERS}.{_MODULE}"), _CLASS)


class Fp8AutomodelPolicyWorkerImpl(Fp8DTensorTraining, _Upstream):
    """Upstream's worker, converted and observed."""


@ray.remote(runtime_env=get_runtime_env_for_policy_worker(_MODULE))
class Fp8AutomodelPolicyWorker(Fp8AutomodelPolicyWorkerImpl):
    """The actor class of :class:`Fp8AutomodelPolicyWorkerImpl`."""

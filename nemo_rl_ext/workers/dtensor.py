"""Ray actor: NeMo RL's first DTensor policy worker with FP8 linear layers and observed KV scales.

As :mod:`nemo_rl_ext.workers.megatron`, for models of transformers under FSDP2.
"""

from __future__ import annotations

import ray
from nemo_rl.models.policy.utils import get_runtime_env_for_policy_worker
from nemo_rl.models.policy.workers.dtensor_policy_worker import DTensorPolicyWorkerImpl

from nemo_rl_ext.workers.dtensor_training import Fp8DTensorTraining


class Fp8DTensorPolicyWorkerImpl(Fp8DTensorTraining, DTensorPolicyWorkerImpl):
    """Upstream's worker, converted and observed."""


@ray.remote(runtime_env=get_runtime_env_for_policy_worker("dtensor_policy_worker"))
class Fp8DTensorPolicyWorker(Fp8DTensorPolicyWorkerImpl):
    """The actor class of :class:`Fp8DTensorPolicyWorkerImpl`."""

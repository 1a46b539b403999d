"""Ray actor: NeMo RL's Automodel policy worker with FP8 linear layers and observed KV scales.

As :mod:`nemo_rl_ext.workers.dtensor`, for the models of transformers that Automodel builds.
"""

from __future__ import annotations

import ray
from nemo_rl.models.policy.utils import get_runtime_env_for_policy_worker
from nemo_rl.models.policy.workers.dtensor_policy_worker_v2 import DTensorPolicyWorkerV2Impl

from nemo_rl_ext.workers.dtensor_training import Fp8DTensorTraining


class Fp8AutomodelPolicyWorkerImpl(Fp8DTensorTraining, DTensorPolicyWorkerV2Impl):
    """Upstream's worker, converted and observed."""


@ray.remote(runtime_env=get_runtime_env_for_policy_worker("dtensor_policy_worker_v2"))
class Fp8AutomodelPolicyWorker(Fp8AutomodelPolicyWorkerImpl):
    """The actor class of :class:`Fp8AutomodelPolicyWorkerImpl`."""

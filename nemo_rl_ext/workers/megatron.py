"""Ray actor: NeMo RL's Megatron policy worker with FP8 linear layers and observed KV scales.

NeMo RL names it by :data:`nemo_rl_ext.patches.worker_classes.STANDS_FOR`. As upstream does, the
class is written plainly first, because an actor class cannot be subclassed or pickled by name.
"""

from __future__ import annotations

import ray
from nemo_rl.models.policy.utils import get_runtime_env_for_policy_worker
from nemo_rl.models.policy.workers import megatron_policy_worker

from nemo_rl_ext.workers.training import Fp8Training


class Fp8MegatronPolicyWorkerImpl(Fp8Training, megatron_policy_worker.MegatronPolicyWorkerImpl):
    """Upstream's worker, converted and observed."""

    upstream_module = megatron_policy_worker


@ray.remote(runtime_env=get_runtime_env_for_policy_worker("megatron_policy_worker"))
class Fp8MegatronPolicyWorker(Fp8MegatronPolicyWorkerImpl):
    """The actor class of :class:`Fp8MegatronPolicyWorkerImpl`."""

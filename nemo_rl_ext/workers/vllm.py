"""Ray actors: NeMo RL's vLLM workers with an engine of fp8rl.

NeMo RL names them by :data:`nemo_rl_ext.patches.worker_classes.STANDS_FOR`. As upstream does, each
class is written plainly first, because an actor class cannot be subclassed or pickled by name.
This module must not import vLLM: upstream sets its environment first.
"""

from __future__ import annotations

import ray
from nemo_rl.distributed.worker_group_utils import get_nsight_config_if_pattern_matches
from nemo_rl.models.generation.vllm.vllm_worker import VllmGenerationWorkerImpl
from nemo_rl.models.generation.vllm.vllm_worker_async import VllmAsyncGenerationWorkerImpl

from nemo_rl_ext.workers.in_flight import RefitInFlight
from nemo_rl_ext.workers.rollout_engine import RestartableEngine


class Fp8VllmGenerationWorkerImpl(RestartableEngine, VllmGenerationWorkerImpl):
    """Upstream's synchronous worker."""


class Fp8VllmAsyncGenerationWorkerImpl(
    RefitInFlight, RestartableEngine, VllmAsyncGenerationWorkerImpl
):
    """Upstream's asynchronous worker."""


@ray.remote(runtime_env=get_nsight_config_if_pattern_matches("vllm_generation_worker"))
class Fp8VllmGenerationWorker(Fp8VllmGenerationWorkerImpl):
    """The actor class of :class:`Fp8VllmGenerationWorkerImpl`."""


@ray.remote(runtime_env=get_nsight_config_if_pattern_matches("vllm_async_generation_worker"))
class Fp8VllmAsyncGenerationWorker(Fp8VllmAsyncGenerationWorkerImpl):
    """The actor class of :class:`Fp8VllmAsyncGenerationWorkerImpl`."""

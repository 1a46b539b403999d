"""Ray actors: NeMo RL's vLLM workers with an engine of fp8rl.

NeMo RL names them by :data:`nemo_rl_ext.patches.worker_classes.STANDS_FOR`. As upstream does, each
class is written plainly first, because an actor class cannot be subclassed or pickled by name.
This module must not import vLLM: upstream sets its environment first.
"""

from __future__ import annotations

from typing import Any

import ray
from nemo_rl.distributed.worker_group_utils import get_nsight_config_if_pattern_matches
from nemo_rl.models.generation.vllm.vllm_worker import VllmGenerationWorkerImpl
from nemo_rl.models.generation.vllm.vllm_worker_async import VllmAsyncGenerationWorkerImpl

from nemo_rl_ext.workers.in_flight import RefitInFlight
from nemo_rl_ext.workers.rollout_engine import RolloutEngine
from nemo_rl_ext.workers.rollout_outputs import RequestsFlatLogprobs, SampledLogprobs


class Fp8VllmGenerationWorkerImpl(RequestsFlatLogprobs, RolloutEngine, VllmGenerationWorkerImpl):
    """Upstream's synchronous worker, with less of a rollout's work on the host."""

    def generate(self, data: Any, *args: Any, **kwargs: Any) -> Any:
        """Upstream's ``generate``, whose log-probabilities are written a sequence at a time."""
        llm = self.llm
        self.llm = kept = SampledLogprobs(llm)
        try:
            result = super().generate(data, *args, **kwargs)
        finally:
            self.llm = llm
        kept.write(result["logprobs"], data["input_lengths"])
        return result


class Fp8VllmAsyncGenerationWorkerImpl(
    RefitInFlight, RequestsFlatLogprobs, RolloutEngine, VllmAsyncGenerationWorkerImpl
):
    """Upstream's asynchronous worker, with less of a rollout's work on the host."""


@ray.remote(runtime_env=get_nsight_config_if_pattern_matches("vllm_generation_worker"))
class Fp8VllmGenerationWorker(Fp8VllmGenerationWorkerImpl):
    """The actor class of :class:`Fp8VllmGenerationWorkerImpl`."""


@ray.remote(runtime_env=get_nsight_config_if_pattern_matches("vllm_async_generation_worker"))
class Fp8VllmAsyncGenerationWorker(Fp8VllmAsyncGenerationWorkerImpl):
    """The actor class of :class:`Fp8VllmAsyncGenerationWorkerImpl`."""

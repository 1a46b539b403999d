"""Stand-ins for the parts of NeMo RL's config and of its vLLM workers that a test calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

if TYPE_CHECKING:
    from support.engine import Engine  # sets what vLLM reads at import


class Section(BaseModel, extra="allow"):
    """A section that is a model, as some of upstream's are."""


class MasterConfig(BaseModel, extra="allow"):
    """As upstream's: sections are plain, but the loss is a model."""

    policy: dict[str, Any]
    loss_fn: Section


class Closing:
    """NeMo RL's extension of vLLM's worker: what is called before an engine ends."""

    closed = 0

    def cleanup(self) -> None:
        Closing.closed += 1


def extension(engine: Engine) -> Any:
    """Our worker extension over the engine's worker, as vLLM mixes it in."""
    from nemo_rl_ext.workers.vllm_extension import Fp8VllmWorkerExtension

    worker = engine.llm.llm_engine.model_executor.driver_worker.worker
    mixed: Any = Fp8VllmWorkerExtension()
    mixed.model_runner = worker.model_runner
    mixed.model_config = worker.model_config
    mixed.device = worker.device
    return mixed

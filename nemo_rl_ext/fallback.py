"""The guard's last stage, in the process that refits: engines start anew in BF16."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from fp8rl.errors import UnsupportedError
from nemo_rl_ext import rollout_engine
from nemo_rl_ext.config_keys import announce_bf16
from nemo_rl_ext.guard import LOGGER

logger = logging.getLogger(LOGGER)

POLL_S = 0.5
TOLD_EVERY_S = 60.0


def fall_back(policy: Any, generation: Any, synchronizer: Any = None) -> None:
    """Start every rollout engine anew in BF16, and let it be refitted.

    The workers stay, and with them the handles, ports and places that others know. Engines that
    share GPUs with the trainer have them alone meanwhile. Running requests are waited for, new ones
    wait. The trainer sends no KV scales any more, and both sides agree anew on what a refit holds
    and by which group of ranks it goes.

    Args:
        policy: NeMo RL's ``Policy``.
        generation: its ``VllmGeneration``.
        synchronizer: the loop's ``WeightSynchronizer``; None where the loop has none.

    Raises:
        UnsupportedError: an engine did not start; the run has no rollouts any more.
    """
    shared = generation.cfg["colocated"]["enabled"]
    workers = generation.worker_group.workers
    started = time.perf_counter()
    logger.warning("fp8rl guard: rollouts go to BF16 for the rest of this run.")
    if shared:
        policy.offload_after_refit()
    _on(workers, rollout_engine.hold)
    _wait_for_running(workers)
    try:
        seconds = _on(workers, rollout_engine.restart_in_bf16)
        generation._post_init()
    except Exception as error:
        raise UnsupportedError(
            "The guard could not start BF16 rollouts in the place of FP8 ones "
            f"({type(error).__name__}: {error}); resume the last checkpoint with rollout=false in "
            "the fp8rl block and policy.generation.vllm_cfg.precision=bfloat16."
        ) from error
    _on(policy.worker_group.workers, announce_to_trainer)
    announce_bf16(generation.cfg)
    if shared:
        generation.finish_generation()
        policy.prepare_for_lp_inference()  # a refit reads weights on the GPU
    (synchronizer or _synchronizer(policy, generation, shared)).init_communicator()
    engines = [s for s in seconds if s is not None]
    logger.warning(
        "fp8rl guard: rollouts are in BF16: %d engines started in %.0f s, %.0f s in all.",
        len(engines),
        max(engines),
        time.perf_counter() - started,
    )


def _synchronizer(policy: Any, generation: Any, shared: bool) -> Any:
    from nemo_rl.weight_sync.factory import create_weight_synchronizer

    return create_weight_synchronizer(
        policy,
        generation,
        generation_backend="vllm",
        colocated=shared,
        train_cluster=policy.worker_group.cluster,
        inference_cluster=generation.worker_group.cluster,
    )


def announce_to_trainer(worker: Any) -> None:
    """Let a policy worker send what a BF16 engine takes."""
    announce_bf16(worker.cfg["generation"])


def _on(workers: list[Any], function: Callable[[Any], Any]) -> list[Any]:
    import ray

    results: list[Any] = ray.get([worker.__ray_call__.remote(function) for worker in workers])
    return results


def _wait_for_running(workers: list[Any]) -> None:
    told = time.perf_counter()
    while requests := sum(_on(workers, rollout_engine.running)):
        if time.perf_counter() - told > TOLD_EVERY_S:
            logger.warning("fp8rl guard: %d FP8 rollouts are still running.", requests)
            told = time.perf_counter()
        time.sleep(POLL_S)

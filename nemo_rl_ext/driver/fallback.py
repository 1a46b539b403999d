"""The guard's last stage, in the process that refits: rollout engines start anew in BF16."""

from __future__ import annotations

import logging
import time
from typing import Any

from fp8rl.errors import UnsupportedError
from nemo_rl_ext.config.merge import trainer_knows_kv_cache, withdraw_kv_cache
from nemo_rl_ext.names import LOGGER

logger = logging.getLogger(LOGGER)

POLL_S = 0.5
LOG_EVERY_S = 60.0


def fall_back(policy: Any, generation: Any, synchronizer: Any = None) -> None:
    """Start every rollout engine anew in BF16, ready for a refit and, after it, :func:`release`.

    The workers stay, and with them the handles, ports and GPUs that others know. A trainer that
    shares GPUs with the engines leaves them meanwhile. Running requests are waited for (the loops
    start no new ones before a refit); later ones wait. The trainer sends no more KV scales and
    rounds no K and V, and both sides agree anew on the content of a refit and on its process group.

    Args:
        policy: NeMo RL's ``Policy``.
        generation: its ``VllmGeneration``.
        synchronizer: the loop's ``WeightSynchronizer``; None where the loop has none.

    Raises:
        UnsupportedError: an engine did not start; the run cannot go on.
    """
    shared = generation.cfg["colocated"]["enabled"]
    workers = generation.worker_group.workers
    started = time.perf_counter()
    logger.warning("fp8rl guard: rollouts go to BF16 for the rest of this run.")
    try:
        if shared:
            policy.offload_after_refit()
        _wait_until_idle(workers)
        seconds = [s for s in _call(workers, "restart_in_bf16") if s is not None]
        if len(seconds) != generation.dp_size:
            raise UnsupportedError(f"{len(seconds)} of {generation.dp_size} engines are fp8rl's.")
        generation._post_init()
        if trainer_knows_kv_cache(generation.cfg["vllm_cfg"]):
            _call(policy.worker_group.workers, "withdraw_kv_cache")
            withdraw_kv_cache({"generation": generation.cfg})
        if shared:
            if not generation.finish_generation():
                raise UnsupportedError("The new engines do not go to sleep.")
            policy.prepare_for_lp_inference()  # a refit reads weights on the GPU
        (synchronizer or _synchronizer(policy, generation, shared)).init_communicator()
    except Exception as error:
        raise UnsupportedError(
            "The guard could not start BF16 rollouts in the place of FP8 ones "
            f"({type(error).__name__}: {error}); resume the last checkpoint with rollout=false in "
            "the fp8rl block and policy.generation.vllm_cfg.precision=bfloat16."
        ) from error
    logger.warning(
        "fp8rl guard: rollouts are in BF16: %d engines started in %.0f s, %.0f s in all.",
        len(seconds),
        max(seconds),
        time.perf_counter() - started,
    )


def release(generation: Any) -> None:
    """Let requests that have come since :func:`fall_back` go on."""
    _call(generation.worker_group.workers, "release")


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


def _call(workers: list[Any], method: str) -> list[Any]:
    """Call a method of :mod:`nemo_rl_ext.workers` on Ray's handles; results in their order."""
    import ray

    results: list[Any] = ray.get([getattr(worker, method).remote() for worker in workers])
    return results


def _wait_until_idle(workers: list[Any]) -> None:
    """Close each engine's gate when its last request has ended."""
    logged = time.perf_counter()
    busy = workers
    while True:
        idle = _call(busy, "hold_if_idle")
        busy = [worker for worker, held in zip(busy, idle, strict=True) if not held]
        if not busy:
            return
        if time.perf_counter() - logged > LOG_EVERY_S:
            logger.warning("fp8rl guard: %d engines still have rollouts in FP8.", len(busy))
            logged = time.perf_counter()
        time.sleep(POLL_S)

"""vLLM workers: every transport's weights go through a refit session of the vLLM plugin.

Why: plain ``load_weights`` cannot know whether a set is complete; a session refuses a mixture of
old and new weights, some of the KV scales, and NaN.
How: the session opens and ends with ``_weight_update_lifecycle``, which the CUDA-IPC and collective
transports share, and ``_load_hf_weights`` loads into it. Batches of the collective transport come
on alternating CUDA streams; each waits for the one before. Engines without ``fp8rl`` go upstream's
way.
Upstream: ``nemo_rl/models/generation/vllm/vllm_backend.py``.
Goes: when the worker extension is a key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from nemo_rl_ext.patches.ledger import Seams
from nemo_rl_ext.patches.upstream import Upstream, resolve

_MODULE = "nemo_rl.models.generation.vllm.vllm_backend"
UPSTREAM = (
    Upstream(
        _MODULE, "VllmInternalWorkerExtension._weight_update_lifecycle", ("self", "transport")
    ),
    Upstream(_MODULE, "VllmInternalWorkerExtension._load_hf_weights", ("self", "policy_weights")),
    Upstream(_MODULE, "VllmInternalWorkerExtension._uses_fp8_kv_cache", ("self",)),
)


def apply(module: ModuleType, seams: Seams) -> None:
    for upstream in UPSTREAM:
        resolve(module, upstream)
    extension = module.VllmInternalWorkerExtension
    lifecycle, load = extension._weight_update_lifecycle, extension._load_hf_weights

    @contextmanager
    def _weight_update_lifecycle(self: Any, transport: str) -> Iterator[Callable[[], None]]:
        from nemo_rl_ext.workers.rollout import FencedSession, is_ours

        if not is_ours(self.model_runner.vllm_config):
            with lifecycle(self, transport) as finalize:
                yield finalize
            return
        session = FencedSession(self.model_runner.model, self._uses_fp8_kv_cache())
        self._fp8rl_session = session
        try:
            with session, lifecycle(self, transport) as finalize:

                def finish() -> None:
                    session.finish()  # before upstream tells the sender that all is well
                    finalize()

                yield finish
        finally:
            self._fp8rl_session = None

    def _load_hf_weights(self: Any, policy_weights: list[tuple[str, Any]]) -> None:
        session = getattr(self, "_fp8rl_session", None)
        if session is None:
            load(self, policy_weights)
        else:
            session.load(policy_weights)

    extension._weight_update_lifecycle = _weight_update_lifecycle
    extension._load_hf_weights = _load_hf_weights

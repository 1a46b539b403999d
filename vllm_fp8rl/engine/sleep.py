"""Sleep mode: the guard of a sleeping model knows what has been given back.

vLLM lets plugins register sleep-mode backends. This one is vLLM's own ``cumem`` (the only one it
brings); it also tells the :class:`~vllm_fp8rl.engine.guard.RefitGuard` of each model which memory
is given back and returned. :func:`watch` selects it for an engine with ``quantization="fp8rl"``.

Level 1 keeps weights on the host. Level 2 discards every parameter; vLLM itself then serves
whatever the new memory holds. KV scales survive both, because loaded values live in
``LayerKVScales`` on the host and are written again in the first step after a wake-up.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from vllm.device_allocator.sleep_mode_backend import CuMemBackend, SleepModeBackendFactory
from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO

from fp8rl.errors import UnsupportedError
from vllm_fp8rl.engine.guard import RefitGuard
from vllm_fp8rl.engine.rank_state import find_state

BACKEND = "fp8rl_cumem"
_STOCK = "cumem"
_TAGS = ("weights", "kv_cache")


def watch(model_config: Any, guard: RefitGuard) -> None:
    """Choose the backend for an engine that may sleep, unless it has one of its own (an error)."""
    if not model_config.enable_sleep_mode:
        return
    if model_config.sleep_mode_backend not in (_STOCK, BACKEND):
        raise UnsupportedError(
            f"fp8rl cannot tell what sleep_mode_backend='{model_config.sleep_mode_backend}' does "
            f"to weights and KV scales; leave it at '{_STOCK}'."
        )
    try:
        SleepModeBackendFactory.get_backend_class(BACKEND)
    except ValueError:
        SleepModeBackendFactory.register_backend(BACKEND, __name__, WatchedBackend.__name__)
    model_config.sleep_mode_backend = BACKEND
    guard.may_sleep = True


class WatchedBackend(CuMemBackend):
    """vLLM's backend, which also tells the guards of the models that sleep.

    vLLM has one allocator a process, so all engines of a process sleep together.
    """

    def suspend(self, level: int = 1) -> None:
        for guard, model in guarded_models():
            guard.sleep(_TAGS, {} if level == 1 else dict(discardable(model)))
        super().suspend(level)

    def resume(self, tags: list[str] | None = None) -> None:
        super().resume(tags)
        for guard, _ in guarded_models():
            guard.wake(tags)

    def discard(self, tags: tuple[str, ...]) -> None:
        """Give memory with certain tags back without keeping its contents (vLLM 0.31 and later)."""
        for guard, model in guarded_models():
            lost = dict(discardable(model)) if "weights" in tags else {}
            guard.sleep([tag for tag in _TAGS if tag in tags], lost)
        super().discard(tags)


def guarded_models() -> Iterator[tuple[RefitGuard, torch.nn.Module]]:
    """Yield every live model in this process whose engine may sleep, with its guard.

    vLLM hands a sleep-mode backend no worker; its table of loaded modules has the models.
    """
    modules = list(LAYERWISE_INFO)
    children = {id(child) for module in modules for child in module.children()}
    for model in (module for module in modules if id(module) not in children):
        state = find_state(model)
        if state is not None and state.guard.may_sleep:
            yield state.guard, model


def discardable(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters that only a refit brings back: all but KV scales, kept on the host."""
    for path, module in model.named_modules():
        if hasattr(module, "kv_cache_dtype"):  # an attention layer
            continue
        for leaf, parameter in module.named_parameters(recurse=False):
            yield f"{path}.{leaf}" if path else leaf, parameter

"""vLLM's ``reload_weights`` and its layerwise reload, as plain loads that must be complete.

See :mod:`vllm_fp8rl.patches.ledger`.
"""

from __future__ import annotations

import copy
import uuid
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import chain, islice
from typing import Any

import torch

from fp8rl.errors import RefitError, UnsupportedError
from vllm_fp8rl.engine.guard import REMEDY
from vllm_fp8rl.engine.names import NAME, uses_fp8rl
from vllm_fp8rl.engine.rank_state import find_state, state_of
from vllm_fp8rl.kv.observer import stop_observing
from vllm_fp8rl.kv.scales import forget_kv_scales
from vllm_fp8rl.refit.receiver.inventory import Inventory, require_one_stage
from vllm_fp8rl.refit.tensor_stream import Named, came_twice, pulled


class Reload:
    """A reload of all weights of one rank's model, in place.

    A layerwise one is the open session of its model: it takes several calls of
    ``model.load_weights``, and one that fails ends it. The KV cache, whose keys are those of older
    weights, is left to its caller.

    Its tensors come by ``model.load_weights``; vLLM maps and skips names as at the engine's start.
    From the first of them on the model is closed until every tensor has come.

    Args:
        model: the vLLM model of this rank.
        what: what reloads, as the beginning of a sentence.

    Raises:
        RefitError: a refit or another load is under way, or the weights sleep.
        UnsupportedError: a pipeline-parallel engine.
    """

    loading = False

    def __init__(self, model: Any, what: str, *, layerwise: bool = False) -> None:
        self.name = uuid.uuid4().hex
        self._model, self._what = model, what
        self._guard = state_of(model).guard
        self._guard.require_free(what)
        self._guard.require_awake()
        require_one_stage()
        self._inventory = Inventory.of(model)
        self._wrote = False
        self._seen: set[str] = set()
        self._loaded: set[str] = set()
        if layerwise:
            self._guard.session = self

    def taken(self, weights: Iterable[Named]) -> Iterator[Named]:
        """Close the model and return the tensors of one ``load_weights``.

        Before that, an unreadable checkpoint, a first tensor of NaN, or a name that comes twice in
        a collection changes nothing. Others are read one by one while they are loaded, because a
        checkpoint need not fit into memory.

        Raises:
            RefitError: a name that comes again; a value that is not finite.
        """
        if isinstance(weights, Collection):
            deque(_once(weights, set(self._seen)), maxlen=0)
        stream = iter(weights)
        first = list(islice(stream, 1))
        self._guard.values.look(first, self._model)
        if first and not self._wrote:
            stop_observing(self._model)  # of a calibration that broke off
            for grid in self._inventory.grids:
                grid.forget_unpaired()
            self._guard.values.owed = None  # every tensor must come, in this or in later loads
            self._guard.close(self._broke_off)
            self._wrote = True
        return _once(chain(first, stream), self._seen)

    def took(self, loaded: Iterable[str]) -> None:
        """Note the engine parameters that a ``load_weights`` of this reload has written to."""
        self._loaded.update(loaded)

    def abandon(self, reason: str) -> None:
        """Give up, where the reload is the open session of its model."""
        if self._guard.session is self:
            self._guard.session = None
            if self._wrote:
                self._guard.close(f"{self._broke_off} ({reason})")

    def finish(self) -> None:
        """Let the model run; RefitError, and it stays closed, where tensors are missing."""
        if self._guard.session is self:
            self._guard.session = None
        owed = self._guard.values.owed if self._wrote else None
        missing = sorted(self._inventory.required if owed is None else owed)
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # from now on the sender may free or reuse its tensors
        if not missing:
            self._guard.open()
        scales = self._inventory.kv_scales_among(self._loaded)  # by any name of the checkpoint
        if scales and not self._inventory.kv_scales <= scales:
            missing += sorted(self._inventory.kv_scales - scales)
            forget_kv_scales(self._model)  # some are new, others old
        if missing:
            raise RefitError(
                f"{self._what} lacks {len(missing)} of the model's tensors, such as "
                f"'{missing[0]}'; {REMEDY}."
            )

    @property
    def _broke_off(self) -> str:
        return f"The weights are half-updated: {self._what} broke off or was incomplete"


def begin_layerwise(initialize: Callable[..., Any]) -> Callable[..., Any]:
    """Replace ``initialize_layerwise_reload`` by the beginning of a :class:`Reload`.

    One that was never finished is given up: its sender begins again.
    """

    def initialize_layerwise_reload(model: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        state = find_state(model)
        if state is None:
            return initialize(model, *args, **kwargs)
        before = state.guard.session
        if isinstance(before, Reload):
            state.guard.require_free("A layerwise reload", beside=before)
            before.abandon("it was begun again")
        Reload(model, "The layerwise reload", layerwise=True)
        return None

    return initialize_layerwise_reload


def finish_layerwise(finalize: Callable[..., Any]) -> Callable[..., Any]:
    """Replace ``finalize_layerwise_reload`` by the end of that :class:`Reload`."""

    def finalize_layerwise_reload(model: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        state = find_state(model)
        if state is None:
            return finalize(model, *args, **kwargs)
        if not isinstance(state.guard.session, Reload):
            raise RefitError(
                "No layerwise reload is under way: it was not begun, or has broken off; begin with "
                "initialize_layerwise_reload and send all tensors again."
            )
        state.guard.require_free("Its end", beside=state.guard.session)
        state.guard.session.finish()
        return None

    return finalize_layerwise_reload


def reload_in_place(reload: Callable[..., Any]) -> Callable[..., Any]:
    """Replace ``GPUModelRunner.reload_weights`` by a load in place, for models of fp8rl."""

    def reload_weights(runner: Any, *args: Any, **kwargs: Any) -> None:
        if uses_fp8rl(runner.vllm_config):
            _reload(runner, *args, **kwargs)
        else:
            reload(runner, *args, **kwargs)

    return reload_weights


def _reload(
    runner: Any,
    weights_iterator: Iterable[Named] | None = None,
    weights_path: str | None = None,
    is_checkpoint_format: bool = True,
) -> None:
    if not is_checkpoint_format:
        raise UnsupportedError(
            "reload_weights(is_checkpoint_format=False) copies tensors into FP8 storage unseen, "
            f"which quantization='{NAME}' does not serve; send HF tensors, without that argument "
            "or with vllm_fp8rl.refit.refit."
        )
    if weights_iterator is not None:
        _reload_from(runner.get_model(), weights_iterator)
        return
    # vLLM 0.25.1's update_config replaces the configs of the runner, not those of the engine.
    config = copy.copy(runner.model_config)
    if weights_path is not None:
        config.model, config.model_weights, config.revision = weights_path, "", None
    _reload_from(runner.get_model(), _checkpoint(runner, config))
    if weights_path is not None:
        live = runner.model_config
        live.model, live.model_weights, live.revision = weights_path, "", None


def _reload_from(model: Any, weights: Iterable[Named]) -> None:
    reload, guard = Reload(model, "reload_weights"), state_of(model).guard
    stream = pulled(weights)
    with guard.plain_load:  # the sender's code runs for the first tensor
        tensors = reload.taken(list(stream) if isinstance(weights, Collection) else stream)
    guard.outdate_cache("keys of older weights")
    reload.took(model.load_weights(tensors))
    reload.finish()


def _once(weights: Iterable[Named], seen: set[str]) -> Iterator[Named]:
    """Yield the tensors; RefitError for a name that has been seen."""
    for name, tensor in weights:
        if name in seen:
            raise came_twice(name)
        seen.add(name)
        yield name, tensor


def _checkpoint(runner: Any, config: Any) -> Iterable[Named]:
    """Return the tensors of the checkpoint that a model config names."""
    from vllm.model_executor.model_loader import get_model_loader

    loader: Any = get_model_loader(runner.load_config)
    if not hasattr(loader, "get_all_weights"):
        raise UnsupportedError(
            f"reload_weights has no checkpoint to read with load_format="
            f"'{runner.load_config.load_format}'; send tensors with "
            "vllm_fp8rl.refit.refit, or start the engine from a checkpoint."
        )
    return loader.get_all_weights(config, runner.get_model())

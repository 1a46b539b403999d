"""vLLM's ``reload_weights`` as a plain load; see :mod:`vllm_fp8rl.patches.ledger`."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import chain, islice
from typing import Any

import torch

from fp8rl.errors import RefitError, UnsupportedError
from vllm_fp8rl.guard import REMEDY
from vllm_fp8rl.kv_observer import stop_observing
from vllm_fp8rl.kv_scales import forget_kv_scales
from vllm_fp8rl.names import NAME, uses_fp8rl
from vllm_fp8rl.refit.intake import Named, came_twice
from vllm_fp8rl.refit.inventory import Inventory, require_one_stage
from vllm_fp8rl.state import state_of

_BROKE_OFF = "The weights are half-updated: reload_weights broke off or was incomplete"


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
        _load_all(runner.get_model(), weights_iterator)
        return
    # vLLM 0.25.1's update_config replaces the configs of the runner, not those of the engine.
    config = copy.copy(runner.model_config)
    if weights_path is not None:
        config.model, config.model_weights, config.revision = weights_path, "", None
    _load_all(runner.get_model(), _checkpoint(runner, config))
    if weights_path is not None:
        live = runner.model_config
        live.model, live.model_weights, live.revision = weights_path, "", None


def _load_all(model: Any, weights: Iterable[Named]) -> None:
    """Load a whole checkpoint in place; vLLM maps and skips names as at the engine's start.

    Raises:
        RefitError: a refit is under way, or the weights sleep. Also for a value that is not finite,
            a name that comes twice and missing tensors, after which the model stays closed until
            all tensors have come, unless it was found before the first write.
        UnsupportedError: a pipeline-parallel engine.
    """
    guard = state_of(model).guard
    if guard.session is not None:
        raise RefitError(
            f"A refit of this model, '{guard.session.name}', is under way; call reload_weights "
            "after it has ended."
        )
    guard.require_awake()
    require_one_stage()
    inventory = Inventory.of(model)
    if isinstance(weights, Collection):  # nothing is changed yet; a stream is checked later
        deque(_once(weights), maxlen=0)
    stream = iter(weights)
    first = list(islice(stream, 1))
    # An unreadable checkpoint and a first tensor of NaN change nothing. Those behind it are read
    # one by one while they are loaded, because a checkpoint need not fit into memory.
    guard.values.look(first, model)
    stop_observing(model)  # of a calibration that broke off
    for grid in inventory.grids:
        grid.forget_unpaired()
    guard.outdate_cache("keys of older weights")
    guard.values.owed = None  # every tensor must come, in this load or in later ones
    guard.close(_BROKE_OFF)
    loaded = model.load_weights(_once(chain(first, stream)))
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # from now on the sender may free or reuse its tensors
    missing = sorted(guard.values.owed or ())
    scales = inventory.kv_scales_among(loaded)  # whatever they were called in the checkpoint
    if scales and not inventory.kv_scales <= scales:
        missing += sorted(inventory.kv_scales - scales)
        forget_kv_scales(model)  # some are new, others old
    if missing:
        raise RefitError(
            f"The reload lacks {len(missing)} of the model's tensors, such as '{missing[0]}'; "
            f"{REMEDY}."
        )


def _once(weights: Iterable[Named]) -> Iterator[Named]:
    """The tensors; RefitError for a name that comes again."""
    seen: set[str] = set()
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

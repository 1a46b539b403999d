"""Plain ``model.load_weights``: values are checked, and a load that breaks off closes the model.

See :mod:`vllm_fp8rl.patches.ledger`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from typing import Any

import torch

from fp8rl.errors import CheckpointError, Fp8RLError
from fp8rl.kv_scales import Role, parse_scale_name, require_one_name
from vllm_fp8rl.compat import reported_name
from vllm_fp8rl.engine.guard import RefitGuard
from vllm_fp8rl.engine.rank_state import RankState, find_state, state_of
from vllm_fp8rl.kv.observer import stop_observing
from vllm_fp8rl.patches.reload import Reload
from vllm_fp8rl.refit.receiver.derived import require_nothing_derived
from vllm_fp8rl.refit.receiver.inventory import Entry, Inventory, entries_of, require_fit
from vllm_fp8rl.refit.tensor_stream import Named, pulled, scalars_on_host

Walk = Callable[[Iterable[Named]], set[str]]

_WALKING: ContextVar[bool] = ContextVar("fp8rl_walking", default=False)
"""Whether vLLM's loader is walking a model in this context; it calls itself for parts of it."""
_BROKE_OFF = "The weights are half-updated: a load broke off"


def check_plain_loads(walk: Callable[..., set[str]]) -> Callable[..., set[str]]:
    """Replace ``AutoWeightsLoader.load_weights`` by one that checks loads for models of fp8rl.

    Models of other quantizations, calls for parts of a model within a walk, and calls by a refit
    session go straight to vLLM's method. A generator, which may reuse its memory and which a
    checkpoint comes as, walks tensor by tensor.
    """

    def load_weights(self: Any, weights: Any, *args: Any, **options: Any) -> set[str]:
        def vllms_walk(batch: Iterable[Named]) -> set[str]:
            return walk(self, batch, *args, **options)

        def by_name(name: str) -> bool:
            """Tell whether vLLM's walk would take the tensor by this name, and not skip it."""
            return usual and not self._can_skip(name)

        if _WALKING.get() or find_state(self.module) is None:
            return vllms_walk(weights)
        mapper = options.get("mapper") or (args[0] if args else None)
        usual = mapper is None or mapper is getattr(type(self.module), "hf_to_vllm_mapper", None)
        # However this ends, the variable is outside as it was before.
        return copy_context().run(_load, self.module, weights, vllms_walk, by_name)

    return load_weights


def _load(
    model: torch.nn.Module, weights: Iterable[Named], walk: Walk, by_name: Callable[[str], bool]
) -> set[str]:
    """Load tensors with the model closed, by the inventory where it has a route for each."""
    _WALKING.set(True)
    state = state_of(model)
    guard = state.guard
    if not state.loaded:
        require_nothing_derived(model)
    if guard.loading:  # a refit session has checked them
        return walk(weights)
    reload = guard.session if isinstance(guard.session, Reload) else None
    guard.require_free("load_weights", beside=reload)
    try:
        with guard.plain_load:
            tensors: Iterable[Named] = _pulled(weights)
            if isinstance(weights, Collection):
                tensors = list(tensors)
            if reload is not None:
                tensors = reload.taken(tensors)
            loaded = _write(model, tensors, walk, by_name)
    except BaseException as error:
        if reload is not None:
            reload.abandon(type(error).__name__)
        raise
    if reload is not None:
        reload.took(loaded)
    return loaded


def _write(
    model: torch.nn.Module, weights: Iterable[Named], walk: Walk, by_name: Callable[[str], bool]
) -> set[str]:
    state = state_of(model)
    guard = state.guard
    if not isinstance(weights, list):
        # At the engine's start vLLM may still replace parameters, so no inventory is kept.
        entries = Inventory.of(model).entries if state.loaded else dict(entries_of(model))
        with _shut(model, guard) as came:
            loaded = walk(_checked(weights, model, entries, came))
            if not state.loaded:
                _require_whole(entries, state, came, loaded)
            return loaded
    names = [name for name, _ in weights]
    inventory = Inventory.of(model, names)
    _check(weights, model, inventory.entries)
    with _shut(model, guard) as came:
        if all(map(by_name, names)) and inventory.routes(names):
            return inventory.write(scalars_on_host(weights), came)
        return walk(noted(weights, came))


def _pulled(weights: Iterable[Named]) -> Iterator[Named]:
    """Yield the tensors, each checked for being one, and KV scales for having one name.

    What pulls a tensor walks no model meanwhile: code of the sender runs there, whose own calls of
    ``load_weights`` must not count as vLLM's.
    """
    stream = pulled(weights)
    scales: dict[tuple[int, Role], str] = {}
    while True:
        _WALKING.set(False)
        item = next(stream, None)
        _WALKING.set(True)
        if item is None:
            return
        place = parse_scale_name(item[0])
        if place is not None:
            require_one_name([(scales.setdefault(place, item[0]), place), (item[0], place)])
        yield item


def _checked(
    weights: Iterable[Named], model: torch.nn.Module, entries: Mapping[str, Entry], came: list[str]
) -> Iterator[Named]:
    """Yield the tensors, which may share memory: each is checked before the next one is pulled."""
    for name, tensor in weights:
        _check([(name, tensor)], model, entries)
        came.append(name)
        yield name, tensor


def _check(weights: Sequence[Named], model: torch.nn.Module, entries: Mapping[str, Entry]) -> None:
    """Check tensors before anything of them is written."""
    for name, tensor in weights:
        if name in entries:
            require_fit(name, tensor, entries[name], model)
    guard = state_of(model).guard
    if guard.values.look(weights, model):
        guard.recheck()


def noted(weights: Iterable[Named], came: list[str]) -> Iterator[Named]:
    """Yield the tensors; the name of each is noted before anything of it can be written."""
    for name, tensor in weights:
        came.append(name)
        yield name, tensor


def _require_whole(
    entries: Mapping[str, Entry], state: RankState, came: Iterable[str], loaded: set[str]
) -> None:
    """Require every tensor of the model from the checkpoint that an engine starts with.

    vLLM checks unquantized models only, and would serve uninitialised memory. Where a checkpoint
    has names that the inventory does not know, a parameter counts as vLLM reports it.
    """
    known = [(name, entries[name]) for name in came if name in entries]
    here = {each for name, entry in known for each in (name, *entry.covers)}
    by_name = {entry.parameter for _, entry in known}
    reported = {reported_name(name) for name in loaded}
    missing = [
        name
        for name, entry in entries.items()
        if entry.required
        and entry.local
        and name not in here
        and (entry.parameter in by_name or reported_name(entry.parameter) not in reported)
    ]
    if missing:
        raise CheckpointError(
            f"The checkpoint lacks {len(missing)} of the model's tensors, such as '{missing[0]}'; "
            "load a complete checkpoint, or use load_format='dummy' and refit."
        )
    state.loaded = True


@contextmanager
def _shut(model: torch.nn.Module, guard: RefitGuard) -> Iterator[list[str]]:
    """Close the model during a load; if the load breaks off, until all tensors have come again.

    The model is closed before the first write, so that it stays closed wherever Ctrl-C comes.

    Yields:
        A list for the names of the tensors whose load has begun.
    """
    came: list[str] = []
    was_open, owed = not guard.closed, guard.values.owed
    guard.values.owed = None
    if was_open:
        guard.close(_BROKE_OFF)
    stop_observing(model)  # a calibration would find the scales of other weights
    guard.restore()  # KV scales may be noted, but not yet written, where the load breaks off
    try:
        yield came
    except BaseException as error:
        if _untouched(model, came, error):
            if was_open:
                guard.open()
            guard.values.owed = owed
        elif was_open:
            guard.close(f"{_BROKE_OFF} ({type(error).__name__})")
        raise
    left = set() if was_open else _left(model, came, owed)
    if was_open or (owed != set() and left == set() and guard.session is None):
        guard.open()
    guard.values.owed = left  # last: until here an interrupt leaves all of them to come again


def _untouched(model: torch.nn.Module, came: list[str], error: BaseException) -> bool:
    """Tell whether an error is known to have come before anything was written."""
    if not isinstance(error, Exception) or isinstance(error, torch.OutOfMemoryError):
        return False
    if len(came) != 1:
        return not came
    entry = Inventory.of(model).entries.get(came[0])
    if entry is None:  # a tensor fused as the engine has it, or a name that nothing takes
        return not any(name == came[0] for name, _ in model.named_parameters())
    return isinstance(error, Fp8RLError) and entry.kind != "fused"


def _left(model: torch.nn.Module, came: Iterable[str], owed: set[str] | None) -> set[str] | None:
    """Return the tensors that must still come after these ones; None: all.

    A part of a model, which knows its tensors by other names, pays nothing.
    """
    inventory = Inventory.of(model)
    if not inventory.whole:
        return owed
    left = set(inventory.required if owed is None else owed)
    for name in came:
        entry = inventory.entries.get(name)
        if entry is not None:
            left -= {name, *entry.covers}
    return left

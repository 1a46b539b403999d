"""`LoadPlan`: what vLLM's loader did with each tensor of a model, done again without the loader.

``AutoWeightsLoader`` walks the model and maps every name anew at each call: 20 to 60 ms a refit of
an 8B model, whose weights quantize in 11 ms. A plan watches one such walk (which parameter, loader
and arguments each HF name reached with its tensor untouched) and afterwards goes straight there,
with few kernel launches for a whole batch. It knows nothing of model classes: a batch with a name
that it did not see, or whose parameter or loader has been replaced since (vLLM's layerwise reload
does that), goes through vLLM.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.model_executor.models.utils import AutoWeightsLoader

from fp8rl.errors import UnsupportedError
from vllm_fp8rl.names import NAME
from vllm_fp8rl.quantization.kv_cache import TAKES_FILL
from vllm_fp8rl.refit.guard import RefitGuard
from vllm_fp8rl.refit.index import ModelIndex, Slot, slots_of
from vllm_fp8rl.storage.block_grid import Writes
from vllm_fp8rl.storage.experts import (
    FUSED,
    SLOTS,
    ExpertGrids,
    ExpertParameter,
    ExpertScale,
    load_fused,
    stack_of,
)
from vllm_fp8rl.storage.parameters import Fp8Scale, Fp8Weight, Shard, ShardedParameter

Named = tuple[str, torch.Tensor]

_PLAN = "fp8rl_load_plan"
_WALKING: ContextVar[bool] = ContextVar("fp8rl_walking", default=False)
"""Whether vLLM's loader is on its way through a model; it calls itself for parts of it."""
_BROKE_OFF = "The weights are a mixture: a load broke off"
_SMALL = 1 << 20  # elements; larger copies do not wait for launches


@dataclass(frozen=True, slots=True)
class Route:
    """What became of one HF tensor: one call of one loader, which may have stored one shard."""

    slot: Slot
    loader: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    shard: Shard | None
    taken: bool
    """False where the loader said that this rank has no place for the tensor."""

    @property
    def live(self) -> bool:
        return self.slot.live and _loader_of(self.slot.parameter) is self.loader

    def replay(self, tensor: torch.Tensor, writes: Writes) -> None:
        """Do the same with another tensor of that name."""
        parameter = self.slot.parameter
        if self.shard is not None:
            assert isinstance(parameter, ShardedParameter)
            parameter.store(tensor, self.shard, writes)
        elif self.loader is default_weight_loader and _alike(parameter, tensor):
            writes.copy(parameter.data, tensor)
        elif hasattr(self.loader, TAKES_FILL):
            self.loader(parameter, tensor, fill=writes.fill)
        else:
            writes.before(parameter.data)
            self.loader(parameter, tensor, *self.args, **self.kwargs)


@dataclass(frozen=True, slots=True)
class ExpertRoute:
    """Where a tensor of an expert, or of all, goes, which :class:`ExpertLayout` knows beforehand.

    vLLM compares each such name with those of all experts, and hands its tensor on as a view.
    """

    slot: Slot
    replay: Callable[[torch.Tensor, Writes], None]
    taken: bool

    @property
    def live(self) -> bool:
        return self.slot.live


@dataclass
class _Window:
    """The time in which vLLM's loader has one tensor in hand."""

    tensor: torch.Tensor
    routes: list[Route] = field(default_factory=list)
    changed: bool = False
    """A loader was given something else, such as a part or a copy."""
    repeated: bool = False


class LoadPlan:
    """The routes of one model's HF names, and how a batch is loaded with or without them."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._irregular: set[str] = set()
        self._wrote = False
        self._owed: set[str] | None = set()
        """Tensors that must come again before the model may run, after a load that broke off; None:
        all of them."""

    @classmethod
    def of(cls, model: torch.nn.Module) -> LoadPlan:
        """The model's plan, made empty at the first call."""
        plan = model.__dict__.get(_PLAN)
        if plan is None:
            plan = model.__dict__[_PLAN] = cls(model)
        return plan

    @functools.cached_property
    def _routes(self) -> dict[str, Route | ExpertRoute]:
        return dict(_expert_routes(self._model))

    def covers(self, names: Iterable[str]) -> bool:
        """Whether a batch of these names needs no walk through the model."""
        return not self._strange(names)

    def _strange(self, names: Iterable[str]) -> list[str]:
        """Names without a route that leads to a parameter of this moment."""
        # vLLM's parameter classes pass every attribute through Python, to no effect.
        with torch._C.DisableTorchFunctionSubclass():
            strange = []
            for name in names:
                route = self._routes.get(name)
                if route is None or not route.live:
                    strange.append(name)
            return strange

    def load(
        self, weights: Collection[Named], walk: Callable[[Iterable[Named]], set[str]]
    ) -> set[str]:
        """Load a batch whose tensors keep their values during the call.

        Args:
            weights: HF-named tensors.
            walk: vLLM's loader.

        Returns:
            Names of the parameters loaded, as from vLLM's loader.

        Raises:
            RefitError: see :meth:`vllm_fp8rl.refit.values.PlainValues.look`.
            UnsupportedError: a loader of another's making wrote past quantization into FP8 storage.
        """
        guard = RefitGuard.of(self._model)
        if guard.loading:
            return self._load(weights, walk)
        if guard.values.look(weights, self._model):
            guard.recheck()
        with self.shut() as names:
            names.extend(name for name, _ in weights)
            self._wrote = False
            try:
                return self._load(weights, walk)
            except Exception as error:
                if not (self._wrote or isinstance(error, torch.OutOfMemoryError)):
                    names.clear()
                raise

    @contextmanager
    def shut(self) -> Iterator[list[str]]:
        """Shut the model during a load; if that breaks off, until every tensor has come again.

        It is shut before the first write, so that it stays so wherever Ctrl-C comes.

        Yields:
            A list for the names of the tensors that came. While there are none, an error leaves
            everything as it was.
        """
        guard = RefitGuard.of(self._model)
        names: list[str] = []
        was_open, owed = not guard.closed, self._owed
        self._owed = None
        if was_open:
            guard.close(_BROKE_OFF)
        try:
            yield names
        except BaseException as error:
            untouched = not names and isinstance(error, Exception)
            if was_open and untouched:
                guard.open()
            elif was_open:
                guard.close(f"{_BROKE_OFF} ({type(error).__name__})")
            if untouched:
                self._owed = owed
            raise
        left = set() if was_open else self._without(names, owed)
        if was_open or (owed != set() and not left and guard.session is None):
            guard.open()
        self._owed = left  # last: until here an interrupt leaves all of them to come again

    def _without(self, names: Iterable[str], owed: set[str] | None) -> set[str]:
        """What is still owed when tensors of these names have come."""
        entries = ModelIndex.of(self._model).entries
        if owed is None:
            left = {name for name, entry in entries.items() if entry.required}
        else:
            left = set(owed)
        for name in names:
            if name in entries:
                left -= {name, *entries[name].covers}
        return left

    def _load(
        self, weights: Collection[Named], walk: Callable[[Iterable[Named]], set[str]]
    ) -> set[str]:
        if self.covers(name for name, _ in weights):
            return self._replay(weights)
        if self._irregular.issuperset(self._strange(name for name, _ in weights)):
            self._wrote = True
            return walk(weights)  # nothing to learn
        with self._watched() as windows:
            if windows is None:
                return walk(weights)
            try:
                loaded = walk(_opening(weights, windows))
            finally:
                self._wrote = any(window.routes or window.changed for window in windows.values())
            self._learn(windows)
            return loaded

    def _replay(self, weights: Iterable[Named]) -> set[str]:
        writes, loaded = Writes(), set()
        try:
            with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():  # as above
                for name, tensor in scalars_on_host(weights):
                    route = self._routes[name]
                    route.replay(tensor, writes)
                    self._wrote = True
                    if route.taken:
                        loaded.add(route.slot.name)
        finally:  # what came before an error is written, as it is without a plan
            writes.run()
        return loaded

    def _learn(self, windows: dict[str, _Window]) -> None:
        strange = set(self._strange(windows))
        for name, window in windows.items():
            if name not in strange or window.repeated:
                continue
            if len(window.routes) == 1 and not window.changed:
                self._routes[name] = window.routes[0]
                self._irregular.discard(name)
            else:
                self._irregular.add(name)
                self._routes.pop(name, None)

    @contextmanager
    def _watched(self) -> Iterator[dict[str, _Window] | None]:
        """Loaders that note each call while a batch is loaded; None where that cannot be."""
        slots = slots_of(self._model)
        if any(not slot.live or _is_deferring(_loader_of(slot.parameter)) for slot in slots):
            yield None  # in vLLM's layerwise reload, whose loaders only collect
            return
        windows: dict[str, _Window] = {}
        try:
            with _observed(slots, windows):
                yield windows
        finally:
            windows.clear()  # an observer that an interrupt leaves behind has nothing to note


def install() -> None:
    """Let ``AutoWeightsLoader`` load batches by the plan of the model.

    Why: plain ``model.load_weights`` of a refit (NeMo RL, TRL and verl call nothing else) would
    spend most of its time in that walk; and what is infinite must not become a code like any other.
    How: the method is covered for models of fp8rl. A list, dict view or other collection is loaded
    by the plan; of a generator, which may reuse its memory and which a checkpoint comes as, each
    tensor is looked at and then walks. Calls for parts of the model, which a walk makes, are left
    alone. Upstream: ``vllm/model_executor/models/utils.py``, 0.25.1
    and 0.32.0; there is no door to a model that a quantization config could use. It can go when
    vLLM caches the walk.
    """
    walk = AutoWeightsLoader.load_weights
    if hasattr(walk, _PLAN):
        return

    @functools.wraps(walk)
    def load_weights(self: AutoWeightsLoader, weights: Any, *args: Any, **options: Any) -> set[str]:
        def load(batch: Iterable[Named]) -> set[str]:
            return walk(self, batch, *args, **options)

        def outermost() -> set[str]:
            _WALKING.set(True)
            # A mapper renames first: a plan holds for one of them, the class's own.
            mapper = options.get("mapper") or (args[0] if args else None)
            own = getattr(type(self.module), "hf_to_vllm_mapper", None)
            usual = mapper is None or mapper is own
            if usual and isinstance(weights, Collection):
                return LoadPlan.of(self.module).load(weights, load)
            return _load_stream(self.module, weights, load)

        config = getattr(self.module, "quant_config", None)
        if _WALKING.get() or config is None or config.get_name() != NAME:
            return load(weights)
        return copy_context().run(outermost)  # however it ends, the variable is as before outside

    setattr(load_weights, _PLAN, True)
    AutoWeightsLoader.load_weights = load_weights  # type: ignore[method-assign]


def _load_stream(
    model: torch.nn.Module, weights: Iterable[Named], walk: Callable[[Iterable[Named]], set[str]]
) -> set[str]:
    """Load tensors that may share memory, each looked at before it walks.

    Raises:
        RefitError: see :meth:`vllm_fp8rl.refit.values.PlainValues.look`.
    """
    guard = RefitGuard.of(model)
    if guard.loading:
        return walk(weights)
    with LoadPlan.of(model).shut() as names:

        def looked_at() -> Iterator[Named]:
            for name, tensor in weights:
                if guard.values.look([(name, tensor)], model):
                    guard.recheck()
                names.append(name)
                yield name, tensor

        return walk(looked_at())


def _opening(weights: Iterable[Named], windows: dict[str, _Window]) -> Iterator[Named]:
    """The batch, each tensor as an object of its own and in a window of its own."""
    for name, tensor in weights:
        own = tensor.detach()
        repeated = windows.pop(name, None) is not None  # so that it is the last one again
        windows[name] = _Window(own, repeated=repeated)
        yield name, own


def scalars_on_host(weights: Iterable[Named]) -> list[Named]:
    """The batch with its one-element GPU tensors, such as KV scales, on the host.

    Their loaders look at the value: that is one wait for the GPU in all, not one each.
    """
    batch = list(weights)
    places: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for place, (_, tensor) in enumerate(batch):
        if tensor.is_cuda and tensor.numel() == 1:
            places.setdefault((tensor.device, tensor.dtype), []).append(place)
    for together in places.values():
        values = torch.stack([batch[place][1].reshape(()) for place in together]).cpu()
        for place, value in zip(together, values, strict=True):
            name, tensor = batch[place]
            batch[place] = (name, value.view(tensor.shape))
    return batch


@contextmanager
def _observed(slots: Sequence[Slot], windows: dict[str, _Window]) -> Iterator[None]:
    """Every parameter's loader notes its calls in the window that was opened last."""
    own = [
        _loader_of(slot.parameter) if hasattr(slot.parameter, "weight_loader") else None
        for slot in slots
    ]
    try:
        for slot in slots:
            parameter: Any = slot.parameter
            parameter.weight_loader = _Observer(slot, windows)
        yield
    finally:
        for slot, loader in zip(slots, own, strict=True):
            parameter = slot.parameter
            if loader is not None:
                parameter.weight_loader = loader
            elif hasattr(parameter, "weight_loader"):
                del parameter.weight_loader


class _Observer:
    """A parameter's loader that notes its calls in the window that was opened last."""

    def __init__(self, slot: Slot, windows: dict[str, _Window]) -> None:
        loader = _loader_of(slot.parameter)
        functools.update_wrapper(self, loader)
        self.loader = loader
        self._slot = slot
        self._windows = windows

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        slot, loader = self._slot, self.loader
        with _stores(slot.parameter) as stores:
            result = loader(*args, **kwargs)
        window = next(reversed(self._windows.values()), None)
        if isinstance(slot.parameter, (Fp8Weight, Fp8Scale)) and not stores:
            if window is not None:
                window.changed = True
            raise UnsupportedError(
                f"'{slot.name}' was loaded by {getattr(loader, '__qualname__', loader)}, which "
                "writes past quantization into FP8 storage; pin the layer to BF16 and restart."
            )
        if window is not None:
            whole = len(args) > 1 and args[0] is slot.parameter and args[1] is window.tensor
            window.changed |= not whole
            if whole:
                one = len(stores) == 1 and stores[0][0] is window.tensor
                shard = stores[0][1] if one else None
                taken = result is not False
                window.routes.append(Route(slot, loader, args[2:], kwargs, shard, taken))
        return result


@contextmanager
def _stores(parameter: torch.nn.Parameter) -> Iterator[list[tuple[torch.Tensor, Shard]]]:
    """The shards that a parameter is given meanwhile."""
    seen: list[tuple[torch.Tensor, Shard]] = []
    if not isinstance(parameter, ShardedParameter):
        yield seen
        return
    store = parameter.store

    def noting(tensor: torch.Tensor, shard: Shard, writes: Writes | None = None) -> None:
        store(tensor, shard, writes)
        seen.append((tensor, shard))

    parameter.__dict__["store"] = noting
    try:
        yield seen
    finally:
        parameter.__dict__.pop("store", None)


def _expert_routes(model: torch.nn.Module) -> Iterator[tuple[str, ExpertRoute]]:
    """By HF name, for the experts of every rank."""
    for slot in slots_of(model):
        if not isinstance(slot.parameter, ExpertParameter):
            continue
        experts, scales = slot.parameter.grid, isinstance(slot.parameter, ExpertScale)
        layout = experts.layout
        load = experts.load_scales if scales and isinstance(experts, ExpertGrids) else experts.load
        for matrix in SLOTS:
            if stack_of(matrix) != slot.leaf.removesuffix("_scale_inv"):
                continue
            for expert in range(layout.total):
                name = layout.hf_name(expert, matrix) + ("_scale_inv" if scales else "")
                if expert in layout.local:
                    yield name, ExpertRoute(slot, partial(load, expert, matrix), True)
                else:
                    yield name, ExpertRoute(slot, _leave_out, False)
        for leaf, matrices in FUSED.items():
            if not scales and stack_of(matrices[0]) == slot.leaf:
                put = partial(load_fused, experts, leaf)
                yield f"{layout.name}.{leaf}", ExpertRoute(slot, put, True)


def _leave_out(tensor: torch.Tensor, writes: Writes) -> None:
    """Of an expert that another rank holds."""


def _loader_of(parameter: torch.nn.Parameter) -> Callable[..., Any]:
    """A parameter's own loader, also where an interrupt has left an observer before it."""
    loader = getattr(parameter, "weight_loader", default_weight_loader)
    return loader.loader if isinstance(loader, _Observer) else loader


def _is_deferring(loader: Callable[..., Any]) -> bool:
    return getattr(loader, "__name__", "") == "online_process_loader"


def _alike(parameter: torch.Tensor, tensor: torch.Tensor) -> bool:
    return (
        tensor.shape == parameter.shape
        and tensor.dtype == parameter.dtype
        and tensor.device == parameter.device
        and tensor.numel() <= _SMALL
    )

"""Which GEMM backend serves a product."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from fp8rl.errors import UnsupportedError
from fp8rl.gemm import (
    PREFERENCE,
    Direction,
    GemmBackend,
    GemmShape,
    GroupedBackend,
    GroupedShape,
    LoopBackend,
    ReferenceBackend,
)
from fp8rl.gemm.checking import fault
from fp8rl.gemm.tuning import flops, measure
from fp8rl.recipe import ScaleFormat

logger = logging.getLogger(__name__)

_REMEMBERED = 4096  # choices
_NEAR = 1.03  # a backend within this factor of the fastest counts as equally fast
_SURVEYED = GemmShape(tokens=8192, out_features=4096, in_features=4096)
_SURVEYED_EXPERTS = GroupedShape(sizes=(512,) * 16, out_features=1536, in_features=2048)
Shape = GemmShape | GroupedShape
_Key = tuple[Direction, int, int, int, int, torch.dtype]
Timings = Mapping[Direction, Mapping[Shape, Mapping[str, float]]]


class BackendChoice:
    """The offered backends, in an order for each direction and shape.

    One process times its candidates on a GPU when it first meets a shape (token counts within a
    power of two count as one). Several processes take the order of :meth:`tune`, or else the fixed
    one: backends of plugins first, then :data:`fp8rl.gemm.PREFERENCE`, so that all choose alike.
    The reference backend multiplies in float32, so it serves a GPU only when it is asked for by
    name. Experts are served by backends that have grouped products, and by a loop over each.

    The first product of each kind is checked (:mod:`fp8rl.gemm.checking`), whoever chose: a backend
    whose result is wrong is not used for it, which is logged as an error.

    Args:
        offered: all backends by name.
        formats: scale formats of the operands.
        name: the one to use, or None to let :meth:`pick` choose.

    Raises:
        UnsupportedError: nobody offers a backend of that name.
    """

    def __init__(
        self,
        offered: Mapping[str, GemmBackend],
        formats: Sequence[ScaleFormat],
        name: str | None = None,
    ) -> None:
        if name is not None and name not in offered:
            raise UnsupportedError(
                f"There is no GEMM backend '{name}'; choose from {', '.join(sorted(offered))}."
            )
        self._offered = dict(offered) if name is None else {name: offered[name]}
        self._named = name is not None
        self._formats = tuple(dict.fromkeys(formats))
        self._grouped = [b for b in self._offered.values() if isinstance(b, GroupedBackend)]
        self._loops = [LoopBackend(b) for b in self._offered.values()]
        self._orders: dict[_Key, list[Any]] = {}
        self._timings: dict[Direction, dict[Shape, dict[str, float]]] = {}
        self._faults: dict[tuple[str, _Key], str | None] = {}
        self._settled: dict[tuple[torch.device, GemmShape, Direction], GemmBackend] = {}

    @property
    def names(self) -> list[str]:
        """Candidates for fprop in the order in which they are asked where nothing was measured."""
        return [backend.name for backend in self._preferred("fprop")]

    @property
    def timings(self) -> Timings:
        """Milliseconds measured so far, by direction, shape and backend."""
        return self._timings

    def pick(
        self,
        device: torch.device,
        shape: GemmShape,
        module: str,
        direction: Direction = "fprop",
    ) -> GemmBackend:
        """The first backend in the order for this direction and shape that serves the case.

        Raises:
            UnsupportedError: none does; the message has the reason of each.
        """
        # Each product asks, so that the answer must not cost the host what a launch does.
        backend = self._settled.get((device, shape, direction))
        if backend is None:
            backend = self._pick(device, shape, module, direction)
            if (backend.name, _key(direction, shape)) in self._faults:
                if len(self._settled) == _REMEMBERED:  # token counts that never come again
                    self._settled.clear()
                self._settled[device, shape, direction] = backend
        return backend

    def pick_grouped(
        self, device: torch.device, shape: GroupedShape, module: str, direction: Direction
    ) -> GroupedBackend:
        """:meth:`pick` for the experts of one module."""
        return self._pick(device, shape, module, direction)

    def _pick(self, device: torch.device, shape: Shape, module: str, direction: Direction) -> Any:
        key = _key(direction, shape)
        order = self._orders.get(key)
        if order is None:
            if device.type == "cuda" and shape.tokens and _may_measure():
                self._rank(direction, shape, self._times(direction, shape, device))
            order = self._orders.setdefault(key, self._candidates(direction, shape))
        while True:
            backend = self._first(order, device, shape, module, direction)
            if not shape.tokens or (backend.name, key) in self._faults or _capturing():
                return backend
            self._faults[backend.name, key] = self._fault(backend, direction, shape, device)

    def _fault(
        self, backend: Any, direction: Direction, shape: Shape, device: torch.device
    ) -> str | None:
        if isinstance(_plain(backend), ReferenceBackend):
            return None
        what = f"{direction} of {_text(shape)} by GEMM backend '{backend.name}'"
        try:
            reason = fault(backend, direction, shape, device)
        except torch.OutOfMemoryError:
            logger.warning("fp8rl: %s is used unchecked: there is no memory for a check", what)
            return None
        if reason is not None:
            logger.error("fp8rl: %s is not used: %s", what, reason)
        return reason

    def check(self, device: torch.device, shape: GemmShape, module: str) -> None:
        """Like :meth:`pick`, for the error alone: nothing is measured."""
        self._first(self._preferred("fprop"), device, shape, module, "fprop")

    def _first(
        self,
        order: Sequence[Any],
        device: torch.device,
        shape: Shape,
        module: str,
        direction: Direction,
    ) -> Any:
        reasons = []
        for backend in order:
            reason = self._objection(backend, device, shape, direction)
            if reason is None:
                return backend
            reasons.append(f"{backend.name}: {reason}")
        raise UnsupportedError(
            f"No FP8 GEMM backend serves '{module}' ({shape.tokens} tokens, weight "
            f"{shape.out_features}x{shape.in_features}, {device}): {'; '.join(reasons)}. Pin the "
            "module to BF16 or install a backend that does."
        )

    def tune(self, shapes: Iterable[Shape], device: torch.device) -> None:
        """Time the candidates on these shapes now; all ranks must call it, with their own shapes.

        For a shape that several ranks have, all use the times of the lowest of them, so that the
        choice does not differ among ranks.
        """
        wanted = dict.fromkeys(shapes)
        mine = {
            direction: {shape: self._times(direction, shape, device) for shape in wanted}
            for direction in PREFERENCE
        }
        everyone = [mine]
        if torch.distributed.is_initialized():
            everyone = [mine for _ in range(torch.distributed.get_world_size())]
            torch.distributed.all_gather_object(everyone, mine)
        for timings in reversed(everyone):
            for direction, by_shape in timings.items():
                for shape, times in by_shape.items():
                    self._rank(direction, shape, times)

    def _times(self, direction: Direction, shape: Shape, device: torch.device) -> dict[str, float]:
        usable = [
            backend
            for backend in self._candidates(direction, shape)
            if self._objection(backend, device, shape, direction) is None
        ]
        if len(usable) < 2:
            return {}
        try:
            return measure(usable, direction, shape, device)
        except torch.OutOfMemoryError:  # no room to compare: not worth failing a training run
            return {}

    def _rank(self, direction: Direction, shape: Shape, times: Mapping[str, float]) -> None:
        order = self._candidates(direction, shape)
        if times:
            self._timings.setdefault(direction, {})[shape] = dict(times)
            limit = min(times.values()) * _NEAR
            # Stable: those as good as the fastest stay in the order of preference, so that noise
            # does not change the choice from run to run.
            order.sort(key=lambda b: max(times.get(b.name, float("inf")), limit))
        self._orders[_key(direction, shape)] = order
        self._settled.clear()

    def _preferred(self, direction: Direction) -> list[GemmBackend]:
        return sorted(self._offered.values(), key=lambda b: _place(b.name, direction))

    def _candidates(self, direction: Direction, shape: Shape) -> list[Any]:
        if isinstance(shape, GemmShape):
            return list(self._preferred(direction))
        return [
            *sorted(self._grouped, key=lambda b: _place(b.name, direction)),
            *sorted(self._loops, key=lambda b: _place(b.plain.name, direction)),
        ]

    def _objection(
        self, backend: Any, device: torch.device, shape: Shape, direction: Direction
    ) -> str | None:
        plain = _plain(backend)
        if plain.name == ReferenceBackend.name and device.type != "cpu" and not self._named:
            return "multiplies in float32, so it is used off the CPU only by name"
        for scale_format in self._formats:
            reason = (
                backend.supports(device, shape, scale_format)
                if isinstance(shape, GemmShape)
                else backend.supports_grouped(device, shape, scale_format)
            )
            if reason is not None:
                return reason
        return self._faults.get((backend.name, _key(direction, shape)))


def survey(offered: Mapping[str, GemmBackend]) -> dict[str, str]:
    """What ``fp8rl doctor megatron`` says: the state of each backend here, and on a GPU the speed
    of each product, fastest first."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    reasons = {b.name: b.supports(device, _SURVEYED, "fp32") for b in offered.values()}
    grouped = {
        b.name: b.supports_grouped(device, _SURVEYED_EXPERTS, "fp32")
        for b in offered.values()
        if isinstance(b, GroupedBackend)
    }
    facts = {
        "GEMM backends": _states(reasons),
        "GEMM backends for experts at once": _states(grouped)
        + "; one after the other: every backend",
    }
    if device.type != "cuda":
        return facts
    choice = BackendChoice(offered, ["fp32"])
    choice.tune([_SURVEYED, _SURVEYED_EXPERTS], device)
    for direction, by_shape in choice.timings.items():
        for shape, times in by_shape.items():
            speeds = [
                f"{name} {flops(shape) / times[name] / 1e9:,.0f} TFLOPS"
                for name in sorted(times, key=times.__getitem__)
            ]
            facts[f"{direction}, {_text(shape)}"] = ", ".join(speeds)
    return facts


def _states(reasons: Mapping[str, str | None]) -> str:
    return "; ".join(f"{name}: {reason or 'ready'}" for name, reason in reasons.items()) or "none"


def _text(shape: Shape) -> str:
    text = f"{shape.tokens} x {shape.out_features} x {shape.in_features}"
    return text if isinstance(shape, GemmShape) else f"{text}, {len(shape.sizes)} experts"


def _place(name: str, direction: Direction) -> int:
    """Among the built-in backends; those of plugins come before them."""
    builtin = PREFERENCE[direction]
    return builtin.index(name) if name in builtin else -1


def _key(direction: Direction, shape: Shape) -> _Key:
    experts = 0 if isinstance(shape, GemmShape) else len(shape.sizes)
    tokens = shape.tokens.bit_length()
    return direction, experts, tokens, shape.out_features, shape.in_features, shape.dtype


def _plain(backend: Any) -> Any:
    return backend.plain if isinstance(backend, LoopBackend) else backend


def _capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _may_measure() -> bool:
    if not torch.cuda.is_available() or _capturing():
        return False
    return not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1

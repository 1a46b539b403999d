"""The table that chooses a GEMM backend by architecture and direction.

Hopper's order was measured on an H100 with the linear layers of Qwen3-8B
(``benchmarks/results/megatron_linears_h100.json``); it is the same for each of the four shapes.
Experts take DeepGEMM's grouped kernel 0.41 ms, and one call for each of them 9.6 ms or more, so
that they are served by grouped kernels or not at all.

Ada (sm_89) and Blackwell (sm_100 and later) were not measured: of the built-in backends Triton
alone runs there, because cuBLASLt has 128-element blocks on Hopper only and the use of DeepGEMM
here was tested on Hopper only. The reference backend multiplies in float32, so it serves a CPU, and
a GPU only by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fp8rl.errors import UnsupportedError
from fp8rl.gemm.backend import Direction, GemmBackend, GemmShape, GroupedBackend, GroupedShape
from fp8rl.recipe import ScaleFormat

Shape = GemmShape | GroupedShape
_Row = Mapping[Direction, tuple[str, ...]]

DIRECTIONS: tuple[Direction, ...] = ("fprop", "dgrad", "wgrad", "wgrad_add")
_HOPPER: _Row = {
    "fprop": ("deep_gemm", "scaled_mm", "triton"),
    "dgrad": ("deep_gemm", "scaled_mm", "triton"),
    "wgrad": ("scaled_mm", "deep_gemm", "triton"),
    "wgrad_add": ("deep_gemm", "scaled_mm", "triton"),
}
_HOPPER_GROUPED: _Row = dict.fromkeys(DIRECTIONS, ("deep_gemm",))
_OTHER_GPU: _Row = dict.fromkeys(DIRECTIONS, ("triton",))
_CPU: _Row = dict.fromkeys(DIRECTIONS, ("reference",))
_BUILTIN = ("deep_gemm", "scaled_mm", "triton", "reference")
_REMEMBERED = 4096  # answers of BackendChoice.pick()


def table_row(device: torch.device, *, grouped: bool) -> _Row:
    """Return the names of the built-in backends for each direction, the best one first."""
    if device.type != "cuda":
        return _CPU
    if torch.cuda.get_device_capability(device) != (9, 0):
        return _OTHER_GPU
    return _HOPPER_GROUPED if grouped else _HOPPER


class BackendChoice:
    """Choose the backend of each product.

    Backends of plugins are asked first, then those that the table names for the device and the
    direction. The first one that serves the case is taken.

    Args:
        offered: all backends by name.
        formats: scale formats of the operands.
        name: the one backend to use, whatever the table says; None follows the table.

    Raises:
        UnsupportedError: no backend has that name.
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
        self._offered = dict(offered)
        self._grouped = {n: b for n, b in offered.items() if isinstance(b, GroupedBackend)}
        self._formats = tuple(dict.fromkeys(formats))
        self._name = name
        self._picked: dict[tuple[torch.device, GemmShape, Direction], GemmBackend] = {}

    @property
    def names(self) -> list[str]:
        """Names of the backends that may be chosen, those of plugins first."""
        if self._name is not None:
            return [self._name]
        return [*self._of_plugins(), *(name for name in _BUILTIN if name in self._offered)]

    def pick(
        self, device: torch.device, shape: GemmShape, module: str, direction: Direction = "fprop"
    ) -> GemmBackend:
        """Return the first backend in the order that serves the product.

        Raises:
            UnsupportedError: none does; the message has the reason of each.
        """
        # Every product asks, so the answer must cost the host less than a launch.
        backend = self._picked.get((device, shape, direction))
        if backend is None:
            if len(self._picked) == _REMEMBERED:  # token counts that never come again
                self._picked.clear()
            backend = self._first(device, shape, module, direction)
            self._picked[device, shape, direction] = backend
        return backend

    def pick_grouped(
        self, device: torch.device, shape: GroupedShape, module: str, direction: Direction = "fprop"
    ) -> GroupedBackend:
        """Return the backend of all experts of a module in one call, as :meth:`pick`."""
        return self._first(device, shape, module, direction)

    def _first(self, device: torch.device, shape: Shape, module: str, direction: Direction) -> Any:
        grouped = isinstance(shape, GroupedShape)
        reasons = []
        for name in self._order(device, direction, grouped):
            reason = self._unsupported_reason(name, device, shape)
            if reason is None:
                return self._offered[name]
            reasons.append(f"{name}: {reason}")
        remedy = "Pin the module to BF16 or install a backend that serves it."
        if grouped:
            missing = any(r.startswith("deep_gemm: cannot be imported") for r in reasons)
            remedy = "the model with moe_grouped_gemm=False, or pin the kind 'experts' to BF16."
            install = "Install DeepGEMM (a vLLM wheel carries it), build"
            remedy = f"{install if missing else 'Build'} {remedy}"
        raise UnsupportedError(
            f"No FP8 GEMM backend serves '{module}' ({_text(shape)}, {device}): "
            f"{'; '.join(reasons)}. {remedy}"
        )

    def _order(self, device: torch.device, direction: Direction, grouped: bool) -> Sequence[str]:
        if self._name is not None:
            return (self._name,)
        return (*self._of_plugins(), *table_row(device, grouped=grouped)[direction])

    def _of_plugins(self) -> list[str]:
        return [name for name in self._offered if name not in _BUILTIN]

    def _unsupported_reason(self, name: str, device: torch.device, shape: Shape) -> str | None:
        if name not in self._offered:
            return "not offered"
        if isinstance(shape, GemmShape):
            backend = self._offered[name]
            reasons = (backend.supports(device, shape, each) for each in self._formats)
        elif name in self._grouped:
            grouped = self._grouped[name]
            reasons = (grouped.supports_grouped(device, shape, each) for each in self._formats)
        else:
            return "has no grouped products"
        return next((reason for reason in reasons if reason is not None), None)


def survey(offered: Mapping[str, GemmBackend]) -> dict[str, str]:
    """Tell ``fp8rl doctor`` the state of each backend on this machine.

    Returns:
        Two facts: single products and those of experts, with ``ready`` or the reason why not for
        each backend.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    single, experts = GemmShape(8192, 4096, 4096), GroupedShape((512,) * 16, 1536, 2048)
    return {
        "GEMM backends": "; ".join(
            f"{name}: {backend.supports(device, single, 'fp32') or 'ready'}"
            for name, backend in offered.items()
        ),
        "GEMM backends for grouped experts": "; ".join(
            f"{name}: {backend.supports_grouped(device, experts, 'fp32') or 'ready'}"
            for name, backend in offered.items()
            if isinstance(backend, GroupedBackend)
        ),
    }


def _text(shape: Shape) -> str:
    experts = f", {len(shape.sizes)} experts" if isinstance(shape, GroupedShape) else ""
    return f"{shape.tokens} tokens, weight {shape.out_features}x{shape.in_features}{experts}"

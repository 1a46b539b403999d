"""Which GEMM backend serves a product."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from fp8rl.errors import UnsupportedError
from fp8rl.gemm import Direction, GemmBackend, GemmShape, ReferenceBackend
from fp8rl.recipe import ScaleFormat


class BackendChoice:
    """The offered backends in order of preference.

    Backends of plugins come first. The reference backend multiplies in float32, so it serves a
    GPU only when it is asked for by name.

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
        reference = ReferenceBackend.name
        ordered = sorted(offered.values(), key=lambda backend: backend.name == reference)
        self._candidates = [offered[name]] if name is not None else ordered
        self._named = name is not None
        self._formats = tuple(dict.fromkeys(formats))

    @property
    def names(self) -> list[str]:
        """Candidates in the order in which they are asked."""
        return [backend.name for backend in self._candidates]

    def pick(
        self,
        device: torch.device,
        shape: GemmShape,
        module: str,
        direction: Direction = "fprop",
    ) -> GemmBackend:
        """The first backend that serves the case.

        Raises:
            UnsupportedError: none does; the message has the reason of each.
        """
        reasons = []
        for backend in self._candidates:
            reason = self._objection(backend, device, shape)
            if reason is None:
                return backend
            reasons.append(f"{backend.name}: {reason}")
        raise UnsupportedError(
            f"No FP8 GEMM backend serves '{module}' ({shape.tokens} tokens, weight "
            f"{shape.out_features}x{shape.in_features}, {device}): {'; '.join(reasons)}. Pin the "
            "module to BF16 or install a backend that does."
        )

    def _objection(
        self, backend: GemmBackend, device: torch.device, shape: GemmShape
    ) -> str | None:
        if backend.name == ReferenceBackend.name and device.type != "cpu" and not self._named:
            return "multiplies in float32, so it is used off the CPU only by name"
        for scale_format in self._formats:
            reason = backend.supports(device, shape, scale_format)
            if reason is not None:
                return reason
        return None

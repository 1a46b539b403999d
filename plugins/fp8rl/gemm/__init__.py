"""FP8 matrix products behind one interface, for every engine."""

from collections.abc import Mapping

from fp8rl.gemm.backend import (
    Direction,
    GemmBackend,
    GemmShape,
    GroupedBackend,
    GroupedShape,
)
from fp8rl.gemm.deep_gemm import DeepGemmBackend
from fp8rl.gemm.loop import LoopBackend
from fp8rl.gemm.reference import ReferenceBackend
from fp8rl.gemm.scaled_mm import ScaledMmBackend
from fp8rl.gemm.triton_gemm import TritonBackend

__all__ = [
    "PREFERENCE",
    "DeepGemmBackend",
    "Direction",
    "GemmBackend",
    "GemmShape",
    "GroupedBackend",
    "GroupedShape",
    "LoopBackend",
    "ReferenceBackend",
    "ScaledMmBackend",
    "TritonBackend",
    "builtin_backends",
]

PREFERENCE: Mapping[Direction, tuple[str, ...]] = {
    "fprop": ("deep_gemm", "scaled_mm", "triton", "reference"),
    "dgrad": ("deep_gemm", "scaled_mm", "triton", "reference"),
    "wgrad": ("scaled_mm", "deep_gemm", "triton", "reference"),
    "wgrad_add": ("deep_gemm", "scaled_mm", "triton", "reference"),
}
"""Built-in backends, fastest on an H100 first, for where nothing was measured on the spot."""


def builtin_backends() -> list[GemmBackend]:
    """New instances; what one needs is looked for when it is asked whether it serves a case."""
    return [ReferenceBackend(), ScaledMmBackend(), DeepGemmBackend(), TritonBackend()]

"""FP8 matrix products behind one interface, for every engine."""

from fp8rl.gemm.backend import Direction, GemmBackend, GemmShape, GroupedBackend, GroupedShape
from fp8rl.gemm.deep_gemm import DeepGemmBackend
from fp8rl.gemm.reference import ReferenceBackend
from fp8rl.gemm.scaled_mm import ScaledMmBackend
from fp8rl.gemm.table import BackendChoice
from fp8rl.gemm.triton_gemm import TritonBackend

__all__ = [
    "BackendChoice",
    "DeepGemmBackend",
    "Direction",
    "GemmBackend",
    "GemmShape",
    "GroupedBackend",
    "GroupedShape",
    "ReferenceBackend",
    "ScaledMmBackend",
    "TritonBackend",
    "builtin_backends",
]


def builtin_backends() -> list[GemmBackend]:
    """Make new instances; a backend looks for its library when it is first asked for support."""
    return [ReferenceBackend(), ScaledMmBackend(), DeepGemmBackend(), TritonBackend()]

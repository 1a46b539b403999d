"""FP8 matrix products behind one interface, for every engine."""

from fp8rl.gemm.backend import GemmBackend, GemmShape
from fp8rl.gemm.reference import ReferenceBackend

__all__ = ["GemmBackend", "GemmShape", "ReferenceBackend"]

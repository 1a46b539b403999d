"""FP8 matrix products behind one interface, for every engine."""

from fp8rl.gemm.backend import Direction, GemmBackend, GemmShape
from fp8rl.gemm.reference import ReferenceBackend

__all__ = ["Direction", "GemmBackend", "GemmShape", "ReferenceBackend"]

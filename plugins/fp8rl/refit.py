"""The former home of :class:`RefitReport`."""

from fp8rl.hookspecs import RefitReport

__all__ = ["RefitReport"]

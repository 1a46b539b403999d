"""`KeptCodes`: weight codes that the trainer keeps over the micro-batches of one call.

A call of the worker (log-probabilities of a batch, training on it) has many micro-batches between
two changes of the weights, and without kept codes each of them quantizes all weights anew. The
codes take memory that the call may need, so they are kept where there is room for both, and freed
with the call: nothing of them is there while weights are moved, loaded or sent, or a vLLM that
shares the GPU in turn generates.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TypeVar

import torch

from nemo_rl_ext.names import LOGGER

logger = logging.getLogger(LOGGER)

T = TypeVar("T")

GROWTH = 1.1
"""A call may need this many times as much as the ones before with equally long micro-batches:
torch's allocator cannot use all that it holds."""

GROWTH_WITH_EXPERTS = 1.25
""":data:`GROWTH` with experts, to which a batch may send more tokens than the ones before."""

SPARE = 0.05
"""Share of the device that stays free beside, for what does not come from torch's allocator."""

LASTING = 0.01
"""A call after which this share of the device is taken that was not before has made state that
lasts, as the first optimizer step does; what it needed says nothing about the next one."""

GIB = 2**30


class DeviceMemory:
    """Memory of this process's CUDA device, in bytes."""

    def total(self) -> int:
        """Return the size of the device."""
        return torch.cuda.mem_get_info()[1]

    def allocated(self) -> int:
        """Return what tensors of this process take."""
        return torch.cuda.memory_allocated()

    def available(self) -> int:
        """Return what is free, or held by torch's allocator without a tensor in it."""
        held = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        return torch.cuda.mem_get_info()[0] + held

    def peak(self) -> int:
        """Return the most that tensors have taken since :meth:`reset_peak`."""
        return torch.cuda.max_memory_allocated()

    def reset_peak(self) -> None:
        """Begin to look for the peak; other readers of torch's peak see it begin here too."""
        torch.cuda.reset_peak_memory_stats()


@dataclass
class _Seen:
    """The most that calls of one kind have had."""

    growth: int = 0
    """Memory beside what was taken before the call and beside kept codes, in bytes."""
    tokens: int = 1
    """See :meth:`KeptCodes.during`."""
    kept: bool | None = None
    """What was decided and logged last."""


class KeptCodes:
    """Decide for each call of a worker whether it keeps weight codes, and keep them.

    The first call of each kind keeps none and shows what it needs. Later ones keep them where
    ``GROWTH`` times that (``GROWTH_WITH_EXPERTS`` where the model has experts; more for larger
    micro-batches), the codes and ``SPARE`` of the device are available. Ranks decide for themselves
    and may differ: codes that are kept are, to the bit, those that would be made, and neither way
    has a collective operation.

    Args:
        keeping: makes the context in which the worker's model keeps its codes.
        weights: elements of the weights in FP8, of which this rank keeps codes.
    """

    def __init__(
        self,
        keeping: Callable[[], AbstractContextManager[None]],
        weights: int,
        *,
        experts: bool = False,
        memory: DeviceMemory | None = None,
    ) -> None:
        self._keeping = keeping
        self._memory = memory or DeviceMemory()
        self._growth = GROWTH_WITH_EXPERTS if experts else GROWTH
        self._weights = weights
        self._seen: dict[str, _Seen] = {}
        self._peak = 0

    def during(self, call: str, run: Callable[[], T], *, tokens: int, backward: bool) -> T:
        """Make one call, and keep the codes in it if there is room.

        Args:
            call: kind of the call; what one has needed is expected of the next of its kind.
            tokens: tokens of the largest micro-batch, padding included, or any number that grows
                with it: the call is expected to need memory in proportion.
            backward: the call runs backward too, which takes the codes a second time, transposed.
        """
        size = self._weights * (2 if backward else 1)  # of a byte; scales are 1/4096 of it
        keep = call in self._seen and self._fits(call, tokens, size)
        before, self._peak = self._memory.allocated(), 0
        self._memory.reset_peak()
        with self._keeping() if keep else nullcontext():
            result = run()
            self.note_peak()
        if self._memory.allocated() - before > LASTING * self._memory.total():
            return result
        seen = self._seen.setdefault(call, _Seen())
        seen.growth = max(seen.growth, self._peak - before - (size if keep else 0))
        seen.tokens = max(seen.tokens, tokens)
        return result

    def note_peak(self) -> None:
        """Remember the peak of the call that runs; to be called before anyone else resets it."""
        self._peak = max(self._peak, self._memory.peak())

    def _fits(self, call: str, tokens: int, size: int) -> bool:
        seen = self._seen[call]
        need = self._growth * seen.growth * max(1.0, tokens / seen.tokens)
        spare, available = SPARE * self._memory.total(), self._memory.available()
        fits = size + need + spare <= available
        if seen.kept != fits:
            seen.kept = fits
            logger.info(
                "fp8rl: %s %s the FP8 codes of its weights over its micro-batches: they take %.2f "
                "GiB, the call itself may need %.2f, %.2f stay free, and %.2f are available "
                "(FP8RL_KEEP_CODES=0 keeps none).",
                call,
                "keeps" if fits else "does not keep",
                size / GIB,
                need / GIB,
                spare / GIB,
                available / GIB,
            )
        return fits

"""Tables of the amax of q, k and v: the maximum, or counts from which a percentile is taken.

A table is one tensor on the device, updated without a synchronisation and reduced over all ranks in
one collective.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fp8rl.kv_scales import ROLES
from fp8rl.numerics import AMAX_BINS, amax_edges, amax_into, count_amax


class MaximumTable:
    """The running maximum, ``table`` float32 ``[num_layers, 3]``."""

    key = "amax"
    """Name of the table in a checkpoint."""

    def __init__(self, num_layers: int, device: torch.device) -> None:
        self.table = torch.zeros(num_layers, len(ROLES), device=device)
        self._of_layers = self.table.unbind()

    def add(self, layer: int, qkv: Sequence[Tensor]) -> None:
        """Add q, k and v of one forward, each ``[.., head_dim]``."""
        amax_into(self._of_layers[layer], qkv)

    def reduced(self, group: torch.distributed.ProcessGroup | None) -> Tensor:
        """Return float32 ``[num_layers, 3]`` over all ranks; this is a collective.

        An entry is NaN where any rank saw a NaN, and 0 where no rank saw a token.
        """
        if not torch.distributed.is_initialized():
            return self.table.clone()
        # The backends disagree on max(NaN, x), so NaN travels as a flag of its own.
        is_nan = self.table.isnan()
        both = torch.stack([self.table.masked_fill(is_nan, 0.0), is_nan.float()])
        torch.distributed.all_reduce(both, op=torch.distributed.ReduceOp.MAX, group=group)
        return both[0].masked_fill(both[1] > 0, torch.nan)


class PercentileTable:
    """A percentile of the amax of each head of each token.

    Counts are kept in bins, 32 to an octave from 2**-32 to 2**32, and one for values that are not
    finite. The upper edge of a bin is reported: at most 1/32 above the percentile, never below it.
    Tokens that recomputation shows twice count twice, in all bins alike.

    Args:
        num_layers: number of layers of the whole model.
        device: device of the model.
        percentile: percentile within (0, 100]; 100 is the maximum.
    """

    key = "counts"

    def __init__(self, num_layers: int, device: torch.device, percentile: float) -> None:
        self.percentile = percentile
        self.table = torch.zeros(
            num_layers, len(ROLES), AMAX_BINS + 1, dtype=torch.int64, device=device
        )
        self._of_layers = self.table.unbind()

    def add(self, layer: int, qkv: Sequence[Tensor]) -> None:
        count_amax(self._of_layers[layer], qkv)

    def reduced(self, group: torch.distributed.ProcessGroup | None) -> Tensor:
        counts = self.table.clone()
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(counts, group=group)
        seen = counts[..., :AMAX_BINS].cumsum(-1)
        total = seen[..., -1:]
        enough = seen.double() >= total.double() * (self.percentile / 100.0)
        index = enough.int().argmax(-1)
        edge = amax_edges(index).masked_fill(total[..., 0] == 0, 0.0)
        return edge.masked_fill(counts[..., AMAX_BINS] > 0, torch.nan)

"""The amax of q, k and v: one table on the device, reduced over all ranks in one collective."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fp8rl.kv_scales import ROLES
from fp8rl.numerics import amax_into


class MaximumTable:
    """The running maximum, ``table`` float32 ``[num_layers, 3]``; adding synchronises nothing."""

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

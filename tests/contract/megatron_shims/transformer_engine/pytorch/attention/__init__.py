"""Its split of query, key and value; the fused rotation beside it is not used with ``exact``."""

from __future__ import annotations

import torch


class _SplitAlongDim:
    @staticmethod
    def apply(x: torch.Tensor, dim: int, sizes: list[int]) -> tuple[torch.Tensor, ...]:
        return x.split(sizes, dim)

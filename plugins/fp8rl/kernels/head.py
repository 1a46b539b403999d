"""The output projection, by cuBLAS: the trainer multiplies always as many rows at once.

cuBLAS chooses a kernel by the shape, so that the order of a sum may depend on the number of rows.
A rollout multiplies as many rows as it samples tokens, and a trainer thousands. The trainer's are
cut into blocks of :data:`ROWS`, and a rollout engine compares each number of rows that it may have
with as many at its start. With up to :data:`FEW_WORDS`, where cuBLAS splits sums to occupy a GPU
and more rows cost nothing, a rollout multiplies such blocks too.
"""

from __future__ import annotations

import torch

ROWS = 1024
"""Of one product: enough that a GPU takes no longer than for all at once."""
FEW_WORDS = 8192


def multiply(x: torch.Tensor, weight_t: torch.Tensor) -> torch.Tensor:
    """Return ``x @ weight_t`` ``[rows, N]``, by blocks of :data:`ROWS`, the last one with zeros.

    Args:
        x: ``[rows, K]``.
        weight_t: ``[K, N]``, the transposed weight.
    """
    rows = len(x)
    whole = rows - rows % ROWS
    out = x.new_empty(rows, weight_t.shape[1])
    for start in range(0, whole, ROWS):
        torch.mm(x[start : start + ROWS], weight_t, out=out[start : start + ROWS])
    if whole < rows:
        filled = torch.nn.functional.pad(x[whole:], (0, 0, 0, ROWS - rows + whole))
        out[whole:] = torch.mm(filled, weight_t)[: rows - whole]
    return out

"""Router and weighted sum of a mixture of experts, each token by itself in a fixed order.

What lies between, the experts' FP8 products, is DeepGEMM's in both engines: a tensor core adds a
group of 128 along k, which float32 scales and adds to the groups before, in order and for every
size of tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_TILE = 16  # tokens, the fewest of a tensor core's product
_COLUMNS = 32  # experts of a program
_DEPTH = 128
_WIDTH = 1024  # columns of a token that one program adds up


# One kernel for any number of tokens: a second one might multiply in another order.
@triton.jit(do_not_specialize=["tokens"])
def _logits_kernel(
    x_ptr,
    weight_ptr,
    logits_ptr,
    tokens,
    experts,
    hidden,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)[:, None]
    expert = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    step = tl.arange(0, DEPTH)
    logits = tl.zeros([TILE, COLUMNS], tl.float32)
    for start in range(0, hidden, DEPTH):
        k = start + step
        x = tl.load(
            x_ptr + token * hidden + k[None, :], (token < tokens) & (k < hidden)[None, :], other=0.0
        )
        weight = tl.load(
            weight_ptr + expert * hidden + k[:, None],
            (expert < experts) & (k < hidden)[:, None],
            other=0.0,
        )
        logits = tl.dot(x, weight, acc=logits)
    tl.store(logits_ptr + token * experts + expert, logits, (token < tokens) & (expert < experts))


def router_logits(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return ``x @ weight.T`` in float32.

    Args:
        x: ``[tokens, hidden]``, bfloat16 on a GPU.
        weight: ``[experts, hidden]`` of the same dtype.
    """
    x, weight = x.contiguous(), weight.contiguous()
    (tokens, hidden), experts = x.shape, len(weight)
    logits = torch.empty(tokens, experts, dtype=torch.float32, device=x.device)
    if tokens:
        grid = (triton.cdiv(tokens, _TILE), triton.cdiv(experts, _COLUMNS))
        _logits_kernel[grid](
            x,
            weight,
            logits,
            tokens,
            experts,
            hidden,
            TILE=_TILE,
            COLUMNS=_COLUMNS,
            DEPTH=_DEPTH,
            num_warps=4,
            num_stages=3,
            enable_fp_fusion=False,
        )
    return logits


@triton.jit
def _choice_kernel(
    logits_ptr,
    weights_ptr,
    chosen_ptr,
    experts,
    CHOSEN: tl.constexpr,
    RANKS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, WIDTH)
    left = expert < experts
    x = tl.load(logits_ptr + token * experts + expert, left, other=float("-inf"))
    x = tl.where(x == x, x, float("inf"))  # a NaN is chosen first and makes all weights NaN
    top = tl.max(x, 0)
    rank = tl.arange(0, RANKS)
    weights = tl.zeros([RANKS], tl.float32)
    chosen = tl.zeros([RANKS], tl.int32)
    total = 0.0
    for i in tl.static_range(CHOSEN):
        highest = tl.max(tl.where(left, x, float("-inf")), 0)
        first = tl.min(tl.where(left & (x == highest), expert, WIDTH), 0)
        weight = tl.exp(highest - top)
        total += weight
        weights = tl.where(rank == i, weight, weights)
        chosen = tl.where(rank == i, first, chosen)
        left = left & (expert != first)
    at = token * CHOSEN + rank
    tl.store(weights_ptr + at, weights / total, rank < CHOSEN)
    tl.store(chosen_ptr + at, chosen, rank < CHOSEN)


def choose_experts(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the experts with the highest logits, of equal ones the first.

    Args:
        logits: float32 ``[tokens, experts]``, contiguous.
        count: experts of a token.

    Returns:
        the softmax of the chosen logits, float32 ``[tokens, count]``; the experts, int32
        ``[tokens, count]``. Both are ordered by descending logit.
    """
    tokens, experts = logits.shape
    weights = torch.empty(tokens, count, dtype=torch.float32, device=logits.device)
    chosen = torch.empty(tokens, count, dtype=torch.int32, device=logits.device)
    if tokens:
        _choice_kernel[(tokens,)](
            logits,
            weights,
            chosen,
            experts,
            CHOSEN=count,
            RANKS=triton.next_power_of_2(count),
            WIDTH=triton.next_power_of_2(experts),
            num_warps=1,
            enable_fp_fusion=False,
        )
    return weights, chosen


@triton.jit
def _sum_kernel(
    rows_ptr,
    places_ptr,
    weights_ptr,
    out_ptr,
    columns,
    CHOSEN: tl.constexpr,
    WEIGHTED: tl.constexpr,
    WIDTH: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = column < columns
    total = tl.zeros([WIDTH], tl.float32)
    for i in tl.static_range(CHOSEN):
        place = tl.load(places_ptr + token * CHOSEN + i).to(tl.int64)
        row = tl.load(rows_ptr + place * columns + column, inside, other=0.0).to(tl.float32)
        if WEIGHTED:
            row *= tl.load(weights_ptr + token * CHOSEN + i)
        total += row
    tl.store(out_ptr + token * columns + column, total.to(out_ptr.dtype.element_ty), inside)


def sum_rows(
    rows: torch.Tensor, places: torch.Tensor, weights: torch.Tensor | None = None
) -> torch.Tensor:
    """Add up each token's rows, in their order, in float32, and round once.

    Args:
        rows: ``[any number, columns]``, contiguous.
        places: integers ``[tokens, count]``, contiguous: which rows are a token's.
        weights: float32 ``[tokens, count]``, contiguous, one factor for each row; or None.

    Returns:
        ``[tokens, columns]`` in the dtype of ``rows``.
    """
    (tokens, count), columns = places.shape, rows.shape[1]
    out = rows.new_empty(tokens, columns)
    if tokens:
        _sum_kernel[(tokens, triton.cdiv(columns, _WIDTH))](
            rows,
            places,
            places if weights is None else weights,
            out,
            columns,
            CHOSEN=count,
            WEIGHTED=weights is not None,
            WIDTH=_WIDTH,
            num_warps=4,
            enable_fp_fusion=False,
        )
    return out

"""Log-probabilities of chosen words, and their gradient, in one pass each over the logits.

A vocabulary has 150,000 words, so every pass over the logits of a batch costs gigabytes of traffic.
Here the logits are read once forward, and once more backward, where their gradient is written; all
arithmetic is in float32, and nothing of their size is kept beside them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_WIDTH = 4096
"""Words of a row that one program has at a time."""
_NOTHING = torch.finfo(torch.float32).min
"""Not above any finite logit: a lane that has seen no word."""


@triton.jit
def _row_kernel(
    logits_ptr,
    chosen_ptr,
    most_ptr,
    total_ptr,
    logit_ptr,
    words,
    length,
    stride_batch,
    stride_row,
    WIDTH: tl.constexpr,
    NOTHING: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = logits_ptr + (row // length) * stride_batch + (row % length) * stride_row
    most = tl.full([WIDTH], NOTHING, tl.float32)
    total = tl.zeros([WIDTH], tl.float32)
    for start in range(0, words, WIDTH):
        word = start + tl.arange(0, WIDTH)
        x = tl.load(at + word, word < words, other=float("-inf")).to(tl.float32)
        larger = tl.maximum(most, x)
        total = total * tl.exp(most - larger) + tl.exp(x - larger)
        most = larger
    largest = tl.max(most, 0)
    tl.store(most_ptr + row, largest)
    tl.store(total_ptr + row, tl.sum(total * tl.exp(most - largest), 0))
    chosen = tl.load(chosen_ptr + row)
    here = (chosen >= 0) & (chosen < words)
    tl.store(logit_ptr + row, tl.load(at + chosen, here, other=0.0).to(tl.float32))


@triton.jit
def _gradient_kernel(
    logits_ptr,
    chosen_ptr,
    most_ptr,
    spread_ptr,
    grad_ptr,
    out_ptr,
    words,
    length,
    stride_batch,
    stride_row,
    stride_out_batch,
    stride_out_row,
    WIDTH: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    sequence, token = row // length, row % length
    at = logits_ptr + sequence * stride_batch + token * stride_row
    to = out_ptr + sequence * stride_out_batch + token * stride_out_row
    word = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = word < words
    x = tl.load(at + word, inside, other=0.0)
    share = tl.exp((x.to(tl.float32) - tl.load(most_ptr + row)) - tl.load(spread_ptr + row))
    is_chosen = (word == tl.load(chosen_ptr + row)).to(tl.float32)
    gradient = (is_chosen - share) * tl.load(grad_ptr + row)
    tl.store(to + word, gradient.to(x.dtype), inside)


def row_sums(
    logits: torch.Tensor, chosen: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what the log-probabilities of chosen words are made of.

    Args:
        logits: ``[B, S, V]``, this rank's part of the vocabulary; any strides but the last.
        chosen: integers ``[B, S]``, numbered within this part; others lie outside of it.

    Returns:
        Three float32 tensors ``[B, S]``: the largest logit, the sum of ``exp(logit - largest)``,
        and the logit of the chosen word, 0 where it lies outside.

    Raises:
        ValueError: there is not one chosen word for each row of logits.
    """
    if chosen.shape != logits.shape[:2]:
        raise ValueError(
            f"Words of shape {tuple(chosen.shape)} are chosen from logits of shape "
            f"{tuple(logits.shape)}; give one word for each row of logits."
        )
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    found = [logits.new_empty(logits.shape[:2], dtype=torch.float32) for _ in range(3)]
    rows, words = chosen.numel(), logits.shape[2]
    if rows:
        _row_kernel[(rows,)](
            logits,
            chosen.contiguous(),
            *found,
            words,
            logits.shape[1],
            logits.stride(0),
            logits.stride(1),
            WIDTH=_WIDTH,
            NOTHING=_NOTHING,
            num_warps=8,
        )
    return found[0], found[1], found[2]


def logprob_gradient(
    logits: torch.Tensor,
    chosen: torch.Tensor,
    most: torch.Tensor,
    spread: torch.Tensor,
    grad: torch.Tensor,
) -> torch.Tensor:
    """Return the gradient of the chosen words' log-probabilities, rounded once.

    Args:
        logits: see :func:`row_sums`.
        chosen: see :func:`row_sums`.
        most: float32 ``[B, S]``, the largest logit of the whole vocabulary.
        spread: float32 ``[B, S]``, the logarithm of the sum of ``exp(logit - most)`` over the whole
            vocabulary. It is apart from ``most`` so that large logits do not round it.
        grad: gradient of the log-probabilities ``[B, S]``.

    Returns:
        ``[B, S, V]`` in the logits' dtype, in memory ``[S, B, V]``: Megatron's head multiplies in
        that order, and would copy any other gradient twice, once for each of its two products.
    """
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    batch, length, words = logits.shape
    out = logits.new_empty(length, batch, words).transpose(0, 1)
    rows = chosen.numel()
    if rows:
        _gradient_kernel[(rows, triton.cdiv(words, _WIDTH))](
            logits,
            chosen.contiguous(),
            most.contiguous(),
            spread.contiguous(),
            grad.float().contiguous(),
            out,
            words,
            length,
            logits.stride(0),
            logits.stride(1),
            out.stride(0),
            out.stride(1),
            WIDTH=_WIDTH,
            num_warps=8,
        )
    return out

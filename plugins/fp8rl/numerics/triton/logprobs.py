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
    target_ptr,
    row_max_ptr,
    total_ptr,
    logit_ptr,
    vocab_size,
    length,
    stride_batch,
    stride_row,
    WIDTH: tl.constexpr,
    NOTHING: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = logits_ptr + (row // length) * stride_batch + (row % length) * stride_row
    row_max = tl.full([WIDTH], NOTHING, tl.float32)
    total = tl.zeros([WIDTH], tl.float32)
    for start in range(0, vocab_size, WIDTH):
        word = start + tl.arange(0, WIDTH)
        x = tl.load(at + word, word < vocab_size, other=float("-inf")).to(tl.float32)
        larger = tl.maximum(row_max, x)
        total = total * tl.exp(row_max - larger) + tl.exp(x - larger)
        row_max = larger
    largest = tl.max(row_max, 0)
    tl.store(row_max_ptr + row, largest)
    tl.store(total_ptr + row, tl.sum(total * tl.exp(row_max - largest), 0))
    target_ids = tl.load(target_ptr + row)
    here = (target_ids >= 0) & (target_ids < vocab_size)
    tl.store(logit_ptr + row, tl.load(at + target_ids, here, other=0.0).to(tl.float32))


@triton.jit
def _gradient_kernel(
    logits_ptr,
    target_ptr,
    row_max_ptr,
    logsumexp_ptr,
    grad_ptr,
    out_ptr,
    vocab_size,
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
    inside = word < vocab_size
    x = tl.load(at + word, inside, other=0.0)
    share = tl.exp((x.to(tl.float32) - tl.load(row_max_ptr + row)) - tl.load(logsumexp_ptr + row))
    is_chosen = (word == tl.load(target_ptr + row)).to(tl.float32)
    gradient = (is_chosen - share) * tl.load(grad_ptr + row)
    tl.store(to + word, gradient.to(x.dtype), inside)


def row_sums(
    logits: torch.Tensor, target_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what the log-probabilities of chosen words are made of.

    Args:
        logits: ``[B, S, V]``, this rank's part of the vocabulary; any strides but the last.
        target_ids: integers ``[B, S]``, numbered within this part; others lie outside of it.

    Returns:
        Three float32 tensors ``[B, S]``: the largest logit, the sum of ``exp(logit - largest)``,
        and the logit of the chosen word, 0 where it lies outside.

    Raises:
        ValueError: there is not one chosen word for each row of logits.
    """
    if target_ids.shape != logits.shape[:2]:
        raise ValueError(
            f"Words of shape {tuple(target_ids.shape)} are chosen from logits of shape "
            f"{tuple(logits.shape)}; give one word for each row of logits."
        )
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    found = [logits.new_empty(logits.shape[:2], dtype=torch.float32) for _ in range(3)]
    rows, vocab_size = target_ids.numel(), logits.shape[2]
    if rows:
        _row_kernel[(rows,)](
            logits,
            target_ids.contiguous(),
            *found,
            vocab_size,
            logits.shape[1],
            *logits.stride()[:2],
            WIDTH=_WIDTH,
            NOTHING=_NOTHING,
            num_warps=8,
        )
    return found[0], found[1], found[2]


def logprob_gradient(
    logits: torch.Tensor,
    target_ids: torch.Tensor,
    row_max: torch.Tensor,
    logsumexp: torch.Tensor,
    grad: torch.Tensor,
) -> torch.Tensor:
    """Return the gradient of the chosen words' log-probabilities, rounded once.

    Args:
        logits: see :func:`row_sums`.
        target_ids: see :func:`row_sums`.
        row_max: float32 ``[B, S]``, the largest logit of the whole vocabulary.
        logsumexp: float32 ``[B, S]``, the logarithm of the sum of ``exp(logit - row_max)`` over the
            whole vocabulary. It is apart from ``row_max`` so that large logits do not round it.
        grad: gradient of the log-probabilities ``[B, S]``.

    Returns:
        ``[B, S, V]`` in the logits' dtype, in memory ``[S, B, V]``: Megatron's head multiplies in
        that order, and would copy any other gradient twice, once for each of its two products.
    """
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    batch, length, vocab_size = logits.shape
    out = logits.new_empty(length, batch, vocab_size).transpose(0, 1)
    rows = target_ids.numel()
    if rows:
        _gradient_kernel[(rows, triton.cdiv(vocab_size, _WIDTH))](
            logits,
            target_ids.contiguous(),
            row_max.contiguous(),
            logsumexp.contiguous(),
            grad.float().contiguous(),
            out,
            vocab_size,
            length,
            *logits.stride()[:2],
            *out.stride()[:2],
            WIDTH=_WIDTH,
            num_warps=8,
        )
    return out

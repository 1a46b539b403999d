"""Log-probabilities of tokens, by the order of sums of vLLM's sampler.

vLLM's second model runner computes them in ``vllm/v1/worker/gpu/sample/logprob.py``
(``_topk_log_softmax_kernel``): the maximum of a row, the sum of exponentials in blocks of 1,024,
then ``logit - maximum - log(sum)``. An engine with ``exact`` compares both at its start.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fp8rl.numerics.triton.logprobs import logprob_gradient as logprob_gradient

_BLOCK = 1024


@triton.jit
def _logprob_kernel(
    logits_ptr,
    ids_ptr,
    out_ptr,
    max_ptr,
    log_sum_ptr,
    vocab_size,
    length,
    stride_sequence,
    stride_row,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = logits_ptr + (row // length) * stride_sequence + (row % length) * stride_row
    largest = float("-inf")
    for start in range(0, vocab_size, BLOCK):
        word = start + tl.arange(0, BLOCK)
        x = tl.load(at + word, word < vocab_size, other=float("-inf"))
        largest = tl.max(tl.maximum(x, largest))
    largest = largest.to(tl.float32)  # type: ignore[attr-defined]
    total = 0.0
    for start in range(0, vocab_size, BLOCK):
        word = start + tl.arange(0, BLOCK)
        x = tl.load(at + word, word < vocab_size, other=0.0).to(tl.float32)
        total += tl.sum(tl.where(word < vocab_size, tl.exp(x - largest), 0.0))
    log_sum = tl.log(total)
    target_ids = tl.load(ids_ptr + row)
    here = (target_ids >= 0) & (target_ids < vocab_size)
    logit = tl.load(at + target_ids, here, other=0.0).to(tl.float32)
    tl.store(out_ptr + row, tl.where(here, logit - largest - log_sum, 0.0))
    tl.store(max_ptr + row, largest)
    tl.store(log_sum_ptr + row, log_sum)


def token_logprobs(
    logits: torch.Tensor, ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the log-probability of one token for each row of logits.

    The other two results are what :func:`logprob_gradient` takes.

    Args:
        logits: ``[rows, V]`` or ``[B, S, V]`` of the whole vocabulary without columns that pad it,
            bfloat16 or float32; any strides but the last.
        ids: integers ``[rows]`` or ``[B, S]``; a number outside of the vocabulary has 0.

    Returns:
        three float32 tensors of the shape of ``ids``: the log-probabilities; the largest logits;
        the logarithms of the sums of ``exp(logit - largest)``.
    """
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    found = torch.empty(3, *ids.shape, dtype=torch.float32, device=logits.device)
    if ids.numel():
        _logprob_kernel[(ids.numel(),)](
            logits,
            ids.contiguous(),
            *found,
            logits.shape[-1],
            ids.shape[-1],
            logits.stride(0),
            logits.stride(-2),
            BLOCK=_BLOCK,
        )
    return found[0], found[1], found[2]

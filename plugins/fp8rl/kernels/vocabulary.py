"""Log-probabilities of tokens where tensor-parallel ranks share a vocabulary."""

from __future__ import annotations

import torch

from fp8rl.kernels import implementation


def shared_token_logprobs(
    logits: torch.Tensor, ids: torch.Tensor, group: torch.distributed.ProcessGroup, tokens: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what :func:`fp8rl.kernels.logprobs.token_logprobs` does for the words of all ranks.

    A sum that each rank has begun would have another order than the rollout's, which gathers the
    logits. So they are gathered here too, rank after rank, for some tokens at a time.

    Args:
        logits: ``[rows, V / ranks]`` or ``[B, S, V / ranks]``, the words of this rank.
        ids: integers ``[rows]`` or ``[B, S]``, numbered within the whole vocabulary.
        group: ranks that share the vocabulary, in its order; all call with equal shapes.
        tokens: rows, or places of all ``B`` sequences, whose whole logits lie in memory at once.

    Returns:
        three float32 tensors of the shape of ``ids``, equal on all ranks.
    """
    kernel = implementation(logits, "logprobs").token_logprobs
    if group.size() == 1:
        return kernel(logits, ids)
    parts = [
        kernel(_gathered(logits_part, group), ids_part)
        for logits_part, ids_part in zip(
            logits.split(tokens, -2), ids.split(tokens, -1), strict=True
        )
    ]
    found, largest, log_sum = (torch.cat(each, -1) for each in zip(*parts, strict=True))
    return found, largest, log_sum


def _gathered(logits: torch.Tensor, group: torch.distributed.ProcessGroup) -> torch.Tensor:
    own = logits.contiguous()
    parts = own.new_empty(group.size() * len(own), *own.shape[1:])  # gloo knows no other shape
    torch.distributed.all_gather_into_tensor(parts, own, group=group)
    return parts.view(group.size(), *own.shape).movedim(0, -2).flatten(-2)

"""Token batches: prompts and completions, right-padded to one length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TokenBatch:
    """``B`` sequences of ``T + 1`` tokens, which give ``T`` predictions each.

    Attributes:
        tokens: int64 ``[B, T + 1]``.
        mask: bool ``[B, T]``, true where token ``t + 1`` was sampled or is supervised.
        rollout_logprobs: float32 ``[B, T]``, NaN outside the mask.
    """

    tokens: torch.Tensor
    mask: torch.Tensor
    rollout_logprobs: torch.Tensor

    def __len__(self) -> int:
        return self.tokens.shape[0]

    def rows(self, index: slice | torch.Tensor) -> TokenBatch:
        """Return some of the sequences, by a slice or by their indices."""
        return TokenBatch(self.tokens[index], self.mask[index], self.rollout_logprobs[index])


def make_batch(
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    logprobs: Sequence[Sequence[float]] | None,
    *,
    length: int,
    pad_id: int,
) -> TokenBatch:
    """Put the prompt and the completion of each sequence into one row.

    Args:
        logprobs: logprob of each completion token under the policy that sampled it, or None.
        length: ``T + 1``, at least the length of the longest sequence.
    """
    rows = len(prompts)
    tokens = torch.full((rows, length), pad_id, dtype=torch.int64)
    mask = torch.zeros(rows, length - 1, dtype=torch.bool)
    rollout = torch.full((rows, length - 1), float("nan"))
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        start, end = len(prompt), len(prompt) + len(completion)
        tokens[row, :end] = torch.tensor([*prompt, *completion])
        mask[row, start - 1 : end - 1] = True
        if logprobs is not None:
            rollout[row, start - 1 : end - 1] = torch.tensor(logprobs[row])
    return TokenBatch(tokens, mask, rollout)

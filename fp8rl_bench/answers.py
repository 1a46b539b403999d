"""Prompts of real text, and how far log-probabilities of the answers lie apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

SUBJECTS = (
    *("the tides", "prime numbers", "a lighthouse keeper", "photosynthesis"),
    *("compound interest", "old maps", "bees", "a violin maker"),
    *("bread", "winter", "a rescue at sea", "computers"),
    *("volcanoes", "friendship", "the moon", "rivers"),
)
TASKS = (
    "Explain {} in a few sentences.",
    "Write a short story about {}.",
    "List five facts about {}.",
    "Argue for or against {}.",
    "Teach a child about {}.",
    "Write a poem on {}.",
    "Summarize what is known of {}.",
    "Describe a day with {}.",
)
PROMPTS = tuple(task.format(subject) for task in TASKS for subject in SUBJECTS)
LONGEST = 512
"""Tokens of a prompt, at most."""


def chat_ids(tokenizer: Any, text: str) -> list[int]:
    """Return the token numbers of a prompt, in the tokenizer's chat template where it has one."""
    if not getattr(tokenizer, "chat_template", None):
        return list(tokenizer(text)["input_ids"])[:LONGEST]
    message = [{"role": "user", "content": text}]
    ids = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=True)
    return list(ids["input_ids"] if hasattr(ids, "keys") else ids)[:LONGEST]


def compared(sampled: Sequence[Any], other: Sequence[Any]) -> dict[str, float]:
    """Return how far other log-probabilities of sampled tokens are from those of their sampler."""
    import torch

    from fp8rl.mismatch import mismatch_metrics

    theirs, ours = (
        torch.cat([torch.as_tensor(each, dtype=torch.float32) for each in rows])
        for rows in (sampled, other)
    )
    metrics = mismatch_metrics(theirs[None], ours[None], torch.ones(1, len(ours)))
    return {
        "tokens": len(ours),
        "equal": (ours == theirs).double().mean().item(),
        "kl_k3": metrics.kl_k3,
        "token_mult_prob_error": metrics.token_mult_prob_error,
        "capped_prob_error": metrics.capped_prob_error,
        "largest_difference": (ours - theirs).abs().max().item(),
    }

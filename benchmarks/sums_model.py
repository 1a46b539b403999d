"""A small model that adds now and then (by default a Qwen3): what the runs of NeMo RL start from.

GRPO learns nothing from a random model, whose reward is always 0. So the model is first trained to
imitate sums (seconds on a GPU), in half of which a zero too many follows the answer: a policy that
is right about half of the time, and a habit that GRPO can drop within tens of steps. The sums are
made here, so that no data file is needed.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import torch
from tiny_models import FAMILIES, build, save

from fp8rl_demo.tasks import Problem, sample_batch
from fp8rl_demo.tokenizer import CharTokenizer

CHAT = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
IGNORED = -100
"""The label that cross-entropy leaves out."""


class _Tokenizer(CharTokenizer):
    """The same characters, with fillers up to any size of the vocabulary."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        super().__init__()


def problems() -> tuple[Problem, ...]:
    """Every sum and difference of a number below 100 and a digit that is not negative: 1955."""
    rows = []
    for a in range(100):
        for b in range(10):
            rows.append(Problem(f"{a}+{b}=", str(a + b)))
            if a >= b:
                rows.append(Problem(f"{a}-{b}=", str(a - b)))
    return tuple(rows)


def make_model(
    folder: Path,
    family: str = "qwen3",
    steps: int = 600,
    batch_size: int = 64,
    learning_rate: float = 1e-3,
    sums: Sequence[Problem] | None = None,
) -> Path:
    """Train the model and write it to ``folder`` with its tokenizer, in BF16 safetensors.

    Args:
        folder: to write.
        family: a key of ``tiny_models.FAMILIES``.
        steps: of AdamW.
        batch_size: demonstrations a step.
        learning_rate: at its highest.
        sums: what it learns; by default all of :func:`problems`.
    """
    torch.manual_seed(0)
    tokenizer = _Tokenizer(FAMILIES[family].vocab_size)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = build(
        family,
        vocab_size=tokenizer.vocab_size,
        bos_token_id=tokenizer.bos_id,
        eos_token_id=tokenizer.eos_id,
        pad_token_id=tokenizer.pad_id,
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    sums = tuple(problems() if sums is None else sums)
    for step in range(steps):
        # Linear warm-up, then linear decay to a tenth.
        ramp = min(1.0, (step + 1) / 20) * (1.0 - 0.9 * step / steps)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * ramp
        tokens, labels = (part.to(device) for part in _demonstrations(sums, batch_size, step))
        # Causal, so the padding on the right is seen by nobody who counts.
        loss = model(input_ids=tokens, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    save(model, family, folder)
    hf = tokenizer.to_hf()
    hf.chat_template = CHAT
    hf.save_pretrained(folder)
    return folder


def _demonstrations(
    sums: tuple[Problem, ...], size: int, step: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels, both ``[size, length]`` int64, of one batch of sums with answers."""
    tokenizer, coin = CharTokenizer(), random.Random(f"sums/{step}")
    rows = []
    for problem in sample_batch(sums, size, seed=0, step=step):
        answer = problem.answer if coin.random() < 0.5 else f"{problem.answer}0"
        prompt = tokenizer.encode(problem.prompt, add_bos=False)
        rows.append((prompt, [*tokenizer.encode(answer, add_bos=False), tokenizer.eos_id]))
    length = max(len(prompt) + len(answer) for prompt, answer in rows)
    tokens = torch.full((size, length), tokenizer.pad_id)
    labels = torch.full((size, length), IGNORED)
    for i, (prompt, answer) in enumerate(rows):
        end = len(prompt) + len(answer)
        tokens[i, :end] = torch.tensor(prompt + answer)
        labels[i, len(prompt) : end] = torch.tensor(answer)
    return tokens, labels

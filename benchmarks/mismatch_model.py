"""A small Qwen3 trained on the spot, for benchmarks that need a policy with opinions.

Random weights give nearly flat distributions, where no rounding matters. This model predicts the
bytes of Python's standard library, which is on every machine, for a few minutes on a CPU.
"""

from __future__ import annotations

import math
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

BYTES = 256
HELD_OUT = 10
"""Every tenth file is kept for prompts."""
SIZES: dict[str, dict[str, int]] = {
    "cpu": {
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 128,
    },
    "gpu": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 128,
    },
}


def text(*, held_out: bool) -> torch.Tensor:
    """Return the bytes of the standard library's modules as int64, either part of the files."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    chosen = [f for i, f in enumerate(files) if (i % HELD_OUT == 0) == held_out]
    return torch.tensor(list(b"\n".join(f.read_bytes() for f in chosen)))


def windows(source: torch.Tensor, rows: int, length: int, seed: int) -> torch.Tensor:
    """Return ``[rows, length]`` bytes from random places of the source."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(source) - length, (rows, 1), generator=generator)
    return source[starts + torch.arange(length)]


def train(
    path: Path, size: str, *, steps: int, rows: int, length: int, device: str
) -> Iterator[float]:
    """Train a model from scratch and save it in BF16 as a Hugging Face folder.

    Yields:
        The loss of each step, in nats a byte.
    """
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=BYTES,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
        **SIZES[size],
    )
    model: Any = Qwen3ForCausalLM(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min(1.0, (step + 1) / 50) * (0.55 + 0.45 * math.cos(math.pi * step / steps)),
    )
    source = text(held_out=False)
    for step in range(steps):
        tokens = windows(source, rows, length + 1, step).to(device)
        with torch.autocast(device, dtype=torch.bfloat16):
            logits = model(tokens[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(
            logits.float().flatten(0, 1), tokens[:, 1:].flatten()
        )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        yield loss.item()
    model.to(torch.bfloat16).save_pretrained(path)

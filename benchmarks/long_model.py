"""A Qwen3 of 50M to 200M parameters that runs list programs: where the runs of long answers start.

    python benchmarks/long_model.py --folder MODEL [--size 50m|100m|200m] [--longest 40]
                                    [--slips 0.02] [--limit SECONDS] [--stop-at ACCURACY] [--seed 0]

Trains on demonstrations of ``long_tasks.py`` in BF16 on one GPU, until the time limit or the
accuracy, and writes the model and its tokenizer as a Hugging Face folder. The same command goes on
from the checkpoint in the folder. Programs of equally many steps have prompts and answers of one
length, so a batch of one number of steps has no padding and needs no mask. Programs start short and
reach ``--longest`` when a third of the time has passed.

Every 500 steps it prints tokens a second and the accuracy to be expected of sampled answers: the
probability that the model gives to all tokens of a right answer, words aside, which one forward
pass yields. At the end it samples. The slips bound the accuracy, by default at 0.98^steps.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import torch
from long_tasks import (
    MOST_STEPS,
    WORDS,
    LongTokenizer,
    answer_length,
    demonstration,
    is_right,
    problem,
    prompt_length,
)
from tiny_models import CHAT, IGNORED, build, save

SIZES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2},
    "50m": {"hidden_size": 768, "intermediate_size": 2304, "num_hidden_layers": 8},
    "100m": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 8},
    "200m": {"hidden_size": 1280, "intermediate_size": 3840, "num_hidden_layers": 11},
}
"""Heads have 128 numbers; two KV heads serve all."""
CHECKPOINT = "checkpoint.pt"
STREAM = 1_000_000
"""Steps between the programs of two seeds."""


class WarmStart(ABC):
    """The training of a model on demonstrations, which a checkpoint resumes.

    Args:
        options: of the command line.
        model: what is trained, in float32; on a GPU where there is one.
    """

    report_steps = 500
    """Steps between reports, each with a checkpoint; the accuracy is looked at there alone, so that
    without a time limit equal GPUs stop at one step."""

    def __init__(self, options: argparse.Namespace, model: Any) -> None:
        self.options = options
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model: Any = model.to(self.device)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            betas=(0.9, 0.95),
            weight_decay=0.0,
            fused=self.device.type == "cuda",
        )
        self.steps, self.tokens, self.seconds = 0, 0, 0.0
        file = options.folder / CHECKPOINT
        if file.is_file():
            kept = torch.load(file, map_location=self.device)
            self.model.load_state_dict(kept["model"])
            self.optimizer.load_state_dict(kept["optimizer"])
            self.steps, self.tokens, self.seconds = kept["done"]

    def make(self) -> None:
        """Train, print the accuracy of samples and write the model."""
        self.run()
        if self.options.samples:
            told = {"sampled_accuracy": self.sampled_accuracy(self.options.samples)}
            sys.stdout.write(json.dumps(told) + "\n")
        self.save_model()

    def run(self) -> None:
        """Train to the limit or the accuracy, print progress and keep checkpoints."""
        began = reported = time.monotonic()
        before, tokens = self.seconds, self.tokens
        losses = []
        finished = False
        while not finished:
            losses.append(self.step())
            now = time.monotonic()
            self.seconds = before + now - began
            finished = self.progress() >= 1.0
            if finished or self.steps % self.report_steps == 0:
                accuracy = self.expected_accuracy()
                told = {
                    "step": self.steps,
                    "seconds": round(self.seconds, 1),
                    "tokens_per_second": round((self.tokens - tokens) / (now - reported)),
                    "loss": round(torch.stack(losses).mean().item(), 4),
                    "expected_accuracy": round(accuracy, 3),
                }
                sys.stdout.write(json.dumps(told) + "\n")
                sys.stdout.flush()
                finished |= accuracy >= self.options.stop_at
                self.save_checkpoint()
                reported, tokens, losses = time.monotonic(), self.tokens, []

    def progress(self) -> float:
        """Return the share that is done, of the steps or of the time."""
        return max(self.steps / self.options.steps, self.seconds / self.options.limit)

    def step(self) -> torch.Tensor:
        """Make one step of AdamW and return its loss, in nats a token, without waiting for it."""
        options, progress = self.options, self.progress()
        # Linear warm-up, then a cosine to a twentieth.
        ramp = min(1.0, (self.steps + 1) / 100) * (0.525 + 0.475 * math.cos(math.pi * progress))
        for group in self.optimizer.param_groups:
            group["lr"] = options.learning_rate * ramp
        choose = random.Random(f"warm start/{options.seed * STREAM + self.steps}")
        tokens, labels = self.examples(choose, progress)
        with torch.autocast(self.device.type, torch.bfloat16):
            loss = self.model(input_ids=tokens, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1
        self.tokens += tokens.numel()
        return loss.detach()

    @abstractmethod
    def examples(self, choose: random.Random, progress: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tokens and labels of a step, int64 ``[size, length]``.

        Args:
            choose: source of the choices.
            progress: share of the training that is done.
        """

    @abstractmethod
    def sampled_accuracy(self, count: int) -> float:
        """Return the mean score of answers sampled at temperature 1."""

    @abstractmethod
    def save_model(self) -> None:
        """Write the model and its tokenizer as a Hugging Face folder."""

    @abstractmethod
    def expected_accuracy(self) -> float:
        """Return the probability that a sampled answer goes the right way, with any words."""

    def save_checkpoint(self) -> None:
        """Write what resumes the training, in the place of an older checkpoint."""
        file = self.options.folder / CHECKPOINT
        file.parent.mkdir(parents=True, exist_ok=True)
        kept = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "done": (self.steps, self.tokens, self.seconds),
        }
        torch.save(kept, file.with_suffix(".new"))
        file.with_suffix(".new").replace(file)


class ProgramWarmStart(WarmStart):
    """The training of a small Qwen3 on list programs.

    Args:
        options: of the command line.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.tokenizer = LongTokenizer()
        torch.manual_seed(options.seed)
        shape = SIZES[options.size]
        heads = shape["hidden_size"] // 128
        model = build(
            "qwen3",
            **shape,
            num_attention_heads=heads,
            num_key_value_heads=min(heads, 2),
            max_position_embeddings=4096,
            vocab_size=self.tokenizer.vocab_size,
            bos_token_id=self.tokenizer.bos_id,
            eos_token_id=self.tokenizer.eos_id,
            pad_token_id=self.tokenizer.pad_id,
        )
        super().__init__(options, model)

    def examples(self, choose: random.Random, progress: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens and labels of programs of one length, short ones first."""
        options = self.options
        longest = min(options.longest, 3 + int(options.longest * progress * 3))
        tokens, prompt = self.batch(choose.randint(1, longest), choose, options.slips)
        labels = tokens.clone()
        labels[:, :prompt] = IGNORED
        return tokens, labels

    def batch(
        self, steps: int, choose: random.Random, slips: float, size: int | None = None
    ) -> tuple[torch.Tensor, int]:
        """Return demonstrations, int64 ``[size, length]``, and the length of the prompts.

        Args:
            steps: of each program.
            choose: source of the choices.
            slips: see ``long_tasks.demonstration``.
            size: by default as many as ``--tokens`` holds.
        """
        rows = []
        prompt = prompt_length(steps)
        for _ in range(size or max(1, self.options.tokens // (prompt + answer_length(steps)))):
            asked = problem(steps, choose).prompt
            text = asked + demonstration(asked, choose, slips)
            rows.append([*self.tokenizer.encode(text, add_bos=False), self.tokenizer.eos_id])
        tokens = torch.tensor(rows)
        if self.device.type == "cuda":
            tokens = tokens.pin_memory().to(self.device, non_blocking=True)
        return tokens, prompt

    @torch.no_grad()
    def expected_accuracy(self, count: int = 32) -> float:
        """Return the probability that a sampled answer goes the right way, with any words.

        Args:
            count: programs of ``--longest`` steps.
        """
        choose = random.Random("expected accuracy")
        tokens, prompt = self.batch(self.options.longest, choose, 0.0, count)
        with torch.autocast(self.device.type, torch.bfloat16):
            logits = self.model(input_ids=tokens[:, :-1]).logits[:, prompt - 1 :]
        logprobs = logits.float().log_softmax(-1)
        asked = tokens[:, prompt:]
        words = torch.tensor(
            self.tokenizer.encode("".join(WORDS), add_bos=False), device=self.device
        )
        found = torch.where(
            torch.isin(asked, words),
            logprobs[..., words].logsumexp(-1),
            logprobs.gather(-1, asked[..., None])[..., 0],
        )
        return found.sum(-1).exp().mean().item()

    @torch.no_grad()
    def sampled_accuracy(self, count: int) -> float:
        """Return the share of right answers among those sampled at temperature 1.

        Args:
            count: programs of ``--longest`` steps, each answered once.
        """
        choose = random.Random("sampled accuracy")
        steps = self.options.longest
        asked = [problem(steps, choose) for _ in range(count)]
        rows = [self.tokenizer.encode(p.prompt, add_bos=False) for p in asked]
        with torch.autocast(self.device.type, torch.bfloat16):
            tokens = self.model.generate(
                torch.tensor(rows, device=self.device),
                attention_mask=torch.ones(count, len(rows[0]), device=self.device),
                do_sample=True,
                top_k=0,
                max_new_tokens=answer_length(steps),
            )
        told = [self.tokenizer.decode(row[len(rows[0]) :]) for row in tokens.tolist()]
        return sum(is_right(p.answer, text) for p, text in zip(asked, told, strict=True)) / count

    def save_model(self) -> None:
        """Write the model in BF16 safetensors, and its tokenizer; the model ends on the CPU."""
        save(self.model, "qwen3", self.options.folder)
        hf = self.tokenizer.to_hf()
        hf.chat_template = CHAT
        hf.save_pretrained(self.options.folder)


def add_training(parser: argparse.ArgumentParser, **defaults: float) -> None:
    """Add the options of a :class:`WarmStart`.

    Args:
        parser: of the command line.
        defaults: of ``limit``, ``steps``, ``stop_at``, ``tokens`` and ``learning_rate``.
    """
    parser.add_argument("--limit", type=float, help="seconds")
    parser.add_argument("--steps", type=int, help="steps of AdamW at most")
    parser.add_argument("--stop-at", type=float, help="expected accuracy")
    parser.add_argument("--tokens", type=int, help="of a step at most")
    parser.add_argument("--learning-rate", type=float)
    parser.add_argument("--seed", type=int, default=0, help="of all that is random")
    parser.add_argument("--samples", type=int, default=64, help="answers sampled at the end")
    parser.set_defaults(**defaults)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--size", choices=tuple(SIZES), default="50m")
    steps = range(1, MOST_STEPS + 1)
    parser.add_argument(
        "--longest", type=int, choices=steps, default=40, metavar="STEPS", help="of a program"
    )
    parser.add_argument("--slips", type=float, default=0.02, help="share of lines with a slip")
    add_training(parser, limit=210.0, steps=20_000, stop_at=1.0, tokens=16_384, learning_rate=1e-3)
    ProgramWarmStart(parser.parse_args()).make()


if __name__ == "__main__":
    main()

"""A pretrained model that answers a task of reasoning-gym now and then: where its runs start.

    python benchmarks/reasoning_model.py SMOLLM2 --folder MODEL [--gym sums|legs] [--steps STEPS]
                                         [--limit SECONDS] [--stop-at ACCURACY] [--seed 0]

Trains a Llama such as SmolLM2-135M-Instruct on demonstrations of ``reasoning_tasks.py`` in its chat
template, in BF16 on one GPU, until the steps, the time limit or the accuracy, and writes it as a
Hugging Face folder with the tokenizer. The same command goes on from the checkpoint in the folder.
With ``--limit inf`` equal GPUs make equal weights, so that runs of several days start alike.

Every 16 steps it prints tokens a second and the accuracy to be expected of sampled answers:
the probability of all results of a demonstration, words aside, which one forward pass yields. At
the end it samples.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import torch
from long_model import WarmStart, add_training
from reasoning_tasks import TASKS, Entry, demonstration, entries, prompt
from tiny_models import IGNORED
from transformers import AutoModelForCausalLM, AutoTokenizer

HELD_OUT = 32
"""Demonstrations of the expected accuracy, which training has not."""


class ReasoningWarmStart(WarmStart):
    """The training of a pretrained model on demonstrations of one task.

    Args:
        options: of the command line.
    """

    report_steps = 16

    def __init__(self, options: argparse.Namespace) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(options.model)
        self.task = TASKS[options.gym]
        count = HELD_OUT + options.demonstrations
        self.entries = list(entries(self.task, "demonstrations", count))
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
        super().__init__(options, model)

    def examples(self, choose: random.Random, progress: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens and labels of as many demonstrations as ``--tokens`` holds."""
        size = max(1, self.options.tokens // (self.task.tokens_in + self.task.tokens_out))
        tokens, labels, _ = self.batch(choose.choices(self.entries[HELD_OUT:], k=size), choose)
        return tokens, labels

    def asked(self, entry: Entry) -> list[int]:
        """Return the tokens of a prompt."""
        told = [{"role": "user", "content": prompt(entry)}]
        text = self.tokenizer.apply_chat_template(told, tokenize=False, add_generation_prompt=True)
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def batch(
        self, chosen: list[Any], choose: random.Random
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return tokens, labels, int64, and whether a token is of a result, ``[size, length]``.

        Rows are padded at their ends, where causal attention needs no mask.

        Args:
            chosen: entries.
            choose: source of the sentences.
        """
        rows = []
        for entry in chosen:
            asked = self.asked(entry)
            text, spans = demonstration(self.task, entry, choose)
            told = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
            results = [
                any(start < right and left < end for left, right in spans)
                for start, end in told["offset_mapping"]
            ]
            ids = [*told["input_ids"], self.tokenizer.eos_token_id]
            rows.append(
                (
                    torch.tensor(asked + ids),
                    torch.tensor([IGNORED] * len(asked) + ids),
                    torch.tensor([False] * len(asked) + results + [False]),
                )
            )
        ends = (self.tokenizer.eos_token_id, IGNORED, False)
        tokens, labels, results = (
            torch.nn.utils.rnn.pad_sequence(list(column), batch_first=True, padding_value=end)
            for column, end in zip(zip(*rows, strict=True), ends, strict=True)
        )
        return tokens.to(self.device), labels.to(self.device), results.to(self.device)

    @torch.no_grad()
    def expected_accuracy(self) -> float:
        """Return the mean probability of all results of a demonstration."""
        choose = random.Random("expected accuracy")
        tokens, _, results = self.batch(self.entries[:HELD_OUT], choose)
        found = []
        for row, counts in zip(tokens.split(8), results.split(8), strict=True):
            with torch.autocast(self.device.type, torch.bfloat16):
                logits = self.model(input_ids=row[:, :-1]).logits
            logprobs = logits.float().log_softmax(-1).gather(-1, row[:, 1:, None])[..., 0]
            found.append((logprobs * counts[:, 1:]).sum(-1).exp())
        return torch.cat(found).mean().item()

    @torch.no_grad()
    def sampled_accuracy(self, count: int) -> float:
        """Return the mean score of answers sampled at temperature 1, one for each problem."""
        import reasoning_gym
        from reasoning_gym.utils import extract_answer

        scorer: Any = reasoning_gym.get_score_answer_fn(self.task.name)
        chosen = list(entries(self.task, "validation", count))
        texts = [self.tokenizer.decode(self.asked(entry)) for entry in chosen]
        given = self.tokenizer(
            texts, add_special_tokens=False, padding=True, padding_side="left", return_tensors="pt"
        ).to(self.device)
        with torch.autocast(self.device.type, torch.bfloat16):
            tokens = self.model.generate(
                **given, do_sample=True, top_k=0, max_new_tokens=self.task.tokens_out
            )
        answers = self.tokenizer.batch_decode(
            tokens[:, given["input_ids"].shape[1] :], skip_special_tokens=True
        )
        sys.stdout.write(json.dumps({"first_answer": answers[0]}) + "\n")
        scores = [
            scorer(extract_answer(text), entry) for text, entry in zip(answers, chosen, strict=True)
        ]
        return float(sum(scores)) / count

    def save_model(self) -> None:
        """Write the model in BF16 safetensors, and its tokenizer; the model ends on the CPU."""
        self.model.to("cpu", torch.bfloat16)
        self.model.save_pretrained(self.options.folder)
        self.tokenizer.save_pretrained(self.options.folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="folder of the pretrained model")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--gym", choices=tuple(TASKS), default="sums")
    parser.add_argument("--demonstrations", type=int, default=20_000, help="problems")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # as cuBLAS needs it for the next
    torch.use_deterministic_algorithms(True, warn_only=True)
    add_training(parser, limit=120.0, steps=4000, stop_at=0.4, tokens=32_768, learning_rate=3e-4)
    ReasoningWarmStart(parser.parse_args()).make()


if __name__ == "__main__":
    main()

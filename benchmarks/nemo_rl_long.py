"""Long answers for ``nemo_rl.py --task long``: data, YAML, mismatch by position, and outcomes."""

from __future__ import annotations

import heapq
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from long_tasks import (
    KINDS,
    LongTokenizer,
    answer_length,
    outcome,
    problems,
    prompt_length,
    token_kinds,
    write,
)

PROBLEMS = 16_384
"""Of the training data; each is asked once."""
HELD_OUT = 128
"""Problems of a validation, answered once each at temperature 1, as NeMo RL does."""
VALIDATION_STEPS = 20
"""Never before the first step, when an FP8 KV cache has no scales of the trainer."""
CHECKPOINT_STEPS = 10
ROUND = 64
"""Sequences are padded to a multiple of this, as kernels in FP8 want it."""
MICRO_BATCH_TOKENS = 16_384
POSITIONS = (0, 128, 256, 512, 1024, 2048, 4096)
"""Where each range of positions in a response begins."""
FAR = 1.0
"""Log-probabilities of a far token differ by at least as many nats."""
FARTHEST = 50
BEFORE = 42
"""Tokens that are kept in front of a far one: two lines of a program."""


def make_data(folder: Path, shortest: int, longest: int) -> Path:
    """Write ``train.jsonl`` and ``validation.jsonl``, and return the former.

    Args:
        folder: to write.
        shortest, longest: steps of a program, inclusive.
    """
    for split, count in (("train", PROBLEMS), ("validation", HELD_OUT)):
        write(folder / f"{split}.jsonl", problems(split, count, 0, shortest, longest))
    return folder / "train.jsonl"


def long_answers(value: dict[str, Any], longest: int, data: Path, checkpoints: Path) -> None:
    """Change a YAML of the benchmark to long answers, in place.

    Args:
        value: the YAML.
        longest: steps of the longest program.
        data: file of the training data; ``validation.jsonl`` lies beside it.
        checkpoints: folder for checkpoints, from the last of which a run goes on.
    """
    needed = prompt_length(longest) + answer_length(longest) + ROUND  # and what the checker says
    length = -(-needed // ROUND) * ROUND
    value["grpo"] |= {
        "val_period": VALIDATION_STEPS,
        "max_val_samples": HELD_OUT,
        "val_batch_size": HELD_OUT,
    }
    policy = value["policy"]
    tokens = max(MICRO_BATCH_TOKENS, length)
    policy |= {
        "max_total_sequence_length": length,
        "make_sequence_length_divisible_by": ROUND,
        "dynamic_batching": {
            "enabled": True,
            "train_mb_tokens": tokens,
            "logprob_mb_tokens": tokens,
            "sequence_length_round": ROUND,
        },
    }
    policy["megatron_cfg"]["checkpoint"] = {"async_save": False}
    grpo = value["grpo"]
    most = max(HELD_OUT, grpo["num_prompts_per_step"] * grpo["num_generations_per_prompt"])
    generation = policy["generation"]
    generation["vllm_cfg"]["enforce_eager"] = False
    generation["vllm_kwargs"] = graphs(most)
    rows = value["data"]
    rows["max_input_seq_length"] = prompt_length(longest) + 1
    rows["train"]["split_validation_size"] = 0
    rows["validation"] = rows["train"] | {"data_path": str(data.with_name("validation.jsonl"))}
    value["checkpointing"] = {
        "enabled": True,
        "checkpoint_dir": str(checkpoints),
        "metric_name": None,
        "save_period": CHECKPOINT_STEPS,
        "keep_top_k": 1,
        "model_save_format": None,  # as DTensor's first worker has it; Megatron has its own
    }


def graphs(most: int) -> dict[str, Any]:
    """Return vLLM's arguments for decode steps of up to ``most`` sequences in full graphs.

    They spare the minutes that torch.compile takes to start.
    """
    return {
        "compilation_config": {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": [1, 2, 4, 8, *range(16, most + 1, 16)],
        }
    }


def read_steps(files: Iterable[Path]) -> dict[str, list[dict[str, Any]]]:
    """Compare generation's log-probabilities with the trainer's, and answers with right ones.

    Args:
        files: ``train_data_step*.jsonl`` of NeMo RL, which have both for every token, and a
            response a line.

    Returns:
        ``positions``: for each range of positions in a response that has tokens its first position
        ``start``, ``tokens``, the number of ``far`` ones (:data:`FAR`), and means in float64:
        ``kl`` (nats a token) and ``error``, computed as upstream's ``gen_kl_error`` and
        ``token_mult_prob_error``, and ``entropy``, minus the log-probability of what was sampled.
        ``kinds``: the same for each ``kind`` of token, which is what a right answer to the prompt
        has at its place (``long_tasks.token_kinds``), of answers of its length. ``farthest``: of
        the far tokens the :data:`FARTHEST` that make most of KL, with their file, ``position``,
        both log-probabilities, ``kl``, and ``token_ids`` of the :data:`BEFORE` tokens before them
        and of themselves. ``outcomes``: of each ``step`` the number of answers by what
        ``long_tasks.outcome`` returns.
    """
    positions, kinds = _Sums(POSITIONS), _Sums(KINDS)
    starts = torch.tensor(POSITIONS)
    farthest: list[dict[str, Any]] = []
    outcomes = []
    tokenizer = LongTokenizer()
    for file in sorted(files, key=_step):
        answers: Counter[str] = Counter()
        for ids, places, generated, trained in _responses(file):
            log_ratio = trained - generated
            far = log_ratio.abs() >= FAR
            kl = log_ratio.exp() - 1 - log_ratio
            error = log_ratio.abs().exp()
            ones = torch.ones_like(generated)
            found = torch.stack((ones, far.double(), kl, error, -generated), dim=1)
            positions.add(torch.bucketize(torch.arange(len(found)), starts, right=True) - 1, found)
            farthest += [
                {
                    "file": file.name,
                    "position": position,
                    "generation": generated[position].item(),
                    "trainer": trained[position].item(),
                    "kl": kl[position].item(),
                    "token_ids": ids[max(0, places[position] - BEFORE) : places[position] + 1],
                }
                for position in far.nonzero()[:, 0].tolist()
            ]
            farthest = heapq.nlargest(FARTHEST, farthest, key=lambda token: token["kl"])
            prompt = tokenizer.decode(ids[: places[0]])
            response = tokenizer.decode(ids[place] for place in places)
            answers[outcome(prompt, response)] += 1
            expected = _kind_numbers(prompt.count("#"))
            if len(expected) == len(found):
                kinds.add(expected, found)
        outcomes.append({"step": _step(file), **answers})
    told = {"positions": positions.rows("start"), "kinds": kinds.rows("kind")}
    return told | {"farthest": farthest, "outcomes": outcomes}


class _Sums:
    """Sums over the tokens of groups, in float64, of which means are made.

    Args:
        groups: what each group is called.
    """

    names = ("tokens", "far", "kl", "error", "entropy")

    def __init__(self, groups: Sequence[int | str]) -> None:
        self._groups = groups
        self._sums = torch.zeros(len(groups), len(self.names), dtype=torch.float64)

    def add(self, where: torch.Tensor, found: torch.Tensor) -> None:
        """Add the values of tokens, ``[tokens, names]``, to their groups, int64 ``[tokens]``."""
        self._sums.index_add_(0, where, found)

    def rows(self, label: str) -> list[dict[str, Any]]:
        """Return the counts and means of each group that has tokens."""
        return [
            {label: group, "tokens": int(row[0]), "far": int(row[1])}
            | dict(zip(self.names[2:], (row[2:] / row[0]).tolist(), strict=True))
            for group, row in zip(self._groups, self._sums, strict=True)
            if row[0] > 0
        ]


def step_files(folders: Iterable[Path]) -> list[Path]:
    """Return the files of a run's steps, of each the latest where a resumed run made it again.

    Args:
        folders: log folders of the run, the oldest first.
    """
    newest: dict[str, Path] = {}
    for folder in folders:
        newest |= {file.name: file for file in folder.glob("train_data_step*.jsonl")}
    return list(newest.values())


@cache
def _kind_numbers(steps: int) -> torch.Tensor:
    """Return the number in ``KINDS`` of each token of a right answer, int64."""
    return torch.tensor([KINDS.index(kind) for kind in token_kinds(steps)])


def _step(file: Path) -> int:
    return int(file.stem.removeprefix("train_data_step"))


def _responses(file: Path) -> Iterator[tuple[list[int], list[int], torch.Tensor, torch.Tensor]]:
    """Yield of each response the tokens of its prompt and of itself, the places of those that count
    in them, and their log-probabilities in generation and by the trainer, float64."""
    with file.open(encoding="utf-8") as lines:
        for line in lines:
            if not line.endswith("\n"):  # the driver was ended while it wrote
                return
            row = json.loads(line)
            (mask,), (ids,) = torch.tensor(row["token_loss_mask"]), row["token_ids"]
            asked = (mask * row["sample_loss_mask"][0]).bool()
            if not asked.any():
                continue
            generated, trained = (
                torch.tensor(row[f"{name}_logprobs"][0])[asked].double()
                for name in ("generation", "prev")
            )
            yield ids, asked.nonzero()[:, 0].tolist(), generated, trained

"""What ``nemo_rl.py`` reads out of a run's logs: curves, seconds, mismatch by position, a table."""

from __future__ import annotations

import json
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from long_tasks import LongTokenizer, outcome
from reasoning_tasks import has_non_words, is_repeated

CURVES = (
    "train/reward",
    "train/token_mult_prob_error",
    "train/gen_kl_error",
    "train/approx_entropy",
    "train/mean_gen_tokens_per_sample",
    "train/fp8rl/is_weight_ess",
    "train/fp8rl/token_mult_prob_error",
    "train/fp8rl/capped_prob_error",
    "train/fp8rl/equal_logprobs",
    "train/fp8rl/guard_level",
    "train/fp8rl/k_clipped_share",
    "train/fp8rl/step_skipped",
)
"""Printed step by step."""
VALIDATION = ("accuracy", "avg_length")
SECONDS = (
    "generation",
    "policy_and_reference_logprobs",
    "policy_training",
    "data_processing",
    "reward_calculation",
    "advantage_calculation",
    "logprob_inference_prep",
    "training_prep",
    "exposed_generation",
    "weight_sync",
    "recompute_kv_scales",
    "prepare_for_generation/total",
    "prepare_for_generation/transfer_and_update_weights",
    "total_step_time",
)
"""Phases (``timing/train/...``); printed are the first step, which warms up, and the median of the
others."""
SETUP = re.compile(r"^ +(Generation init|Policy init|Total setup): ([0-9.]+)s", re.MULTILINE)
"""Lines of the driver's."""
CALIBRATION = re.compile(r"KV scales calibrated from .* in ([0-9.]+) s:")
"""A line of ``nemo_rl_ext.workers.self_calibration``."""
POSITIONS = (0, 128, 256, 512, 1024, 2048, 4096)
"""Where each range of positions in a response begins."""
Judge = Callable[[list[int], list[int], float], Iterable[str]]
"""Words for an answer, which are counted: of the tokens of its prompt, of its own, its reward."""
FAR = 1.0
"""Log-probabilities of a far token differ by at least as many nats."""
WARM_STEPS = 2
"""Steps before those whose median is given."""
MEDIAN_STEPS = 3
"""Steps that a median needs at least."""
PHASES = {
    "rollout": ("generation",),
    "log-probabilities": ("policy_and_reference_logprobs",),
    "training": ("policy_training",),
    "weights to vLLM": ("prepare_for_generation/transfer_and_update_weights",),
    "KV scales by the trainer": ("recompute_kv_scales",),
    "sleep, wake-up, moves to and from the host": (
        "prepare_for_generation/total",
        "logprob_inference_prep",
        "training_prep",
    ),
    "reward, advantages, batches": (
        "data_processing",
        "reward_calculation",
        "advantage_calculation",
    ),
}
"""Timers of NeMo RL, which are added up. The wake-up's contains the transfer of weights, which is
taken off."""
STEP = "total_step_time"


def judge_of(task: str, model: Path) -> Judge:
    """Return what tells answers of a task apart.

    ``reasoning`` has ``right`` (the whole reward), ``wrong`` and, beside one of them, what is
    garbled: ``repeated`` (:func:`reasoning_tasks.is_repeated`) and ``non-words``.

    Args:
        task: ``long`` or ``reasoning``.
        model: folder with the tokenizer of ``reasoning``.
    """
    if task == "long":
        own = LongTokenizer()
        return lambda asked, told, _: (outcome(own.decode(asked), own.decode(told)),)
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model)

    def judge(asked: list[int], told: list[int], reward: float) -> Iterator[str]:
        yield "right" if reward == 1 else "wrong"
        if is_repeated(told):
            yield "repeated"
        if has_non_words(tokenizer.decode(told, skip_special_tokens=True)):
            yield "non-words"

    return judge


def summary(logs: Path, log: Path, judge: Judge | None, warm: int = 1) -> dict[str, Any]:
    """``steps``, each of CURVES, ``seconds`` and ``setup``, from the run's tensorboard and log.

    Medians leave out ``warm`` steps.

    A run that can be resumed, whose answers ``judge`` tells apart, consists of all runs of the
    folder, and has ``validation`` and what :func:`read_steps` returns too.
    """
    resumed = judge is not None
    folders = sorted(logs.glob("exp_*")) or [logs]  # NeMo RL makes a new one for each run
    found = scalars(folders if resumed else folders[-1:])
    values = {tag: list(by_step.values()) for tag, by_step in found.items()}
    seconds = {name: values.get(f"timing/train/{name}", []) for name in SECONDS}
    text = log.read_text(encoding="utf-8", errors="replace")
    seconds["engine_calibration"] = [float(taken) for taken in CALIBRATION.findall(text)]
    told = {
        "steps": len(values.get("train/reward", [])),
        "curves": {tag: [digits(x) for x in values[tag]] for tag in CURVES if tag in values},
        "seconds": {
            name: first_and_median(taken, warm) for name, taken in seconds.items() if taken
        },
        "setup": {name: float(taken) for name, taken in SETUP.findall(text)},
    }
    if judge is not None:
        validation = {name: found.get(f"validation/{name}", {}) for name in VALIDATION}
        told["validation"] = {"steps": list(validation["accuracy"])} | {
            name: [digits(x) for x in by_step.values()] for name, by_step in validation.items()
        }
        told |= read_steps(step_files(folders), judge)
    return told


def digits(x: float) -> float:
    """Round to seven significant digits, as many as a float32 has: KL may be far below 1e-6."""
    return float(f"{x:.7g}")


def scalars(folders: Sequence[Path]) -> dict[str, dict[int, float]]:
    """Read the values of each tag in tensorboard's files, by step, in order.

    Args:
        folders: log folders of one run; later ones replace the steps that they have made again.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    values: dict[str, dict[int, float]] = {}
    for folder in folders:
        for file in sorted(folder.rglob("events.out.tfevents.*")):
            events = EventAccumulator(str(file))
            events.Reload()
            for tag in events.Tags()["scalars"]:
                found = {event.step: event.value for event in events.Scalars(tag)}
                values[tag] = values.get(tag, {}) | found
    return {tag: dict(sorted(by_step.items())) for tag, by_step in values.items()}


def first_and_median(taken: list[float], warm: int = 1) -> dict[str, float]:
    """``first``, and ``median`` of what follows the first ``warm`` ones, if anything does."""
    told = {"first": round(taken[0], 3)}
    if len(taken) > warm:
        told["median"] = round(statistics.median(taken[warm:]), 3)
    return told


def read_steps(files: Iterable[Path], judge: Judge) -> dict[str, list[dict[str, Any]]]:
    """Compare generation's log-probabilities with the trainer's, and judge the answers.

    Args:
        files: ``train_data_step*.jsonl`` of NeMo RL, which have both for every token, and a
            response a line.
        judge: of :func:`judge_of`.

    Returns:
        ``positions``: for each range of positions in a response that has tokens its first position
        ``start``, ``tokens``, the number of ``far`` ones (:data:`FAR`), and means in float64:
        ``kl`` (nats a token) and ``error``, computed as upstream's ``gen_kl_error`` and
        ``token_mult_prob_error``, and ``entropy``, minus the log-probability of what was sampled.
        ``outcomes``: of each ``step`` the number of answers by the judge's words.
        ``lengths``: of all steps together the number of ``answers`` of each range of lengths, and
        of those by the judge's words.
    """
    starts, names = torch.tensor(POSITIONS), ("kl", "error", "entropy")
    sums = torch.zeros(len(starts), 2 + len(names), dtype=torch.float64)
    outcomes = []
    lengths: list[Counter[str]] = [Counter() for _ in POSITIONS]
    for file in sorted(files, key=_step):
        answers: Counter[str] = Counter()
        for ids, places, generated, trained, reward in _responses(file):
            log_ratio = trained - generated
            far = (log_ratio.abs() >= FAR).double()
            kl, error = log_ratio.exp() - 1 - log_ratio, log_ratio.abs().exp()
            found = torch.stack((torch.ones_like(far), far, kl, error, -generated), dim=1)
            where = torch.bucketize(torch.arange(len(found)), starts, right=True) - 1
            sums.index_add_(0, where, found)
            words = list(judge(ids[: places[0]], [ids[place] for place in places], reward))
            answers.update(words)
            lengths[int(where[-1])].update(("answers", *words))
        outcomes.append({"step": _step(file), **answers})
    positions = [
        {"start": start, "tokens": int(row[0]), "far": int(row[1])}
        | dict(zip(names, (row[2:] / row[0]).tolist(), strict=True))
        for start, row in zip(POSITIONS, sums, strict=True)
        if row[0] > 0
    ]
    by_length = [
        {"start": start, **counts} for start, counts in zip(POSITIONS, lengths, strict=True)
    ]
    return {
        "positions": positions,
        "outcomes": outcomes,
        "lengths": [row for row in by_length if "answers" in row],
    }


def step_files(folders: Iterable[Path]) -> list[Path]:
    """Return the files of a run's steps, of each the latest where a resumed run made it again.

    Args:
        folders: log folders of the run, the oldest first.
    """
    newest: dict[str, Path] = {}
    for folder in folders:
        newest |= {file.name: file for file in folder.glob("train_data_step*.jsonl")}
    return list(newest.values())


def _step(file: Path) -> int:
    return int(file.stem.removeprefix("train_data_step"))


def _responses(
    file: Path,
) -> Iterator[tuple[list[int], list[int], torch.Tensor, torch.Tensor, float]]:
    """Yield of each response the tokens of its prompt and of itself, the places of those that count
    in them, their log-probabilities in generation and by the trainer, float64, and its reward."""
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
            yield ids, asked.nonzero()[:, 0].tolist(), generated, trained, row["rewards"][0]


def is_complete(run: Mapping[str, Any]) -> bool:
    """Tell whether a run has the steps of a median."""
    return run.get("steps", 0) >= WARM_STEPS + MEDIAN_STEPS


def phases(run: Mapping[str, Any]) -> dict[str, float]:
    """Return the median seconds of each of PHASES, of the rest, and of the whole step."""
    seconds = {name: told.get("median", 0.0) for name, told in run["seconds"].items()}
    found = {
        phase: sum(seconds.get(name, 0.0) for name in names) for phase, names in PHASES.items()
    }
    found["sleep, wake-up, moves to and from the host"] -= found["weights to vLLM"]
    found["rest"] = seconds[STEP] - sum(found.values())
    return found | {"whole step": seconds[STEP]}


def table(runs: Sequence[Mapping[str, Any]], variants: Sequence[str]) -> str:
    """Return a table in Markdown: seconds by phase, their share of the first run's, and ratios.

    Args:
        runs: results, the first of which is BF16.
        variants: name of each.
    """
    columns = {
        variant: phases(run)
        for variant, run in zip(variants, runs, strict=True)
        if is_complete(run)
    }
    if not columns:
        return "No run has the steps of a median."
    (first, base), *others = columns.items()
    heads = [f"| median seconds | {first} | share |", *(f" {name} |" for name, _ in others)]
    lines = ["".join(heads), "|" + " --- |" * (3 + len(others))]
    for phase, seconds in base.items():
        share = f"{seconds / base['whole step']:.0%}"
        row = f"| {phase} | {seconds:.2f} | {share} |"
        for _, found in others:
            ratio = f" ({seconds / found[phase]:.2f}x)" if found[phase] and seconds else ""
            row += f" {found[phase]:.2f}{ratio} |"
        lines.append(row)
    bounds = [variant for variant, run in zip(variants, runs, strict=True) if run["upper_bounds"]]
    if bounds:
        lines += ["", f"Upper bounds, since others used the machine: {', '.join(bounds)}."]
    for variant, run in zip(variants, runs, strict=True):
        if run.get("set"):
            lines += ["", f"{variant} was run with --set {' --set '.join(run['set'])}."]
    return "\n".join(lines)

"""Read the files of all runs in an output folder, without those that are incomplete or missing."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from fp8rl.errors import Fp8RLError

ORDER = ("bf16", "fp8-rollout", "fp8", "exact")
PHASES = ("generate", "logprobs", "train", "calibrate", "refit")
_EDGE = 5
"""Number of steps over which the reward is averaged at both ends of a run: one step is noisy."""


class ReportError(Fp8RLError, ValueError):
    """The output folder cannot hold a run."""


@dataclass(frozen=True)
class Run:
    """The run of one precision.

    Attributes:
        steps: lines of ``metrics.jsonl``, sorted by ``step``.
        validation: (finished steps, accuracy in [0, 1]), sorted.
        info: ``run.json``; empty if it is missing or incomplete.
    """

    name: str
    steps: list[dict[str, Any]] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)
    info: dict[str, Any] = field(default_factory=dict)

    def series(self, *keys: str) -> tuple[list[int], list[float]]:
        """Return (finished steps, values) of one metric, e.g. ``series("mismatch", "kl_k3")``.

        Steps without a finite value are left out.
        """
        xs, ys = [], []
        for line in self.steps:
            value: Any = line
            for key in keys:
                value = value.get(key) if isinstance(value, dict) else None
            if _finite(value):
                xs.append(line["step"] + 1)
                ys.append(float(value))
        return xs, ys

    def mean(self, *keys: str) -> float | None:
        """Return the mean of a metric over all steps, or None if no step has it."""
        values = self.series(*keys)[1]
        return sum(values) / len(values) if values else None

    def reward_ends(self) -> tuple[float, float] | None:
        """Return the mean reward of the first and of the last steps, or None before the first."""
        rewards = self.series("reward")[1]
        if not rewards:
            return None
        first, last = rewards[:_EDGE], rewards[-_EDGE:]
        return sum(first) / len(first), sum(last) / len(last)

    @property
    def device(self) -> str:
        """Name of the GPU, or ``CPU``."""
        return str(self.info.get("device", "CPU"))

    @property
    def model(self) -> str | None:
        """Name of the model on the hub or of its folder, or None for the demo's own model."""
        settings = self.info.get("settings")
        name = settings.get("pretrained_name") if isinstance(settings, dict) else None
        if not isinstance(name, str):
            return None
        return Path(name).name if Path(name).is_absolute() else name

    def tokens_per_second(self) -> float | None:
        """Return the median speed of the rollouts of a step."""
        speeds = [
            line["tokens"] / line["seconds"]["generate"]
            for line in self.steps
            if _finite(line.get("tokens")) and (line.get("seconds") or {}).get("generate")
        ]
        return median(speeds) if speeds else None

    def seconds(self) -> dict[str, float]:
        """Return median seconds of a step by phase: the five of the loop first, then any other.

        A median, because on a GPU kernels are compiled in the first step.
        """
        named = {p for line in self.steps for p in line.get("seconds") or {}}
        order = [p for p in PHASES if p in named] + sorted(named - set(PHASES))
        values = {phase: self.series("seconds", phase)[1] for phase in order}
        return {phase: median(found) for phase, found in values.items() if found}


def load_runs(out_dir: Path) -> list[Run]:
    """Read the runs in ``out_dir``: those of ``ORDER``, then others by name."""
    if not out_dir.is_dir():
        raise ReportError(f"{out_dir} is not a folder; give the demo's --out.")
    names = [
        folder.name
        for folder in out_dir.iterdir()
        if (folder / "metrics.jsonl").is_file() or (folder / "run.json").is_file()
    ]
    names.sort(key=lambda name: (ORDER.index(name) if name in ORDER else len(ORDER), name))
    return [_load(out_dir / name) for name in names]


def _load(folder: Path) -> Run:
    by_step = {line["step"]: line for line in _lines(folder / "metrics.jsonl")}
    steps = [by_step[step] for step in sorted(by_step)]
    accuracy = {
        line["step"] + 1: line["validation_accuracy"]
        for line in steps
        if _finite(line.get("validation_accuracy"))
    }
    accuracy |= {
        line["step"]: line["accuracy"]
        for line in _lines(folder / "validation.jsonl")
        if _finite(line.get("accuracy"))
    }
    return Run(
        folder.name,
        steps,
        sorted(accuracy.items()),
        list(_lines(folder / "samples.jsonl")),
        _object(folder / "run.json"),
    )


def _lines(path: Path) -> Iterable[dict[str, Any]]:
    """Yield the lines that are JSON objects with a step; a kill may have cut off the last one."""
    if not path.is_file():
        return
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict) and isinstance(line.get("step"), int):
            yield line


def _object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)

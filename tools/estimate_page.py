#!/usr/bin/env python
"""Write the table of docs/estimate.md: what ``fp8rl estimate`` computes beside what was measured.

    python tools/estimate_page.py

tests/fp8rl/test_estimate.py compares the page with the same files.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, cast

from fp8rl import PluginManager, Recipe
from fp8rl.estimate import (
    Load,
    Loss,
    Model,
    find_gpu,
    layers_seconds,
    optimizer_seconds,
    rollout,
    trainer_seconds,
)
from fp8rl.families import module_names
from fp8rl.measured import Engine
from fp8rl.recipe import KVDtype

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "estimate.md"
BEGIN = "<!-- written by tools/estimate_page.py: begin -->"
END = "<!-- written by tools/estimate_page.py: end -->"
BOUND = 0.15
"""Largest relative error that counts as met."""


def _shape(name: str) -> dict[str, Any]:
    file = ROOT / "benchmarks" / "shapes" / f"{name}.json"
    return json.loads(file.read_text(encoding="utf-8"))


QWEN3_8B = _shape("qwen3_8b")
QWEN3_1_7B = _shape("qwen3_1.7b")
QWEN3_4B = _shape("qwen3_4b")
QWEN3_30B_A3B = _shape("qwen3_30b_a3b")
CONFIGS = {"Qwen3-8B": QWEN3_8B, "Qwen3-30B-A3B": QWEN3_30B_A3B}
_ROLLOUTS = ("rollout_h100", *(f"rollout_{number}_h100" for number in (2, 3, 4, 5)))
_PRECISION = {
    "bf16": "BF16",
    "stock": "vLLM's own FP8, FP8 KV cache",
    "fp8rl": "fp8rl, FP8 KV cache",
    "fp8rl-int8": "fp8rl, INT8 KV cache",
}


VARIANTS = (("bf16", "BF16"), ("fp8rl", "fp8rl"))
CHUNKS: Loss = "NeMo RL in chunks"
LOSSES: dict[str, Loss] = {"BF16": CHUNKS, "fp8rl": "one pass"}
"""Of a worker with ``logprob_chunk_size``, by precision; earlier runs of fp8rl had no one pass."""


class Row(NamedTuple):
    """A figure that was measured, and what is computed for it."""

    what: str
    gpu: str
    precision: str
    unit: str
    predicted: float
    measured: float
    files: tuple[str, ...]

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def result(name: str) -> Any:
    """Return the values of a file of results."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def model(config: dict[str, Any], ep: int = 1) -> Model:
    """Return the shapes of a model whose linear layers are all in FP8; ``ep`` GPUs train it."""
    policy = PluginManager(discover=False).pin_policy(Recipe().pins, module_names(config))
    return Model(config, policy.report(), ep=ep)


def rows() -> Iterator[Row]:
    """Yield every measured figure that the estimate has something for."""
    yield from _rollouts()
    yield from _layers()
    yield from _eight_layers()
    yield from _steps()
    yield from _trainer_alone()
    yield from _in_nemo_rl()


def _rollouts() -> Iterator[Row]:
    folders = result("restructuring")["h200"]
    runs = [
        (file, "Qwen3-8B", each)
        for file in (*_ROLLOUTS, "versions_gpu", "rollout_8b_int8_h200")
        for each in result(file)["results"]
    ]
    for key, name in (("rollout", "Qwen3-8B"), ("rollout_30b_a3b", "Qwen3-30B-A3B")):
        runs += [("restructuring", name, each) for each in folders[key]["after"]["results"]]
    mixtures = "rollout_30b_h200", "rollout_30b_2_h200", "rollout_30b_3_h200"
    runs += [(file, "Qwen3-30B-A3B", each) for file in mixtures for each in result(file)["results"]]
    found: dict[tuple[str, str, str, str], list[tuple[str, float]]] = {}
    for file, name, each in runs:
        gpu, variant = each["gpu"].split()[1].lower(), each["variant"].removesuffix("-kv")
        for load, speeds in each["loads"].items():
            figures = found.setdefault((name, gpu, load, variant), [])
            figures.append((file, speeds["median"]))
    order = [*CONFIGS, *_PRECISION]
    for key in sorted(found, key=lambda key: (order.index(key[0]), *key[1:3], order.index(key[3]))):
        yield _rollout(*key, found[key])


def _rollout(name: str, gpu: str, load: str, variant: str, figures: list[tuple[str, float]]) -> Row:
    requests, fp8 = Load.parse(load), variant != "bf16"
    eight_bits: KVDtype = "int8_per_token_head" if variant.endswith("-int8") else "fp8_e4m3"
    found = rollout(
        find_gpu(gpu),
        model(CONFIGS[name]),
        requests,
        cast("Engine", variant.removesuffix("-int8")),
        fp8=fp8,
        kv=eight_bits if fp8 else "auto",
    )
    return Row(
        f"{name}, {requests.requests} x ({requests.tokens_in:,}, {requests.tokens_out:,})",
        gpu,
        _PRECISION[variant],
        "tokens/s",
        found.tokens_per_second,
        median(figure for _, figure in figures),
        tuple(dict.fromkeys(file for file, _ in figures)),
    )


def _layers() -> Iterator[Row]:
    shapes = model({**QWEN3_8B, "num_hidden_layers": 1})
    for name in ("h100", "h200"):
        files = f"megatron_layer_{name}", f"megatron_layer_2_{name}"
        runs = {file: result(file)["milliseconds"] for file in files}
        if name == "h100":
            runs["restructuring"] = result("restructuring")[name]["after"]["layer_milliseconds"]
        for precision in ("BF16", "fp8rl"):
            seconds = layers_seconds(
                find_gpu(name), shapes, 8192, 4096, precision != "BF16", training=True
            )
            yield Row(
                "a layer of Qwen3-8B, forward and backward",
                name,
                precision,
                "ms",
                1e3 * seconds,
                median(each[f"{precision}, main_grad"] for each in runs.values()),
                tuple(runs),
            )


def _eight_layers() -> Iterator[Row]:
    gpu, shapes = find_gpu("h100"), model({**QWEN3_8B, "num_hidden_layers": 8})
    for precision in ("BF16", "fp8rl"):
        for what, measured in result("noted")["eight_layers"][precision].items():
            seconds = trainer_seconds(
                gpu,
                shapes,
                8192,
                4096,
                precision != "BF16",
                training=what == "forward and backward",
                loss="one pass",
            )
            name = f"8 layers of Qwen3-8B, {what}"
            yield Row(name, "h100", precision, "ms", 1e3 * seconds, measured, ("noted",))


def _steps() -> Iterator[Row]:
    shapes, folders = model(QWEN3_1_7B), result("restructuring")["h200"]["step"]
    runs = [
        *(
            (name, file, result(file)["rows"])
            for name, file in (
                ("h100", "megatron_step_h100"),
                ("h100", "megatron_step_2_h100"),
                ("h200", "megatron_step_h200"),
            )
        ),
        *(("h200", "restructuring", folders[turn]["after"]["rows"]) for turn in folders),
    ]
    for name in ("h100", "h200"):
        gpu, mine = find_gpu(name), [run for run in runs if run[0] == name]
        for precision in ("BF16", "fp8rl"):
            seconds = 2 * trainer_seconds(
                gpu, shapes, 8192, 4096, precision != "BF16", training=True, loss="Megatron"
            ) + optimizer_seconds(gpu, shapes)
            yield Row(
                "Qwen3-1.7B, a step of two micro-batches",
                name,
                precision,
                "ms",
                1e3 * seconds,
                median(each[precision]["milliseconds"]["total"] for _, _, each in mine),
                tuple(dict.fromkeys(file for _, file, _ in mine)),
            )


class Training(NamedTuple):
    """Runs of NeMo RL's Megatron worker, in its driver or alone, in one precision."""

    what: str
    gpu: str
    shapes: Model
    sequences: int
    micro_batch: int
    length: int
    precision: str
    loss: Loss
    runs: Sequence[tuple[str, float, float]]
    """File, and seconds of log-probabilities and of training, of each run."""
    recompute: bool = False

    def rows(self) -> Iterator[Row]:
        """Yield log-probabilities and training, beside the median of the runs."""
        gpu = find_gpu(self.gpu)
        for training in (False, True):
            recompute = training and self.recompute
            seconds = (self.sequences / self.micro_batch) * trainer_seconds(
                gpu,
                self.shapes,
                self.micro_batch * self.length,
                self.length,
                self.precision != "BF16",
                training=training,
                loss=self.loss,
                recompute=recompute,
            )
            phase = "training" if training else "log-probabilities"
            yield Row(
                f"{self.what}, {self.sequences} x {self.length:,} tokens, {phase}"
                f"{', recomputed' if recompute else ''}",
                self.gpu,
                self.precision,
                "s",
                seconds + optimizer_seconds(gpu, self.shapes) * training,
                median(run[1 + training] for run in self.runs),
                tuple(dict.fromkeys(run[0] for run in self.runs)),
            )


def _trainer_alone() -> Iterator[Row]:
    """Yield the calls of NeMo RL's Megatron worker alone."""

    def calls(file: str, runs: dict[str, Any], *names: str) -> list[tuple[str, float, float]]:
        found = [runs[name]["seconds"] for name in names]
        return [(file, each["get_logprobs"]["median"], each["train"]["median"]) for each in found]

    eight = model({**QWEN3_8B, "num_hidden_layers": 8})
    for gpu in ("h100", "h200"):
        file = f"trainer_8_layers_{gpu}"
        what = "8 layers of Qwen3-8B", gpu, eight, 32, 2, 4096
        found = result(file)["runs"]
        for variant, precision in VARIANTS:
            run = calls(file, found, variant)
            yield from Training(*what, precision, LOSSES[precision], run).rows()
    file = "trainer_1.7b_h100"
    what = "Qwen3-1.7B", "h100", model(QWEN3_1_7B), 64, 8, 1536
    found = result(file)["runs"]
    yield from Training(*what, "BF16", CHUNKS, calls(file, found, "bf16")).rows()
    twice = calls(file, found, "fp8rl", "fp8rl, again")
    yield from Training(*what, "fp8rl", "one pass", twice).rows()
    file = "trainer_moe_h200"
    quarter = model({**QWEN3_30B_A3B, "num_hidden_layers": 4, "num_experts": 32})
    for variant, precision in VARIANTS:
        what = "4 layers of Qwen3-30B-A3B, 32 experts", "h200", quarter, 64, 8, 1536
        run = calls(file, result(file)["runs"], variant)
        yield from Training(*what, precision, LOSSES[precision], run).rows()
    file = "trainer_4b_h200"
    losses: tuple[tuple[str, int, Loss], ...] = (("eight", 8, CHUNKS), ("four", 4, "NeMo RL"))
    for name, count, loss in losses:
        found = result(file)[f"{name}_sequences"]
        what = f"Qwen3-4B, micro-batches of {count}", "h200", model(QWEN3_4B), 32, count, 1536
        for variant, precision in VARIANTS:
            yield from Training(*what, precision, loss, calls(file, found, variant)).rows()


def _in_nemo_rl() -> Iterator[Row]:
    """Yield the trainer's phases in NeMo RL's driver, without the host's and the engine's."""
    phases = "policy_and_reference_logprobs", "policy_training"

    def medians(file: str, run: dict[str, Any]) -> tuple[str, float, float]:
        logprobs, training = (run["seconds"][phase]["median"] for phase in phases)
        return file, logprobs, training

    def later(file: str, run: dict[str, Any]) -> tuple[str, float, float]:
        steps = run["seconds_of_each_step"]
        logprobs, training = (median(steps[phase][2:]) for phase in phases)
        return file, logprobs, training

    small, dense = model(QWEN3_4B), model(QWEN3_8B)
    file = "nemo_rl_real_4b_h200"
    name = "Qwen3-4B in NeMo RL, micro-batches of "
    for (_, precision), run in zip(VARIANTS, result(file)["runs"], strict=True):
        what = f"{name}4", "h200", small, 256, 4, 1536, precision
        yield from Training(*what, "NeMo RL", [medians(file, run)]).rows()
    again, file = "nemo_rl_real_4b_2_h200", "nemo_rl_real_4b_3_h200"
    found = result(file)["runs"]
    runs = {
        "BF16": [later(file, found["bf16"])],
        "fp8rl": [
            *(later(file, found[variant]) for variant in ("fp8rl", "fp8rl-mp")),
            later(again, result(again)),
        ],
    }
    for precision, each in runs.items():  # from before fp8rl's one pass
        what = f"{name}8", "h200", small, 256, 8, 1536, precision
        yield from Training(*what, CHUNKS, each).rows()
    files = {
        128: ["nemo_rl_real_8b_h200"],
        256: ["nemo_rl_real_8b_2_h200", "nemo_rl_real_8b_4_h200"],
    }
    for count, each in files.items():
        for variant, precision in VARIANTS:
            what = "Qwen3-8B in NeMo RL", "h200", dense, count, 8, 1536, precision
            taken = [medians(file, result(file)["runs"][variant]) for file in each]
            yield from Training(*what, LOSSES[precision], taken, recompute=True).rows()
    file = "nemo_rl_real_30b_a3b_12l_2_h200"
    shared = model({**QWEN3_30B_A3B, "num_hidden_layers": 12}, ep=4)
    for variant, precision in VARIANTS:
        what = "12 layers of Qwen3-30B-A3B in NeMo RL, EP 4", "h200", shared, 192, 8, 1536
        run = medians(file, result(file)["runs"][variant])
        yield from Training(*what, precision, LOSSES[precision], [run]).rows()


def page(text: str) -> str:
    """Return the page with the table written anew."""
    lines = [
        "| what | GPU | precision | predicted | measured | error | data |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows():
        error = f"{row.error:+.1%}"
        files = [f"[{n + 1}](../benchmarks/results/{f}.json)" for n, f in enumerate(row.files)]
        cells = (
            row.what,
            row.gpu.upper(),
            row.precision,
            f"{_number(row.predicted)} {row.unit}",
            _number(row.measured),
            error if abs(row.error) <= BOUND else f"**{error}**",
            ", ".join(files),
        )
        lines.append(f"| {' | '.join(cells)} |")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return "\n".join([before + BEGIN, "", *lines, "", END + after])


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    sys.stdout.write(f"{PAGE} was written.\n")

"""``fp8rl bench``: a process for each engine, one after the other, and a report."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from fp8rl.cli.exact import read_prompts
from fp8rl.errors import OptionError
from fp8rl_bench.answers import PROMPTS
from fp8rl_bench.variants import VARIANTS

DEFAULT = tuple(VARIANTS)[:6]
ON_CPU = ("bf16", "fp8rl-kv", "fp8rl", "fp8rl-exact")
ALWAYS = 2
"""So many variants are measured however long it takes: BF16 and one to compare."""


def bench(
    model: Annotated[str, typer.Argument(help="Folder of a model, or its name on the hub.")],
    random: Annotated[
        bool, typer.Option("--random", help="Random weights: the shape of config.json alone.")
    ] = False,
    load: Annotated[
        str | None, typer.Option(help="Requests x tokens in x tokens out.", metavar="NxNxN")
    ] = None,
    variants: Annotated[
        str | None, typer.Option(help=f"Some of {', '.join(VARIANTS)}, separated by commas.")
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="Text file with a prompt in each line, for KL.")
    ] = None,
    minutes: Annotated[
        float, typer.Option(min=1, help="Variants that take longer than this are left out.")
    ] = 10.0,
    memory: Annotated[
        float, typer.Option(min=0.1, max=1, help="Share of the GPU that vLLM takes.")
    ] = 0.9,
    out: Annotated[Path, typer.Option(help="Folder for report and logs.")] = Path("out/bench"),
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the report as JSON, not as tables.")
    ] = False,
) -> None:
    """Measure what FP8 gains and costs for a model on this machine, and say what to choose.

    Rollouts in vLLM and a layer of Megatron's trainer in BF16 and FP8: speed, memory, refit, start;
    with trained weights also the KL and capped_prob_error of rollout and trainer on real prompts.
    The page report.html in --out shows it.
    """
    import torch

    from fp8rl.models.folder import folder_config, local_folder, require_plain_weights
    from fp8rl_bench.advice import advise, recipe_line
    from fp8rl_bench.facts import versions
    from fp8rl_bench.report import tables, write_page

    device = "cuda" if torch.cuda.is_available() else "cpu"
    names = _variants(variants, device)
    requests = _load(load or ("4x16x8" if device == "cpu" else "256x512x1024"))
    count = 128 if device == "cuda" else 4
    texts = PROMPTS if prompts is None else read_prompts(prompts)
    folder = local_folder(model, weights=not random)
    config = folder_config(folder)
    require_plain_weights(config, model)
    config = config.get("text_config") or config
    try:
        out.mkdir(parents=True, exist_ok=True)
        for old in out.glob("*.answers.json"):
            old.unlink()
    except OSError as error:
        raise OptionError(f"--out '{out}' cannot be written to ({error.strerror}).") from None
    job = {
        "model": str(folder),
        "config": config,
        "random": random,
        "device": device,
        "load": requests,
        "memory": memory,
        "prompts": texts[:: max(1, len(texts) // count)][:count],
        "calls": None if device == "cuda" else 1,
        "answer_tokens": 256 if device == "cuda" else 16,
        "words": min(150_000, config["vocab_size"]),
        "positions": config.get("max_position_embeddings", 1 << 20),
        "folder": str(out),
    }
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    found = Queue(job, names, minutes, console).run()
    rows = [*found["variants"].values(), found["training"]]
    report = {
        "model": model,
        "random": random,
        # Asked here, it would take memory of the GPU.
        "device": next((row["device"] for row in rows if "device" in row), device.upper()),
        "load": "x".join(map(str, requests)),
        "versions": versions(),
        **found,
    }
    advice = advise(report)
    report |= {"advice": advice.text, "recipe": advice.recipe}
    text = json.dumps(report, indent=1)
    (out / "report.json").write_text(text + "\n", encoding="utf-8")
    page = write_page(report, out / "report.html")
    if as_json:
        typer.echo(text)
    else:
        for table in tables(report):
            Console().print(table)
        for line in (advice.text, recipe_line(advice.recipe)):
            Console().print(line, markup=False, highlight=False, soft_wrap=True)
    console.print(f"Page: {page}; data: {out / 'report.json'}", markup=False)


@dataclass
class Queue:
    """The processes of a run: each imports its engine while the one before it starts its own."""

    job: dict[str, Any]
    names: list[str]
    minutes: float
    console: Console
    began: float = 0.0
    longest: float = 0.0
    """Seconds of the engine that took longest."""

    def run(self) -> dict[str, Any]:
        """Measure all rows, and return ``variants``, ``training`` and ``seconds``."""
        self.began = time.monotonic()
        rows: dict[str, Any] = {}
        waiting = Process(self.job, self.names[0])
        try:
            for number, name in enumerate([*self.names, "trainer"]):
                if number >= ALWAYS and name != "trainer" and self._too_long(rows):
                    told = f"{self.minutes:g} minutes would not do; give --minutes more"
                    rows[name] = {"failed": {"left out": told}}
                    continue
                if waiting.name != name:
                    waiting.end()
                    waiting = Process(self.job, name)
                process = waiting
                if name != "trainer":
                    waiting = Process(self.job, [*self.names, "trainer"][number + 1])
                started = time.monotonic()
                try:
                    rows[name] = process.measure(self._job(rows), partial(self._say, name))
                finally:
                    process.end()
                if name != "trainer":
                    self.longest = max(self.longest, time.monotonic() - started)
        finally:
            waiting.end()
        return {
            "training": rows.pop("trainer"),
            "variants": rows,
            "seconds": round(time.monotonic() - self.began),
        }

    def _job(self, rows: dict[str, Any]) -> dict[str, Any]:
        """Return the job of the next row: its load runs as often as in the rows before it."""
        done = (len(row.get("tokens_per_second", ())) for row in rows.values())
        return self.job | {"calls": next(filter(None, done), self.job["calls"])}

    def _too_long(self, rows: dict[str, Any]) -> bool:
        """Tell whether one more engine and the trainer would take too long."""
        weights = next((row["weight_bytes"] for row in rows.values() if "weight_bytes" in row), 0)
        trainer = 40 + (0 if self.job["random"] else 3 * weights / 2**30)
        passed = time.monotonic() - self.began
        return passed + self.longest + trainer > 60 * self.minutes

    def _say(self, name: str, text: str) -> None:
        passed, usual = int(time.monotonic() - self.began), ""
        if text.startswith("starts") and self.longest:
            usual = f" (the row takes about {self.longest:.0f} s)"
        clock = f"{passed // 60}:{passed % 60:02} of {self.minutes:g}:00"
        told = f"[{clock}] {VARIANTS.get(name, 'trainer')}: {text}{usual}"
        self.console.print(told, markup=False)


class Process:
    """A process of :mod:`fp8rl_bench.worker`, which imports its engine and waits for its turn."""

    def __init__(self, job: dict[str, Any], name: str) -> None:
        self.name = name
        folder = Path(job["folder"])
        self._out, self._log = folder / f"{name}.json", folder / f"{name}.log"
        self._out.unlink(missing_ok=True)
        module = f"fp8rl_bench.{'trainer' if name == 'trainer' else 'rollouts'}"
        read, write = os.pipe()
        with self._log.open("w", encoding="utf-8") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "fp8rl_bench.worker", module, self._out, str(write)],
                env={**os.environ, **environment(job["device"], name)},
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=[write],
                text=True,
            )
        os.close(write)
        self._events = os.fdopen(read, encoding="utf-8")

    def measure(self, job: dict[str, Any], say: Callable[[str], None]) -> dict[str, Any]:
        """Give the process its job and its turn, show its progress and return its row."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended, and its log says why
            json.dump({**job, "variant": self.name}, self._process.stdin)
            self._process.stdin.close()
        for line in self._events:
            say(line.strip())
        code = self._process.wait()
        found: dict[str, Any] = {"failed": {}}
        if self._out.is_file():
            found = json.loads(self._out.read_text(encoding="utf-8"))
        if code:
            lines = self._log.read_text(encoding="utf-8", errors="replace").split("\n")
            last = next((line.strip() for line in reversed(lines) if line.strip()), "no output")
            found["failed"]["process"] = f"it ended with {code}: {last[:240]} (log: {self._log})"
        for part, why in found["failed"].items():
            say(f"{part} failed: {why}")
        return found

    def end(self) -> None:
        """End the process if it still runs."""
        self._events.close()
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()


def environment(device: str, name: str) -> dict[str, str]:
    """Return the variables of a row's process."""
    found = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_DEEP_GEMM_WARMUP": "skip"}
    if device == "cpu":  # else vLLM compiles a helper, which needs a C++ compiler
        found["TORCHDYNAMO_DISABLE"] = "1"
    elif name == "fp8rl-exact":
        found["VLLM_USE_V2_MODEL_RUNNER"] = "1"  # with experts vLLM 0.26 does not by itself
    return found


def _variants(text: str | None, device: str) -> list[str]:
    """Return the variants to measure, BF16 first: others are compared with it."""
    if text is None:
        return list(ON_CPU if device == "cpu" else DEFAULT)
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in VARIANTS]
    if unknown or not names:
        raise OptionError(
            f"--variants '{text}': there is no '{', '.join(unknown)}'; choose among "
            f"{', '.join(VARIANTS)}."
        )
    return sorted(set(names), key=lambda name: (name != "bf16", names.index(name)))


def _load(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"[1-9]\d*x[1-9]\d*x[1-9]\d*", text):
        raise OptionError(
            f"--load '{text}' is no load; write requests x tokens in x tokens out, such as "
            "256x512x1024."
        )
    return tuple(map(int, text.split("x")))

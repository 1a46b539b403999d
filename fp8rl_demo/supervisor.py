"""Run the demo's stages as child processes and show their progress."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from fp8rl.errors import Fp8RLError
from fp8rl_demo.events import read_events
from fp8rl_demo.rollout import engine_env
from fp8rl_demo.worker import INTERRUPTED, Job


class DemoError(Fp8RLError, RuntimeError):
    """A stage of the demo failed."""


@dataclass(frozen=True)
class Stage:
    """One child process."""

    title: str
    job: dict[str, Any]
    """Fields of :class:`Job` without the event pipe."""

    @property
    def log(self) -> Path:
        return Path(self.job["folder"]) / "log.txt"


class Supervisor:
    """Runs stages, at most ``parallel`` at a time, and forwards interrupts to them."""

    def __init__(self, console: Console, parallel: int) -> None:
        self._console = console
        self._parallel = max(parallel, 1)
        self._interrupts = 0
        self._failed = False
        self._running: set[subprocess.Popen] = set()

    @property
    def interrupted(self) -> bool:
        """Whether a stop was requested."""
        return self._interrupts > 0

    def run(self, stages: Sequence[Stage]) -> None:
        """Run all stages, each in a thread; after an interrupt, no further one is started."""
        with (
            self._forward_interrupts(),
            self._progress() as progress,
            ThreadPoolExecutor(self._parallel) as pool,
        ):
            runs = []
            for stage in stages:
                task = progress.add_task(stage.title, total=None, phase="waiting", note="")
                runs.append(pool.submit(self._run, stage, partial(progress.update, task)))
            try:
                for run in as_completed(runs):
                    run.result()
            except BaseException:
                self._failed = True
                self._signal(signal.SIGKILL)
                raise

    def _run(self, stage: Stage, show: Callable[..., None]) -> None:
        if self.interrupted or self._failed:
            return
        process, events = self._start(stage)
        self._running.add(process)
        if self._failed:  # another stage failed, or Ctrl-C came, while this one started
            process.kill()
        elif self.interrupted:
            process.send_signal(signal.SIGINT)
        error = ""
        with os.fdopen(events, encoding="utf-8") as stream:
            for event in read_events(stream):
                if event.phase == "error":
                    error = event.note
                total = event.total or None
                show(completed=event.done, total=total, phase=event.phase, note=event.note)
        code = process.wait()
        self._running.discard(process)
        if code == 0:
            show(phase="done")
        elif self.interrupted and code in (INTERRUPTED, -signal.SIGINT):
            show(phase="stopped")
        else:
            self._failed = True  # before this thread takes the next stage
            raise DemoError(_explain(stage, error, code))

    @staticmethod
    def _start(stage: Stage) -> tuple[subprocess.Popen, int]:
        stage.log.parent.mkdir(parents=True, exist_ok=True)
        read_fd, write_fd = os.pipe()
        job = Job(**stage.job, events_fd=write_fd)
        with stage.log.open("a", encoding="utf-8") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "fp8rl_demo.worker", job.model_dump_json()],
                env={**os.environ, **engine_env()},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[write_fd],
                # A terminal sends Ctrl-C to its whole group; the child gets it once, from here.
                start_new_session=True,
            )
        os.close(write_fd)
        return process, read_fd

    def _signal(self, number: int) -> None:
        for process in list(self._running):
            process.send_signal(number)

    @contextmanager
    def _forward_interrupts(self) -> Iterator[None]:
        def forward(number: int, frame: object) -> None:
            self._interrupts += 1
            if self._interrupts == 1:
                self._console.print("Stopping after this step; press Ctrl-C again to stop at once.")
            self._signal(signal.SIGINT)

        numbers = (signal.SIGINT, signal.SIGTERM)
        previous = {number: signal.signal(number, forward) for number in numbers}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _progress(self) -> Progress:
        return Progress(
            SpinnerColumn(),
            TextColumn("{task.description:<12}"),
            BarColumn(bar_width=16),
            MofNCompleteColumn(),
            TextColumn("{task.fields[phase]}"),
            TextColumn("[dim]{task.fields[note]}"),
            TimeElapsedColumn(),
            console=self._console,
        )


def _explain(stage: Stage, error: str, code: int) -> str:
    if error:
        return f"{stage.title}: {error} (log: {stage.log})"
    lines = stage.log.read_text(encoding="utf-8", errors="replace").splitlines()
    tail = next((line.strip() for line in reversed(lines) if line.strip()), "no output")
    return f"{stage.title} ended with exit code {code}: {tail} (whole log: {stage.log})"

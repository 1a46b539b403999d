"""Run the demo's stages as child processes and show their progress."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from fp8rl.errors import Fp8RLError
from fp8rl_demo.events import read_events
from fp8rl_demo.rollout import ENGINE_ENV
from fp8rl_demo.worker import INTERRUPTED, Job


class DemoError(Fp8RLError, RuntimeError):
    """A stage of the demo failed."""


@dataclass
class Stage:
    """One child process."""

    title: str
    job: dict[str, Any]
    """Fields of :class:`Job` without the event pipe."""
    error: str = ""
    process: subprocess.Popen | None = None
    task: TaskID | None = None
    reader: threading.Thread | None = None
    log: Path = field(init=False)

    def __post_init__(self) -> None:
        self.log = Path(self.job["folder"]) / "log.txt"


class Supervisor:
    """Runs stages, at most ``parallel`` at a time, and forwards interrupts to them.

    Args:
        console: console for the progress bars.
        parallel: number of processes at a time; each uses one core.
    """

    def __init__(self, console: Console, parallel: int) -> None:
        self._console = console
        self._parallel = max(parallel, 1)
        self._interrupts = 0
        self._running: list[Stage] = []

    @property
    def interrupted(self) -> bool:
        """Whether a stop was requested."""
        return self._interrupts > 0

    def run(self, stages: Sequence[Stage]) -> None:
        """Run all stages; after an interrupt, no further one is started.

        Raises:
            DemoError: a stage failed; the message names the reason and the log file.
        """
        waiting = list(stages)
        with self._forward_interrupts(), self._progress() as progress:
            for stage in waiting:
                stage.task = progress.add_task(stage.title, total=None, phase="waiting", note="")
            while waiting or self._running:
                while waiting and len(self._running) < self._parallel and not self.interrupted:
                    self._start(waiting.pop(0), progress)
                if not self._running:
                    return
                self._wait_for_one(progress)

    def _start(self, stage: Stage, progress: Progress) -> None:
        stage.log.parent.mkdir(parents=True, exist_ok=True)
        read_fd, write_fd = os.pipe()
        job = Job(**stage.job, events_fd=write_fd)
        with stage.log.open("a", encoding="utf-8") as log:
            stage.process = subprocess.Popen(
                [sys.executable, "-m", "fp8rl_demo.worker", job.model_dump_json()],
                env={**os.environ, **ENGINE_ENV},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[write_fd],
                # A terminal sends Ctrl-C to its whole group; the child gets it once, from here.
                start_new_session=True,
            )
        os.close(write_fd)
        stage.reader = threading.Thread(target=self._read, args=(stage, read_fd, progress))
        stage.reader.start()
        self._running.append(stage)

    def _read(self, stage: Stage, read_fd: int, progress: Progress) -> None:
        assert stage.task is not None
        with os.fdopen(read_fd, encoding="utf-8") as stream:
            for event in read_events(stream):
                if event.phase == "error":
                    stage.error = event.note
                progress.update(
                    stage.task,
                    completed=event.done,
                    total=event.total or None,
                    phase=event.phase,
                    note=event.note,
                )

    def _wait_for_one(self, progress: Progress) -> None:
        for stage in list(self._running):
            assert stage.process and stage.reader and stage.task is not None
            try:
                code = stage.process.wait(timeout=0.2)
            except subprocess.TimeoutExpired:
                continue
            stage.reader.join()
            self._running.remove(stage)
            if code == 0:
                progress.update(stage.task, phase="done")
            elif self.interrupted and code in (INTERRUPTED, -signal.SIGINT):
                progress.update(stage.task, phase="stopped")
            else:
                self._stop_all()
                raise DemoError(_explain(stage, code))

    def _stop_all(self) -> None:
        for stage in self._running:
            assert stage.process is not None and stage.reader is not None
            stage.process.kill()
            stage.process.wait()
            stage.reader.join()
        self._running.clear()

    @contextmanager
    def _forward_interrupts(self) -> Iterator[None]:
        def forward(number: int, frame: object) -> None:
            self._interrupts += 1
            if self._interrupts == 1:
                self._console.print("Stopping after this step; press Ctrl-C again to stop at once.")
            for stage in self._running:
                if stage.process is not None:
                    stage.process.send_signal(signal.SIGINT)

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


def _explain(stage: Stage, code: int) -> str:
    if stage.error:
        return f"{stage.title}: {stage.error} (log: {stage.log})"
    lines = stage.log.read_text(encoding="utf-8", errors="replace").splitlines()
    tail = next((line.strip() for line in reversed(lines) if line.strip()), "no output")
    return f"{stage.title} ended with exit code {code}: {tail} (whole log: {stage.log})"

"""Run the steps of a row: each writes to the row's log and is shown while it runs."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

PERCENT = re.compile(r"\[ *(\d+)%\]")
TELL_EVERY = 60.0


class StepError(Exception):
    """One sentence on why a step of a row did not end well."""


class Steps:
    """Runs commands for one row.

    Args:
        label: what is printed before each step, such as ``[2/8] vllm-0.32.0``.
        log: file that gets all output.
        folder: where commands run.
    """

    def __init__(self, label: str, log: Path, folder: Path) -> None:
        self._label, self._log, self._folder = label, log, folder
        self._env = {
            name: value
            for name, value in os.environ.items()
            if name not in ("PYTHONPATH", "FP8RL_RECIPE", "PYTEST_ADDOPTS", "VIRTUAL_ENV")
        }
        # Rows are compared with each other, and several threads add up in another order.
        self._env.setdefault("OMP_NUM_THREADS", "1")
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("", encoding="utf-8")

    def run(self, title: str, command: list, limit: float, ends: tuple[int, ...] = (0,)) -> str:
        """Run a command and return its output.

        Args:
            title: what it does, for progress and for the error.
            command: words of the command.
            limit: seconds after which it is stopped, with all processes that it has started.
            ends: exit codes that are no error.

        Raises:
            StepError: another exit code, or the limit was reached.
        """
        words = [str(word) for word in command]
        with self._log.open("a", encoding="utf-8") as log:
            log.write(f"$ {' '.join(words)}\n")
        start = self._log.stat().st_size
        code = self._wait(title, words, limit)
        output = self._log.read_bytes()[start:].decode("utf-8", "replace")
        if code is None:
            raise StepError(f"{title}: stopped after {limit:.0f} s.")
        if code not in ends:
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            raise StepError(f"{title}: {how}: {error_line(output)}")
        return output

    def _wait(self, title: str, words: list[str], limit: float) -> int | None:
        began = told = time.monotonic()
        self._say(f"{title} ...")
        with self._log.open("ab") as log:
            process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self._folder,
                env=self._env,
                start_new_session=True,
            )
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return process.wait(timeout=1)
                now = time.monotonic()
                if now - began > limit:
                    return None
                line = f"{title}: {now - began:.0f} s {self._percent()}"
                if sys.stdout.isatty():
                    self._say(line, end="")
                elif now - told > TELL_EVERY:
                    told = now
                    self._say(line)
        finally:
            # Also what the command has left behind, such as the processes of an engine.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _percent(self) -> str:
        """Return what pytest has printed last on how much is done."""
        with self._log.open("rb") as log:
            log.seek(max(0, self._log.stat().st_size - 4000))
            found = PERCENT.findall(log.read().decode("utf-8", "replace"))
        return f"{found[-1]}%" if found else ""

    def _say(self, text: str, end: str = "\n") -> None:
        if sys.stdout.isatty():
            width = shutil.get_terminal_size().columns - 1
            print(f"\r\033[K{f'{self._label}  {text}'[:width]}", end=end, flush=True)
        else:
            print(f"{self._label}  {text}", flush=True)


def error_line(output: str) -> str:
    """Return the line of a command's output that says best why it failed."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    told = [line for line in lines if re.match(r"(ERROR|error|[\w.]*Error)\b: ?", line)]
    return (told or lines or ["no output"])[-1]

"""One row of the report in a process of its own: ``python -m fp8rl_bench.worker JOB``.

JOB is a JSON object. The process imports its engine, waits for a line on stdin, which is its turn
on the GPU, and measures. What it finds is in the file ``out`` after each part, whatever comes
later; progress goes to the file descriptor ``events``; what engines print, to stdout and stderr.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

_LONGEST = 240


class Row:
    """What a process has found so far; a part that fails becomes one sentence in ``failed``."""

    def __init__(self, out: Path, events: IO[str]) -> None:
        self.found: dict[str, Any] = {"failed": {}}
        self._out, self._events = out, events

    @contextmanager
    def part(self, name: str, doing: str) -> Iterator[None]:
        """Tell what is done inside the block, and write what was found at its end."""
        try:
            self._events.write(doing + "\n")
            self._events.flush()
        except BrokenPipeError:
            sys.exit("The process that shows the progress has ended.")
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.found["failed"][name] = sentence(error)
        self._out.write_text(json.dumps(self.found), encoding="utf-8")


def sentence(error: BaseException) -> str:
    """Return the beginning of an error in one line, with its kind."""
    text = ": ".join(filter(None, (type(error).__name__, " ".join(str(error).split()))))
    return text if len(text) <= _LONGEST else text[:_LONGEST] + " .."


def main(text: str) -> None:
    """Do a job."""
    job = json.loads(text)
    with os.fdopen(job["events"], "w", encoding="utf-8") as events:
        row = Row(Path(job["out"]), events)
        module = importlib.import_module(job["module"])
        with row.part("import", "imports its engine"):
            module.prepare()
        if not sys.stdin.readline() or row.found["failed"]:
            return
        row.found["device"] = _device()
        module.measure(job, row)


def _device() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


if __name__ == "__main__":
    main(sys.argv[1])

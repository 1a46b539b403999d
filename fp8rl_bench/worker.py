"""One row of the report: ``python -m fp8rl_bench.worker MODULE OUT EVENTS``, a process of its own.

The process imports the engine of MODULE, waits on stdin for its job, a JSON object, which is its
turn on the GPU, and measures. What it finds is in the file OUT after each part, whatever comes
later; progress goes to the file descriptor EVENTS; what engines print, to stdout and stderr.
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

from fp8rl.errors import sentence


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


def main(name: str, out: str, descriptor: str) -> None:
    """Do the job that stdin gives."""
    with os.fdopen(int(descriptor), "w", encoding="utf-8") as events:
        row = Row(Path(out), events)
        module = importlib.import_module(name)
        with row.part("import", "imports its engine"):
            module.prepare()
        job = sys.stdin.read()
        if not job or row.found["failed"]:
            return
        row.found["device"] = _device()
        module.measure(json.loads(job), row)


def _device() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


if __name__ == "__main__":
    main(*sys.argv[1:])

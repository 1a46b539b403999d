"""Progress events, which a run sends to the process that shows them."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import IO


@dataclass(frozen=True)
class Event:
    """Progress of a run: ``done`` of ``total`` steps, and the current phase."""

    phase: str
    done: int = 0
    total: int = 0
    note: str = ""


class EventWriter:
    """Writes events as JSON lines to a pipe; if nobody reads the pipe any more, the run stops."""

    def __init__(self, stream: IO[str] | None) -> None:
        self._stream = stream
        self.stop_requested = False

    def __call__(self, phase: str, done: int = 0, total: int = 0, note: str = "") -> None:
        if self._stream is None:
            return
        try:
            self._stream.write(json.dumps(asdict(Event(phase, done, total, note))) + "\n")
            self._stream.flush()
        except BrokenPipeError:
            self._stream = None
            self.stop_requested = True

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Within it, a first SIGINT or SIGTERM requests a stop and a second ends the process."""

        def ask(number: int, frame: object) -> None:
            self.stop_requested = True
            signal.signal(number, previous[signal.Signals(number)])

        previous = {n: signal.signal(n, ask) for n in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


def read_events(stream: IO[str]) -> Iterator[Event]:
    """Yield the events from a pipe until it is closed."""
    for line in stream:
        yield Event(**json.loads(line))

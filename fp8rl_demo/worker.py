"""One stage of the demo in a process of its own: ``python -m fp8rl_demo.worker JOB``.

JOB is a :class:`Job` as JSON. Progress goes to the file descriptor that it names; what the engines
print goes to stdout and stderr.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from fp8rl.errors import Fp8RLError, sentence
from fp8rl_demo.events import EventWriter
from fp8rl_demo.settings import Precision, Settings

INTERRUPTED = 130


class Job(BaseModel):
    """The work of one process: a GRPO run, or the warm start if ``precision`` is None."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    settings: Settings
    length: int
    """Tokens of the longest prompt and answer."""
    warm_start: Path | None
    folder: Path
    events_fd: int
    precision: Precision | None = None
    recipe: dict[str, Any] = {}
    steps: int = 0
    resume: bool = False


def main(text: str) -> int:
    """Run a job and return the exit code: 0, 2 after an error, 130 after an interrupt."""
    job = Job.model_validate_json(text)
    with os.fdopen(job.events_fd, "w", encoding="utf-8") as stream:
        events = EventWriter(stream)
        try:
            with events.interruptible():
                _run(job, events)
        except KeyboardInterrupt:
            return INTERRUPTED
        except Exception as error:
            traceback.print_exc()
            events("error", note=str(error) if isinstance(error, Fp8RLError) else sentence(error))
            return 2
        finally:
            _end_process_group()
    return 0


def _run(job: Job, events: EventWriter) -> None:
    import torch

    from fp8rl_demo.products import float32_products

    if not torch.cuda.is_available():
        # One thread: small GEMMs gain nothing from two, and a resumed run must repeat exactly.
        torch.set_num_threads(1)
    with float32_products():
        if job.precision is None:
            from fp8rl_demo.warm_start import run_warm_start

            run_warm_start(job.settings, job.length, job.folder, events)
            return
        from fp8rl import Recipe
        from fp8rl_demo.loop import GrpoRun

        recipe = Recipe.from_dict(job.recipe)
        run = GrpoRun(job.precision, recipe, job.settings, job.length, job.folder, events)
        run.run(job.steps, job.warm_start, resume=job.resume)


def _end_process_group() -> None:
    """End torch's process group; NCCL's warning that it was left would be the log's last line."""
    import torch

    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

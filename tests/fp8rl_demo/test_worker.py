from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8rl.errors import ModelError
from fp8rl_demo import worker


@pytest.mark.parametrize(
    ("error", "note"),
    [
        (ModelError("No weights; download them."), "No weights; download them."),
        (torch.OutOfMemoryError("CUDA out of memory.\nTried 2"), "OutOfMemoryError: CUDA out of m"),
        (ValueError("To serve at least one request"), "ValueError: To serve at least one request"),
    ],
)
def test_any_error_is_told_and_the_process_group_ends(
    error: Exception, note: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the last line of the log is what a user sees, and that is NCCL's warning."""
    done: list[str] = []

    def fail(job: worker.Job, events: Any) -> None:
        raise error

    monkeypatch.setattr(worker, "_run", fail)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: done.append("ended"))
    read, write = os.pipe()
    job = {"settings": {}, "length": 9, "warm_start": None, "folder": str(tmp_path)}
    assert worker.main(json.dumps({**job, "events_fd": write})) == 2
    with os.fdopen(read) as stream:
        (event,) = map(json.loads, stream)
    assert event["phase"] == "error" and event["note"].startswith(note)
    assert "\n" not in event["note"] and done == ["ended"]

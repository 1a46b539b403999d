from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fp8rl_bench import command
from fp8rl_bench.worker import Row


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"variants": "bf16,fp9"}, "there is no 'fp9'"),
        ({"load": "256x512"}, "'256x512' is no load"),
        ({"model": "/no/such/folder"}, "is no folder"),
        ({"prompts": Path("/no/such/file")}, "cannot be read"),
        ({"config": {"quantization_config": {"quant_method": "fp8"}}}, "is quantized already"),
    ],
)
def test_bad_options_are_told_before_anything_starts(
    change: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"model_type": "llama", "vocab_size": 9, **change.get("config", {})}
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = {"model": str(tmp_path), "out": tmp_path / "out", "variants": None, **change}
    options.pop("config", None)
    monkeypatch.setattr(command, "Process", None)
    with pytest.raises(Exception, match=message):
        command.bench(**options)
    assert not (tmp_path / "out" / "report.json").exists()


class Clock:
    """In the place of processes: an engine takes 100 seconds, the trainer 50."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.alive, self.jobs, clock = 0.0, [], [], self

        class Process:
            def __init__(self, job: dict[str, Any], name: str) -> None:
                self.name = name
                clock.alive.append(name)

            def measure(self, job: dict[str, Any], say: Any) -> dict[str, Any]:
                say("starts an engine")
                clock.jobs.append(job)
                clock.now += 50 if self.name == "trainer" else 100
                speeds = {} if self.name == "trainer" else {"tokens_per_second": [1.0] * 3}
                return {"failed": {}, "weight_bytes": 0, **speeds}

            def end(self) -> None:
                if self.name in clock.alive:
                    clock.alive.remove(self.name)

        monkeypatch.setattr(command, "Process", Process)
        monkeypatch.setattr(command.time, "monotonic", lambda: self.now)


@pytest.mark.parametrize(("minutes", "measured"), [(10, 5), (6, 3), (1, 2)])
def test_variants_that_would_take_too_long_are_left_out(
    minutes: int, measured: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer's 40 seconds are kept for it; BF16 and one variant run in any case."""
    clock, names = Clock(monkeypatch), list(command.DEFAULT)
    console = Console(record=True, quiet=True)
    found = command.Queue({"random": True, "calls": None}, names, minutes, console).run()
    whole = [name for name, row in found["variants"].items() if not row["failed"]]
    assert whole == names[:measured] and list(found["variants"]) == names
    assert found["training"] == {"failed": {}, "weight_bytes": 0}
    assert found["seconds"] == 100 * measured + 50 and clock.alive == []
    # All run the load as often as the first, so that their medians are alike.
    assert [job["calls"] for job in clock.jobs] == [None, *[3] * measured]


def test_a_process_that_dies_costs_its_row_alone(tmp_path: Path) -> None:
    """It is killed; its job is longer than an argument of a process may be."""
    job = {"folder": str(tmp_path), "device": "cpu", "prompts": ["x" * 200_000]}
    process = command.Process(job, "trainer")
    try:
        process._process.kill()
        told: list[str] = []
        found = process.measure(job, told.append)
    finally:
        process.end()
    assert "it ended with -9" in found["failed"]["process"] and told


def test_a_part_that_fails_is_a_sentence_and_the_others_go_on(tmp_path: Path) -> None:
    row = Row(tmp_path / "row.json", io.StringIO())
    with row.part("refit", "takes new weights"):
        raise ValueError("no kernel\nfor this cache")
    with row.part("memory", "reads its memory"):
        row.found["weight_bytes"] = 9
    found = json.loads((tmp_path / "row.json").read_text(encoding="utf-8"))
    assert found["weight_bytes"] == 9 and list(found["failed"]) == ["refit"]
    assert "no kernel" in found["failed"]["refit"] and "\n" not in found["failed"]["refit"]

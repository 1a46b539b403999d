from __future__ import annotations

import io
import re
from pathlib import Path

from rich.console import Console

from fp8rl_bench.report import EMULATED, RANDOM, tables, write_page
from support.bench_reports import report
from support.html_page import Page


def test_the_page_is_whole_and_has_three_plots_of_what_was_measured(tmp_path: Path) -> None:
    html = write_page(report(), tmp_path / "report.html").read_text(encoding="utf-8")
    page = Page(html)
    assert page.open == page.fetched == []
    assert not re.search(r"url\(|@import|<script", html)
    speed, memory, kl = page.labels
    assert "BF16: 100; " in speed and "fp8rl, FP8 cache: 170" in speed
    # 16 GiB and 393,216 tokens of 144 KiB
    assert "BF16: 70.00 GiB (16.00 weights)" in memory
    assert "fp8rl, FP8 cache: 2.2e-02" in kl
    assert max(page.widths) == 346 and len(page.widths) == 15
    for text in ("Do <this>.", "9.8.7", "trained weights", "9 min 59 s", "mean of 30,000 tokens"):
        assert text in page.text


def test_bars_are_as_long_as_their_values(tmp_path: Path) -> None:
    given = report(speeds={"bf16": 50.0, "fp8rl": 200.0}, random=True)
    page = Page(write_page(given, tmp_path / "report.html").read_text(encoding="utf-8"))
    assert page.widths[:2] == [86.5, 346.0]
    assert RANDOM in page.text and "random weights" in page.text and len(page.labels) == 2


def test_what_was_not_measured_says_why() -> None:
    given = report(device="CPU")
    given["variants"]["fp8rl-int8"] = {"failed": {"start": "UnsupportedError: no [such] cache."}}
    del given["training"]["layer"]
    stream = io.StringIO()
    for table in tables(given):
        Console(file=stream, width=100).print(table)
    text = stream.getvalue()
    assert EMULATED in text and "fp8rl, INT8 cache, start: UnsupportedError: no [such]" in text
    assert re.search(r"over BF16 .* 1\.00 .* 1\.36 .* 1\.70 .* - .* 1\.18", text)
    assert re.search(r"KL, trainer +2\.0e-03 ", text)

"""The demo's report: a self-contained HTML page and a terminal table, from the files of a run.

Both read only ``OUT/<precision>/{metrics,validation,samples}.jsonl`` and ``run.json``, so they work
while a run continues and after it was stopped or killed.
"""

from __future__ import annotations

from fp8rl_demo.report.page import write_report
from fp8rl_demo.report.runs import ReportError
from fp8rl_demo.report.table import terminal_table

__all__ = ["ReportError", "terminal_table", "write_report"]

"""A plugin of pytest for older engines: skips what fp8rl refuses, by ``FP8RL_TEST_REFUSED``."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any

import pytest

from fp8rl.errors import UnsupportedError

REFUSED = os.environ.get("FP8RL_TEST_REFUSED", "")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[Any]:
    """Turn the report of a test that was refused into one of a test that was skipped."""
    report = yield
    if REFUSED and call.excinfo is not None:
        said = f"{call.excinfo.typename}: {call.excinfo.value}"  # or an engine process's error
        if UnsupportedError.__name__ in said and re.search(REFUSED, said):
            report.outcome = "skipped"
            report.longrepr = (str(item.path), item.location[1] or 0, f"Skipped: {said}")
    return report

"""A benchmark's variants in processes of their own: what is kept of one that fails."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from support.benchmarks import imported

CHILD = """
import sys
from pathlib import Path
written, status = {written!r}, {status}
if written is not None:
    Path(sys.argv[sys.argv.index("--out") + 1]).write_text(written)
sys.exit(status)
"""


@pytest.mark.parametrize(
    ("written", "status", "result"),
    [
        ('{"variant": "v", "speed": 2}', 0, {"variant": "v", "speed": 2}),
        ('{"variant": "v", "speed": 2}', 3, {"variant": "v", "speed": 2, "failed": 3}),
        ('{"variant": "v", "sp', 3, {"variant": "v", "failed": 3}),
        (None, 3, {"variant": "v", "failed": 3}),
    ],
    ids=["whole", "failed later", "failed while writing", "failed at once"],
)
def test_what_a_process_has_written_is_kept(
    written: str | None,
    status: int,
    result: dict[str, object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script = tmp_path / "child.py"
    script.write_text(CHILD.format(written=written, status=status), encoding="utf-8")
    monkeypatch.setattr(sys, "argv", [str(script)])
    assert imported("processes", monkeypatch).in_process("v") == result

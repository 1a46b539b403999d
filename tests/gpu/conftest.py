"""Workers and checks that CPU tests have, too; they are no tests and no package."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "megatron_fp8rl"))
pytest.register_assert_rewrite("parallel_checks")

"""Workers and checks that CPU tests have, too; they are no tests and no package."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "megatron_fp8rl"))
pytest.register_assert_rewrite("parallel_checks")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of one world of GPUs in the order of its results, so that each is told as it comes."""
    places = [n for n, i in enumerate(items) if i.path.name == "test_megatron_two_gpus.py"]
    if places:
        names = [name for world in items[places[0]].module.WORLDS for name in world]
        tests = [items[place] for place in places]
        tests.sort(key=lambda item: names.index(item.callspec.params["name"]))
        for place, item in zip(places, tests, strict=True):
            items[place] = item

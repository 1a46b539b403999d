from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("FP8RL_RECIPE", raising=False)
    monkeypatch.delenv("FP8RL_DEBUG", raising=False)

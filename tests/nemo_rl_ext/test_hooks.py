"""What the package and its hooks offer."""

from __future__ import annotations

import pytest

import nemo_rl_ext
from fp8rl import PluginManager
from nemo_rl_ext.grpo.importance_sampling import correct_is


def test_the_installed_entry_point_offers_the_corrector() -> None:
    assert PluginManager().is_correctors()["is"] is correct_is


def test_every_public_name_resolves() -> None:
    for name in nemo_rl_ext.__all__:
        assert getattr(nemo_rl_ext, name).__module__.startswith("nemo_rl_ext.")
    assert set(nemo_rl_ext.__all__) <= set(dir(nemo_rl_ext))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = nemo_rl_ext.nothing

"""What torch_fp8rl offers through the plugin contract."""

from __future__ import annotations

import torch

from fp8rl import PluginManager
from torch_fp8rl import hooks


def test_the_doctor_knows_torch():
    manager = PluginManager(discover=False)
    manager.register(hooks, "torch")
    manager.check_pending()
    (adapter,) = manager.engine_adapters()
    diagnosis = adapter.diagnose()
    assert adapter.name == "torch" and diagnosis.installed == torch.__version__
    assert not diagnosis.problems and "Qwen3-MoE" in diagnosis.facts["families"]
    assert "reference: ready" in diagnosis.facts["GEMM backends"]

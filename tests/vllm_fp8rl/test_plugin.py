"""Registration, versions, diagnosis and the checks that need no engine of their own."""

from __future__ import annotations

import copy
import pickle
import re

import pytest
import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.linear import ReplicatedLinear

import vllm_fp8rl
from fp8rl import PluginManager, Recipe
from fp8rl.errors import UnsupportedError
from fp8rl.gemm import ReferenceBackend
from fp8rl.numerics import quantize_block, quantize_group
from vllm_fp8rl import compat
from vllm_fp8rl.kernels.linear.choice import CpuKernel
from vllm_fp8rl.quantization.config import Fp8RLConfig


@pytest.mark.parametrize(
    ("release", "served"),
    [("0.25.1", True), ("0.32.1+cpu", True), ("1.0", True), ("0.25.0", False), ("0.9", False)],
)
def test_versions(monkeypatch, release, served):
    monkeypatch.setattr(compat, "installed_version", lambda: release)
    if served:
        Fp8RLConfig()
    else:
        with pytest.raises(UnsupportedError, match=rf"0\.25\.1 or later, but {release} is"):
            Fp8RLConfig()
        vllm_fp8rl.register()  # an engine that does not ask for fp8rl must still start


def test_a_copied_config_has_a_state_of_its_own():
    config = Fp8RLConfig({"kv_cache": {"dtype": "auto"}})
    config._state = object()
    for other in (copy.copy(config), copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert other._recipe == config._recipe and other._state is None
        assert other.changes is not config.changes


def test_doctor_sees_vllm():
    (adapter,) = (a for a in PluginManager().engine_adapters() if a.name == "vllm")
    diagnosis = adapter.diagnose()
    assert diagnosis.installed == compat.installed_version()
    assert diagnosis.problems == ()
    probes = diagnosis.facts["probes of vLLM's internals"]
    assert re.fullmatch(r"(\d+) of \1 passed, in [\d.]+ ms", probes)


def test_doctor_names_a_version_that_is_too_old_or_lacks_something(monkeypatch):
    from vllm_fp8rl import hooks

    (adapter,) = hooks.register_engine_adapters()
    monkeypatch.setattr(hooks, "installed_version", lambda: "0.24.0")
    (problem,) = adapter.diagnose().problems
    assert "0.24.0 is too old" in problem
    for module in (hooks, compat):
        monkeypatch.setattr(module, "installed_version", lambda: "0.99.0")
    assert adapter.diagnose().facts["tested"].startswith("no; 0.25.1, ")
    monkeypatch.delattr("vllm.v1.engine.output_processor.OutputProcessor")
    (problem,) = adapter.diagnose().problems
    assert "OutputProcessor', which is missing in vLLM 0.99.0" in problem


def test_layers_and_models_that_are_not_served(engine):
    vllm_config = engine.llm.llm_engine.vllm_config
    quant_config = vllm_config.quant_config
    with set_current_vllm_config(vllm_config):
        with pytest.raises(UnsupportedError, match=r"'model.layers.0.mixer.in_proj' is no layer"):
            ReplicatedLinear(
                128, 128, quant_config=quant_config, prefix="model.layers.0.mixer.in_proj"
            )

        class OddLinear(ReplicatedLinear):
            def weight_loader(self, param, loaded_weight):
                super().weight_loader(param, loaded_weight.t())

        with pytest.raises(UnsupportedError, match="OddLinear, which loads its weight in a way"):
            OddLinear(128, 128, quant_config=quant_config, prefix="model.layers.0.mlp.down_proj")


@pytest.mark.parametrize(
    ("keep", "scale_format", "dtype"),
    [
        (False, "fp32", torch.bfloat16),
        (True, "fp32", torch.float32),
        (True, "pow2", torch.bfloat16),
        (False, "pow2", torch.float32),
    ],
)
def test_cpu_kernels_equal_the_reference_backend(keep, scale_format, dtype):
    recipe = Recipe.from_dict({"activations": {"scale_format": scale_format}})
    x = torch.randn(2, 5, 200).to(dtype)
    weight = quantize_block(torch.randn(300, 200))
    wanted = ReferenceBackend().fprop(
        quantize_group(x.view(10, 200), scale_format=scale_format), weight, dtype
    )
    built = CpuKernel(recipe, keep=keep)
    for _ in range(2):
        assert torch.equal(built.apply(x, weight), wanted.view(2, 5, 300))

"""Registration, versions, diagnosis and the checks that need no engine of their own."""

from __future__ import annotations

import copy
import pickle
import re

import pytest
import torch
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers import quantization
from vllm.model_executor.layers.linear import ReplicatedLinear

import vllm_fp8rl
from fp8rl import PluginManager, Recipe
from fp8rl.errors import UnsupportedError
from fp8rl.gemm import GemmShape, ReferenceBackend
from fp8rl.numerics import quantize_block, quantize_group
from vllm_fp8rl import compat
from vllm_fp8rl.kernels.linear.choice import CPU_CACHE_ENV, select_kernel
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


def test_an_engine_that_asks_for_a_plugin_that_broke_does_not_start(checkpoints, monkeypatch):
    """vLLM logs what a plugin raises while it is loaded, and goes on without it."""
    methods = [name for name in quantization.QUANTIZATION_METHODS if name != "fp8rl"]
    monkeypatch.setattr(quantization, "QUANTIZATION_METHODS", methods)
    monkeypatch.setattr("vllm.plugins.plugins_loaded", True)
    asked = EngineArgs(str(checkpoints["a"]), skip_tokenizer_init=True, quantization="fp8rl")
    with pytest.raises(ValueError, match=r"(Unknown|Invalid) quantization method: fp8rl"):
        asked.create_engine_config()


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
    assert re.fullmatch(r"(\d+) of \1 passed", probes)


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
    [(False, "fp32", torch.bfloat16), (True, "pow2", torch.float32)],
)
def test_cpu_kernels_equal_the_reference_backend(monkeypatch, keep, scale_format, dtype):
    """With a float32 copy of the weight and without."""
    recipe = Recipe.from_dict({"activations": {"scale_format": scale_format}})
    x = torch.randn(2, 5, 200).to(dtype)
    weight = quantize_block(torch.randn(300, 200))
    wanted = ReferenceBackend().fprop(
        quantize_group(x.view(10, 200), scale_format=scale_format), weight, dtype
    )
    monkeypatch.setenv(CPU_CACHE_ENV, str(int(keep)))
    built = select_kernel(torch.device("cpu"), GemmShape(0, 300, 200), recipe, dtype)
    for _ in range(2):
        assert torch.equal(built.apply(x, weight), wanted.view(2, 5, 300))
    assert any(isinstance(value, torch.Tensor) for value in vars(built).values()) is keep

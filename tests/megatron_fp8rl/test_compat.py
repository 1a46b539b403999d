"""Version checks, and what `fp8rl doctor` says about Megatron-Core."""

from __future__ import annotations

import re
import sys
from importlib.machinery import ModuleSpec
from importlib.metadata import version
from types import ModuleType, SimpleNamespace

import megatron.core
import pytest
from megatron.core.tensor_parallel import layers

from fp8rl import PluginManager
from fp8rl.errors import UnsupportedError
from megatron_fp8rl import compat, hooks
from megatron_fp8rl.conversion import fp8_classes
from megatron_fp8rl.integrations.bridge import register


def test_an_old_megatron_and_one_that_is_built_differently_are_named(monkeypatch):
    compat.check_forward_impl()
    with monkeypatch.context() as patch:
        patch.setattr(megatron.core, "__version__", "0.15.3")
        with pytest.raises(UnsupportedError, match=r"0\.16 and later, but 0\.15\.3 is installed"):
            compat.check_forward_impl()
    monkeypatch.delattr(layers.RowParallelLinear, "_forward_impl")
    monkeypatch.setattr(
        layers, "linear_with_grad_accumulation_and_async_allreduce", lambda input, weight: None
    )
    with pytest.raises(UnsupportedError, match=r"tp_group.*RowParallelLinear\._forward_impl"):
        compat.check_forward_impl()


@pytest.mark.skipif(compat.has_transformer_engine(), reason="TransformerEngine is here")
def test_without_transformer_engine_its_classes_are_not_served():
    """megatron-core defines their names all the same, over a stand-in."""
    assert set(fp8_classes()) == {layers.ColumnParallelLinear, layers.RowParallelLinear}
    facts = hooks.diagnose().facts
    assert facts["transformer-engine"].startswith("not installed")
    assert "not TransformerEngine's" in facts["FP8 linears"]


def test_a_region_without_the_norm_of_queries(monkeypatch):
    """Megatron-LM 0.20 makes it; elsewhere nothing is changed."""

    class Resolver:
        linear_impl = "linear"

        def _mla_fused_linear_or_default(self, module_spec, module_name):
            return f"norm and {module_name}"

    module = ModuleType("megatron.core.transformer.mla_qk_norm_config")
    module.QKNormConfigResolver = Resolver  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    choose, names = "_mla_fused_linear_or_default", ("linear_q_proj", "linear_kv_up_proj")
    with compat.without_query_norm():
        made = [getattr(Resolver(), choose)(None, name) for name in names]
    assert made == ["linear", "norm and linear_kv_up_proj"]
    assert getattr(Resolver(), choose)(None, names[0]) == "norm and linear_q_proj"
    monkeypatch.setitem(sys.modules, module.__name__, None)
    with compat.without_query_norm():
        pass


@pytest.mark.parametrize(
    ("installed", "triton", "problem"),
    [
        (version("megatron-core"), True, None),
        ("0.9.0", True, r"0\.9\.0 is untested; install .*0\.16\.1"),
        (None, True, r"install megatron-core 0\.16\.1, einops and packaging"),
        ("0.19.2", False, "Triton is missing.*megatron-core 0.19.2.*install triton"),
    ],
)
def test_doctor_names_another_version_none_and_a_missing_triton(
    monkeypatch, installed, triton, problem
):
    """megatron-core 0.19.2 has been seen to end in "No module named 'triton'" (noxfile.py)."""
    module = ModuleType("triton")
    module.__spec__ = ModuleSpec("triton", None)
    monkeypatch.setitem(sys.modules, "triton", module if triton else None)
    monkeypatch.setattr(hooks, "installed_version", lambda: installed)
    plugins = PluginManager(discover=False)
    plugins.register(hooks)
    (adapter,) = plugins.engine_adapters()
    found = adapter.diagnose()
    assert (adapter.name, found.installed) == ("megatron", installed)
    if problem is None:
        assert found.problems == ()
    else:
        assert re.search(problem, " ".join(found.problems), re.S)


def test_bridge_is_told_all_classes_of_linear_layers(monkeypatch):
    """With the head of an exact model on a CPU, or a refit would not know how to export it."""
    told = {}
    parts = ["megatron", "bridge", "models", "conversion", "param_mapping"]
    for end in range(2, len(parts) + 1):
        module = ModuleType(parts[end - 1])
        monkeypatch.setitem(sys.modules, ".".join(parts[:end]), module)
    module.AutoMapping = SimpleNamespace(register_module_type=told.setdefault)
    register()
    assert set(told) == {cls.__name__ for cls in fp8_classes().values()} | {
        "ExactColumnParallelLinear"
    }
    assert told["ExactColumnParallelLinear"] == told["Fp8ColumnParallelLinear"] == "column"
    assert told["Fp8RowParallelLinear"] == "row"

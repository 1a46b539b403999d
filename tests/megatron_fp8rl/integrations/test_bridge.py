"""Models that Megatron-Bridge loads, converts by our hook and exports; skipped without Bridge."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fp8rl import Recipe
from fp8rl.numerics import quantize_block
from fp8rl.recipe import KVCache, Pins
from megatron_fp8rl import conversion_of
from megatron_fp8rl.integrations.bridge import export_hf_weights, pre_wrap_hook
from megatron_fp8rl.testing.cpu_shim import CPU_CONFIG
from support.gaps import gap, noise_floor
from support.hf_reference import load_reference
from support.megatron import logprobs, prompts
from support.numeric import same_codes
from support.tiny import make_checkpoint, make_moe_checkpoint

RECIPE = Recipe(kv_cache=KVCache(dtype="auto"), pins=Pins(layers=[0], kinds=["o_proj"]))
FLOAT32: dict[str, Any] = {
    "bf16": False,
    "fp16": False,
    "params_dtype": torch.float32,
    "pipeline_dtype": torch.float32,
    "autocast_dtype": torch.float32,
}


@pytest.fixture(scope="module")
def auto_bridge() -> Any:
    return pytest.importorskip("megatron.bridge", exc_type=ImportError).AutoBridge


def load(bridge: Any) -> list[torch.nn.Module]:
    """A converted model with the checkpoint's weights, in float32 and of Megatron's local spec."""
    from megatron.bridge.models.gpt_provider import local_layer_spec

    provider = bridge.to_megatron_provider(load_weights=True)
    provider.transformer_layer_spec = local_layer_spec
    provider.moe_grouped_gemm = provider.moe_permute_fusion = False  # TransformerEngine's
    for field, value in (CPU_CONFIG | FLOAT32).items():
        setattr(provider, field, value)
    provider.register_pre_wrap_hook(pre_wrap_hook(RECIPE, report=lambda text: None))
    provider.finalize()
    return provider.provide_distributed_model(wrap_with_ddp=False, use_cpu_initialization=True)


@pytest.mark.parametrize("make", [make_checkpoint, make_moe_checkpoint], ids=["dense", "experts"])
def test_a_model_of_bridge_is_transformers_and_its_tensors_come_back(
    mcore: None, auto_bridge: Any, tmp_path: Path, make: Callable[[Path, int], Path]
) -> None:
    path = make(tmp_path / "model", 3)
    expected = load_file(path / "model.safetensors")
    bridge = auto_bridge.from_hf_pretrained(str(path))
    model = load(bridge)
    near = gap(logprobs(model[0].eval(), prompts()), load_reference(path, RECIPE).many(prompts()))
    assert near.within(noise_floor(path, RECIPE, prompts()), 4.0)

    plain = dict(export_hf_weights(bridge, model, show_progress=False))
    assert sorted(plain) == sorted(expected)
    for name, tensor in plain.items():
        assert torch.equal(tensor, expected[name].float()), name

    wire = dict(export_hf_weights(bridge, model, precision="fp8", show_progress=False))
    rows = conversion_of(model).policy.report()
    fp8 = {f"{row.name}.weight" for row in rows if row.precision == "fp8"}
    assert fp8 and set(wire) == set(expected) | {f"{name}_scale_inv" for name in fp8}
    for name in fp8:
        codes, scale_inv = quantize_block(expected[name])
        assert same_codes((wire[name], wire[f"{name}_scale_inv"]), (codes, scale_inv)), name

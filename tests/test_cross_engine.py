"""Trainer and rollout hold equal codes and scales, and pin the same modules, for one recipe.

Real Megatron-Core and real vLLM modules, in two gloo processes: see cross_engine_cases.py.
"""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest

from megatron_fp8rl.testing.launch import launch

SCRIPT = Path(__file__).with_name("cross_engine_cases.py")
# With head size 128 and width 512 each HF tensor has blocks of its own, at TP=2 too. With 64 and
# 328, k begins within a block of q, up within one of gate, and rows and columns have ragged ends.
ALIGNED, RAGGED = {"head_dim": 128, "width": 512}, {"head_dim": 64, "width": 328}
CASES = {
    "tp1-fp32": {"tp": 1, "weights": "fp32", "activations": "pow2", **RAGGED},
    "tp1-pow2": {"tp": 1, "weights": "pow2", "activations": "fp32", **ALIGNED},
    "tp2-fp32": {"tp": 2, "weights": "fp32", "activations": "fp32", **ALIGNED},
    "tp2-fp32-ragged": {"tp": 2, "weights": "fp32", "activations": "pow2", **RAGGED},
    "tp2-pow2-ragged": {"tp": 2, "weights": "pow2", "activations": "pow2", **RAGGED},
    "tp2-pow2-codes": {"tp": 2, "weights": "pow2", "activations": "pow2", **ALIGNED, "wire": "fp8"},
}
PLUGIN = """
    from fp8rl import hookimpl
    from fp8rl.recipe import Pins

    @hookimpl
    def register_pins(module_names):
        return Pins(names=("model.layers.2.self_attn.o_proj",))
"""
FP8_MODULES = [
    "model.layers.1.mlp.gate_up_proj",
    "model.layers.1.self_attn.o_proj",
    "model.layers.1.self_attn.qkv_proj",
    "model.layers.2.mlp.down_proj",
    "model.layers.2.mlp.gate_up_proj",
    "model.layers.2.self_attn.qkv_proj",
]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    plugins = tmp_path_factory.mktemp("plugins")
    info = plugins / "pinner-1.0.dist-info"
    info.mkdir()
    (plugins / "pinner.py").write_text(textwrap.dedent(PLUGIN))
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: pinner\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[fp8rl]\npinner = pinner\n")
    out = tmp_path_factory.mktemp("cross-engine")
    # vLLM's CPU worker would set the last one; here there is no worker.
    env = {"PYTHONPATH": str(plugins), "VLLM_DIST_IDENT": out.name}
    launch(SCRIPT, 2, [str(out), json.dumps(CASES)], timeout=240, env=env)
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(2)]


each_case = pytest.mark.parametrize("name", CASES)


@each_case
def test_codes_and_scales_are_equal(ranks: list[dict], name: str):
    """The trainer's export, tensor by tensor in a strange order, in the rollout's live weights."""
    for rank in ranks:
        assert rank[name]["error"] is None  # each name, shape and KV scale was known and complete
        for module, (compared, wrong) in rank[name]["differing"].items():
            assert compared > 0 and wrong == 0, f"{module}: {wrong} of {compared} differ"
        assert rank[name]["scales_differ"] == []


@each_case
def test_the_same_modules_are_pinned(ranks: list[dict], name: str):
    """By the recipe and by a plugin, on both sides."""
    for rank in ranks:
        assert rank[name]["trainer"] == FP8_MODULES
        assert rank[name]["rollout"] == FP8_MODULES


@each_case
def test_both_engines_multiply_in_the_formats_of_the_recipe(ranks: list[dict], name: str):
    for rank in ranks:
        assert rank[name]["wrong_products"] == []

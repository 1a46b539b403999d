"""Names of an engine's modules in the checkpoint, by vLLM's own maps of model classes."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")
from vllm.model_executor.models.utils import WeightsMapper

from vllm_fp8rl.engine.hf_names import HfNames
from vllm_fp8rl.quantization.config import Fp8RLConfig

LAYER = "model.language_model.layers.1."
MODULES = [f"{LAYER}mlp.experts.0.up_proj", f"{LAYER}self_attn.q_proj", "lm_head"]
WRAPPER = WeightsMapper(
    orig_to_new_prefix={
        "model.visual.": "visual.",
        "lm_head.": "language_model.lm_head.",
        "model.language_model.": "language_model.model.",
    }
)


@pytest.mark.parametrize(
    ("engine", "checkpoint"),
    [
        ("language_model.model.layers.1.self_attn.qkv_proj", f"{LAYER}self_attn.qkv_proj"),
        (
            "language_model.model.layers.1.self_attn.q_norm.weight",
            f"{LAYER}self_attn.q_norm.weight",
        ),
        ("language_model.model.layers.1.mlp.experts", f"{LAYER}mlp.experts"),
        ("language_model.model.norm.weight", "model.language_model.norm.weight"),
        ("language_model.lm_head", "lm_head"),
        ("visual.merger.linear_fc1", "model.visual.merger.linear_fc1"),
        ("something.else", "something.else"),
    ],
)
def test_inside_a_wrapper(engine: str, checkpoint: str) -> None:
    names = HfNames(MODULES, WRAPPER)
    assert names.of(engine) == checkpoint


def test_a_text_model_whose_class_also_loads_other_names() -> None:
    """Its checkpoint has the engine's names, which the map leaves as they are."""
    mapper = WeightsMapper(orig_to_new_prefix={"model.language_model.": "model.", "mtp.": None})
    names = HfNames(["model.layers.1.mlp.up_proj", "lm_head"], mapper)
    assert names.of("model.layers.1.mlp.gate_up_proj") == "model.layers.1.mlp.gate_up_proj"
    assert names.of("lm_head.weight") == "lm_head.weight"


def test_a_class_without_a_map() -> None:
    names = HfNames(["model.layers.1.mlp.up_proj"], None)
    assert names.of("model.layers.1.mlp.gate_up_proj") == "model.layers.1.mlp.gate_up_proj"


def test_the_map_of_the_whole_model_counts() -> None:
    """A wrapper's comes first, and then that of the language model inside it."""
    config = Fp8RLConfig()
    config.apply_vllm_mapper(WRAPPER)
    config.apply_vllm_mapper(WeightsMapper())
    assert config._mapper is WRAPPER

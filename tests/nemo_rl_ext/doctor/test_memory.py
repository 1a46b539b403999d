"""Sizes of models, against transformers' counts and what vLLM reports."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

from fp8rl import PluginManager
from fp8rl.models.pins import PinRow
from fp8rl.models.sizes import GIB, Sizes
from fp8rl.models.spec import ModelSpec
from fp8rl.recipe import Pins

SHAPES = Path(__file__).resolve().parents[3] / "benchmarks" / "shapes"
SHAPE = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
DENSE: dict[str, Any] = {"model_type": "qwen3", "tie_word_embeddings": False, **SHAPE}
MOE = {**DENSE, "model_type": "qwen3_moe", "num_experts": 8, "moe_intermediate_size": 128}


def rows_of(model: dict[str, Any], **pins: Any) -> list[PinRow]:
    return PluginManager().pin_policy(Pins(**pins), ModelSpec.of(model).names).report()


def parameters(model: dict[str, Any]) -> int:
    kind: Any = Qwen3MoeConfig if "num_experts" in model else Qwen3Config
    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(kind(**model))
    return sum(parameter.numel() for parameter in made.parameters())


TIED = {**DENSE, "tie_word_embeddings": True}
# As a config.json of the hub has it.
RENAMED = {**{k: v for k, v in MOE.items() if k != "num_experts"}, "num_local_experts": 8}


@pytest.mark.parametrize(
    ("model", "config"),
    [(DENSE, DENSE), (TIED, TIED), (MOE, {"text_config": RENAMED})],
)
def test_one_rank_holds_the_whole_model(model: dict[str, Any], config: dict[str, Any]) -> None:
    assert Sizes(ModelSpec.of(config), 1).elements(rows_of(model)) == parameters(model)


def test_experts_are_spread_whole_or_split() -> None:
    rows = rows_of(MOE)
    whole = Sizes(ModelSpec.of(MOE), 1).bytes(rows, 2, "auto")
    experts = 6 * 8 * 3 * 128 * 256
    spread = Sizes(ModelSpec.of(MOE), 1, expert_ranks=4).bytes(rows, 2, "auto")
    assert whole.codes - spread.codes == experts * 3 // 4
    assert spread.plain == whole.plain
    split = Sizes(ModelSpec.of(MOE), 4).bytes(rows, 2, "auto")
    assert split.codes == whole.codes // 4


@pytest.mark.parametrize(("precision", "reported"), [("bf16", 15.27), ("fp8", 8.83)])
def test_weights_take_what_vllm_reports(precision: str, reported: float) -> None:
    """GiB of Qwen3-8B on one GPU: "Model loading took" in the log of vLLM 0.25.1."""
    shape = json.loads((SHAPES / "qwen3_8b.json").read_text(encoding="utf-8"))
    rows = [row if precision == "fp8" else replace(row, precision="bf16") for row in rows_of(shape)]
    weights = Sizes(ModelSpec.of(shape), 1).bytes(rows, 2, "auto").weights
    assert weights / GIB == pytest.approx(reported, rel=0.01)

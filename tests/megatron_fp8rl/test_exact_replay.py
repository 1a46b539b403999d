"""``fp8rl exact``: vLLM records in a process of its own, Megatron's modules get the same inputs."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from fp8rl import Recipe
from fp8rl.first_layers import write_first_layers
from fp8rl.plugins.adapters import Compared, ExactRequest

pytest.importorskip("vllm")

from megatron_fp8rl.testing.exact_replay import _Rows, compare, trainer
from support.tiny import make_family_checkpoint
from vllm_fp8rl.commands.exact_record import record

SHAPE = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64, "num_hidden_layers": 3}
ATTENTION = ("qkv_proj", "q_norm", "k_norm", "rotary_emb (q)", "rotary_emb (k)", "attn", "o_proj")
LAYER = (
    "input_layernorm",
    *(f"self_attn.{leaf}" for leaf in ATTENTION),
    "post_attention_layernorm",
    "mlp",
)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> ExactRequest:
    """Two of a model's three layers, run by vLLM."""
    root = tmp_path_factory.mktemp("exact")
    whole = make_family_checkpoint(root / "whole", 0, "qwen3", **SHAPE)
    (root / "model").mkdir()
    write_first_layers(whole, 2, root / "model")
    recipe = Recipe.from_dict({"exact": True})
    asked = ExactRequest(root / "model", recipe, ("x" * 90, "x", "x" * 30), root / "record.pt")
    record(asked)
    return asked


def compared(request: ExactRequest, recipe: Recipe, **epsilons: float) -> list[Compared]:
    found: dict[str, Any] = torch.load(request.record)
    with torch.no_grad():
        model = trainer(request.model, recipe, found)
        for name, epsilon in epsilons.items():
            getattr(model.decoder.layers[1], name).eps = epsilon
        return compare(model, found)


def differing(rows: list[Compared]) -> list[str]:
    return [row.name for row in rows if row.equal < row.total]


def test_every_module_is_compared_and_none_differs(mcore: None, recorded: ExactRequest) -> None:
    rows = compared(recorded, recorded.recipe)
    layers = [f"model.layers.{layer}.{leaf}" for layer in (0, 1) for leaf in LAYER]
    last = ["lm_head", "log-probabilities", "log-probabilities, end to end"]
    assert [row.name for row in rows] == ["model.embed_tokens", *layers, "model.norm", *last]
    assert not differing(rows)
    assert rows[0].total == (90 + 31) * 256 and rows[-1].total == 3 * 32


def test_a_wrong_epsilon_is_named(mcore: None, recorded: ExactRequest) -> None:
    rows = compared(recorded, recorded.recipe, pre_mlp_layernorm=1e-2)
    name = "model.layers.1.post_attention_layernorm"
    assert differing(rows) == [name, "log-probabilities, end to end"]


def test_bits_are_compared_and_not_numbers() -> None:
    rows = _Rows({"modules": {}, "device": "cpu"})
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.tensor([0.0, math.nan, 1.0], dtype=dtype)
        rows.add("x", x, torch.tensor([-0.0, math.nan, 1.0], dtype=dtype))
    assert [row.equal for row in rows.found] == [2, 2]

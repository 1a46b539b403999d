"""Models that the bench builds from a ``config.json`` as its author wrote it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")

from transformers import AutoConfig, AutoModelForCausalLM

from fp8rl.models.folder import read_tensors
from fp8rl_bench.layers import build, shape_of
from megatron_fp8rl.export import load_hf
from megatron_fp8rl.testing.exact_replay import alone
from support.numeric import relative_error

SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 32}


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "llama"},  # without rope_theta
        {"model_type": "qwen2", "sliding_window": 32, "use_sliding_window": False},
        {"model_type": "qwen3_moe", "norm_topk_prob": True, **EXPERTS},
    ],
    ids=lambda config: config["model_type"],
)
def test_the_model_is_that_of_transformers(config: dict[str, Any], tmp_path: Path) -> None:
    config = SHAPE | config
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).eval()
    theirs.save_pretrained(tmp_path)
    ids = torch.randint(96, (1, 24))
    with alone("cpu"), torch.no_grad():
        ours = build(shape_of(config), device="cpu", dtype=torch.float32)
        load_hf([ours], read_tensors(tmp_path))
        found = ours.eval()(ids, torch.arange(24)[None], None)
        assert relative_error(found, theirs(ids).logits) < 1e-5

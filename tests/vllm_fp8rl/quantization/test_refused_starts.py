"""Engines that do not start: checkpoints, recipes and arguments that cannot work, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.config import WeightTransferConfig

from fp8rl import Recipe
from fp8rl.errors import CheckpointError, PinError, RecipeError, RefitError, UnsupportedError
from support.copies import BLOCK_FP8, copied
from support.engine import load_tensors, make_checkpoint
from support.mla import ON_A_CPU
from support.tiny import make_family_checkpoint, make_mla_checkpoint, make_qwen35_checkpoint
from vllm_fp8rl.compat import require_cpu_router

UP = "model.layers.1.mlp.up_proj.weight"
HEAD = "model.embed_tokens.weight"
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"
A_LOG = "model.layers.0.linear_attn.A_log"
LORA = {"enable_lora": True}
PLAIN = {"kv_cache": {"dtype": "auto"}}
MODELS: dict[str, Callable[[Path], Path]] = {
    "tied": lambda path: make_checkpoint(path, 0, tie_word_embeddings=True),
    "mla": lambda path: make_mla_checkpoint(path, 0, num_hidden_layers=2),
    "minimax": lambda path: make_family_checkpoint(path, 0, "minimax_m2"),
    "qwen35": lambda path: make_qwen35_checkpoint(path, 0),
}
"""Beside the session's dense model and its model with experts."""


def quantized(**changes: Any) -> dict[str, Any]:
    """A checkpoint as DeepSeek-V3's, but for these keys."""
    return {"quantization_config": BLOCK_FP8 | changes}


@dataclass(frozen=True)
class Start:
    """An engine of a model, or of a copy that lacks a tensor, holds an infinite one, or has keys
    of a config."""

    error: type[Exception]
    message: str
    model: str = "dense"
    lacks: str = ""
    infinite: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    recipe: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)


def lacks(
    name: str, model: str = "dense", recipe: dict[str, Any] = PLAIN, **arguments: Any
) -> Start:
    """vLLM itself would serve uninitialised memory: it checks unquantized models only."""
    message = f"lacks 1 of the model's tensors.*'{name}'"
    arguments |= {"dtype": "bfloat16"}
    return Start(CheckpointError, message, model, name, recipe=recipe, arguments=arguments)


CANNOT = UnsupportedError
UNKNOWN_KEY = {"additional_config": {"fp8rl": {"pins": {"layer": [1]}}}}
STARTS: dict[str, Start] = {
    "a tensor is missing": lacks(UP),
    "a pinned tensor is missing": lacks(UP, recipe={"pins": {"last": 1}}),
    "a bias of a router is missing": lacks(BIAS, "mla", **ON_A_CPU),
    "a decay of a delta net is missing": lacks(A_LOG, "qwen35"),
    "a tied embedding is missing": lacks(HEAD, "tied"),
    # It would become a code like any other.
    "infinite": Start(RefitError, f"'{UP}' has NaN or infinite values; it was not", infinite=UP),
    "small blocks": Start(
        CANNOT, r"weight_block_size \[64, 64\]", config=quantized(weight_block_size=[64, 64])
    ),
    "no blocks": Start(CANNOT, "per-tensor FP8", config=quantized(weight_block_size=None)),
    "mxfp8": Start(CANNOT, "quantized with 'mxfp8'", config=quantized(quant_method="mxfp8")),
    "static": Start(
        CANNOT, "activation_scheme 'static'", config=quantized(activation_scheme="static")
    ),
    "unknown key": Start(
        RecipeError, r"unknown key 'additional_config\.fp8rl\.pins\.layer'", arguments=UNKNOWN_KEY
    ),
    "pins of nothing": Start(
        PinError, "dawn_proj", recipe={"pins": {"names": ["model.layers.*.mlp.dawn_proj"]}}
    ),
    "a pin of one expert": Start(
        PinError,
        r"experts.2.down_proj' but not all experts of its layer",
        "experts",
        recipe=PLAIN | {"pins": {"names": ["model.layers.1.mlp.experts.2.down_proj"]}},
    ),
    "another cache": Start(
        RecipeError,
        r"dtype 'fp8_e4m3'.*kv_cache_dtype 'auto'",
        arguments={"kv_cache_dtype": "auto"},
    ),
    "an MoE model": Start(CANNOT, "an MoE model", arguments={"hf_overrides": {"num_experts": 8}}),
    "a head size": Start(
        CANNOT, "Head size 40 has no attention", arguments={"hf_overrides": {"head_dim": 40}}
    ),
    "skipped layers": Start(
        CANNOT,
        r"skip_layers=\['1'\].* leave it empty",
        arguments={"kv_cache_dtype_skip_layers": ["1"]},
    ),
    "adapters of dummies": Start(CANNOT, "enable_lora needs the weights of", arguments=LORA),
    "adapters of experts": Start(
        CANNOT, r"mlp.experts' has LoRA, which vllm_fp8rl does not", "experts", arguments=LORA
    ),
    "exact in float32": Start(
        CANNOT, r"exact needs dtype torch\.bfloat16 in the rollout", recipe={"exact": True}
    ),
    # Its layers had a cache at scale 1.0, and a draft equal to the target was accepted by 76%.
    "a draft model": Start(
        CANNOT,
        r"'draft_model', .* without scales",
        arguments={"speculative_config": {"method": "draft_model", "num_speculative_tokens": 2}},
    ),
    "latents in FP8": Start(
        CANNOT, "absorbed query with one scale that no", "mla", arguments=ON_A_CPU
    ),
    "rotation of latents": Start(
        CANNOT, r"'custom_ops': \['-rotary_embedding'\]", "mla", recipe=PLAIN
    ),
    "a router": Start(
        CANNOT, "no sigmoid without groups, which 'minimax_m2'", "minimax", recipe=PLAIN
    ),
    **{
        f"transfer by {backend}": Start(
            CANNOT,
            f"'{backend}' takes an incomplete.* it to {remedy}",
            arguments={"weight_transfer_config": WeightTransferConfig(backend=backend)},
        )
        for backend, remedy in (("nccl", "'fp8rl_nccl', and"), ("sparse_nccl", "one of .'fp8rl'"))
    },
}


@pytest.mark.parametrize("case", STARTS)
def test_an_engine_that_cannot_work_does_not_start(
    moe_engine, checkpoints, expert_checkpoints, tmp_path, case
):
    asked = STARTS[case]
    if asked.model in ("mla", "minimax", "experts"):
        require_cpu_router()
    known = {"dense": checkpoints["a"], "experts": expert_checkpoints["a"]}
    path = known.get(asked.model) or MODELS[asked.model](tmp_path / "model")
    arguments = asked.arguments
    if asked.lacks or asked.infinite:
        tensors = load_tensors(path)
        tensors.pop(asked.lacks, None)
        if asked.infinite:
            tensors[asked.infinite].view(-1)[5] = torch.inf
        path = copied(path, tmp_path / "copy", tensors)
    elif asked.config:
        path = copied(path, tmp_path / "copy", load_tensors(path), **asked.config)
    elif asked.model != "experts":  # whose weights adapters need
        arguments = {"load_format": "dummy"} | arguments
    if "speculative_config" in arguments:
        draft = arguments["speculative_config"] | {"model": str(path)}
        arguments = arguments | {"speculative_config": draft}
    with pytest.raises(asked.error, match=asked.message):
        moe_engine(path, Recipe.from_dict(asked.recipe), **arguments)

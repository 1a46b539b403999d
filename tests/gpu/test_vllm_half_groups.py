"""A model whose widths end within a group of 128, as SmolLM2's, on a GPU: logprobs against
transformers, through refits under full graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)
pytest.importorskip("vllm")

from fp8rl import Recipe
from fp8rl.numerics import quantize_block
from fp8rl.recipe import KVCache
from support.gpu_engine import (
    Rollout,
    check_through_refits,
    expected_logprobs,
    refit_tensors,
    start_engine,
)
from support.tiny import make_checkpoint
from vllm_fp8rl.refit import refit

RECIPE = Recipe(kv_cache=KVCache(dtype="auto"))
SHAPE: dict[str, Any] = {
    "hidden_size": 576,
    "intermediate_size": 1472,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "initializer_range": 0.04,
}


def test_logprobs_equal_transformers_through_refits(tmp_path: Path) -> None:
    paths = {n: make_checkpoint(tmp_path / n, seed, **SHAPE) for seed, n in enumerate("ab")}
    engine = start_engine(paths["a"], RECIPE)
    try:
        tensors = {name: refit_tensors(path, RECIPE) for name, path in paths.items()}

        def give(name: str) -> None:
            refit(engine.llm, tensors[name].items(), expect_kv_scales=False)

        def expected(name: str, rollout: Rollout, recipe: Recipe, **options: Any) -> torch.Tensor:
            return expected_logprobs(paths[name], recipe, rollout, **options)

        check_through_refits(engine, give, expected)
        give("b")
        layer = engine.model.get_submodule("model.layers.1")
        for module, columns in ((layer.self_attn.o_proj, 576), (layer.mlp.down_proj, 1472)):
            name = next(n for n, m in engine.model.named_modules() if m is module)
            sent = quantize_block(tensors["b"][f"{name}.weight"].cpu())
            codes = module.weight.data.cpu().view(torch.uint8)
            assert module.quant_method.kernel.backend == "deep_gemm"
            assert codes.shape[1] % 128 == 0 and not codes[:, columns:].any()
            assert torch.equal(codes[:, :columns], sent.codes.view(torch.uint8))
            assert torch.equal(module.weight_scale_inv.data.cpu(), sent.scale_inv)
    finally:
        engine.llm.llm_engine.engine_core.shutdown()

"""Families on a GPU: logprobs against transformers, through refits under full graphs.

See ``test_vllm_engine`` for how an engine in BF16 is compared with transformers, and
``test_vllm_moe`` and ``test_vllm_mla`` for Qwen3-MoE and for multi-latent attention.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)
pytest.importorskip("vllm")

from safetensors.torch import load_file

from fp8rl import Recipe
from fp8rl.numerics import quantize_block
from fp8rl.recipe import KVCache
from support.gpu_engine import (
    PROMPTS,
    QUICK,
    GpuEngine,
    Rollout,
    check_through_refits,
    expected_logprobs,
    start_engine,
)
from support.tiny import make_checkpoint, make_family_checkpoint, make_qwen35_checkpoint
from support.towers import TEXT_ONLY
from support.wrong_tensors import changed_checkpoint, nearer, wrong_tensors
from vllm_fp8rl.calibration import calibrate_kv_scales
from vllm_fp8rl.refit import refit

AUTO = Recipe(kv_cache=KVCache(dtype="auto"))
SHAPE: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "initializer_range": 0.04,
}
QWEN35: dict[str, Any] = SHAPE | {
    "num_key_value_heads": 4,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
}
EXPERTS = {"moe_intermediate_size": 256, "shared_expert_intermediate_size": 256}
HALF_GROUPS = SHAPE | {
    "hidden_size": 576,
    "intermediate_size": 1472,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
}
"""Widths that end within a group of 128, as SmolLM2's."""


@dataclass
class Run:
    """An engine, and what it has been refitted with: the weights of ``a`` or ``b``."""

    engine: GpuEngine
    paths: dict[str, Path]
    tensors: dict[str, dict[str, torch.Tensor]]
    scales: dict[str, dict[str, float]]
    """KV scales of each checkpoint; empty without an FP8 cache."""

    def give(self, name: str) -> None:
        scales = {key: torch.tensor([value]) for key, value in self.scales[name].items()}
        tensors = self.tensors[name] | scales
        refit(self.engine.llm, tensors.items(), expect_kv_scales=bool(scales))

    def expected(self, name: str, rollout: Rollout, recipe: Recipe, **options: Any) -> torch.Tensor:
        if recipe is self.engine.recipe:
            options["kv_scales"] = self.scales[name] or None
        return expected_logprobs(self.paths[name], recipe, rollout, **options)


def no_wrong_tensor(run: Run, folder: Path) -> None:
    """The engine is nearer to the reference than to one with a wrong tensor of the last layer."""
    rollout = run.engine.rollout()
    wrong = {
        what: expected_logprobs(
            changed_checkpoint(run.paths["b"], folder / "wrong", changes), AUTO, rollout
        )
        for what, changes in wrong_tensors(run.tensors["b"], run.tensors["a"]).items()
    }
    assert wrong and not nearer(rollout.logprobs, run.expected("b", rollout, AUTO), wrong)


def filled_groups(run: Run, folder: Path) -> None:
    """Zeros fill the last group of codes, for DeepGEMM."""
    layer = run.engine.model.get_submodule("model.layers.1")
    for path, columns in (("self_attn.o_proj", 576), ("mlp.down_proj", 1472)):
        module = layer.get_submodule(path)
        sent = quantize_block(run.tensors["b"][f"model.layers.1.{path}.weight"].cpu())
        codes = module.weight.data.cpu().view(torch.uint8)
        assert module.quant_method.kernel.backend == "deep_gemm"
        assert codes.shape[1] % 128 == 0 and not codes[:, columns:].any()
        assert torch.equal(codes[:, :columns], sent.codes.view(torch.uint8))
        assert torch.equal(module.weight_scale_inv.data.cpu(), sent.scale_inv)


@dataclass(frozen=True)
class Case:
    """``make``: writes a checkpoint into a folder, of a seed."""

    make: Callable[[Path, int], Path]
    check: Callable[[Run, Path], None] | None = None
    recipe: Recipe = AUTO
    options: dict[str, Any] = field(default_factory=dict)
    needs: tuple[str, ...] = ()


def family(kind: str, **shape: Any) -> Case:
    def make(folder: Path, seed: int) -> Path:
        return make_family_checkpoint(folder, seed, kind, **SHAPE, **shape)

    return Case(make, no_wrong_tensor)


# All inside the vision wrapper, as Qwen publishes them: vLLM 0.25.1 does not start the text alone.
# On Hopper vLLM would take flashinfer's kernel of delta nets, which compiles itself in a run.
QWEN35_ENGINE: dict[str, Any] = {
    "options": QUICK | TEXT_ONLY | {"gdn_prefill_backend": "triton"},
    # vLLM's Qwen3.5 imports the first; an old transformers has no second.
    "needs": ("torchvision", "transformers.models.qwen3_5_moe"),
}
qwen35 = partial(make_qwen35_checkpoint, vision=True, **QWEN35)
CASES: dict[str, Case] = {
    # First: vLLM makes the group of expert parallel with the first engine of a process only.
    "qwen3_5_moe": Case(partial(qwen35, experts=True, **EXPERTS), **QWEN35_ENGINE),
    "qwen3_5 over FP8": Case(partial(qwen35, experts=False), recipe=Recipe(), **QWEN35_ENGINE),
    "qwen2_moe": family("qwen2_moe", head_dim=64, moe_intermediate_size=640),
    "mixtral": family("mixtral"),
    "glm4_moe": family("glm4_moe", moe_intermediate_size=640, use_qk_norm=True),
    "minimax_m2": family("minimax_m2"),
    "half groups": Case(partial(make_checkpoint, **HALF_GROUPS), filled_groups),
}


@pytest.mark.parametrize("kind", CASES)
def test_logprobs_equal_transformers_through_refits(kind: str, tmp_path: Path) -> None:
    case = CASES[kind]
    for module in case.needs:
        pytest.importorskip(module)
    paths = {name: case.make(tmp_path / name, seed) for seed, name in enumerate("ab")}
    tensors = {name: load_file(path / "model.safetensors") for name, path in paths.items()}
    engine = start_engine(paths["a"], case.recipe, **case.options)
    try:
        run = Run(engine, paths, tensors, {name: {} for name in paths})
        if case.recipe.kv_cache.has_scales:
            for name in "ba":
                run.give(name)
                run.scales[name] = calibrate_kv_scales(engine.llm, [p + p for p in PROMPTS])
        check_through_refits(engine, run.give, run.expected)
        if case.check is not None:
            run.give("b")
            case.check(run, tmp_path)
    finally:
        engine.llm.llm_engine.engine_core.shutdown()

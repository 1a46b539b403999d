"""Rotation with cos and sin in float32; modules that are replaced while a model is built."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.modules import module as torch_module
from vllm.config import CompilationMode, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

from fp8rl import Recipe
from support.engine import PROMPTS, Engine, keep_process_groups, start_engine
from support.processes import answer, run_forked
from support.tiny import make_checkpoint
from vllm_fp8rl.kernels.replaced_modules import ModuleReplacement
from vllm_fp8rl.kernels.rounding import Float32Rotary, kept_reason, nearest_bf16

HEADS, SIZE, LENGTH = 3, 64, 200
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
KINDS: dict[str, dict[str, Any]] = {
    "default": {},
    "llama3": LLAMA3,
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn without mscale": {**YARN, "factor": 1.0},
    "partial": {"partial_rotary_factor": 0.5},
}
OTHERS = {
    "yarn": (YARN, r"YaRN scales cos and sin \(mscale\)"),
    "mrope": ({"mrope_section": [8, 12, 12]}, "MRotaryEmbedding has a rotation of its own"),
    "deepseek": (
        {**YARN, "rope_type": "deepseek_yarn", "mscale": 1.0, "mscale_all_dim": 1.0},
        "DeepseekScalingRotaryEmbedding has a rotation of its own",
    ),
}


@pytest.fixture(autouse=True)
def config() -> Iterator[VllmConfig]:
    made = VllmConfig()
    with set_current_vllm_config(made):
        yield made


def rope(parameters: dict[str, Any], neox: bool = True) -> RotaryEmbedding:
    parameters = {"rope_theta": 1e4, **parameters}
    return get_rope(SIZE, 512, neox, parameters, torch.bfloat16)


def engine(**changes: Any) -> Any:
    """What is read of an engine's configuration."""
    settings = {
        "model_config": SimpleNamespace(use_mla=False),
        "compilation_config": SimpleNamespace(
            mode=CompilationMode.NONE,
            pass_config=SimpleNamespace(enable_qk_norm_rope_fusion=False),
        ),
        "device_config": SimpleNamespace(device_type="cpu"),
        "quant_config": object(),
    }
    return SimpleNamespace(**(settings | changes))


def queries(seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(LENGTH, HEADS * SIZE, generator=generator).bfloat16()


def rotate(x: torch.Tensor, table: torch.Tensor, neox: bool, dtype: torch.dtype) -> torch.Tensor:
    """The formula, in one dtype and rounded once."""
    width = table.shape[1]
    heads = x.view(LENGTH, -1, SIZE).to(dtype)
    cos, sin = (each[:, None].to(dtype) for each in table[:LENGTH].chunk(2, -1))
    part = heads[..., :width]
    a, b = part.chunk(2, -1) if neox else (part[..., ::2], part[..., 1::2])
    both = (a * cos - b * sin, b * cos + a * sin)
    turned = torch.cat(both, -1) if neox else torch.stack(both, -1).flatten(-2)
    return torch.cat((turned, heads[..., width:]), -1).bfloat16().view_as(x)


@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_rotation_in_float32_to_the_bit(kind: str, neox: bool) -> None:
    vllms = rope(KINDS[kind], neox)
    assert kept_reason(vllms, engine()) is None
    ours = Float32Rotary(vllms)
    table = ours.cos_sin_cache
    assert table.dtype == torch.float32 and vllms.cos_sin_cache.dtype == torch.bfloat16
    assert torch.equal(table.bfloat16(), vllms.cos_sin_cache)
    positions, q, k = torch.arange(LENGTH), queries(), queries(1)
    before = q.clone()
    for got, x in zip(ours(positions, q, k), (q, k), strict=True):
        assert got.dtype == torch.bfloat16
        assert torch.equal(got, rotate(x, table, neox, torch.float32))
        # The sum of two products in float32 is rounded twice; in float64 the products are exact.
        exact = rotate(x, table, neox, torch.float64)
        assert (got != exact).float().mean() < 1e-4
    assert torch.equal(q, before)
    rotated, none = ours(positions, q)
    assert none is None and torch.equal(rotated, ours(positions, q, k)[0])
    assert not torch.equal(rotated, vllms.forward_native(positions, q, k)[0])


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("default", {}),
        ("llama3", {"rope_scaling": True, "rope_scaling_factor": 8.0}),
        ("partial", {"rotary_percent": 0.5}),
    ],
)
def test_frequencies_are_megatrons_to_the_bit(kind: str, options: dict[str, Any]) -> None:
    embedding = pytest.importorskip("megatron.core.models.common.embeddings.rotary_pos_embedding")
    trainer = embedding.RotaryEmbedding(
        SIZE, **{"rotary_percent": 1.0, "use_cpu_initialization": True, **options}
    )
    angles = trainer.get_freqs_non_repeated(512)
    table = torch.cat((angles.cos(), angles.sin()), -1)
    assert torch.equal(Float32Rotary(rope(KINDS[kind])).cos_sin_cache, table)


@pytest.mark.parametrize("kind", OTHERS)
def test_other_rotations_stay(kind: str) -> None:
    parameters, reason = OTHERS[kind]
    found = kept_reason(rope(parameters), engine())
    assert found is not None and re.search(reason, found)


def test_models_and_passes_that_rotate_otherwise() -> None:
    mla = engine(model_config=SimpleNamespace(use_mla=True))
    assert "MLA" in str(kept_reason(rope({}), mla))
    fused = engine()
    fused.compilation_config.pass_config.enable_qk_norm_rope_fusion = True
    assert "enable_qk_norm_rope_fusion" in str(kept_reason(rope({}), fused))


def test_rounding_in_bits_is_the_cast() -> None:
    bits = torch.arange(-(2**31), 2**31, 65521, dtype=torch.int64).to(torch.int32)
    values = bits.view(torch.float32)

    got, cast = nearest_bf16(values), values.bfloat16().float()
    nan = values.isnan()
    tie = (bits & 0xFFFF) == 0x8000
    assert torch.equal(got[~nan & ~tie], cast[~nan & ~tie]) and got[nan].isnan().all()
    ties = torch.tensor([1 + 2.0**-8, 1 + 3 * 2.0**-8, -1 - 2.0**-8])
    assert nearest_bf16(ties).tolist() == [1 + 2.0**-7, 1 + 2.0**-6, -1 - 2.0**-7]


COMPILED = """
import json
import torch
from torch._inductor import config, metrics
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.ir.ops import rms_norm
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm_fp8rl.kernels.rounding import Float32Rotary

config.cpp.vec_isa_ok = True  # which a compilation of its own would find out
torch.set_num_threads(1)
with set_current_vllm_config(VllmConfig()):
    vllms = get_rope(64, 64, True, {"rope_theta": 1e4}, torch.bfloat16)
    ours = Float32Rotary(vllms)
generator = torch.Generator().manual_seed(0)
q = torch.randn(64, 4 * 64, generator=generator).bfloat16()
weight = torch.rand(64, generator=generator).bfloat16()
positions = torch.arange(64)
norm = rms_norm.impls["native"].impl_fn

def alone(rope, q):
    return rope.forward_native(positions, q)[0]

def behind_a_norm(rope, q):
    return rope.forward_native(positions, norm(q.view(64, 4, 64), weight, 1e-6).flatten(1))[0]

def compiled(function, rope):
    torch._dynamo.reset()
    metrics.reset()
    result = torch.compile(function, fullgraph=True)(rope, q)
    return result, metrics.generated_kernel_count

(_, before), (rotated, after) = compiled(alone, vllms), compiled(alone, ours)
equal = torch.equal(rotated, alone(ours, q))
normed = torch.nn.functional.rms_norm(q.view(64, 4, 64), (64,), weight, 1e-6).flatten(1)
wanted = alone(ours, normed)
behind = (compiled(behind_a_norm, ours)[0] != wanted).float().mean().item() < 1e-3  # ties
print(json.dumps([before, after, equal, behind]))
"""


@pytest.mark.slow
def test_compiled_it_is_one_kernel_and_reads_the_rounded_norm(tmp_path: Path) -> None:
    """Inductor alone would rotate the unrounded norm of a query, which no trainer does."""
    script = tmp_path / "compiled.py"
    script.write_text(COMPILED)
    variables = {
        "TORCHDYNAMO_DISABLE": "0",  # support/engine.py switches it off for the other tests
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),
    }
    assert answer(run_forked(script, timeout=300, **variables)) == [1, 1, True, True]


def test_towers_keep_the_table_that_they_read(
    config: VllmConfig, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM's attention of towers on a GPU takes cos and sin in the dtype of its queries alone."""
    made = engine()
    made.quant_config = config.quant_config = object()
    tower = torch.nn.Module()
    replacement = ModuleReplacement(made, Recipe(rope_dtype="float32"))
    try:
        tower.rotary_pos_emb = rope({"partial_rotary_factor": 0.5})
    finally:
        replacement.close()
    assert type(tower.rotary_pos_emb) is RotaryEmbedding
    assert "rope_dtype 'float32' changed nothing" in caplog.text
    found = find_spec("vllm.model_executor.models.qwen3_vl")  # an import would need torchvision
    assert found is not None and found.origin is not None
    assert "self.rotary_pos_emb = get_rope(" in Path(found.origin).read_text(encoding="utf-8")


def rotary_modules(engine: Engine) -> set[type]:
    return {type(m) for name, m in engine.model.named_modules() if name.endswith(".rotary_emb")}


def test_engines_of_one_process(tmp_path: Path) -> None:
    """One without fp8rl, which shares vLLM's rotary embeddings with all others, then each kind."""
    path = make_checkpoint(tmp_path, 0)
    recipe = Recipe.from_dict({"rope_dtype": "float32", "kv_cache": {"dtype": "auto"}})
    settings = {"dtype": "bfloat16"}
    plain = {"quantization": None, "additional_config": {}}
    first = start_engine(path, recipe, **settings, **plain)
    before = first.greedy(PROMPTS)
    ours = start_engine(path, recipe, **settings)
    second = start_engine(path, Recipe.from_dict({"kv_cache": {"dtype": "auto"}}), **settings)
    third = start_engine(path, recipe, **settings, **plain)
    found = [rotary_modules(each) for each in (first, ours, second, third)]
    assert found == [{RotaryEmbedding}, {Float32Rotary}, {RotaryEmbedding}, {RotaryEmbedding}]
    assert not torch_module._global_module_registration_hooks
    assert first.greedy(PROMPTS) == before == third.greedy(PROMPTS)
    assert len(ours.greedy(PROMPTS)[0]) == 12
    for each in (first, ours, second, third):
        keep_process_groups(each)

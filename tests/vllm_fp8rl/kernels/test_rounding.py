"""Rotation with cos and sin in float32; modules that are replaced while a model is built."""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.modules import module as torch_module
from vllm.config import CompilationMode, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

from fp8rl import Recipe
from support.engine import PROMPTS, keep_process_groups, start_engine
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
    "yarn without mscale": {**YARN, "factor": 1.0},
    "partial": {"partial_rotary_factor": 0.5},
}


@pytest.fixture(autouse=True)
def config() -> Iterator[VllmConfig]:
    made = VllmConfig()
    with set_current_vllm_config(made):
        yield made


def rope(parameters: dict[str, Any], neox: bool = True) -> RotaryEmbedding:
    parameters = {"rope_theta": 1e4, **parameters}
    return get_rope(SIZE, 512, neox, parameters, torch.bfloat16)


def engine() -> Any:
    """What is read of an engine's configuration."""
    return SimpleNamespace(
        model_config=SimpleNamespace(use_mla=False),
        compilation_config=SimpleNamespace(
            mode=CompilationMode.NONE, pass_config=SimpleNamespace(enable_qk_norm_rope_fusion=False)
        ),
        device_config=SimpleNamespace(device_type="cpu"),
        quant_config=object(),
    )


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


@pytest.mark.parametrize(("kind", "neox"), [*((kind, True) for kind in KINDS), ("partial", False)])
def test_rotation_in_float32_to_the_bit(kind, neox):
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
        ("llama3", {"rope_scaling": True, "rope_scaling_factor": 8.0}),
        ("partial", {"rotary_percent": 0.5}),
    ],
)
def test_frequencies_are_megatrons_to_the_bit(kind, options):
    embedding = pytest.importorskip("megatron.core.models.common.embeddings.rotary_pos_embedding")
    trainer = embedding.RotaryEmbedding(
        SIZE, **{"rotary_percent": 1.0, "use_cpu_initialization": True, **options}
    )
    angles = trainer.get_freqs_non_repeated(512)
    table = torch.cat((angles.cos(), angles.sin()), -1)
    assert torch.equal(Float32Rotary(rope(KINDS[kind])).cos_sin_cache, table)


@pytest.mark.parametrize(
    ("parameters", "setting", "reason"),
    [
        (YARN, None, r"YaRN scales cos and sin \(mscale\)"),
        ({"mrope_section": [8, 12, 12]}, None, "MRotaryEmbedding has a rotation of its own"),
        ({}, "use_mla", "MLA"),
        ({}, "enable_qk_norm_rope_fusion", "enable_qk_norm_rope_fusion"),
    ],
)
def test_rotations_that_stay(parameters, setting, reason):
    made = engine()
    for part in (made.model_config, made.compilation_config.pass_config) if setting else ():
        if hasattr(part, setting):
            setattr(part, setting, True)
    found = kept_reason(rope(parameters), made)
    assert found is not None and re.search(reason, found)


def test_rounding_in_bits_is_the_cast():
    bits = torch.arange(-(2**31), 2**31, 65521, dtype=torch.int64).to(torch.int32)
    values = bits.view(torch.float32)

    got, cast = nearest_bf16(values), values.bfloat16().float()
    nan = values.isnan()
    tie = (bits & 0xFFFF) == 0x8000
    assert torch.equal(got[~nan & ~tie], cast[~nan & ~tie]) and got[nan].isnan().all()
    ties = torch.tensor([1 + 2.0**-8, 1 + 3 * 2.0**-8, -1 - 2.0**-8])
    assert nearest_bf16(ties).tolist() == [1 + 2.0**-7, 1 + 2.0**-6, -1 - 2.0**-7]


def test_towers_keep_the_table_that_they_read(config, caplog):
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


def test_engines_of_one_process(tmp_path):
    """One without fp8rl shares vLLM's rotary embeddings with all others, before and after ours."""
    path = make_checkpoint(tmp_path, 0)
    recipe = Recipe.from_dict({"rope_dtype": "float32", "kv_cache": {"dtype": "auto"}})
    plain = {"quantization": None, "additional_config": {}}
    engines = [start_engine(path, recipe, dtype="bfloat16", **x) for x in (plain, {}, plain)]
    found = [
        {type(m) for name, m in each.model.named_modules() if name.endswith(".rotary_emb")}
        for each in engines
    ]
    assert found == [{RotaryEmbedding}, {Float32Rotary}, {RotaryEmbedding}]
    assert not torch_module._global_module_registration_hooks
    said = [each.greedy(PROMPTS) for each in engines]
    assert said[0] == said[2] != said[1]
    for each in engines:
        keep_process_groups(each)

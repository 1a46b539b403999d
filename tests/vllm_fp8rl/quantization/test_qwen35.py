"""Qwen3.5: gated delta nets, gated attention, experts with a gated shared one, a vision wrapper.

vLLM's kernel of the gated delta net for CPUs takes BF16 alone. So the numerics are compared in
float32 with that one kernel replaced (:mod:`support.gated_delta_net`), and engines in BF16, with
all of vLLM's own kernels, with fresh engines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8rl import Recipe
from fp8rl.errors import RefitError
from fp8rl.kv_scales import scale_name
from fp8rl.numerics import quantize_block
from fp8rl.recipe import KVCache
from support.engine import FUSED, Engine, load_tensors, same_bits, same_state
from support.towers import TEXT_ONLY, keep_towers

pytest.importorskip("vllm")
pytest.importorskip("transformers.models.qwen3_5_moe", reason="transformers has no Qwen3.5")
from vllm.distributed import parallel_state
from vllm.model_executor.models.registry import _TEXT_GENERATION_MODELS

from support import teacher_forced
from support.gaps import Gap, gap, observed_kv_scales
from support.gated_delta_net import compute_in_float32, token_by_token
from support.hf_reference import load_reference
from support.tiny import make_qwen35_checkpoint
from vllm_fp8rl.calibration import calibrate_kv_scales
from vllm_fp8rl.engine.rank_state import state_of
from vllm_fp8rl.refit import refit

PROMPTS = teacher_forced.PROMPTS[:48]
"""Half of them, since a recurrence takes long on a CPU. A correct engine lies at 0.3 to 0.75 of the
noise on them, one layer left unquantized at 11 to 15."""
FACTOR = 2.0
"""Bound on the distance from transformers, in units of its own noise."""
ATTENTION = 3
"""The only layer of four with a KV cache."""
SCALE_NAMES = {scale_name(ATTENTION, role) for role in ("k", "v")}
LINEARS = {
    "linear_attn.in_proj_qkvz": ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z"),
    "linear_attn.out_proj": ("linear_attn.out_proj",),
    **FUSED,
    "mlp.shared_expert.gate_up_proj": (
        "mlp.shared_expert.gate_proj",
        "mlp.shared_expert.up_proj",
    ),
    "mlp.shared_expert.down_proj": ("mlp.shared_expert.down_proj",),
}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two checkpoints of each shape: dense as text alone, and experts inside the wrapper."""
    root = tmp_path_factory.mktemp("qwen35")
    made = {}
    for seed, name in enumerate("ab"):
        made[f"dense_{name}"] = make_qwen35_checkpoint(root / f"dense_{name}", seed)
        made[f"moe_{name}"] = make_qwen35_checkpoint(
            root / f"moe_{name}", seed, experts=True, vision=True
        )
    return made


@pytest.fixture(scope="module", autouse=True)
def experts_group(engine: Engine) -> Iterator[None]:
    """The group of expert-parallel ranks, which vLLM makes with a process's first engine alone."""
    before = parallel_state._EP
    parallel_state._EP = parallel_state.get_tp_group()
    yield
    parallel_state._EP = before


def require_text_model() -> None:
    """Skip with a vLLM up to 0.26, which has Qwen3.5 in the vision wrapper alone."""
    if "Qwen3_5ForCausalLM" not in _TEXT_GENERATION_MODELS:
        pytest.skip("this vLLM has no Qwen3.5 without the vision wrapper")


@pytest.fixture(scope="module")
def dense(paths: dict[str, Path], other_engine: Callable[..., Engine]) -> Engine:
    """A dense engine in BF16 with an FP8 KV cache; its scales are calibrated."""
    require_text_model()
    engine = other_engine(paths["dense_a"], Recipe(), scaled=False, dtype="bfloat16")
    calibrate_kv_scales(engine.llm, PROMPTS[:4])
    return engine


@pytest.fixture(scope="module")
def moe(paths: dict[str, Path], other_engine: Callable[..., Engine]) -> Iterator[Engine]:
    """An engine with experts inside the wrapper, with its tower in memory but without images."""
    recipe = Recipe(kv_cache=KVCache(dtype="auto"))
    with pytest.MonkeyPatch.context() as patch:
        keep_towers(patch)
        yield other_engine(paths["moe_a"], recipe, dtype="bfloat16", **TEXT_ONLY)


def stem(shape: str) -> str:
    """What precedes the names of the language model in a checkpoint."""
    return "model." if shape == "dense" else "model.language_model."


def floor_of(path: Path, recipe: Recipe, scales: dict[str, float], expected: torch.Tensor) -> Gap:
    """How far transformers is from itself, with another order of sums in all its layers."""
    with token_by_token():
        other = load_reference(path, recipe, kv_scales=scales, attention="sdpa").many(PROMPTS)
    return gap(other, expected)


def scales_of(engine: Engine) -> dict[str, torch.Tensor]:
    return {name: torch.tensor([value]) for name, value in engine.kv_scales().items()}


@pytest.mark.parametrize("shape", ["dense", "moe"])
def test_equals_transformers_after_a_refit(
    shape: str,
    paths: dict[str, Path],
    other_engine: Callable[..., Engine],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if shape == "dense":
        require_text_model()
    compute_in_float32(monkeypatch)
    options: dict[str, Any] = {} if shape == "dense" else TEXT_ONLY
    engine = other_engine(paths[f"{shape}_a"], Recipe(), scaled=False, **options)
    path = paths[f"{shape}_b"]
    scales = observed_kv_scales(path, engine.recipe, PROMPTS[:16])
    assert set(scales) == SCALE_NAMES
    sent = load_tensors(path) | {n: torch.tensor([s]) for n, s in scales.items()}
    report = refit(engine.llm, sent.items(), expect_kv_scales=True)
    assert report.kv_scales == len(SCALE_NAMES)
    assert report.left_out == sum(tensor.startswith("model.visual.") for tensor in sent)
    actual = teacher_forced.vllm_logprobs(engine, PROMPTS)
    expected = load_reference(path, engine.recipe, kv_scales=scales).many(PROMPTS)
    floor = floor_of(path, engine.recipe, scales, expected)
    assert gap(actual, expected).within(floor, FACTOR), (gap(actual, expected), floor)
    left = [f"{stem(shape)}layers.1.linear_attn.in_proj_z"]
    wrong = load_reference(path, engine.recipe, kv_scales=scales, unquantized=left)
    assert not gap(actual, wrong.many(PROMPTS)).within(floor, FACTOR)


def test_a_refit_there_and_back(
    dense: Engine, paths: dict[str, Path], other_engine: Callable[..., Engine]
) -> None:
    fresh = other_engine(paths["dense_b"], Recipe(), scaled=False, dtype="bfloat16")
    calibrate_kv_scales(fresh.llm, PROMPTS[:4])
    a, b = (load_tensors(paths[f"dense_{name}"]) for name in "ab")
    before, said, scales = dense.state(), dense.greedy(PROMPTS[:4]), scales_of(dense)
    pointers = dense.pointers()

    refit(dense.llm, (b | scales_of(fresh)).items(), expect_kv_scales=True)
    assert same_state(dense.state(), fresh.state())
    assert dense.greedy(PROMPTS[:4]) == fresh.greedy(PROMPTS[:4]) != said

    refit(dense.llm, (a | scales).items(), expect_kv_scales=True)
    assert same_state(dense.state(), before)
    assert dense.greedy(PROMPTS[:4]) == said
    assert dense.pointers() == pointers


def test_the_kernels_of_a_cpu_are_near_transformers(dense: Engine, paths: dict[str, Path]) -> None:
    """In BF16, where all codes flip: as near as transformers in BF16 is to itself in float32."""
    path, scales = paths["dense_a"], dense.kv_scales()
    few = PROMPTS[:16]
    exact, rounded = (
        load_reference(path, dense.recipe, kv_scales=scales, dtype=dtype).many(few)
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert gap(teacher_forced.vllm_logprobs(dense, few), exact).mean < 2 * gap(rounded, exact).mean


@pytest.mark.parametrize("shape", ["dense", "moe"])
def test_codes_are_the_trainers(
    shape: str, request: pytest.FixtureRequest, paths: dict[str, Path]
) -> None:
    engine: Engine = request.getfixturevalue(shape)
    tensors, state = load_tensors(paths[f"{shape}_a"]), engine.state()
    prefix = "model." if shape == "dense" else "language_model.model."
    compared = set()
    for layer in range(4):
        for fused, parts in LINEARS.items():
            name = f"{prefix}layers.{layer}.{fused}.weight"
            sent = [f"{stem(shape)}layers.{layer}.{part}.weight" for part in parts]
            if name not in state:
                assert sent[0] not in tensors
                continue
            codes, scale_inv = quantize_block(torch.cat([tensors[each] for each in sent]))
            assert same_bits(state[name], codes), name
            assert same_bits(state[f"{name}_scale_inv"], scale_inv), name
            compared.add(fused)
    only_moe = {name for name in LINEARS if "shared" in name}
    only_dense = {"mlp.gate_up_proj", "mlp.down_proj"}
    assert compared == set(LINEARS) - (only_moe if shape == "dense" else only_dense)


def test_a_refit_of_the_tower_and_of_fused_experts(moe: Engine, paths: dict[str, Path]) -> None:
    a, b = (load_tensors(paths[f"moe_{name}"]) for name in "ab")
    before, said = moe.state(), moe.greedy(PROMPTS[:4])
    slabs = with_slabs(b)
    report = refit(moe.llm, slabs.items(), expect_kv_scales=False)
    assert report.left_out == 0
    state = moe.state()
    for name, tensor in b.items():
        if name.startswith("model.visual."):
            assert same_bits(state[name.removeprefix("model.")], tensor), name
    assert moe.greedy(PROMPTS[:4]) != said
    assert not same_bits(state["visual.pos_embed.weight"], before["visual.pos_embed.weight"])
    in_slabs = moe.state()
    refit(moe.llm, b.items(), expect_kv_scales=False)
    assert same_state(moe.state(), in_slabs)
    refit(moe.llm, a.items(), expect_kv_scales=False)
    assert same_state(moe.state(), before)
    assert moe.greedy(PROMPTS[:4]) == said


def with_slabs(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors with the experts of each layer in two, as published checkpoints have them."""
    found = {name: t for name, t in tensors.items() if ".experts." not in name}
    for layer in range(4):
        block = f"model.language_model.layers.{layer}.mlp.experts"

        def each(leaf: str, block: str = block) -> list[torch.Tensor]:
            return [tensors[f"{block}.{expert}.{leaf}.weight"] for expert in range(8)]

        pairs = zip(each("gate_proj"), each("up_proj"), strict=True)
        found[f"{block}.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in pairs])
        found[f"{block}.down_proj"] = torch.stack(each("down_proj"))
    return found


def test_an_fp8_cache_is_for_the_layer_with_attention(dense: Engine) -> None:
    layers = dense.llm.llm_engine.vllm_config.compilation_config.static_forward_context
    state = state_of(dense.model)
    assert list(state.kv_scales) == [f"model.layers.{ATTENTION}.self_attn.attn"]
    assert set(dense.kv_scales()) >= SCALE_NAMES
    nets = {name: layer for name, layer in layers.items() if name.endswith(".linear_attn")}
    assert len(nets) == ATTENTION
    for layer in nets.values():
        assert {tensor.dtype for tensor in layer.kv_cache} <= {torch.bfloat16, torch.float32}


def test_a_missing_or_unknown_tensor_is_refused(moe: Engine, paths: dict[str, Path]) -> None:
    a = load_tensors(paths["moe_a"])
    conv = "model.language_model.layers.1.linear_attn.conv1d.weight"
    for name in (conv, "model.visual.pos_embed.weight"):
        rest = [(each, tensor) for each, tensor in a.items() if each != name]
        with pytest.raises(RefitError, match=name):
            refit(moe.llm, rest, expect_kv_scales=False)
    foreign = {"model.layers.0.mlp.gate.weight": a["lm_head.weight"]}
    with pytest.raises(RefitError, match=r"has no tensor 'model\.layers\.0\.mlp\.gate\.weight'"):
        refit(moe.llm, foreign.items(), expect_kv_scales=False)
    sent = a | {"mtp.fc.weight": torch.zeros(1)}  # vLLM's class drops what predicts more tokens
    assert refit(moe.llm, sent.items(), expect_kv_scales=False).left_out == 1

"""Qwen3.5 in Megatron-Core: gated delta nets and gated attention, against transformers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

import delta_net_ranks
from fp8rl import Recipe
from fp8rl.errors import PinError, UnsupportedError
from fp8rl.kv_scales import next_scales, scale_name
from fp8rl.models.spec import ModelSpec
from fp8rl.numerics import quantize_block
from fp8rl.recipe import KVCache, Pins
from megatron_fp8rl import conversion_of, convert
from megatron_fp8rl.export import export_hf, fp8_wire
from megatron_fp8rl.hf_names import module_names
from megatron_fp8rl.kv.cache import KVCacheInTraining
from megatron_fp8rl.kv.observers import QKVObserver
from support.gaps import gap
from support.gated_delta_net import token_by_token
from support.hf_reference import load_reference
from support.megatron import convert_alone, hf_gpt, logprobs, prompts, weight_codes_hf
from support.megatron_delta_net import build_hybrid, delta_nets
from support.numeric import relative_error, same_codes
from support.processes import run_ranks
from support.tiny import make_qwen35_checkpoint

RECIPE = Recipe(kv_cache=KVCache(dtype="auto"))
UNQUANTIZED = Recipe(rollout=False, training=False, kv_cache=RECIPE.kv_cache)
FACTOR = 2.0
ATTENTION = 3
"""The only layer of four with keys and values."""
SHAPES: dict[str, dict[str, Any]] = {"dense": {}, "moe": {"experts": True}}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("qwen35")
    return {name: make_qwen35_checkpoint(root / name, 3, **shape) for name, shape in SHAPES.items()}


@pytest.fixture(autouse=True)
def not_compiled() -> Iterator[None]:
    """Megatron compiles what is around the linears of a gated delta net, which takes 10 s."""
    with torch.compiler.set_stance("force_eager"), delta_nets():
        yield


def gpt(path: Path, dtype: torch.dtype = torch.float32, **overrides: Any) -> Any:
    """``A_log`` is float32 in the checkpoint."""
    return hf_gpt(path, dtype, allow_cast=dtype != torch.float32, build=build_hybrid, **overrides)


def load_tensors(path: Path) -> dict[str, torch.Tensor]:
    return load_file(path / "model.safetensors")


@pytest.mark.parametrize("name", SHAPES)
def test_logprobs_equal_transformers_and_tensors_come_back(mcore, paths, name):
    model, tensors = gpt(paths[name]), load_tensors(paths[name])
    expected = load_reference(paths[name], UNQUANTIZED).many(prompts())
    found = gap(logprobs(model, prompts()), expected)
    assert found.mean < 5e-6 and found.max < 5e-4, found
    exported = dict(export_hf(model))
    assert exported.keys() == tensors.keys()
    for key, tensor in tensors.items():
        # Megatron keeps this norm less one.
        near = 1e-6 if key.endswith("linear_attn.norm.weight") else 0.0
        assert torch.allclose(exported[key], tensor.float(), rtol=0, atol=near), key


def test_fp8_logprobs_equal_transformers_with_the_same_fake_quantization(mcore, paths):
    model = gpt(paths["dense"])
    plain = logprobs(model, prompts())
    convert_alone(model, RECIPE)
    expected = load_reference(paths["dense"], RECIPE).many(prompts())
    with token_by_token():
        other = load_reference(paths["dense"], RECIPE, attention="sdpa").many(prompts())
    floor = gap(other, expected)
    found = gap(logprobs(model, prompts()), expected)
    assert found.within(floor, FACTOR), (found, floor)
    assert gap(plain, expected).mean > 2 * found.mean


def test_codes_are_the_rollouts(mcore, paths):
    model, tensors = gpt(paths["moe"], torch.bfloat16), load_tensors(paths["moe"])
    conversion = convert_alone(model, RECIPE)
    prefix = "model.layers.0.linear_attn.in_proj"
    codes = weight_codes_hf(conversion.modules[f"{prefix}_qkvz"])
    joined = tuple(
        map(torch.cat, zip(*(codes[f"{prefix}_{p}"] for p in ("qkv", "z")), strict=True))
    )
    fused = torch.cat([tensors[f"{prefix}_{part}.weight"] for part in ("qkv", "z")])
    assert same_codes(joined, quantize_block(fused))
    wire = dict(fp8_wire(export_hf(model), conversion.policy, "fp32"))
    for key in (
        f"{prefix}_qkv.weight",
        "model.layers.0.linear_attn.out_proj.weight",
        f"model.layers.{ATTENTION}.self_attn.q_proj.weight",
    ):
        found = wire[key], wire[f"{key}_scale_inv"]
        assert same_codes(found, quantize_block(tensors[key]))
    assert wire[f"{prefix}_b.weight"].dtype == torch.bfloat16
    # Over two ranks each of q, k and v is cut, and the tensor does not tell their rows.
    wire = dict(fp8_wire(export_hf(model), conversion.policy, tensor_parallel_size=2))
    assert wire[f"{prefix}_qkv.weight"].dtype == torch.bfloat16


def test_names_are_the_rollouts(mcore, paths):
    names = ModelSpec.of(AutoConfig.from_pretrained(paths["moe"])).names
    config = gpt(paths["moe"]).config
    assert sorted(module_names(config)) == sorted(names)
    inside = module_names(config, wrapped=True)
    assert inside[0] == "model.visual" and len(inside) == 1 + len(names)
    assert "model.language_model.layers.0.linear_attn.in_proj_qkv" in inside


def test_rows_without_blocks_stay_in_bf16(mcore, paths):
    conversion = convert_alone(gpt(paths["dense"]), RECIPE)
    linear: Any = conversion.modules["model.layers.0.linear_attn.in_proj_qkvz"]
    rows = linear.fp8_state.codes.layout.rows
    weight = linear.weight.detach().clone()
    x = torch.randn(16, 2, 256, generator=torch.Generator().manual_seed(1), requires_grad=True)
    y, _ = linear(x)
    assert y.shape[-1] == len(weight) == rows + 8
    upstream = torch.randn(y.shape, generator=torch.Generator().manual_seed(2))
    y.backward(upstream)
    flat, rest = upstream.flatten(0, 1), x.detach().flatten(0, 1)
    exact = flat.t() @ rest
    assert torch.equal(y[..., rows:], torch.nn.functional.linear(x, weight[rows:]))
    assert torch.allclose(linear.weight.grad[rows:], exact[rows:], rtol=1e-5, atol=1e-5)
    for found, expected in (
        (y[..., :rows].flatten(0, 1), rest @ weight[:rows].t()),
        (linear.weight.grad[:rows], exact[:rows]),
        (x.grad.flatten(0, 1), flat @ weight),
    ):
        near = torch.nn.functional.cosine_similarity(found.flatten(), expected.flatten(), 0)
        assert 0.99 < near < 1 - 1e-9


def test_the_input_has_the_gradient_of_rows_in_bf16(mcore, paths):
    """From these rows alone: beside the rest the noise of FP8 would hide that it is missing."""
    conversion = convert_alone(gpt(paths["dense"]), RECIPE)
    linear: Any = conversion.modules["model.layers.0.linear_attn.in_proj_qkvz"]
    found = delta_net_ranks.gradient_of_bf16_rows(linear)
    assert relative_error(found["grad"], expected_gradient([found])) < 1e-5


def expected_gradient(ranks: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    """The sum over ranks, each with rows of its own."""
    parts = [found["upstream"].double() @ found["weight"].double() for found in ranks]
    return torch.stack(parts).sum(0)


@pytest.mark.slow
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_the_gradient_of_rows_in_bf16_is_summed_over_ranks(paths, two_ranks, sequence_parallel):
    ranks = [found[sequence_parallel]["bf16_rows"] for found in two_ranks]
    expected = expected_gradient(ranks)
    shares = expected.chunk(2) if sequence_parallel else [expected] * 2
    for found, share in zip(ranks, shares, strict=True):
        assert relative_error(found["grad"], share) < 1e-5


def test_every_parameter_has_a_gradient(mcore, paths):
    model = gpt(paths["moe"])
    convert_alone(model, RECIPE)
    tokens = torch.tensor(prompts())
    positions = torch.arange(tokens.shape[1]).expand(len(tokens), -1)
    model(tokens, positions, None).float().log_softmax(-1)[..., 7].sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and torch.isfinite(parameter.grad).all(), name
        assert parameter.grad.any(), name


@pytest.mark.slow
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_two_ranks(mcore, paths, two_ranks, sequence_parallel):
    """As near to one rank as codes that flip allow: ranks sum in another order."""
    one = delta_net_ranks.run(paths["dense"])
    ranks = [found[sequence_parallel] for found in two_ranks]
    assert torch.equal(ranks[0]["logprobs"], ranks[1]["logprobs"])
    both = (found["logprobs"].flatten() for found in (ranks[0], one))
    assert gap(*both).mean < 0.02
    assert [found["off"] for found in ranks] == [one["off"]] * 2
    sizes = [256, 256, 512, 512, 4, 4]  # of q, k, v, z, b and a
    for name, whole in one["gradients"].items():
        parts = [found["gradients"][name] for found in ranks]
        if name == delta_net_ranks.NORM:
            # Under sequence parallelism each rank has seen half of the tokens.
            joined = sum(parts) if sequence_parallel else parts[0]
            pairs = [(joined, whole)]
        else:
            cut = [part.split([size // 2 for size in sizes]) for part in parts]
            joined = [torch.cat(pieces) for pieces in zip(*cut, strict=True)]
            pairs = list(zip(joined, whole.split(sizes), strict=True))
        for found, expected in pairs:
            near = torch.nn.functional.cosine_similarity(found.flatten(), expected.flatten(), 0)
            assert near > 0.98, (name, near)
            assert 0.9 < found.norm() / expected.norm() < 1.1, name  # of b and a: 4 rows


@pytest.fixture(scope="module")
def two_ranks(paths, tmp_path_factory) -> list[Any]:
    folder = tmp_path_factory.mktemp("ranks")
    arguments = paths["dense"], folder
    run_ranks(Path(delta_net_ranks.__file__), 2, *arguments, timeout=300, TORCHDYNAMO_DISABLE="1")
    return [torch.load(folder / f"{rank}.pt") for rank in (0, 1)]


def test_only_layers_with_keys_have_scales(mcore, paths):
    model = gpt(paths["dense"])
    observer = QKVObserver(model)
    before = logprobs(model, prompts())
    scales = observer.scales(1.0)
    assert set(scales) == {scale_name(ATTENTION, role) for role in ("q", "k", "v")}
    kept = KVCache(margin=1.0, recalibrate="start")
    held = next_scales(scales, 2 * observer.amax(), kept, observer.layers)
    assert held.scales == scales and set(held.outgrown) <= set(scales)
    cache = KVCacheInTraining(model)
    cache.set(scales)
    assert not torch.equal(logprobs(model, prompts()), before)


class Wrapper(torch.nn.Module):
    """What Megatron-Bridge makes of a multimodal model, as far as this package looks at it."""

    def __init__(self, language_model: torch.nn.Module) -> None:
        super().__init__()
        self.vision_model = torch.nn.Linear(8, 8)
        self.language_model = language_model


def test_a_language_model_inside_a_wrapper(mcore, paths):
    wrapper = Wrapper(gpt(paths["dense"]))
    stem = "model.language_model."
    pinned = f"{stem}layers.1.mlp.down_proj"
    recipe = Recipe(pins=Pins(names=(pinned,)), kv_cache=RECIPE.kv_cache)
    conversion = convert_alone(wrapper, recipe)
    assert f"{stem}layers.0.linear_attn.in_proj_qkvz" in conversion.modules
    assert all(name.startswith(f"{stem}layers.") for name in conversion.modules)
    assert pinned not in conversion.modules
    assert conversion.policy.precision("model.visual.blocks.0.attn.qkv") == "bf16"
    assert type(wrapper.vision_model) is torch.nn.Linear
    assert set(conversion_of(wrapper).modules) == set(conversion.modules)
    observer = QKVObserver(wrapper)
    logprobs(wrapper.language_model, prompts())
    assert len(observer.scales(1.0)) == 3
    with pytest.raises(UnsupportedError, match="Megatron-Bridge"):
        export_hf(wrapper)


def test_refusals(mcore, paths):
    model = gpt(paths["dense"])
    ba = Recipe(pins=Pins(fp8=("*.in_proj_a", "*.in_proj_b")), kv_cache=RECIPE.kv_cache)
    with pytest.raises(PinError, match=r"pins\.fp8 puts .*in_proj_ba' in FP8"):
        convert(model, ba)
    model.config.experimental_attention_variant = "gdn2"
    with pytest.raises(UnsupportedError, match="gdn2"):
        convert(model, RECIPE)
    with pytest.raises(UnsupportedError, match="gdn2"):
        dict(export_hf(model))

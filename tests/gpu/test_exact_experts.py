"""Experts of ``exact``: a token's bits in any batch, and those of vLLM's layer in Megatron's.

With ``TRITON_INTERPRET=1`` and triton installed the kernels and Megatron's layer run on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from support.triton_device import DEVICE, INTERPRETED

kernels = pytest.importorskip("fp8rl.kernels.experts")

DTYPE = torch.float32 if INTERPRETED else torch.bfloat16  # the interpreter truncates to bfloat16
on_a_gpu = pytest.mark.skipif(INTERPRETED, reason="needs a Hopper GPU")


def heavy_tailed(*shape: int, scale: float = 1.0) -> torch.Tensor:
    """Student's t with 4 degrees of freedom: a normal over the root of a mean square."""
    roots = torch.randn(4, *shape, device=DEVICE).square().mean(0).sqrt()
    return (torch.randn(*shape, device=DEVICE) / roots * scale).to(DTYPE)


@pytest.mark.parametrize(("hidden", "experts", "count"), [(300, 40, 3), (2048, 128, 8)])
def test_the_router_by_rows_and_in_float64(hidden: int, experts: int, count: int) -> None:
    torch.manual_seed(hidden)
    tokens = 19 if INTERPRETED else 300
    x, weight = heavy_tailed(tokens, hidden), heavy_tailed(experts, hidden, scale=0.02)
    logits = kernels.router_logits(x, weight)
    # numpy, which the interpreter multiplies with, may have another order in another row of a tile.
    moved = () if INTERPRETED else (slice(5, 6), slice(3, 64))
    for some in (slice(1), slice(7), slice(18), *moved):
        assert torch.equal(kernels.router_logits(x[some], weight), logits[some])
    expected = x.double() @ weight.double().t()
    assert (logits - expected).abs().max() < 1e-4 * expected.abs().max()
    weights, chosen = kernels.choose_experts(logits, count)
    values, order = logits.double().sort(dim=-1, descending=True, stable=True)
    assert torch.equal(chosen.long(), order[:, :count])
    torch.testing.assert_close(weights.double(), values[:, :count].softmax(-1), rtol=1e-5, atol=0)
    assert torch.equal(kernels.choose_experts(logits[4:5].clone(), count)[0], weights[4:5])


def test_of_equal_logits_the_first_is_chosen_and_no_expert_twice() -> None:
    inf, nan = float("inf"), float("nan")
    rows = [[0, 3, 3, 3, 3], [-inf] * 5, [nan] * 5, [1, 0, nan, 2, 0], [-inf, 0, -inf, -inf, 0]]
    weights, chosen = kernels.choose_experts(torch.tensor(rows, device=DEVICE), 3)
    assert chosen.tolist() == [[1, 2, 3], [0, 1, 2], [0, 1, 2], [2, 3, 0], [1, 4, 0]]
    assert weights[1:4].isnan().all()  # seen, not hidden
    assert torch.equal(weights[0], torch.full((3,), 1 / 3, device=DEVICE))
    assert weights[4].tolist() == [0.5, 0.5, 0.0]


@pytest.mark.parametrize("weighted", [True, False])
def test_rows_are_added_in_their_order_and_rounded_once(weighted: bool) -> None:
    torch.manual_seed(0)
    rows = heavy_tailed(50, 1030)
    places = torch.randint(0, 50, (9, 4), device=DEVICE)
    weights = torch.rand(9, 4, device=DEVICE) if weighted else None
    total = torch.zeros(9, 1030, device=DEVICE)
    for i in range(4):
        row = rows[places[:, i]].float()
        total += row if weights is None else row * weights[:, i, None]
    assert torch.equal(kernels.sum_rows(rows, places, weights), total.to(DTYPE))


@pytest.fixture
def world(request: pytest.FixtureRequest) -> Iterator[None]:
    """Megatron's parallel state over the one device."""
    pytest.importorskip("megatron.core")
    if not INTERPRETED:
        request.getfixturevalue("world_of_one")
        yield
        return
    from support.megatron import one_process

    with one_process() as shim, shim.active():
        yield


def megatron_model(hidden: int, experts: int, count: int, width: int, **options: Any) -> Any:
    from transformers import Qwen3MoeConfig

    from megatron_fp8rl.testing.models import build_gpt

    config = Qwen3MoeConfig(
        vocab_size=128,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=128,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        moe_intermediate_size=width,
        num_experts=experts,
        num_experts_per_tok=count,
        norm_topk_prob=True,
    )
    return build_gpt(config, dtype=DTYPE, bias_activation_fusion=not INTERPRETED, **options)


@pytest.mark.skipif(not INTERPRETED, reason="bfloat16 logits of upstream's choose other experts")
@pytest.mark.parametrize("recompute", [False, True])
def test_megatrons_layer_is_upstreams_function(world: None, recompute: bool) -> None:
    """Without FP8, in float32: result and gradients, with experts that have no tokens."""
    from megatron.core.transformer.moe.moe_layer import MoELayer

    from megatron_fp8rl.layers.experts import ExactMoELayer, ExactRouter

    torch.manual_seed(0)
    layer = megatron_model(128, 12, 2, 128).decoder.layers[0].mlp
    x = torch.randn(5, 2, 128).requires_grad_()
    grad = torch.randn(5, 2, 128)
    inputs = [x, *layer.parameters()]
    expected, _ = layer(x)
    expected_grads = torch.autograd.grad(expected, inputs, grad)
    layer.__class__, layer.router.__class__ = ExactMoELayer, ExactRouter
    layer.moe_layer_recompute = recompute
    layer.train()
    found, bias = layer(x)
    assert bias is None and found.shape == x.shape
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    assert any(not g.any() for g in expected_grads[2:])  # an expert without tokens
    found.backward(grad)
    for leaf, theirs in zip(inputs, expected_grads, strict=True):
        torch.testing.assert_close(leaf.grad, theirs, rtol=1e-3, atol=1e-6)
    for module in (layer.router, layer):
        module.give_back()
    assert type(layer) is MoELayer and torch.equal(layer(x)[0], expected)


class Grouped(torch.nn.Module):
    """As TransformerEngine's: the linears of all experts as one module."""

    def __init__(self, weights: list[torch.nn.Parameter], multiply: Any) -> None:
        super().__init__()
        self.weights, self.multiply = torch.nn.ParameterList(weights), multiply

    def forward(self, rows: torch.Tensor, splits: list[int]) -> tuple[torch.Tensor, None]:
        return self.multiply(rows, splits, list(self.weights)), None


def group(layer: Any, multiply: Any) -> None:
    """Put grouped experts with the same weights into a layer."""
    experts, grouped = layer.experts.local_experts, torch.nn.Module()
    for name in ("linear_fc1", "linear_fc2"):
        weights = [getattr(expert, name).weight for expert in experts]
        grouped.add_module(name, Grouped(weights, multiply(name)))
    layer.experts = grouped


@on_a_gpu
@pytest.mark.parametrize(
    ("hidden", "experts", "count", "width", "scale_format"),
    [(256, 8, 2, 128, "pow2"), (2048, 128, 8, 768, "fp32")],
)
def test_vllms_layer_and_megatrons_have_equal_bits(
    world: None,
    monkeypatch: pytest.MonkeyPatch,
    hidden: int,
    experts: int,
    count: int,
    width: int,
    scale_format: str,
) -> None:
    pytest.importorskip("vllm")
    from fp8rl import PluginManager, Recipe
    from fp8rl.numerics import quantize_block
    from fp8rl.training.grouped import grouped_linear
    from fp8rl.training.layout import plain_layout
    from fp8rl.training.linear import Fp8State
    from fp8rl.training.weight_codes import WeightCodes, WeightEpoch
    from megatron_fp8rl import convert
    from vllm_fp8rl.quantization.exact_experts import ExactMoEMethod

    monkeypatch.setattr(
        "vllm.utils.deep_gemm.is_deep_gemm_e8m0_used", lambda: scale_format == "pow2"
    )
    recipe = Recipe.from_dict(
        {
            "exact": True,
            "activations": {"scale_format": scale_format},
            "weights": {"scale_format": scale_format},
        }
    )
    torch.manual_seed(experts)
    model = megatron_model(hidden, experts, count, width, use_cpu_initialization=False).cuda()
    layer = model.decoder.layers[0].mlp
    w13 = heavy_tailed(experts, 2 * width, hidden, scale=0.02)
    w2 = heavy_tailed(experts, hidden, width, scale=0.02)
    layer.router.weight.data.copy_(heavy_tailed(experts, hidden, scale=0.02))
    for expert, gate_up, down in zip(layer.experts.local_experts, w13, w2, strict=True):
        expert.linear_fc1.weight.data.copy_(gate_up)
        expert.linear_fc2.weight.data.copy_(down)
    convert(model, recipe, plugins=PluginManager(discover=False))
    model.eval()

    stacks: dict[str, torch.Tensor] = {}
    for name, weights in (("w13", w13), ("w2", w2)):
        pairs = [quantize_block(weight, scale_format=scale_format) for weight in weights]
        stacks[f"{name}_weight"] = torch.stack([pair.codes for pair in pairs])
        stacks[f"{name}_weight_scale_inv"] = torch.stack([pair.scale_inv for pair in pairs])
    method = ExactMoEMethod.__new__(ExactMoEMethod)
    method.state = SimpleNamespace(recipe=recipe)  # type: ignore[assignment]
    of_vllm: Any = SimpleNamespace(**stacks, top_k=count, local_num_experts=experts)

    def rollout(rows: torch.Tensor) -> torch.Tensor:
        logits = kernels.router_logits(rows, layer.router.weight.data)
        return method.apply_monolithic(of_vllm, rows, logits)

    x = heavy_tailed(300, hidden)
    x[:, :16] *= 10
    with torch.no_grad():
        whole = layer(x[:, None])[0][:, 0]
        for some in (slice(1), slice(7), slice(64), slice(300), slice(17, 18), slice(100, 230)):
            assert torch.equal(layer(x[some][:, None])[0][:, 0], whole[some]), some
            assert torch.equal(rollout(x[some]), whole[some]), some

    trained, _ = layer(x[:, None].clone().requires_grad_())
    assert torch.equal(trained[:, 0], whole)  # the training forward
    trained.float().square().mean().backward()
    grads = [parameter.grad for parameter in layer.parameters()]
    assert all(grad is not None and grad.isfinite().all() for grad in grads)

    def fp8(name: str) -> Any:
        setup = layer.fp8_setup
        layout = plain_layout(name, 2 * width if name == "linear_fc1" else hidden)
        codes = WeightCodes(layout, scale_format, WeightEpoch(), stacked=True)
        names = tuple(f"{name}.{expert}" for expert in range(experts))
        state = Fp8State(name, codes, setup.backends, scale_format, names)

        def multiply(rows: torch.Tensor, splits: list[int], weights: list[Any]) -> torch.Tensor:
            return grouped_linear(rows, splits, weights, None, state, fusion=False)

        return multiply

    group(layer, fp8)
    with torch.no_grad():
        for some in (slice(1), slice(64), slice(300)):
            assert torch.equal(layer(x[some][:, None])[0][:, 0], whole[some]), some

    weights, chosen = kernels.choose_experts(
        kernels.router_logits(x, layer.router.weight.data), count
    )
    expected = torch.zeros(300, hidden, device=DEVICE)
    for i in range(count):
        for expert in chosen[:, i].unique().tolist():
            rows = chosen[:, i] == expert
            gate, up = (x[rows].float() @ w13[expert].float().t()).chunk(2, -1)
            down = (torch.nn.functional.silu(gate) * up) @ w2[expert].float().t()
            expected[rows] += down * weights[rows, i, None]
    assert (whole.float() - expected).norm() < 0.15 * expected.norm()  # three roundings to FP8


@pytest.mark.parametrize(
    ("where", "key", "value"),
    [
        ("config", "norm_topk_prob", False),
        ("config", "shared_expert_intermediate_size", 512),
        ("parallel", "tensor_parallel_size", 2),
        ("parallel", "data_parallel_size", 2),
        ("parallel", "enable_expert_parallel", True),
        ("parallel", "enable_eplb", True),
        ("kernels", "moe_backend", "triton"),
        ("device", "device_type", "cpu"),
    ],
)
def test_engines_whose_experts_are_refused(where: str, key: str, value: Any) -> None:
    pytest.importorskip("vllm")
    from fp8rl.errors import UnsupportedError
    from vllm_fp8rl.kernels.exact import check_experts

    config = SimpleNamespace(norm_topk_prob=True)
    parallel = SimpleNamespace(
        tensor_parallel_size=1,
        data_parallel_size=1,
        enable_expert_parallel=False,
        enable_eplb=False,
    )
    kernel, device = SimpleNamespace(moe_backend="auto"), SimpleNamespace(device_type="cuda")
    engine: Any = SimpleNamespace(
        model_config=SimpleNamespace(hf_text_config=config),
        parallel_config=parallel,
        kernel_config=kernel,
        device_config=device,
    )
    check_experts(engine)
    places = {"config": config, "parallel": parallel, "kernels": kernel, "device": device}
    setattr(places[where], key, value)
    with pytest.raises(UnsupportedError, match=f"not {value!r}; .*, or set exact to false"):
        check_experts(engine)

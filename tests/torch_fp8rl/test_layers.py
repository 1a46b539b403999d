"""Products of the FP8 modules, and when they quantize."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from fp8rl.errors import UnsupportedError
from fp8rl.numerics import dequantize_block, dequantize_group, quantize_block, quantize_group
from fp8rl.training import linear as linear_function
from fp8rl.training import weight_codes
from support.fused_swiglu import spy_on_swiglu
from support.hf import ALIGNED, RAGGED, convert_alone, hf_model, loss_of
from support.numeric import relative_error

Q, K, V = "q_proj", "k_proj", "v_proj"
QKV = (Q, K, V)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often activations or gradients, and weights, are quantized."""
    found: Counter[str] = Counter()

    def count(module: Any, name: str) -> None:
        real = getattr(module, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            found[name] += 1
            return real(*args, **kwargs)

        monkeypatch.setattr(module, name, counted)

    count(linear_function, "quantize_operand")
    count(weight_codes, "quantize_weight")
    count(weight_codes, "quantize_weights")
    return found


def attention(shape: dict[str, int] = ALIGNED, kind: str = "qwen3", **more: Any) -> Any:
    model = hf_model(kind, shape, **more)
    convert_alone(model)
    return model.model.layers[0].self_attn


def inputs(module: nn.Linear, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    torch.manual_seed(3)
    x = torch.randn(2, 70, module.in_features)  # a ragged last group of tokens
    return x.to(dtype).requires_grad_()


def grouped(x: torch.Tensor) -> torch.Tensor:
    return dequantize_group(*quantize_group(x.detach().float())).double()


@pytest.mark.parametrize(
    ("kind", "shape"), [("qwen2", RAGGED), ("qwen3", ALIGNED)], ids=["biased, ragged", "aligned"]
)
def test_fused_products_against_float64(kind: str, shape: dict[str, int]):
    """In float32, so that nothing but the operands is rounded; blocks and groups lie on q|k|v."""
    module = attention(shape, kind, dtype=torch.float32)
    linears = [getattr(module, name) for name in QKV]
    if kind == "qwen2":
        for each in linears:
            nn.init.normal_(each.bias)
    x = inputs(linears[0], torch.float32)
    y = torch.cat([each(x) for each in linears], -1)
    grad = torch.randn_like(y)
    y.backward(grad)

    weight = torch.cat([each.weight.detach() for each in linears]).bfloat16()
    w = dequantize_block(*quantize_block(weight)).double()
    rows, grads = x.flatten(0, 1), grad.flatten(0, 1)
    bias = torch.cat([each.bias for each in linears]).double() if kind == "qwen2" else 0
    expected = {
        "y": (y.flatten(0, 1), grouped(rows) @ w.t() + bias),
        "dx": (x.grad.flatten(0, 1), grouped(grads) @ w),
        "dw": (
            torch.cat([each.weight.grad for each in linears]),
            grouped(grads.t().contiguous()) @ grouped(rows.t().contiguous()).t(),
        ),
    }
    for name, (got, truth) in expected.items():
        assert relative_error(got, truth) < 1e-6, name
    if kind == "qwen2":
        assert relative_error(linears[1].bias.grad, grads[:, len(linears[0].weight) :].sum(0)[
            : len(linears[1].weight)
        ]) < 1e-5  # fmt: skip


@pytest.mark.parametrize(
    ("between", "products"),
    [
        ("nothing", 1),
        ("written input", 2),
        ("no gradients", 2),
        ("new weights", 2),
        ("an optimizer step", 2),
    ],
)
def test_a_share_is_of_this_input_and_these_weights(
    calls: Counter[str], between: str, products: int
):
    module = attention()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    x = inputs(module.q_proj).detach()
    module.q_proj(x)
    if between == "written input":
        x += 1
    elif between == "new weights":
        with torch.no_grad():
            module.k_proj.weight *= 2
    elif between == "an optimizer step":
        optimizer.step()
    with torch.set_grad_enabled(between != "no gradients"):
        y = module.k_proj(x)
    assert calls["quantize_operand"] == products
    fresh = x.clone()
    module.q_proj(fresh)
    assert torch.equal(module.k_proj(fresh), y)


def test_swiglu_is_fused_with_its_quantization(monkeypatch: pytest.MonkeyPatch):
    """Near what the linears give by themselves, and used where nothing watches them."""
    model, found = hf_model(shape=RAGGED), []
    convert_alone(model)
    mlp = model.model.layers[0].mlp
    x = inputs(mlp.gate_proj)
    grad = torch.randn_like(x)
    fused = spy_on_swiglu(monkeypatch)
    for watched in (False, True):
        fused.clear()
        if watched:
            mlp.down_proj.register_forward_hook(lambda *_: None)
        mlp.zero_grad()
        x.grad = None
        y = mlp(x)
        y.backward(grad)
        assert len(fused) == (0 if watched else 2)
        found.append([y, x.grad, *(parameter.grad for parameter in mlp.parameters())])
    for got, expected in zip(*found, strict=True):
        # Where the activation is rounded differently its code may be the next one, of 16 in a power
        # of two, and the code of a gradient too.
        assert 0 < relative_error(got, expected) < 0.03
    mlp.down_proj._forward_hooks.clear()
    mlp.float()(x.detach().float())  # the kernel is BF16's
    assert not fused


def test_parts_that_are_not_used_have_no_part_in_the_gradient():
    module = attention()
    x = inputs(module.q_proj)
    module.q_proj(x).sum().backward()
    assert module.q_proj.weight.grad.any() and not module.k_proj.weight.grad.any()
    module.q_proj.weight.requires_grad_(False)
    module.q_proj.weight.grad = None
    (module.q_proj(x).sum() + module.v_proj(x).sum()).backward()
    assert module.q_proj.weight.grad is None and module.v_proj.weight.grad.any()


@pytest.mark.parametrize("kind", ["qwen2", "qwen3_moe"])
def test_float32_masters_under_autocast(kind: str):
    """The products are those of the BF16 copy; gradients come in float32."""
    masters, copied = hf_model(kind, dtype=torch.float32), hf_model(kind)
    for model in (masters, copied):
        convert_alone(model)
    x = torch.randn(1, 40, 256)
    found = []
    for model, each in ((masters, x), (copied, x.bfloat16())):
        block = model.model.layers[0]
        with torch.autocast("cpu", torch.bfloat16, enabled=model is masters):
            y = block.self_attn.q_proj(each).float().sum() + block.mlp(each).float().square().sum()
            y.backward()  # inside, as some trainers do
        found.append({name: p.grad for name, p in block.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys()
    for name, grad in found[0].items():
        assert grad.dtype == torch.float32
        assert relative_error(grad, found[1][name]) < 0.02, name


def test_activation_checkpointing_changes_no_bit():
    found = []
    for checkpointing in (False, True):
        model = hf_model("qwen3_moe", RAGGED)
        convert_alone(model)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        loss = loss_of(model)
        loss.backward()
        found.append((loss.detach(), [p.grad for p in model.parameters()]))
    (first, grads), (second, others) = found
    assert first == second and all(map(torch.equal, grads, others))


@pytest.mark.slow  # torch's compiler
def test_what_lies_between_fp8_modules_is_compiled():
    model, eager = hf_model(), hf_model()
    for each in (model, eager):
        convert_alone(each)
    loss, expected = loss_of(torch.compile(model, backend="aot_eager")), loss_of(eager)
    loss.backward()
    expected.backward()
    assert loss == expected
    for parameter, other in zip(model.parameters(), eager.parameters(), strict=True):
        assert torch.equal(parameter.grad, other.grad)


def test_codes_are_kept_within_a_step(calls: Counter[str]):
    model = hf_model("qwen3_moe")
    conversion = convert_alone(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def micro_batches() -> list[int]:
        calls.clear()
        for seed in range(2):
            loss_of(model, seed).backward()
        return [calls[name] for name in ("quantize_weight", "quantize_weights")]

    assert micro_batches() == [16, 16]  # two layers, two matrices, forward and backward
    with conversion.keeping_codes():
        assert micro_batches() == [4, 4] and micro_batches() == [0, 0]
        optimizer.step()
        optimizer.zero_grad()
        assert micro_batches() == [4, 4]
        after = float(loss_of(model))
        model.load_state_dict({name: x.clone() for name, x in model.state_dict().items()})
        assert micro_batches() == [4, 4]
        conversion.invalidate()
        assert micro_batches() == [4, 4]
    assert float(loss_of(model)) == after
    assert micro_batches() == [16, 16]


def test_experts_are_those_of_transformers():
    """Against its own grouped forward, over weights that FP8 holds exactly, and tokens too."""
    pinned, model = hf_model("qwen3_moe"), hf_model("qwen3_moe")
    powers = torch.tensor([0.25, -0.5, 1.0, 0.0], dtype=torch.bfloat16)
    experts = [each.model.layers[0].mlp.experts for each in (pinned, model)]
    for each in experts:
        for parameter in each.parameters():
            torch.manual_seed(9)
            parameter.data = powers[torch.randint(0, 4, parameter.shape)] / 8
    convert_alone(model)
    x = powers[torch.randint(0, 4, (30, 256))]
    index = torch.stack([torch.arange(30) % 2, torch.full((30,), 3)], 1)  # expert 2 has no tokens
    weights = torch.rand(30, 2, dtype=torch.bfloat16)
    results = []
    for each in experts:
        each.zero_grad()
        y = each(x, index, weights)
        y.float().sum().backward()
        results.append((y, each.gate_up_proj.grad, each.down_proj.grad))
    # Gate and up are exact; the activation in front of down is rounded to FP8.
    for got, expected in zip(*reversed(results), strict=True):
        assert relative_error(got, expected) < 0.06
    assert not results[1][1][2].any() and results[1][1][3].any()
    experts[1]._is_expert_parallel = True
    with pytest.raises(UnsupportedError, match="load the model without tp_plan"):
        experts[1](x, index, weights)

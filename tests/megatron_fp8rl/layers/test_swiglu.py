"""The fused gated MLP against the separate operations, and what it must not touch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP

from fp8rl.errors import UnsupportedError
from fp8rl.training.linear import Link
from megatron_fp8rl.layers.swiglu import Fp8SwigluMLP
from megatron_fp8rl.testing.models import build_gpt
from support.fused_swiglu import Calls, spy_on_swiglu
from support.megatron import convert_alone, dense, losses, moe
from support.numeric import relative_error

pytestmark = pytest.mark.usefixtures("mcore")

SHAPE = {"num_hidden_layers": 1, "head_dim": 64, "tie_word_embeddings": False}


def _mlp(dtype: torch.dtype = torch.bfloat16, width: int = 256, **overrides: Any) -> Any:
    conversion, gpt = _gpt(dtype, width, **overrides)
    return conversion, gpt.decoder.layers[0].mlp


def _gpt(dtype: torch.dtype = torch.bfloat16, width: int = 256, **overrides: Any) -> Any:
    config = dense(**SHAPE, intermediate_size=width)
    gpt = build_gpt(config, dtype=dtype, **{"bias_activation_fusion": True, **overrides})
    return convert_alone(gpt), gpt


def _loss(gpt: Any) -> torch.Tensor:
    return losses(gpt, torch.arange(33).expand(2, -1)).float().mean()


def _separate(mlp: Any, x: torch.Tensor) -> torch.Tensor:
    gate_up, _ = mlp.linear_fc1(x)
    gate, up = gate_up.float().chunk(2, -1)
    act = torch.nn.functional.silu(gate) * up
    return mlp.linear_fc2(act.to(x.dtype))[0]


def _run(forward: Any, mlp: Any, x: torch.Tensor, grad: torch.Tensor) -> list[torch.Tensor]:
    x = x.detach().requires_grad_()
    y = forward(x)
    y.backward(grad)
    grads = [mlp.linear_fc1.weight.grad, mlp.linear_fc2.weight.grad]
    mlp.linear_fc1.weight.grad = mlp.linear_fc2.weight.grad = None
    return [y.detach(), x.grad, *grads]


@pytest.mark.parametrize("width", [256, 192])
def test_results_and_gradients_are_those_of_the_separate_operations(width):
    _, mlp = _mlp(width=width)
    assert type(mlp) is Fp8SwigluMLP
    x, grad = torch.randn(2, 40, 3, 128).bfloat16()
    fused = _run(lambda x: mlp(x)[0], mlp, x, grad)
    separate = _run(lambda x: _separate(mlp, x), mlp, x, grad)
    # Codes of values that round the other way in bfloat16 differ now and then.
    for got, expected in zip(fused, separate, strict=True):
        assert relative_error(got, expected) < 5e-3


@pytest.fixture
def quantized(monkeypatch) -> Iterator[Calls]:
    """Calls of the fused functions and the shape of gate and up; nothing is compiled."""
    calls = spy_on_swiglu(monkeypatch)
    with torch.compiler.set_stance("force_eager"):
        yield calls


def test_a_layer_that_megatron_calls_or_recomputes_goes_through_the_fused_kernels(quantized):
    """A layer gives its MLP arguments that a bare call does not have; Megatron's checkpointing
    runs the first forward without gradients."""
    _, plain = _gpt()
    _, gpt = _gpt(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    _loss(plain).backward()
    h = torch.Size((64, 512))  # gate and up of all tokens
    assert quantized == [("quantize_swiglu", h), ("quantize_swiglu_grad", h)]
    quantized.clear()
    _loss(gpt).backward()
    names = [name for name, _ in quantized]
    assert names == ["quantize_swiglu", "quantize_swiglu", "quantize_swiglu_grad"]
    for got, expected in zip(gpt.parameters(), plain.parameters(), strict=True):
        assert got.grad.isfinite().all() and torch.equal(got.grad, expected.grad)


def test_gradients_are_added_to_main_grad():
    _, mlp = _mlp()
    x, grad = torch.randn(2, 40, 3, 128).bfloat16()
    expected = _run(lambda x: mlp(x)[0], mlp, x, grad)
    weights = [mlp.linear_fc1.weight, mlp.linear_fc2.weight]
    for weight in weights:
        weight.main_grad = torch.ones_like(weight, dtype=torch.float32)
        weight.grad_added_to_main_grad = False
    _run(lambda x: mlp(x)[0], mlp, x, grad)
    for weight, wanted in zip(weights, expected[2:], strict=True):
        assert weight.grad_added_to_main_grad
        torch.testing.assert_close(weight.main_grad - 1, wanted.float(), rtol=2**-7, atol=1e-4)


# ---- megatron's own forward, where the fused one would show


def _apart(mlp: Any, x: torch.Tensor, quantized: list[Any]) -> None:
    """One pass that must not be fused."""
    x = x.clone().requires_grad_()
    y, _ = mlp(x)
    y.backward(torch.ones_like(y))
    assert not quantized and x.grad is not None and x.grad.isfinite().all()


def test_float32_and_tokens_with_scales_are_left_to_megatron(quantized):
    _, mlp = _mlp(torch.float32)
    _apart(mlp, torch.randn(8, 1, 128), quantized)
    _, mlp = _mlp()
    x, scales = torch.randn(8, 1, 128).bfloat16(), torch.full((8,), 0.5)
    y, _ = mlp(x, per_token_scale=scales)
    assert not quantized
    assert relative_error(y.detach(), mlp(x)[0].detach() / 2) < 0.05


HOOKS = {
    "input of fc2": lambda mlp, seen: mlp.linear_fc2.register_forward_pre_hook(
        lambda module, args: seen.append(args[0])
    ),
    "forward of fc1": lambda mlp, seen: mlp.linear_fc1.register_forward_hook(
        lambda module, args, output: output[0].register_hook(seen.append) and None
    ),
    "before the gradient of fc1": lambda mlp, seen: mlp.linear_fc1.register_full_backward_pre_hook(
        lambda module, grads_out: seen.append(grads_out[0])
    ),
    "gradient of fc1": lambda mlp, seen: mlp.linear_fc1.register_full_backward_hook(
        lambda module, grads_in, grads_out: seen.append(grads_out[0])
    ),
    "all modules": lambda mlp, seen: torch.nn.modules.module.register_module_forward_pre_hook(
        lambda module, args: seen.append(args[0]) if module is mlp.linear_fc2 else None
    ),
}


@pytest.mark.parametrize("where", HOOKS)
def test_hooks_see_what_megatron_would_show_them(where, quantized):
    _, mlp = _mlp()
    seen: list[torch.Tensor] = []
    handle = HOOKS[where](mlp, seen)
    try:
        _apart(mlp, torch.randn(8, 1, 128).bfloat16(), quantized)
    finally:
        handle.remove()
    (tensor,) = seen
    assert tensor.shape == (8, 1, 512 if "fc1" in where else 256) and tensor.isfinite().all()
    mlp(torch.randn(8, 1, 128).bfloat16())
    assert quantized


def test_a_linear_that_was_replaced_is_called(quantized):
    """As adapters do after conversion: their gradient must not be the placeholder."""
    _, mlp = _mlp()

    extra = torch.nn.Parameter(torch.zeros(512, 128, dtype=torch.bfloat16))

    class Adapter(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            y, bias = base(x)
            return y + x @ extra.t(), bias

    base, mlp.linear_fc1 = mlp.linear_fc1, Adapter()
    _apart(mlp, torch.randn(8, 1, 128).bfloat16(), quantized)
    assert extra.grad is not None and extra.grad.isfinite().all() and extra.grad.any()


def test_several_forwards_may_be_open_at_once():
    _, mlp = _mlp()
    a, b = torch.randn(2, 16, 1, 128).bfloat16()
    expected = [_run(lambda x: mlp(x)[0], mlp, x, x)[1] for x in (a, b)]
    first, second = a.clone().requires_grad_(), b.clone().requires_grad_()
    outputs = mlp(first)[0], mlp(second)[0]
    outputs[0].backward(a)
    outputs[1].backward(b)
    assert torch.equal(first.grad, expected[0]) and torch.equal(second.grad, expected[1])


def test_shared_experts_are_not_fused(quantized):
    """They overlap with communication, in a class of their own."""
    gpt = build_gpt(
        moe(3, **SHAPE), bias_activation_fusion=True, moe_shared_expert_intermediate_size=128
    )
    conversion = convert_alone(gpt)
    mlp = gpt.decoder.layers[0].mlp
    assert "model.layers.0.mlp.shared_experts.gate_up_proj" in conversion.modules
    assert type(mlp.shared_experts) is SharedExpertMLP
    assert [type(expert) for expert in mlp.experts.local_experts] == [Fp8SwigluMLP] * 3
    _loss(gpt).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in gpt.parameters())


def test_a_second_user_of_gate_and_up_is_noticed():
    link = Link()
    like = torch.zeros(4, 6)
    placeholder = link.put(object(), like)
    assert placeholder.isnan().all() and placeholder.shape == like.shape
    with pytest.raises(UnsupportedError, match=r"output of 'fc1' is used by more"):
        link.take(placeholder + like, "fc1")
    assert link.take(like, "fc1") is None  # taken; from here on a gradient is a gradient

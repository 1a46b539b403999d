"""The fused gated MLP against the separate operations, and what it must not touch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.transformer.mlp import MLP
from transformers import Qwen3Config

from fp8rl import PluginManager, Recipe
from fp8rl.errors import UnsupportedError
from fp8rl.testing.numeric import relative_error
from megatron_fp8rl import convert, linear
from megatron_fp8rl.linear import Link
from megatron_fp8rl.swiglu import Fp8SwigluMLP
from megatron_fp8rl.testing.models import build_gpt

pytestmark = pytest.mark.usefixtures("mcore")


def _mlp(dtype: torch.dtype = torch.bfloat16, width: int = 256, **overrides: Any) -> Any:
    conversion, gpt = _gpt(dtype, width, **overrides)
    return conversion, gpt.decoder.layers[0].mlp


def _gpt(dtype: torch.dtype = torch.bfloat16, width: int = 256, **overrides: Any) -> Any:
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=128,
        intermediate_size=width,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=32,
    )
    gpt = build_gpt(config, dtype=dtype, **{"bias_activation_fusion": True, **overrides})
    return convert(gpt, Recipe(), plugins=PluginManager(discover=False)), gpt


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_results_and_gradients_are_those_of_the_separate_operations(dtype):
    _, mlp = _mlp(dtype)
    assert type(mlp) is Fp8SwigluMLP
    x = torch.randn(40, 3, 128).to(dtype)
    grad = torch.randn(40, 3, 128).to(dtype)
    fused = _run(lambda x: mlp(x)[0], mlp, x, grad)
    separate = _run(lambda x: _separate(mlp, x), mlp, x, grad)
    # Codes of values that round the other way in bfloat16 differ now and then.
    tolerance = 5e-3 if dtype is torch.bfloat16 else 1e-3
    for got, expected in zip(fused, separate, strict=True):
        assert relative_error(got, expected) < tolerance


def test_a_layer_that_megatron_calls_goes_through_the_fused_kernels(monkeypatch):
    """As part of a model: a layer gives its MLP arguments that a bare call does not have."""
    shapes: list[tuple[str, torch.Size]] = []

    def spy(name: str) -> None:
        function = getattr(linear, name)

        def call(*args: Any, **options: Any) -> Any:
            shapes.append((name, args[-2].shape))
            return function(*args, **options)

        monkeypatch.setattr(linear, name, call)

    _, gpt = _gpt()
    spy("quantize_swiglu")
    spy("quantize_swiglu_grad")
    ids = torch.arange(33).expand(2, -1)
    positions = torch.arange(32).expand(2, -1)
    loss = gpt(ids[:, :-1].contiguous(), positions, None, labels=ids[:, 1:].contiguous())
    loss.float().mean().backward()
    h = torch.Size((64, 512))  # gate and up of all tokens
    assert shapes == [("quantize_swiglu", h), ("quantize_swiglu_grad", h)]
    assert all(p.grad is not None and p.grad.isfinite().all() for p in gpt.parameters())


def test_weights_that_are_frozen_get_no_gradient():
    _, mlp = _mlp()
    mlp.linear_fc1.weight.requires_grad_(False)
    mlp.linear_fc2.weight.requires_grad_(False)
    x = torch.randn(8, 1, 128).bfloat16()
    fused = _run(lambda x: mlp(x)[0], mlp, x, x)
    separate = _run(lambda x: _separate(mlp, x), mlp, x, x)
    assert fused[2] is None and fused[3] is None
    assert relative_error(fused[1], separate[1]) < 5e-3


def test_evaluation_and_recompute_give_the_same_values():
    _, mlp = _mlp()
    x, grad = torch.randn(2, 130, 1, 128).bfloat16()
    plain = _run(lambda x: mlp(x)[0], mlp, x, grad)
    with torch.no_grad():
        assert torch.equal(mlp(x)[0], plain[0])

    def recomputed(x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(lambda x: mlp(x)[0], x, use_reentrant=False)

    for got, expected in zip(_run(recomputed, mlp, x, grad), plain, strict=True):
        assert torch.equal(got, expected)


def test_several_forwards_may_be_open_at_once():
    _, mlp = _mlp()
    a, b = torch.randn(2, 16, 1, 128).bfloat16()
    expected = [_run(lambda x: mlp(x)[0], mlp, x, x)[1] for x in (a, b)]
    first, second = a.clone().requires_grad_(), b.clone().requires_grad_()
    outputs = mlp(first)[0], mlp(second)[0]
    outputs[0].backward(a)
    outputs[1].backward(b)
    assert torch.equal(first.grad, expected[0]) and torch.equal(second.grad, expected[1])


def test_no_tokens():
    _, mlp = _mlp()
    x = torch.zeros(0, 1, 128, dtype=torch.bfloat16, requires_grad=True)
    y, _ = mlp(x)
    y.sum().backward()
    assert x.grad.shape == x.shape and not mlp.linear_fc1.weight.grad.any()


@pytest.mark.parametrize(
    "overrides", [{"bias_activation_fusion": False}, {"width": 192}], ids=["unfused", "ragged"]
)
def test_what_is_not_fused(overrides):
    _, mlp = _mlp(**overrides)
    assert type(mlp) is MLP


def test_closing_gives_the_class_back():
    conversion, mlp = _mlp()
    conversion.close()
    assert type(mlp) is MLP


def test_a_second_user_of_gate_and_up_is_noticed():
    link = Link()
    like = torch.zeros(4, 6)
    placeholder = link.put(object(), like)
    assert placeholder.isnan().all() and placeholder.shape == like.shape
    with pytest.raises(UnsupportedError, match=r"output of 'fc1' is used by more"):
        link.take(placeholder + like, "fc1")
    assert link.take(like, "fc1") is None  # taken; from here on a gradient is a gradient

"""One FP8 linear layer: each product against float64 on the dequantized operands."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8rl.errors import UnsupportedError
from fp8rl.gemm import BackendChoice, ReferenceBackend
from fp8rl.numerics import dequantize_block, dequantize_group, quantize_block, quantize_group
from fp8rl.training.layout import RowLayout, gate_up_layout, plain_layout, qkv_layout
from fp8rl.training.linear import Fp8State
from fp8rl.training.weight_codes import WeightCodes, WeightEpoch
from megatron_fp8rl.layers.linear import FP8_CLASSES
from support.numeric import relative_error

pytestmark = pytest.mark.usefixtures("mcore")

FLOAT32 = 1e-6  # relative error of float32 accumulation over a few hundred terms
BFLOAT16 = 2**-8


def _build(
    kind: str,
    in_features: int,
    layout: RowLayout,
    *,
    dtype: torch.dtype = torch.float32,
    bias: bool = False,
    fp8: bool = True,
    scale_format: str = "fp32",
    backends: dict | None = None,
):
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=1,
        params_dtype=dtype,
        use_cpu_initialization=True,
    )
    cls, extra = (
        (ColumnParallelLinear, {})
        if kind == "column"
        else (RowParallelLinear, {"input_is_parallel": True, "skip_bias_add": False})
    )
    module = cls(
        in_features,
        layout.rows,
        config=config,
        init_method=torch.nn.init.xavier_normal_,
        bias=bias,
        **extra,
    )
    if fp8:
        codes = WeightCodes(layout, scale_format, WeightEpoch())
        choice = BackendChoice(backends or {"reference": ReferenceBackend()}, [scale_format])
        module.fp8_state = Fp8State("model.layers.0.x", codes, choice, scale_format)
        module.__class__ = FP8_CLASSES[cls]
    return module


def _operands(module, x, grad, scale_format="fp32"):
    """The two factors of each product, in float64, ``a @ b.t()``."""

    def groups(t: torch.Tensor) -> torch.Tensor:
        return dequantize_group(*quantize_group(t, scale_format=scale_format)).double()

    layout: RowLayout = module.fp8_state.codes.layout
    x, grad = x.detach().flatten(0, -2), grad.flatten(0, -2)
    w_hf = dequantize_block(
        *quantize_block(layout.to_hf(module.weight.detach()), scale_format=scale_format)
    ).double()
    return [
        (groups(x), layout.from_hf(w_hf)),
        (groups(layout.to_hf(grad, -1)), w_hf.t()),
        (groups(grad.t()), groups(x.t())),
    ]


def _run(module, x, grad):
    x = x.detach().requires_grad_()
    y, _ = module(x)
    y.backward(grad)
    return y.detach().flatten(0, -2), x.grad.flatten(0, -2), module.weight.grad


# Heads that share a block, and parts of which each begins with one.
MIXED = [qkv_layout(4, 2, 40), qkv_layout(4, 2, 64), gate_up_layout(192, apart=True)]


@given(
    tokens=st.tuples(st.integers(0, 90), st.integers(1, 3)),
    in_features=st.integers(1, 300),
    layout=st.one_of(st.integers(1, 300).map(partial(plain_layout, "w")), st.sampled_from(MIXED)),
    kind=st.sampled_from(["column", "row"]),
    scale_format=st.sampled_from(["fp32", "pow2"]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
@settings(max_examples=30)
def test_every_direction(tokens, in_features, layout, kind, scale_format, dtype):
    """Within float32 accumulation, measured against the sum of magnitudes: sums may cancel."""
    torch.manual_seed(0)
    module = _build(kind, in_features, layout, scale_format=scale_format, dtype=dtype)
    x = torch.randn(*tokens, in_features, dtype=dtype)
    grad = torch.randn(*tokens, layout.rows, dtype=dtype)
    rounding = 0.0 if dtype == torch.float32 else BFLOAT16
    operands = _operands(module, x, grad, scale_format)
    for actual, (a, b) in zip(_run(module, x, grad), operands, strict=True):
        assert actual.shape == (len(a), len(b)) and actual.dtype == dtype
        exact, magnitudes = a @ b.t(), a.abs() @ b.abs().t()
        error = (actual.double() - exact).norm()
        assert error <= rounding * exact.norm() + FLOAT32 * magnitudes.norm()


@pytest.mark.parametrize("kind", ["column", "row"])
def test_near_the_upstream_layer_with_bias_and_any_strides(kind):
    layout = plain_layout("w", 256)
    ours, theirs = (_build(kind, 192, layout, bias=True, fp8=fp8) for fp8 in (True, False))
    theirs.load_state_dict(ours.state_dict())
    with torch.no_grad():
        for module in (ours, theirs):
            module.bias.copy_(torch.linspace(-3, 3, 256))
    x = torch.randn(192, 3, 50).permute(2, 1, 0)
    grad = torch.randn(256, 50, 3).permute(1, 2, 0)
    for got, expected in zip(_run(ours, x, grad), _run(theirs, x, grad), strict=True):
        # E4M3 has 3 mantissa bits: 2.6% rms a value, and two of them in each product.
        assert 1e-3 < relative_error(got, expected) < 0.06
    torch.testing.assert_close(ours.bias.grad, theirs.bias.grad)


def test_an_overflow_shows_in_its_token_and_in_the_gradient():
    module = _build("column", 256, plain_layout("w", 64))
    x = torch.randn(6, 1, 256)
    x[2, 0, 5] = torch.inf
    grad = torch.randn(6, 1, 64)
    grad[1, 0, 7] = torch.nan
    y, dx, dw = _run(module, x, grad)
    assert y.isnan().all(1).tolist() == [i == 2 for i in range(6)]
    assert y.isfinite().all(1).tolist() == [i != 2 for i in range(6)]
    assert dx.isnan().all(1).tolist() == [i == 1 for i in range(6)]
    assert dw.isnan().all(0).nonzero().flatten().tolist() == [5]
    assert dw.isnan().all(1).nonzero().flatten().tolist() == [7]


@pytest.mark.parametrize(("hooked", "zero_out"), [(True, True), (True, False), (False, False)])
def test_gradient_accumulation_fusion_contract(hooked, zero_out):
    module = _build("column", 96, plain_layout("w", 160), dtype=torch.bfloat16)
    x = torch.randn(40, 1, 96, dtype=torch.bfloat16)
    grad = torch.randn(40, 1, 160, dtype=torch.bfloat16)
    a, b = _operands(module, x, grad)[2]
    expected = a @ b.t()
    module.gradient_accumulation_fusion = True
    module.weight.main_grad = torch.ones(160, 96)
    if hooked:  # megatron's DistributedDataParallel sets it
        module.weight.grad_added_to_main_grad = False
        module.weight.zero_out_wgrad = zero_out
    buffer = module.weight.main_grad
    for passes in (1, 2):
        _run(module, x, grad)
        assert module.weight.main_grad is buffer
        assert relative_error(buffer - 1, passes * expected) < FLOAT32 * 10
    if not hooked:
        assert module.weight.grad is None
        return
    assert module.weight.grad_added_to_main_grad
    assert module.weight.grad.shape == module.weight.shape
    if zero_out:
        assert torch.equal(module.weight.grad, torch.zeros_like(module.weight))


def test_options_that_are_not_served_are_refused():
    module = _build("column", 32, plain_layout("w", 32))
    x = torch.randn(2, 1, 32)
    impl, weight = module._forward_impl, module.weight
    assert impl(x, weight, gtp_remat_size=1, output_dtype=None).shape == (2, 1, 32)
    module.gradient_accumulation_fusion = True
    sharded = torch.nn.Parameter(weight.detach().clone())
    sharded.__fsdp_param__ = True
    for call, message in (
        (lambda: impl(x, weight, output_dtype=torch.float32), "output_dtype"),
        (lambda: impl(x, weight, grad_output_buffer=[]), "defer_embedding_wgrad_compute"),
        (lambda: impl(x, weight.detach().clone()), "not its own"),
        (lambda: module(x)[0].sum().backward(), r"model\.layers\.0\.x.*main_grad"),
        (lambda: setattr(module, "weight", sharded) or impl(x, sharded), "FSDP"),
    ):
        with pytest.raises(UnsupportedError, match=message):
            call()

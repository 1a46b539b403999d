"""Numerics against the format's definition, written out here with a table of all 256 codes."""

from __future__ import annotations

import inspect
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8rl.errors import UnsupportedError
from fp8rl.numerics import (
    cdiv,
    dequantize_block,
    dequantize_group,
    quantize_block,
    quantize_group,
    quantize_operand,
    quantize_swiglu,
    quantize_swiglu_grad,
    quantize_weight,
)

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
FORMATS = ["fp32", "pow2"]
F32_MAX = float(np.finfo(np.float32).max)


def e4m3_value(code: int) -> float:
    """OCP FP8 E4M3: 1 sign, 4 exponent (bias 7), 3 mantissa bits, no infinity, NaN at 0x7F/0xFF."""
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = (code >> 3) & 0xF, code & 7
    if exponent == 15 and mantissa == 7:
        return math.copysign(math.nan, sign)
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


TABLE = np.array([e4m3_value(code) for code in range(256)])
GRID = TABLE[:127]  # 0 to 448, ascending; the index is the code
MIDDLE = (GRID[:-1] + GRID[1:]) / 2  # exact in float64


def encode(x: np.ndarray) -> np.ndarray:
    """Codes of float64 values: nearest, ties to the even code, saturating, sign kept."""
    magnitude = np.minimum(np.abs(x), 448.0)
    above = np.searchsorted(MIDDLE, magnitude, side="right")
    tie = np.isin(magnitude, MIDDLE)
    code = np.where(tie & (above % 2 == 1), above - 1, above)
    code = np.where(np.isnan(x), 0x7F, code)
    return (code | np.where(np.signbit(x), 0x80, 0)).astype(np.uint8)


def ceil_log2(value: Fraction) -> int:
    exponent = value.numerator.bit_length() - value.denominator.bit_length() - 1
    while Fraction(2) ** exponent < value:
        exponent += 1
    return exponent


def scales(amax: float, scale_format: str) -> tuple[float, float]:
    """(scale, scale_inv). Quotients of float32 numbers do not suffer from rounding twice here."""
    with np.errstate(over="ignore"):
        scale = float(np.float32(448.0 / amax)) if amax else math.inf
    if not (math.isfinite(amax) and math.isfinite(scale)):
        return 1.0, 1.0
    if scale_format == "pow2":
        exponent = min(max(ceil_log2(Fraction(amax) / 448), -127), 127)
        return 2.0**-exponent, 2.0**exponent
    return scale, float(np.float32(1.0 / scale))


def quantize_tile(tile: np.ndarray, scale_format: str) -> tuple[np.ndarray, float]:
    amax = float(np.max(np.abs(tile)))  # NaN if there is one
    scale, scale_inv = scales(amax, scale_format)
    with np.errstate(over="ignore", under="ignore"):
        product = (tile * scale).astype(np.float32)  # exact in float64, then rounded once
    return encode(product.astype(np.float64)), scale_inv


def expected_blocks(x: torch.Tensor, block, scale_format: str) -> tuple[np.ndarray, np.ndarray]:
    values = x.double().numpy()
    (n, k), (bn, bk) = values.shape, block
    codes = np.zeros((n, k), np.uint8)
    scale_inv = np.zeros((cdiv(n, bn), cdiv(k, bk)))
    for i in range(scale_inv.shape[0]):
        for j in range(scale_inv.shape[1]):
            where = np.s_[i * bn : (i + 1) * bn, j * bk : (j + 1) * bk]
            codes[where], scale_inv[i, j] = quantize_tile(values[where], scale_format)
    return codes, scale_inv


def assert_exact(quantized, codes: np.ndarray, scale_inv: np.ndarray) -> None:
    assert quantized.codes.dtype == torch.float8_e4m3fn
    assert quantized.scale_inv.dtype == torch.float32
    assert quantized.codes.is_contiguous()
    np.testing.assert_array_equal(quantized.codes.view(torch.uint8).numpy(), codes)
    np.testing.assert_array_equal(quantized.scale_inv.double().numpy(), scale_inv)


def check(x: torch.Tensor, scale_format: str) -> None:
    assert_exact(
        quantize_block(x, scale_format=scale_format), *expected_blocks(x, (128, 128), scale_format)
    )
    assert_exact(
        quantize_group(x, scale_format=scale_format), *expected_blocks(x, (1, 128), scale_format)
    )


def make(shape, dtype: torch.dtype, seed: int, log2_scale: int, spread: int) -> torch.Tensor:
    """Normal values times ``2**log2_scale``, their magnitudes spread over ``2**spread``."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=g, dtype=torch.float64)
    x *= 2.0 ** (log2_scale - spread * torch.rand(shape, generator=g, dtype=torch.float64))
    return x.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype)


sizes = st.one_of(st.integers(1, 20), st.sampled_from([127, 128, 129, 200, 256, 257]))
special_values = st.lists(
    st.sampled_from([0.0, -0.0, math.nan, math.inf, -math.inf, 448.0, 5e-324, 1e-40, F32_MAX]),
    max_size=3,
)


@settings(max_examples=60, deadline=None)
@given(
    shape=st.tuples(sizes, sizes),
    dtype=st.sampled_from(DTYPES),
    scale_format=st.sampled_from(FORMATS),
    seed=st.integers(0, 2**31),
    log2_scale=st.integers(-150, 130),
    spread=st.sampled_from([0, 10, 40]),
    strides=st.sampled_from(["plain", "transposed", "sliced", "expanded"]),
    special=special_values,
)
def test_equal_to_the_definition(
    shape, dtype, scale_format, seed, log2_scale, spread, strides, special
):
    n, k = shape
    x = {
        "plain": lambda: make((n, k), dtype, seed, log2_scale, spread),
        "transposed": lambda: make((k, n), dtype, seed, log2_scale, spread).t(),
        "sliced": lambda: make((2 * n, k + 3), dtype, seed, log2_scale, spread)[::2, 3:],
        "expanded": lambda: make((1, k), dtype, seed, log2_scale, spread).expand(n, k),
    }[strides]()
    if strides != "expanded":
        for i, value in enumerate(special):
            x[(seed + i) % n, (seed * 7 + i) % k] = value
    check(x, scale_format)


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_strides_of_whole_blocks(dtype):
    """Nothing to pad, so that the reference works on a view of the source."""
    base = make((512, 768), dtype, 0, 0, 6)
    for x in (
        base.t(),
        base[::2, ::3],
        base[:256, 128:384],
        base[:1, :256].expand(256, 256),
        base[:256, :1].expand(256, 256),
        base[0, 0].expand(256, 256),
        base.view(2, 256, 6, 128).transpose(0, 2)[1, :, 0],
    ):
        check(x, "fp32")


def test_every_code_survives_a_round_trip():
    values = torch.tensor(TABLE, dtype=torch.float32)[:, None]
    pairs = torch.cat([values, torch.full_like(values, 448.0)], 1)  # 448: the scale is 1
    codes, scale_inv = quantize_group(pairs)
    assert codes.view(torch.uint8)[:, 0].tolist() == list(range(256))
    np.testing.assert_array_equal(dequantize_group(codes, scale_inv)[:, 0].numpy(), TABLE)


def test_ties_go_to_the_even_code():
    ties = torch.tensor(np.concatenate([MIDDLE, -MIDDLE]), dtype=torch.float32)
    group = torch.cat([ties.view(-1, 1), torch.full((len(ties), 1), 448.0)], 1)
    codes = quantize_group(group).codes.view(torch.uint8)[:, 0]
    assert (codes % 2 == 0).all()
    np.testing.assert_array_equal(codes.numpy(), encode(ties.double().numpy()))


def test_scale_is_the_ieee_quotient():
    amax = torch.linspace(1.0, 2.0, 4097)[:, None]
    expected = [1 / float(np.float32(448.0 / float(a))) for a in amax.flatten().tolist()]
    np.testing.assert_array_equal(
        quantize_group(amax).scale_inv.flatten().numpy(), np.array(expected, np.float32)
    )


@pytest.mark.parametrize("value", [0.0, -0.0, 1e-37, 1e-45, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("scale_format", FORMATS)
def test_blocks_without_a_usable_amax_take_scale_one(value, scale_format):
    x = torch.full((3, 5), value)
    check(x, scale_format)
    assert (quantize_block(x, scale_format=scale_format).scale_inv == 1).all()


def test_special_values_stay_in_their_block():
    x = torch.ones(256, 256)
    x[0, 0], x[200, 0] = math.nan, math.inf
    back = dequantize_block(*quantize_block(x))
    assert math.isnan(back[0, 0]) and back[200, 0] == 448
    assert (back[:, 128:] == 1).all()
    assert (back[1:128, :128] == 1).all()


@pytest.mark.parametrize("offset", [-1, 0, 1])
@pytest.mark.parametrize("exponent", [-134, -133, -127, -126, -100, -1, 0, 1, 110, 119])
def test_pow2_at_the_edges_of_an_exponent(exponent, offset):
    """One ulp around ``448 * 2**exponent``, down to where the exponent is clamped."""
    exact = np.float32(448.0 * 2.0**exponent)
    amax = float((exact.view(np.int32) + np.int32(offset)).view(np.float32))
    check(torch.tensor([[amax, -amax / 3]]), "pow2")
    scale_inv = quantize_group(torch.tensor([[amax]]), scale_format="pow2").scale_inv.item()
    assert scale_inv == scales(amax, "pow2")[1]


@settings(max_examples=30, deadline=None)
@given(
    lead=st.lists(st.integers(0, 3), max_size=3),
    k=st.sampled_from([1, 64, 128, 130, 300]),
    scale_format=st.sampled_from(FORMATS),
    seed=st.integers(0, 1000),
)
def test_groups_of_any_rank(lead, k, scale_format, seed):
    x = make((*lead, k), torch.bfloat16, seed, 3, 6)
    quantized = quantize_group(x, scale_format=scale_format)
    assert quantized.codes.shape == x.shape
    assert quantized.scale_inv.shape == (*lead, cdiv(k, 128))
    codes, scale_inv = expected_blocks(x.reshape(-1, k), (1, 128), scale_format)
    np.testing.assert_array_equal(quantized.codes.view(torch.uint8).reshape(-1, k).numpy(), codes)
    np.testing.assert_array_equal(quantized.scale_inv.reshape(scale_inv.shape).numpy(), scale_inv)


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)])
def test_empty(shape):
    codes, scale_inv = quantize_block(torch.zeros(shape))
    assert codes.shape == shape
    assert scale_inv.shape == (cdiv(shape[0], 128), cdiv(shape[1], 128))
    assert dequantize_block(codes, scale_inv).shape == shape


@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_dequantize(dtype, scale_format):
    w = make((150, 260), torch.float32, 0, 0, 12)
    codes, scale_inv = quantize_block(w, scale_format=scale_format)
    values = TABLE[codes.view(torch.uint8).numpy()]
    factors = scale_inv.double().numpy().repeat(128, 0)[:150].repeat(128, 1)[:, :260]
    expected = torch.tensor((values * factors).astype(np.float32)).to(dtype)
    assert torch.equal(dequantize_block(codes, scale_inv, dtype=dtype), expected)

    codes, scale_inv = quantize_group(w, scale_format=scale_format)
    values = TABLE[codes.view(torch.uint8).numpy()]
    factors = scale_inv.double().numpy().repeat(128, 1)[:, :260]
    expected = torch.tensor((values * factors).astype(np.float32)).to(dtype)
    assert torch.equal(dequantize_group(codes, scale_inv, dtype=dtype), expected)


def test_the_source_is_untouched_and_stays_out_of_autograd():
    w = torch.nn.Parameter(torch.randn(128, 256))
    before = w.detach().clone()
    for quantized in (quantize_block(w), quantize_group(w)):
        assert not quantized.codes.requires_grad
        assert not quantized.scale_inv.requires_grad
    assert torch.equal(w, before)


@pytest.mark.parametrize("quantize", [quantize_block, quantize_group])
@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(2, 2, dtype=torch.float64), "float64; convert it to bfloat16"),
        (torch.zeros(2, 2, dtype=torch.int8), "int8; multiply codes by their scales"),
        (
            torch.zeros(2, 2).to(torch.float8_e4m3fn),
            "float8_e4m3fn; multiply codes by their scales",
        ),
        (torch.zeros(2, 2, dtype=torch.bool), "bool; convert it"),
        (torch.zeros(2, 2).to_sparse(), "sparse tensor; make it dense"),
        (torch.zeros(2, 2).numpy(), "Cannot quantize a ndarray; give a torch.Tensor"),
        (None, "Cannot quantize a NoneType; give a torch.Tensor"),
        (torch.tensor(1.0), r"shape \(\)"),
    ],
)
def test_bad_sources(quantize, x, message):
    with pytest.raises(UnsupportedError, match=message):
        quantize(x)


def test_bad_rank_and_scale_format():
    with pytest.raises(UnsupportedError, match="expected 2 dimension"):
        quantize_block(torch.zeros(2, 2, 2))
    with pytest.raises(
        UnsupportedError, match="Unknown scale_format 'e8m0'; use one of fp32, pow2"
    ):
        quantize_group(torch.zeros(2, 2), scale_format="e8m0")


def test_dequantize_refuses_what_is_not_its_own():
    codes, scale_inv = quantize_block(torch.randn(130, 130))
    with pytest.raises(UnsupportedError, match=r"shape \(2, 2\)"):
        dequantize_block(codes, scale_inv[:1])
    with pytest.raises(UnsupportedError, match="bfloat16 of shape"):
        dequantize_block(codes, scale_inv.bfloat16())
    with pytest.raises(UnsupportedError, match=r"Cannot dequantize torch\.uint8"):
        dequantize_block(codes.view(torch.uint8), scale_inv)
    with pytest.raises(UnsupportedError, match="expected 2 dimension"):
        dequantize_block(codes[None], scale_inv)
    with pytest.raises(UnsupportedError, match=r"shape \(130, 2\)"):
        dequantize_group(codes, scale_inv)


class TestUpstream:
    """Other people's quantizers, where they are installed and run on a CPU.

    They agree on codes and scales up to the rounding of the scale: transformers and vLLM's
    ``scaled_quantize`` write ``448.0 / amax``, for which torch rounds a reciprocal and then a
    product; DeepGEMM's ``per_block_cast_to_fp8`` in vLLM multiplies by ``1 / (amax / 448)``. A
    power of two is exact in all of them.
    """

    W = make((384, 512), torch.bfloat16, 5, -6, 6)

    @staticmethod
    def agree(codes: torch.Tensor, scale_inv: torch.Tensor, scale_format: str) -> None:
        ours = quantize_block(TestUpstream.W, scale_format=scale_format)
        theirs = codes.view(torch.uint8), scale_inv.float().view(torch.int32)
        ulps = (ours.scale_inv.view(torch.int32) - theirs[1]).abs().max().item()
        differing = (ours.codes.view(torch.uint8) != theirs[0]).double().mean().item()
        assert ulps <= (0 if scale_format == "pow2" else 2)
        assert differing <= (0 if scale_format == "pow2" else 1e-3)

    @pytest.mark.parametrize("scale_format", FORMATS)
    def test_transformers(self, scale_format):
        module = pytest.importorskip(
            "transformers.integrations.finegrained_fp8", reason="transformers is not installed"
        )
        if not hasattr(module, "Fp8Quantize"):
            pytest.skip("this transformers has no Fp8Quantize")
        from types import SimpleNamespace

        config = SimpleNamespace(
            weight_block_size=(128, 128), scale_fmt="ue8m0" if scale_format == "pow2" else "float"
        )
        quantizer = module.Fp8Quantize(SimpleNamespace(quantization_config=config))
        found = quantizer.convert({"w.weight": self.W})
        self.agree(found["w.weight"], found["w.weight_scale_inv"], scale_format)

    def test_vllm_scaled_quantize(self):
        module = pytest.importorskip(
            "vllm.model_executor.layers.quantization.utils.quant_utils",
            reason="vLLM is not installed",
        )
        found = module.scaled_quantize(
            self.W, module.GroupShape(128, 128), torch.float8_e4m3fn, compute_dtype=torch.float32
        )
        self.agree(*found, "fp32")

    @pytest.mark.parametrize("scale_format", FORMATS)
    def test_vllm_per_block_cast_to_fp8(self, scale_format):
        module = pytest.importorskip("vllm.utils.deep_gemm", reason="vLLM is not installed")
        quantize = inspect.unwrap(module.per_block_cast_to_fp8)  # without its torch.compile
        found = quantize(self.W, use_ue8m0=scale_format == "pow2")
        self.agree(*found, scale_format)


@pytest.mark.parametrize("scale_format", ["fp32", "pow2"])
@pytest.mark.parametrize("sides", [(True, True), (True, False), (False, True)])
def test_both_directions_of_an_operand_are_the_group_codes_of_each(scale_format, sides):
    x = torch.randn(130, 200).bfloat16()
    x[3, 4], x[100, 199] = float("inf"), float("-inf")
    marked = x.clone()
    marked[3, 4] = marked[100, 199] = float("nan")
    rowwise, columnwise = quantize_operand(x, scale_format, rowwise=sides[0], columnwise=sides[1])
    for got, source, wanted in zip(
        (rowwise, columnwise), (marked, marked.t().contiguous()), sides, strict=True
    ):
        assert (got is not None) == wanted
        if got is not None:
            expected = quantize_group(source, scale_format=scale_format)
            assert torch.equal(got.codes.view(torch.uint8), expected.codes.view(torch.uint8))
            assert torch.equal(got.scale_inv, expected.scale_inv)


def test_the_sides_of_a_weight_are_each_others_transpose():
    w = torch.randn(200, 130).bfloat16()
    w[7, 9] = float("inf")
    rowwise, columnwise = quantize_weight(w, "pow2")
    assert rowwise is not None and columnwise is not None
    assert rowwise.codes[7, 9].isnan() and columnwise.codes[9, 7].isnan()
    w[7, 9] = float("nan")
    expected = quantize_block(w, scale_format="pow2")
    for got in (rowwise, (columnwise.codes.t(), columnwise.scale_inv.t())):
        codes = got[0].contiguous().view(torch.uint8)
        assert torch.equal(codes, expected.codes.view(torch.uint8))
        assert torch.equal(got[1], expected.scale_inv)


@pytest.mark.parametrize("function", [quantize_operand, quantize_weight])
def test_operands_must_be_matrices_of_a_known_dtype(function):
    with pytest.raises(UnsupportedError, match="expected 2 dimension"):
        function(torch.zeros(2, 3, 4))
    with pytest.raises(UnsupportedError, match=r"torch\.float64"):
        function(torch.zeros(3, 4, dtype=torch.float64))


@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_swiglu_is_quantized_as_if_it_had_been_stored(dtype, scale_format):
    h = (torch.randn(70, 2 * 200) * 3).to(dtype).requires_grad_()
    grad = torch.randn(70, 200).to(dtype)
    wide = h.double()
    y = torch.nn.functional.silu(wide[:, :200]) * wide[:, 200:]
    (of_h,) = torch.autograd.grad(y, wide, grad.double())
    for got, exact in (
        (quantize_swiglu(h, scale_format), y.detach()),
        (quantize_swiglu_grad(grad, h, scale_format), of_h),
    ):
        expected = quantize_operand(exact.to(dtype), scale_format)
        for side, wanted in zip(got, expected, strict=True):
            assert side is not None and wanted is not None
            assert side.codes.shape == wanted.codes.shape
            # Float32 and float64 round to different values of the dtype once in a while.
            differ = side.codes.view(torch.uint8) != wanted.codes.view(torch.uint8)
            assert differ.float().mean() < 1e-3
            near = torch.isclose(side.scale_inv, wanted.scale_inv, rtol=2**-7, atol=0)
            assert near.float().mean() >= (1 if scale_format == "fp32" else 0.99)


def test_an_overflow_of_swiglu_is_nan():
    h = torch.ones(3, 256, dtype=torch.bfloat16)
    h[0, 0], h[1, 1], h[1, 129] = float("inf"), 3e38, 3e38
    rowwise, columnwise = quantize_swiglu(h)
    assert rowwise is not None and columnwise is not None
    assert rowwise.codes.isnan().nonzero().tolist() == [[0, 0], [1, 1]]
    assert columnwise.codes.isnan().nonzero().tolist() == [[0, 0], [1, 1]]
    of_h, _ = quantize_swiglu_grad(h[:, :128].contiguous(), h)
    assert of_h is not None and of_h.codes[0].isnan().nonzero().tolist() == [[0], [128]]


@pytest.mark.parametrize("sides", [(True, False), (False, True)])
def test_sides_of_swiglu_may_be_left_out(sides):
    h, grad = torch.randn(5, 256), torch.randn(5, 128)
    wanted = dict(zip(("rowwise", "columnwise"), sides, strict=True))
    for made in (quantize_swiglu(h, **wanted), quantize_swiglu_grad(grad, h, **wanted)):
        assert tuple(side is not None for side in made) == sides


def test_swiglu_operands_that_do_not_fit_are_refused():
    with pytest.raises(UnsupportedError, match="no halves of equal width"):
        quantize_swiglu(torch.zeros(4, 3))
    with pytest.raises(UnsupportedError, match="expected 2 dimension"):
        quantize_swiglu(torch.zeros(4, 3, 2))
    with pytest.raises(UnsupportedError, match=r"must be \(4, 128\)"):
        quantize_swiglu_grad(torch.zeros(4, 256), torch.zeros(4, 256))
    with pytest.raises(UnsupportedError, match="of that dtype, not"):
        quantize_swiglu_grad(torch.zeros(4, 128).half(), torch.zeros(4, 256))

"""Codes and scales of every source: the reference against the format's definition, written out here
in float64 with a table of all codes; Triton's kernels against the reference, bit for bit."""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Iterable
from itertools import cycle, product, repeat
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8rl.numerics import (
    BLOCK,
    Operand,
    Quantized,
    cdiv,
    dequantize_block,
    dequantize_group,
    quantize_block,
    quantize_group,
    reference,
)
from support.devices import DEVICE, HAS_KERNELS, Device, assert_same, bits, needs_gpu, needs_kernels
from support.shapes import DTYPES, FORMATS, LAYOUTS, VALUES, sources

SIDES = [(True, True), (True, False), (False, True)]
# (implementation, scale format); kernels convert to E4M3 natively or in software.
HAS_NATIVE = HAS_KERNELS and importlib.import_module(
    "fp8rl.numerics.triton.quantize"
).has_native_cast(DEVICE)
CASTS = ["native", "software"] if HAS_NATIVE else ["software"]


MODES = [*product(("reference", *CASTS), FORMATS)]


def cases(table: Iterable[str], dtypes: Iterable[torch.dtype], modes: list[tuple]) -> list:
    """Each of the table in the next dtype, in all modes."""
    return [
        pytest.param(case, dtype, mode, marks=() if mode[0] == "reference" else needs_kernels)
        for case, dtype in zip(table, dtypes, strict=False)
        for mode in modes
    ]


# Values in every dtype, layouts in one each; those of the reference are torch's own matter.
CASES = [
    *(case for dtype in DTYPES for case in cases(VALUES, repeat(dtype), MODES)),
    *cases(LAYOUTS, cycle(DTYPES), [MODES[0], *MODES[2:]]),
]


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


def scales(amax: np.ndarray, scale_format: str) -> tuple[np.ndarray, np.ndarray]:
    """(scale, scale_inv). Quotients of float32 numbers do not suffer from rounding twice here."""
    scale = (448.0 / amax).astype(np.float32).astype(np.float64)
    usable = np.isfinite(amax) & np.isfinite(scale)
    amax = np.where(usable, amax, 448.0)
    if scale_format == "pow2":
        exponent = np.ceil(np.log2(amax / 448))  # may be off by one at the edges
        exponent += amax > 448 * 2.0**exponent
        exponent -= amax <= 448 * 2.0 ** (exponent - 1)
        exponent = exponent.clip(-127, 127)
        return 2.0**-exponent, 2.0**exponent
    scale = np.where(usable, scale, 1.0)
    return scale, (1.0 / scale).astype(np.float32).astype(np.float64)


def tiles(x: torch.Tensor, block: tuple[int, int], scale_format: str) -> Quantized:
    """The definition, for blocks of a matrix."""
    (rows, columns), (height, width) = x.shape, block
    padded = np.pad(x.double().numpy(), ((0, -rows % height), (0, -columns % width)))
    down, across = cdiv(rows, height), cdiv(columns, width)
    parts = padded.reshape(down, height, across, width)
    with np.errstate(all="ignore"):
        amax = np.abs(parts).max((1, 3), initial=0)  # NaN if there is one
        scale, scale_inv = scales(amax, scale_format)
        product = (parts * scale[:, None, :, None]).astype(np.float32)  # exact, then rounded once
    codes = encode(product.astype(np.float64)).reshape(padded.shape)[:rows, :columns]
    return Quantized(
        torch.from_numpy(codes.copy()).view(torch.float8_e4m3fn),
        torch.from_numpy(scale_inv.astype(np.float32)),
    )


class Definition:
    """What the numerics are defined to give, with the functions of the reference."""

    def quantize_block(self, w: torch.Tensor, block: tuple[int, int], form: str) -> Quantized:
        return tiles(w, block, form)

    def quantize_group(self, x: torch.Tensor, group: int, form: str) -> Quantized:
        flat = tiles(x.reshape(math.prod(x.shape[:-1]), x.shape[-1]), (1, group), form)
        shape = (*x.shape[:-1], cdiv(x.shape[-1], group))
        return Quantized(flat.codes.view(x.shape), flat.scale_inv.view(shape))

    def quantize_operand(self, x: torch.Tensor, form: str, rows: bool, columns: bool) -> Operand:
        marked = x.where(x.isfinite(), torch.nan)
        return Operand(
            tiles(marked, (1, 128), form) if rows else None,
            tiles(marked.t(), (1, 128), form) if columns else None,
        )

    def quantize_weight(self, w: torch.Tensor, form: str, rows: bool, columns: bool) -> Operand:
        made = tiles(w.where(w.isfinite(), torch.nan), BLOCK, form)
        turned = Quantized(made.codes.t().contiguous(), made.scale_inv.t().contiguous())
        return Operand(made if rows else None, turned if columns else None)


def launch(
    one_way: object, dual: object, x: torch.Tensor, case: str, form: str, cast: str = "reference"
) -> list[Quantized]:
    """Groups; of a matrix also blocks and both sides as operand and as weight."""
    alone = case in VALUES if cast != "reference" else case == "special_values"
    made = [one_way.quantize_group(x, 128, form)]
    if x.ndim == 2:
        made.append(one_way.quantize_block(x, BLOCK, form))
        for quantize in (dual.quantize_operand, dual.quantize_weight):
            for sides in SIDES if alone else SIDES[:1]:
                operand = quantize(x, form, *sides)
                assert tuple(side is not None for side in operand) == sides
                made += [side for side in operand if side is not None]
    return made


def kernels() -> tuple[ModuleType, ModuleType]:
    return Device(True).module("quantize"), Device(True).module("dual")


def check(x: torch.Tensor, case: str, form: str, *, cast: str) -> None:
    if cast == "reference":
        actual = launch(reference, reference, x, case, form)
        expected = launch(Definition(), Definition(), x, case, form)
    else:
        actual = launch(*kernels(), Device(True).moved(x), case, form, cast)
        expected = launch(reference, reference, x, case, form, cast)
    for got, want in zip(actual, expected, strict=True):
        assert_same(got, want)


def set_cast(cast: str, patch: pytest.MonkeyPatch) -> None:
    if cast != "reference":
        for module in kernels():
            patch.setattr(module, "has_native_cast", lambda device: cast == "native")


@pytest.fixture(autouse=True)
def poisoned_outputs(monkeypatch):
    """Outputs start as 0xAA bytes, so that an element no program writes shows."""

    def poison(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.numel() and tensor.ndim:
            tensor.view(torch.uint8).fill_(0xAA)
        return tensor

    empty, new_empty = torch.empty, torch.Tensor.new_empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: poison(empty(*a, **k)))
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda t, *a, **k: poison(new_empty(t, *a, **k)))


@pytest.mark.parametrize(("case", "dtype", "mode"), CASES)
def test_values_and_layouts(case, dtype, mode, monkeypatch):
    cast, scale_format = mode
    set_cast(cast, monkeypatch)
    for x in sources(case, dtype):
        check(x, case, scale_format, cast=cast)


@pytest.mark.parametrize("cast", ["reference", pytest.param("software", marks=needs_kernels)])
@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)])
def test_empty(shape, cast):
    check(torch.zeros(shape), "one", "fp32", cast=cast)
    codes, scale_inv = quantize_block(torch.zeros(shape))
    assert dequantize_block(codes, scale_inv).shape == shape


@needs_gpu
@pytest.mark.parametrize("cast", CASTS)
def test_more_than_two_to_the_31_elements(cast, monkeypatch):
    free, _ = torch.cuda.mem_get_info()
    if free < 10 << 30:
        pytest.skip("needs 10 GiB of free GPU memory")
    set_cast(cast, monkeypatch)
    x = torch.ones(1, 128, dtype=torch.bfloat16, device=DEVICE).expand((2**31 >> 7) + 40, 128)
    codes, scale_inv = kernels()[0].quantize_group(x, 128, "fp32")
    assert (codes.view(torch.uint8) == 0x7E).all()
    assert (scale_inv == scale_inv[0]).all()


sizes = st.one_of(st.integers(1, 20), st.sampled_from([127, 128, 129, 200, 256, 257]))
special = st.sampled_from([0.0, -0.0, math.nan, math.inf, -math.inf, 448.0, 5e-324, 1e-40, 3.4e38])


@settings(max_examples=30)
@given(
    shape=st.tuples(sizes, sizes),
    dtype=st.sampled_from(DTYPES),
    scale_format=st.sampled_from(FORMATS),
    seed=st.integers(0, 2**31),
    log2_scale=st.integers(-150, 130),
    spread=st.sampled_from([0, 10, 40]),
    values=st.lists(special, max_size=3),
)
def test_any_matrix_equals_the_definition(
    shape, dtype, scale_format, seed, log2_scale, spread, values
):
    x = make(shape, dtype, seed, log2_scale, spread)
    for i, value in enumerate(values):
        x[(seed + i) % shape[0], (seed * 7 + i) % shape[1]] = value
    check(x, "any", scale_format, cast="reference")


def make(shape, dtype: torch.dtype, seed: int, log2_scale: int, spread: int) -> torch.Tensor:
    """Normal values times ``2**log2_scale``, their magnitudes spread over ``2**spread``."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=g, dtype=torch.float64)
    x *= 2.0 ** (log2_scale - spread * torch.rand(shape, generator=g, dtype=torch.float64))
    return x.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype)


@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_dequantize(dtype, scale_format):
    w = make((150, 260), torch.float32, 0, 0, 12)
    for quantize, dequantize, height in (
        (quantize_block, dequantize_block, 128),
        (quantize_group, dequantize_group, 1),
    ):
        codes, scale_inv = quantize(w, scale_format=scale_format)
        values = TABLE[codes.view(torch.uint8).numpy()]
        factors = scale_inv.double().numpy().repeat(height, 0)[:150].repeat(128, 1)[:, :260]
        expected = torch.tensor((values * factors).astype(np.float32)).to(dtype)
        assert torch.equal(dequantize(codes, scale_inv, dtype=dtype), expected)
    strided = dequantize_group(codes[::2], scale_inv[::2], dtype=dtype)
    assert torch.equal(strided, expected[::2])


W = make((384, 512), torch.bfloat16, 5, -6, 6)


def of_transformers(scale_format: str) -> tuple[torch.Tensor, ...]:
    module = importlib.import_module("transformers.integrations.finegrained_fp8")
    config = SimpleNamespace(
        weight_block_size=(128, 128), scale_fmt="ue8m0" if scale_format == "pow2" else "float"
    )
    quantizer = module.Fp8Quantize(SimpleNamespace(quantization_config=config))
    found = quantizer.convert({"w.weight": W})
    return found["w.weight"], found["w.weight_scale_inv"]


def of_vllm(scale_format: str) -> tuple[torch.Tensor, ...]:
    module = pytest.importorskip("vllm.utils.deep_gemm", reason="vLLM is not installed")
    quantize = inspect.unwrap(module.per_block_cast_to_fp8)  # without its torch.compile
    return quantize(W, use_ue8m0=scale_format == "pow2")


@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize("theirs", [of_transformers, of_vllm])
def test_other_peoples_quantizers_agree(theirs, scale_format):
    """Up to the rounding of the scale: transformers writes ``448.0 / amax``, for which torch rounds
    a reciprocal and then a product; DeepGEMM's ``per_block_cast_to_fp8`` in vLLM multiplies by
    ``1 / (amax / 448)``. A power of two is exact in both."""
    ours, (codes, scale_inv) = quantize_block(W, scale_format=scale_format), theirs(scale_format)
    ulps = (bits(ours.scale_inv) - bits(scale_inv.float())).abs().max().item()
    differing = (ours.codes.view(torch.uint8) != codes.view(torch.uint8)).double().mean().item()
    assert ulps <= (0 if scale_format == "pow2" else 2)
    assert differing <= (0 if scale_format == "pow2" else 1e-3)

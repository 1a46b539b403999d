"""The Triton kernels against the torch reference on CPU copies, bit for bit.

Needs a CUDA GPU; with ``TRITON_INTERPRET=1`` and triton installed it runs on the CPU instead, in
Triton's interpreter, on the software cast.
"""

from __future__ import annotations

import importlib
import os

import pytest
import torch

from fp8rl.errors import UnsupportedError
from fp8rl.numerics import Quantized, quantize_block, quantize_group, reference

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not (torch.cuda.is_available() or INTERPRETED):
    pytest.skip("needs a CUDA GPU, or TRITON_INTERPRET=1", allow_module_level=True)
pytest.importorskip("triton", reason="triton is not installed")
triton_kernels = importlib.import_module("fp8rl.numerics.triton_kernels")
triton_two_way = importlib.import_module("fp8rl.numerics.triton_two_way")

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
FORMATS = ["fp32", "pow2"]
SHAPES = [(1, 1), (3, 130), (127, 129), (128, 128), (256, 384), (300, 65), (129, 257)]


@pytest.fixture(params=[True, False], ids=["native", "software"])
def cast(request, monkeypatch):
    """Both casts, wherever the device has them."""
    if request.param and not triton_kernels.has_native_cast(DEVICE):
        pytest.skip("this device has no E4M3 conversion in hardware")
    for module in (triton_kernels, triton_two_way):
        monkeypatch.setattr(module, "has_native_cast", lambda device: request.param)


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


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def heavy_tailed(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Magnitudes over the whole range of the dtype, in every block."""
    g = generator(seed)
    info = torch.finfo(dtype)
    low, high = torch.tensor([info.smallest_normal / 64, info.max], dtype=torch.float64).log2()
    exponent = torch.rand(shape, generator=g, dtype=torch.float64) * (high - low) + low
    sign = torch.randint(0, 2, shape, generator=g) * 2 - 1
    return (exponent.exp2() * sign).clamp(-info.max, info.max).to(dtype)


def assert_same(actual: Quantized, expected: Quantized) -> None:
    assert actual.codes.dtype == torch.float8_e4m3fn
    assert actual.codes.is_contiguous()
    for got, want, bits in (
        (actual.codes, expected.codes, torch.uint8),
        (actual.scale_inv, expected.scale_inv, torch.int32),
    ):
        assert got.shape == want.shape
        differing = (got.cpu().view(bits) != want.view(bits)).sum().item()
        assert differing == 0, f"{differing} of {want.numel()} differ"


def check(x: torch.Tensor, scale_format: str) -> None:
    """Block (2-D only) and group quantization of ``x``, a CPU tensor with any strides."""
    moved = x.to(DEVICE)  # keeps the strides of a dense tensor
    if x.ndim == 2:
        assert_same(
            triton_kernels.quantize_block(moved, (128, 128), scale_format),
            reference.quantize_block(x, (128, 128), scale_format),
        )
        check_two_way(x, moved, scale_format)
    assert_same(
        triton_kernels.quantize_group(moved, 128, scale_format),
        reference.quantize_group(x, 128, scale_format),
    )


def check_two_way(x: torch.Tensor, moved: torch.Tensor, scale_format: str) -> None:
    """Both sides of an operand and of a weight, made together and alone."""
    for name in ("quantize_operand", "quantize_weight"):
        expected = getattr(reference, name)(x, scale_format, True, True)
        for wanted in ((True, True), (True, False), (False, True)):
            actual = getattr(triton_two_way, name)(moved, scale_format, *wanted)
            for got, want, asked in zip(actual, expected, wanted, strict=True):
                assert (got is not None) == asked
                if got is None:
                    continue
                width = want.codes.shape[1]
                padding = got.codes.view(torch.uint8)[:, width:]
                assert not padding.any()
                codes = got.codes.view(torch.uint8)[:, :width].contiguous()
                assert_same(
                    Quantized(codes.view(got.codes.dtype), got.scale_inv.contiguous()),
                    Quantized(want.codes.contiguous(), want.scale_inv.contiguous()),
                )


@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_normal_values(shape, dtype, scale_format, cast):
    check(torch.randn(shape, generator=generator(0)).to(dtype), scale_format)


@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(3))
def test_heavy_tails(seed, dtype, scale_format, cast):
    check(heavy_tailed((200, 300), dtype, seed), scale_format)


@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_of_every_magnitude(dtype, scale_format, cast):
    info = torch.finfo(dtype)
    low = torch.tensor(info.smallest_normal / 2**6, dtype=torch.float64).log2().int().item()
    high = torch.tensor(info.max, dtype=torch.float64).log2().int().item()
    rows = [torch.randn(384, generator=generator(e)).double() * 2.0**e for e in range(low, high)]
    check(torch.stack(rows).clamp(-info.max, info.max).to(dtype), scale_format)


@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_special_values(dtype, scale_format, cast):
    info = torch.finfo(dtype)
    tiny = info.smallest_normal
    special = torch.tensor(
        [0.0, -0.0, tiny, -tiny, info.max, -info.max, 448, -449, torch.inf, -torch.inf, torch.nan]
    ).to(dtype)
    special = torch.cat([special, -special[-1:], special[2:4] / 2])
    x = torch.randn(len(special) * 3, 260, generator=generator(1)).to(dtype)
    x[::3] = 0
    x[:, 5] = special.repeat(3)
    x[: len(special), 200] = special
    check(x, scale_format)


@pytest.mark.parametrize("scale_format", FORMATS)
def test_every_rounding_step(scale_format, cast):
    """All float16 values below 448 with scale 1, hence every tie of E4M3."""
    bits = torch.arange(0, 0x10000, dtype=torch.int32).to(torch.int16).view(torch.float16)
    values = bits[bits.abs() <= 448]
    rows = values[: values.numel() // 127 * 127].view(-1, 127)
    full = torch.full((rows.shape[0], 1), 448.0, dtype=torch.float16)
    check(torch.cat([full, rows], 1), scale_format)


@pytest.mark.parametrize("dtype", DTYPES)
def test_amax_at_the_edges_of_a_power_of_two(dtype, cast):
    edges = 448.0 * 2.0 ** torch.arange(-20, 6, dtype=torch.float64)
    exact = edges.to(dtype)
    amax = torch.cat([exact, torch.nextafter(exact, exact * 0), torch.nextafter(exact, exact * 2)])
    check(amax[:, None] * torch.linspace(-1, 1, 128).to(dtype), "pow2")


@pytest.mark.parametrize("scale_format", FORMATS)
def test_smallest_usable_amax(scale_format, cast):
    edge = torch.tensor(448.0 / torch.finfo(torch.float32).max, dtype=torch.float32)
    around = (edge.view(torch.int32) + torch.arange(-40, 40)).view(torch.float32)
    tiny = torch.cat([around, torch.tensor([1e-40, 1e-45, 5.3e-36, 2.6e-36])])
    check(tiny[:, None] * torch.linspace(-1, 1, 128), scale_format)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale_format", FORMATS)
def test_strides(dtype, scale_format, cast):
    base = torch.randn(260, 520, generator=generator(2)).to(dtype)
    check(base.t(), scale_format)
    check(base[:, 3:300], scale_format)
    check(base[::2, ::3], scale_format)
    check(base[:1].expand(140, 520), scale_format)
    batch = torch.randn(3, 5, 7, 150, generator=generator(3)).to(dtype)
    check(batch, scale_format)
    check(batch.transpose(0, 2), scale_format)
    check(base[0], scale_format)


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)])
def test_empty(shape):
    check(torch.zeros(shape), "fp32")


def test_block_sides_that_are_no_power_of_two_are_refused():
    with pytest.raises(UnsupportedError, match="powers of two, not 96"):
        triton_kernels.quantize_block(torch.zeros(8, 8, device=DEVICE), (128, 96), "fp32")


@pytest.mark.parametrize("scale_format", FORMATS)
def test_whole_tiles_of_bfloat16(scale_format, cast):
    """What has a kernel of its own: also with rows further apart, and repeated ones."""
    wide = heavy_tailed((384, 400), torch.bfloat16, 3)
    wide[:128, :128] = 0.0
    wide[130, 140], wide[260, 7], wide[383, 255] = torch.inf, torch.nan, -torch.inf
    wide[::3, 128:] *= 0.0  # zeros of both signs
    moved = wide.to(DEVICE)
    for x, y in ((wide, moved), (wide[1:2].expand(128, -1), moved[1:2].expand(128, -1))):
        check_two_way(x[:, :256], y[:, :256], scale_format)
        check_two_way(x[:, 4:132], y[:, 4:132], scale_format)
        check_two_way(x[:, 1:129], y[:, 1:129], scale_format)  # unaligned: the general kernel


@pytest.mark.skipif(INTERPRETED, reason="needs a CUDA GPU")
def test_dispatch_takes_the_kernels():
    x = torch.randn(130, 140)
    assert_same(quantize_block(x.cuda()), quantize_block(x))
    assert_same(quantize_group(x.cuda(), scale_format="pow2"), quantize_group(x, 128, "pow2"))


@pytest.mark.skipif(INTERPRETED, reason="needs a CUDA GPU")
def test_more_than_two_to_the_31_elements(cast):
    free, _ = torch.cuda.mem_get_info()
    if free < 10 << 30:
        pytest.skip("needs 10 GiB of free GPU memory")
    x = torch.ones(1, 128, dtype=torch.bfloat16, device=DEVICE).expand((2**31 >> 7) + 40, 128)
    codes, scale_inv = triton_kernels.quantize_group(x, 128, "fp32")
    assert (codes.view(torch.uint8) == 0x7E).all()
    assert (scale_inv == scale_inv[0]).all()

"""The Triton kernels against the torch reference on CPU copies, bit for bit.

Needs a CUDA GPU; with ``TRITON_INTERPRET=1`` and triton installed it runs on the CPU instead, in
Triton's interpreter, on the software cast.

Kernels differ by dtype, cast, scale format and sides wanted, and by what strides and sizes are: 1,
multiples of 16, or others. ``VALUES`` are contiguous with widths that are multiples of 16, and go
through every combination of the rest; ``LAYOUTS`` go through every dtype, cast and scale format.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable
from types import ModuleType

import pytest
import torch

from fp8rl.errors import UnsupportedError
from fp8rl.numerics import Quantized, quantize_block, quantize_group, reference
from support.triton_device import DEVICE, INTERPRETED, assert_same

triton_kernels = importlib.import_module("fp8rl.numerics.triton.quantize")
triton_dual = importlib.import_module("fp8rl.numerics.triton.dual")
KERNELS = (triton_kernels, triton_dual)

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
FORMATS = ["fp32", "pow2"]
CASTS = ["native", "software"]  # how the kernels convert to E4M3
HAS_NATIVE = triton_kernels.has_native_cast(DEVICE)
CAN_PACK = INTERPRETED or torch.cuda.get_device_capability() >= (9, 0)
SHAPES = [(3, 144), (127, 64), (129, 272), (128, 128), (256, 384)]
ODD_SHAPES = [(3, 130), (127, 129), (144, 129), (129, 257), (300, 65)]
SIDES = [(True, True), (True, False), (False, True)]
ROWS = [1, 2, 3, 4, 5, 126, 127, 129, 131, 255, 257, 300]


def set_cast(cast: str, patch: pytest.MonkeyPatch) -> None:
    for module in KERNELS:
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


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(dtype: torch.dtype) -> list[torch.Tensor]:
    return [torch.randn(shape, generator=generator(0)).to(dtype) for shape in SHAPES]


def heavy_tailed(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Magnitudes over the whole range of the dtype, in every block."""
    g = generator(seed)
    info = torch.finfo(dtype)
    low, high = torch.tensor([info.smallest_normal / 64, info.max], dtype=torch.float64).log2()
    exponent = torch.rand(shape, generator=g, dtype=torch.float64) * (high - low) + low
    sign = torch.randint(0, 2, shape, generator=g) * 2 - 1
    return (exponent.exp2() * sign).clamp(-info.max, info.max).to(dtype)


def heavy_tails(dtype: torch.dtype) -> list[torch.Tensor]:
    ragged = [heavy_tailed((200, 304), dtype, seed) for seed in range(3)]
    return [*ragged, heavy_tailed((256, 128), dtype, 3)]


def rows_of_every_magnitude(dtype: torch.dtype) -> list[torch.Tensor]:
    info = torch.finfo(dtype)
    low = torch.tensor(info.smallest_normal / 2**6, dtype=torch.float64).log2().int().item()
    high = torch.tensor(info.max, dtype=torch.float64).log2().int().item()
    rows = [torch.randn(384, generator=generator(e)).double() * 2.0**e for e in range(low, high)]
    return ragged_and_whole(torch.stack(rows).clamp(-info.max, info.max).to(dtype))


def special_values(dtype: torch.dtype) -> list[torch.Tensor]:
    info = torch.finfo(dtype)
    tiny = info.smallest_normal
    special = torch.tensor(
        [0.0, -0.0, tiny, -tiny, info.max, -info.max, 448, -449, torch.inf, -torch.inf, torch.nan]
    ).to(dtype)
    special = torch.cat([special, -special[-1:], special[2:4] / 2])
    x = torch.randn(len(special) * 3, 272, generator=generator(1)).to(dtype)
    x[::3] = 0
    x[:, 5] = special.repeat(3)
    x[: len(special), 200] = special
    return ragged_and_whole(x)


def every_rounding_step(dtype: torch.dtype) -> list[torch.Tensor]:
    """All float16 values below 448 with scale 1, hence every tie of E4M3."""
    bits = torch.arange(0, 0x10000, dtype=torch.int32).to(torch.int16).view(torch.float16)
    values = bits[bits.abs() <= 448]
    rows = values[: values.numel() // 127 * 127].view(-1, 127)
    full = torch.full((rows.shape[0], 1), 448.0, dtype=torch.float16)
    return ragged_and_whole(torch.cat([full, rows], 1).to(dtype))


def amax_at_the_edges_of_a_power_of_two(dtype: torch.dtype) -> list[torch.Tensor]:
    edges = 448.0 * 2.0 ** torch.arange(-20, 6, dtype=torch.float64)
    exact = edges.to(dtype)
    amax = torch.cat([exact, torch.nextafter(exact, exact * 0), torch.nextafter(exact, exact * 2)])
    return ragged_and_whole(amax[:, None] * torch.linspace(-1, 1, 128).to(dtype))


def smallest_usable_amax(dtype: torch.dtype) -> list[torch.Tensor]:
    edge = torch.tensor(448.0 / torch.finfo(torch.float32).max, dtype=torch.float32)
    around = (edge.view(torch.int32) + torch.arange(-40, 40)).view(torch.float32)
    tiny = torch.cat([around, torch.tensor([1e-40, 1e-45, 5.3e-36, 2.6e-36])])
    return ragged_and_whole((tiny[:, None] * torch.linspace(-1, 1, 128)).to(dtype))


def ragged_and_whole(x: torch.Tensor) -> list[torch.Tensor]:
    """``x``, and ``x`` repeated until it ends with whole tiles, or with all but some rows."""
    rows, cols = (-(-size // 128) * 128 for size in x.shape)
    whole = x.repeat(-(-rows // x.shape[0]), -(-cols // x.shape[1]))[:rows, :cols]
    return [x, whole.contiguous(), whole[: rows - 1 - len(x) % 4].contiguous()]


def base(dtype: torch.dtype, shape: tuple[int, ...] = (260, 520)) -> torch.Tensor:
    """Every seventh row with magnitudes over the whole range; a NaN and an infinity if large."""
    x = torch.randn(shape, generator=generator(2)).to(dtype)
    x[6::7] = heavy_tailed(x[6::7].shape, dtype, 3)
    if len(x) > 250:
        x[130, 14], x[252, 7] = torch.nan, -torch.inf
    return x


def batch(dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(3, 5, 7, 150, generator=generator(3)).to(dtype)


VALUES: dict[str, Callable[[torch.dtype], list[torch.Tensor]]] = {
    made.__name__: made
    for made in (
        normal,
        heavy_tails,
        rows_of_every_magnitude,
        special_values,
        every_rounding_step,
        amax_at_the_edges_of_a_power_of_two,
        smallest_usable_amax,
    )
}
LAYOUTS: dict[str, Callable[[torch.dtype], list[torch.Tensor]]] = {
    "one": lambda dtype: [base(dtype, (1, 1))],
    "odd shapes": lambda dtype: [base(dtype, shape) for shape in ODD_SHAPES],
    "transposed": lambda dtype: [base(dtype).t(), base(dtype, (256, 384)).t()],
    "unaligned": lambda dtype: [base(dtype)[:, 3:300], base(dtype)[:256, 1:385]],
    "aligned to eight bytes": lambda dtype: [base(dtype)[:n, 4:388] for n in (256, 203)],
    "rows apart": lambda dtype: [base(dtype)[:256, :384], base(dtype)[::2, :384]],
    "every third column": lambda dtype: [base(dtype)[::2, ::3]],
    "one row many times": lambda dtype: [base(dtype)[6:7, :384].expand(n, 384) for n in (128, 140)],
    "batch": lambda dtype: [batch(dtype), batch(dtype).transpose(0, 2), batch(dtype)[0, 0, 0]],
}
MODES = list(itertools.product(CASTS, FORMATS))
LAYOUT_MODES = [("native", "fp32"), ("software", "pow2")]


def sources(case: str, dtype: torch.dtype) -> list[torch.Tensor]:
    return (VALUES if case in VALUES else LAYOUTS)[case](dtype)


def on_device(x: torch.Tensor) -> torch.Tensor:
    """A copy with the strides of ``x``, whose address is a multiple of what that of ``x`` is."""
    memory = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage()).to(DEVICE)
    return memory.as_strided(x.shape, x.stride(), x.storage_offset())


@pytest.fixture(scope="module", autouse=True)
def compiled(request: pytest.FixtureRequest) -> None:
    """Every kernel of the cases that are going to run."""
    if INTERPRETED:
        return
    from support.compile_ahead import compiling_ahead

    items = [item for item in request.session.items if item.path == request.path]
    with compiling_ahead():
        for item in items:
            asked = item.callspec.params if hasattr(item, "callspec") else {}
            if "case" in asked and (HAS_NATIVE or asked["mode"][0] != "native"):
                with pytest.MonkeyPatch.context() as patch:
                    set_cast(asked["mode"][0], patch)
                    for x in sources(asked["case"], asked["dtype"]):
                        launch(KERNELS, on_device(x), asked["case"], asked["mode"][1])


def launch(
    modules: tuple[ModuleType, ModuleType], x: torch.Tensor, case: str, scale_format: str
) -> list[Quantized]:
    """Groups; of a matrix also blocks and both sides of it as operand and as weight, made together
    and, of ``VALUES``, alone."""
    one_way, dual = modules
    made = [one_way.quantize_group(x, 128, scale_format)]
    if x.ndim == 2:
        made.append(one_way.quantize_block(x, (128, 128), scale_format))
        for quantize in (dual.quantize_operand, dual.quantize_weight):
            for sides in SIDES if case in VALUES else SIDES[:1]:
                operand = quantize(x, scale_format, *sides)
                assert tuple(side is not None for side in operand) == sides
                made += [side for side in operand if side is not None]
    return made


def check(x: torch.Tensor, case: str, scale_format: str) -> None:
    actual = launch(KERNELS, on_device(x), case, scale_format)
    expected = launch((reference, reference), x, case, scale_format)
    for got, want in zip(actual, expected, strict=True):
        assert_same(got, want)


@pytest.mark.parametrize("mode", MODES, ids="-".join)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", VALUES)
def test_values(case, dtype, mode, monkeypatch):
    run(case, dtype, mode, monkeypatch)


@pytest.mark.parametrize("mode", LAYOUT_MODES, ids="-".join)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", LAYOUTS)
def test_layouts(case, dtype, mode, monkeypatch):
    run(case, dtype, mode, monkeypatch)


def run(case, dtype, mode, monkeypatch):
    cast, scale_format = mode
    if cast == "native" and not HAS_NATIVE:
        pytest.skip("this device has no E4M3 conversion in hardware")
    set_cast(cast, monkeypatch)
    for x in sources(case, dtype):
        check(x, case, scale_format)


@pytest.mark.usefixtures("guarded")
@pytest.mark.parametrize("mode", MODES if HAS_NATIVE else MODES[2:], ids="-".join)
@pytest.mark.parametrize("rows", ROWS)
def test_rows_that_fill_no_tile(rows, mode, monkeypatch):
    """Nothing is written behind the outputs, nor by the general kernel."""
    cast, scale_format = mode
    set_cast(cast, monkeypatch)
    if CAN_PACK:
        monkeypatch.delattr(triton_dual, "_dual_kernel")
    x = base(torch.bfloat16, (rows, 256))
    x[:, 5], x[rows // 2], x[-1, 130] = torch.nan, 0, torch.inf
    actual = triton_dual.quantize_operand(x.to(DEVICE), scale_format, True, True)
    expected = reference.quantize_operand(x, scale_format, True, True)
    for got, want in zip(actual, expected, strict=True):
        assert_same(got, want)


@pytest.mark.skipif(INTERPRETED, reason="needs a CUDA GPU")
def test_another_number_of_rows_compiles_nothing(monkeypatch):
    def quantize(rows: int) -> None:
        x = torch.ones(rows, 256, dtype=torch.bfloat16, device=DEVICE)
        triton_dual.quantize_operand(x, "fp32", True, True)

    for rows in (128, 130):
        quantize(rows)
    monkeypatch.delattr(importlib.import_module("triton").JITFunction, "_do_compile")
    for rows in (1, 2, 16, 64, 129, 256, 300, 384):
        quantize(rows)


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)])
def test_empty(shape):
    check(torch.zeros(shape), "one", "fp32")


def test_block_sides_that_are_no_power_of_two_are_refused():
    with pytest.raises(UnsupportedError, match="powers of two, not 96"):
        triton_kernels.quantize_block(torch.zeros(8, 8, device=DEVICE), (128, 96), "fp32")


@pytest.mark.skipif(INTERPRETED, reason="needs a CUDA GPU")
def test_dispatch_takes_the_kernels():
    x = torch.randn(130, 140)
    assert_same(quantize_block(x.cuda()), quantize_block(x))
    assert_same(quantize_group(x.cuda(), scale_format="pow2"), quantize_group(x, 128, "pow2"))


@pytest.mark.skipif(INTERPRETED, reason="needs a CUDA GPU")
@pytest.mark.parametrize("cast", CASTS if HAS_NATIVE else CASTS[1:])
def test_more_than_two_to_the_31_elements(cast, monkeypatch):
    free, _ = torch.cuda.mem_get_info()
    if free < 10 << 30:
        pytest.skip("needs 10 GiB of free GPU memory")
    set_cast(cast, monkeypatch)
    x = torch.ones(1, 128, dtype=torch.bfloat16, device=DEVICE).expand((2**31 >> 7) + 40, 128)
    codes, scale_inv = triton_kernels.quantize_group(x, 128, "fp32")
    assert (codes.view(torch.uint8) == 0x7E).all()
    assert (scale_inv == scale_inv[0]).all()

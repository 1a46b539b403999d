"""Every kind of values and layouts that a kernel of the numerics may meet, on the CPU.

Kernels differ by dtype and by what strides and sizes are: 1, multiples of 16, or others. ``VALUES``
are contiguous with widths that are multiples of 16; ``LAYOUTS`` are of the other kinds.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
FORMATS = ["fp32", "pow2"]
SHAPES = [(3, 144), (127, 64), (129, 272), (128, 128), (256, 384)]
ODD_SHAPES = [(3, 130), (127, 129), (144, 129), (129, 257), (300, 65)]
HALF_GROUPS = (64, 192, 576, 960)
"""Widths of real models, on one rank or on several, that end within a group."""
PACKED = [(65, 1, 2, 4, 128), (7, 3, 1, 2, 64), (1, 1, 1, 1, 80), (130, 2, 2, 1, 256)]
"""Of queries, keys and values: tokens, batch, groups, query heads of a group, head size."""

# As many experts each time: DeepGEMM compiles for it.
SPLITS = [(130, 0, 128, 5, 300), (0, 0, 1, 0, 0), (256, 128, 128, 384, 128), (0, 777, 0, 40, 0)]
"""Tokens of each expert."""


def packed(
    tokens: int, batch: int, groups: int, ratio: int, head: int, dtype: torch.dtype
) -> tuple[torch.Tensor, ...]:
    """q, k and v as megatron splits them from one tensor, ``[s, b, heads, head]``."""
    g = generator(tokens)
    x = torch.randn(tokens, batch, groups, (ratio + 2) * head, generator=g)
    x *= torch.randn(tokens, batch, groups, 1, generator=g).mul(3).exp2()
    return x.to(dtype).split([ratio * head, head, head], dim=3)


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
    edges = 448.0 * 2.0 ** torch.arange(-134, 119, dtype=torch.float64)
    exact = edges.to(dtype)
    exact = exact[exact.isfinite() & (exact > 0)]
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
    "half groups": lambda dtype: [base(dtype, shape) for shape in [(5, 64), (130, 192), (9, 960)]],
    "transposed": lambda dtype: [base(dtype).t(), base(dtype, (256, 384)).t()],
    "unaligned": lambda dtype: [base(dtype)[:, 3:300], base(dtype)[:256, 1:385]],
    "aligned to eight bytes": lambda dtype: [base(dtype)[:n, 4:388] for n in (256, 203)],
    "rows apart": lambda dtype: [base(dtype)[:256, :384], base(dtype)[::2, :384]],
    "every third column": lambda dtype: [base(dtype)[::2, ::3]],
    "one row many times": lambda dtype: [base(dtype)[6:7, :384].expand(n, 384) for n in (128, 140)],
    "batch": lambda dtype: [batch(dtype), batch(dtype).transpose(0, 2), batch(dtype)[0, 0, 0]],
}


def sources(case: str, dtype: torch.dtype) -> list[torch.Tensor]:
    return (VALUES if case in VALUES else LAYOUTS)[case](dtype)

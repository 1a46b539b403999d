"""Rows of activations quantized by the rollout's kernels, against float64.

Values are such that nothing is rounded: Triton's interpreter truncates in conversions. Rounding is
compared in ``tests/gpu/test_triton_fused.py``.
"""

from __future__ import annotations

import pytest
import torch

from fp8rl.numerics import GROUP
from support.devices import DEVICE, needs_kernels
from support.shapes import FORMATS, HALF_GROUPS, generator

pytestmark = needs_kernels
WIDTHS = [*HALF_GROUPS, 128, 384]
ROWS = 5


def representable(columns: int, seed: int = 0) -> torch.Tensor:
    """bfloat16 values of E4M3 times a power of two for each row; 448 times it in each group."""
    g = generator(seed)
    codes = torch.randint(0, 127, (ROWS, columns), generator=g).to(torch.uint8)
    codes[:, ::64] = 126
    signs = torch.randint(0, 2, (ROWS, columns), generator=g) * 2.0 - 1
    by_row = 2.0 ** torch.arange(-2, ROWS - 2.0)[:, None]
    return (codes.view(torch.float8_e4m3fn).float() * signs * by_row).bfloat16()


def check(codes: torch.Tensor, scales: torch.Tensor, values: torch.Tensor) -> None:
    """Codes times scales are the values, and what fills the last group is zero."""
    columns = values.shape[1]
    groups = -(-columns // GROUP)
    assert codes.shape == (ROWS, groups * GROUP)
    assert scales.shape == (groups, 8)
    factors = scales.t()[:ROWS].cpu().double().repeat_interleave(GROUP, 1)
    assert torch.equal((codes.cpu().double() * factors)[:, :columns], values.double())
    assert not codes[:, columns:].view(torch.uint8).any()
    by_group = torch.nn.functional.pad(values.abs().double(), (0, -columns % GROUP))
    amax = by_group.view(ROWS, groups, GROUP).amax(-1)
    assert torch.equal(scales.t()[:ROWS].cpu().double(), amax / 448)


@pytest.mark.usefixtures("guarded")
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("columns", WIDTHS)
def test_rows(columns, form):
    from fp8rl.numerics.triton.activations import quantize_rows

    x = representable(columns)
    check(*quantize_rows(x.to(DEVICE), form), x)
    wide = torch.full((ROWS, 2 * columns), torch.nan).bfloat16()  # nothing beside a row is read
    wide[:, :columns] = x
    check(*quantize_rows(wide.to(DEVICE)[:, :columns], form), x)


@pytest.mark.usefixtures("guarded")
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("columns", WIDTHS)
def test_silu_and_mul(columns, form):
    """Where the sigmoid of gates is 1 in float32."""
    from fp8rl.numerics.triton.activations import quantize_rows

    up = representable(columns)
    gate = torch.full_like(up, 64.0)
    codes, scales = quantize_rows(torch.cat((gate, up), 1).to(DEVICE), form, silu_and_mul=True)
    check(codes, scales, 64 * up)


def test_a_nan_stays_in_its_place():
    from fp8rl.numerics.triton.activations import quantize_rows

    x = representable(192)
    x[1, 130], x[2, 130] = torch.nan, torch.inf
    codes, scales = (made.cpu() for made in quantize_rows(x.to(DEVICE), "fp32"))
    assert codes.isnan().nonzero().tolist() == [[1, 130]]
    assert codes[2, 130] == 448 and scales[1, 1:3].tolist() == [1, 1]
    assert not codes[:, 192:].view(torch.uint8).any()

"""The norm fused with quantization, of rows that end within a group, against float64.

Rows have one magnitude, so that the norm is exact and Triton's interpreter, which truncates in
conversions, rounds nothing. Rounding is compared in ``tests/gpu``.
"""

from __future__ import annotations

import pytest
import torch

from fp8rl.numerics import GROUP
from support.devices import DEVICE, needs_kernels
from support.shapes import FORMATS, HALF_GROUPS, generator

pytestmark = needs_kernels
ROWS = 5


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("columns", [*HALF_GROUPS, 128, 384])
def test_a_norm_and_its_quantization(columns, form, add):
    from fp8rl.kernels.norm import rms_norm_quantize

    g = generator(columns)
    codes = torch.randint(0, 127, (columns,), generator=g).to(torch.uint8)
    codes[::64] = 126
    weight = codes.view(torch.float8_e4m3fn).float()
    signs = torch.randint(0, 2, (ROWS, columns), generator=g) * 2.0 - 1
    total = (signs * 2.0 ** torch.arange(ROWS)[:, None]).bfloat16()
    expected = signs.double() * weight.double()
    if add:
        total[2], expected[2] = torch.nan, torch.nan  # nor does a NaN leave its row's columns
    residual = total / 4 if add else None
    x = total - residual if add else total
    made, scales, found = rms_norm_quantize(
        x.to(DEVICE),
        None if residual is None else residual.to(DEVICE),
        weight.bfloat16().to(DEVICE),
        0.0,
        form,
    )
    groups = -(-columns // GROUP)
    assert made.shape == (ROWS, groups * GROUP) and scales.shape == (groups, 8)
    assert not made[:, columns:].view(torch.uint8).any()
    factors = scales.t()[:ROWS].cpu().double().repeat_interleave(GROUP, 1)
    values = (made.cpu().double() * factors)[:, :columns]
    torch.testing.assert_close(values, expected, rtol=0, atol=0, equal_nan=True)
    sound = [row for row in range(ROWS) if not expected[row].isnan().any()]
    assert (scales.t()[sound] == 1).all()
    if add:
        assert found is not None
        torch.testing.assert_close(found.cpu(), total, rtol=0, atol=0, equal_nan=True)
    else:
        assert found is None

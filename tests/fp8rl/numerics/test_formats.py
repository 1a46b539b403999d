"""The reference's decoding of E4M3 against torch's own cast."""

from __future__ import annotations

import torch

from fp8rl.numerics import FP8_DTYPE, dequantize_block, dequantize_group


def test_every_code_decodes_as_torch_casts_it():
    codes = torch.arange(256, dtype=torch.uint8).view(FP8_DTYPE).view(2, 128)
    expected = codes.float()
    group = dequantize_group(codes, torch.ones(2, 1))
    block = dequantize_block(codes, torch.ones(1, 1))
    for actual in (group, block):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
        zero = expected == 0
        assert torch.equal(torch.signbit(actual[zero]), torch.signbit(expected[zero]))


def test_decoding_takes_any_strides():
    codes = torch.randn(64, 256).to(FP8_DTYPE)
    scale_inv = torch.rand(64, 2) + 0.5
    got = dequantize_group(codes[::2], scale_inv[::2])
    torch.testing.assert_close(got, dequantize_group(codes[::2].clone(), scale_inv[::2]))

"""The reference's products against float64, and each way to be wrong is found."""

from __future__ import annotations

import pytest
import torch

from fp8rl.gemm import GemmShape, GroupedShape, ReferenceBackend
from fp8rl.numerics import Quantized
from fp8rl.testing.gemm import product_error

CPU = torch.device("cpu")
DIRECTIONS = ("fprop", "dgrad", "wgrad", "wgrad_add")
RIGHT = 1e-2
SHAPES = [
    GemmShape(300, 136, 200),
    GemmShape(1, 16, 520, torch.float32),
    GroupedShape((130, 0, 5), 136, 200),
]


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_right_products_pass(shape, direction):
    assert product_error(ReferenceBackend(), direction, shape, CPU) < RIGHT


class _ScalesOfTheNextRow(ReferenceBackend):
    def fprop(self, x, w, dtype):
        return super().fprop(Quantized(x.codes, x.scale_inv.roll(1, 0)), w, dtype)


class _Overwrites(ReferenceBackend):
    def wgrad(self, grad_t, x_t, dtype, out=None):
        product = super().wgrad(grad_t, x_t, dtype)
        return product if out is None else out.copy_(product)


class _WeightsOfOneExpert(ReferenceBackend):
    def grouped_fprop(self, x, w, dtype):
        first = Quantized(*(t[:1].expand_as(t) for t in w))
        return super().grouped_fprop(x, first, dtype)


class _Unwritten(ReferenceBackend):
    def grouped_fprop(self, x, w, dtype):
        y = super().grouped_fprop(x, w, dtype)
        y[-1, -1] = torch.nan
        return y


@pytest.mark.parametrize(
    ("backend", "direction", "shape"),
    [
        (_ScalesOfTheNextRow(), "fprop", SHAPES[0]),
        (_ScalesOfTheNextRow(), "fprop", SHAPES[2]),
        (_Overwrites(), "wgrad_add", SHAPES[0]),
        (_WeightsOfOneExpert(), "fprop", SHAPES[2]),
        (_Unwritten(), "fprop", SHAPES[2]),
    ],
)
def test_each_way_to_be_wrong_is_found(backend, direction, shape):
    assert product_error(backend, "dgrad", shape, CPU) < RIGHT  # what it does right
    assert not product_error(backend, direction, shape, CPU) < RIGHT

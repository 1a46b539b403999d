"""The reference backend against float64 products of the dequantized operands."""

from __future__ import annotations

import pytest
import torch

from fp8rl.gemm import GemmBackend, GemmShape, ReferenceBackend
from fp8rl.numerics import Quantized, cdiv, quantize_block, quantize_group
from fp8rl.testing.numeric import relative_error

TOKENS, OUT, IN = 37, 200, 300


def exact_groups(q: Quantized) -> torch.Tensor:
    factors = q.scale_inv.double().repeat_interleave(128, 1)[:, : q.codes.shape[1]]
    return q.codes.double() * factors


def exact_blocks(q: Quantized) -> torch.Tensor:
    n, k = q.codes.shape
    factors = q.scale_inv.double().repeat_interleave(128, 0)[:n]
    return q.codes.double() * factors.repeat_interleave(128, 1)[:, :k]


def transposed(q: Quantized) -> Quantized:
    return Quantized(q.codes.t(), q.scale_inv.t())


@pytest.fixture
def tensors():
    g = torch.Generator().manual_seed(0)
    return {
        "x": torch.randn(TOKENS, IN, generator=g),
        "w": torch.randn(OUT, IN, generator=g) * 0.02,
        "grad": torch.randn(TOKENS, OUT, generator=g) * 1e-4,
    }


@pytest.mark.parametrize("scale_format", ["fp32", "pow2"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 4e-3)])
def test_three_products(tensors, dtype, tolerance, scale_format):
    backend = ReferenceBackend()
    x = quantize_group(tensors["x"], scale_format=scale_format)
    w = quantize_block(tensors["w"], scale_format=scale_format)
    grad = quantize_group(tensors["grad"], scale_format=scale_format)
    x_t = quantize_group(tensors["x"].t(), scale_format=scale_format)
    grad_t = quantize_group(tensors["grad"].t(), scale_format=scale_format)
    assert grad_t.scale_inv.shape == (OUT, cdiv(TOKENS, 128))
    for actual, expected in (
        (backend.fprop(x, w, dtype), exact_groups(x) @ exact_blocks(w).t()),
        (backend.dgrad(grad, transposed(w), dtype), exact_groups(grad) @ exact_blocks(w)),
        (backend.wgrad(grad_t, x_t, dtype), exact_groups(grad_t) @ exact_groups(x_t).t()),
    ):
        assert actual.dtype == dtype
        assert relative_error(actual, expected) < tolerance


def test_products_stay_near_the_unquantized_ones(tensors):
    """E4M3 keeps 4 significant bits: a product of two such operands is off by a few percent."""
    backend, (x, w, grad) = ReferenceBackend(), tensors.values()
    pairs = {
        "fprop": (backend.fprop(quantize_group(x), quantize_block(w), torch.float32), x @ w.t()),
        "dgrad": (
            backend.dgrad(quantize_group(grad), transposed(quantize_block(w)), torch.float32),
            grad @ w,
        ),
        "wgrad": (
            backend.wgrad(quantize_group(grad.t()), quantize_group(x.t()), torch.float32),
            grad.t() @ x,
        ),
    }
    for name, (actual, expected) in pairs.items():
        assert 1e-3 < relative_error(actual, expected) < 0.06, name


def test_reference_serves_every_case():
    backend = ReferenceBackend()
    assert isinstance(backend, GemmBackend)
    assert backend.name == "reference"
    assert backend.supports(torch.device("cpu"), GemmShape(1, 7, 3), "pow2") is None

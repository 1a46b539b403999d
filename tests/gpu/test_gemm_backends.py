"""GPU backends against float64 products of the dequantized operands, in every direction.

Tensor cores sum FP8 products with fewer bits than float32; every backend here restarts the sum
after 128 products, which bounds the error.
"""

from __future__ import annotations

import pytest
import torch

from fp8rl.gemm import BackendChoice, GemmShape, builtin_backends
from fp8rl.gemm.table import DIRECTIONS, table_row
from fp8rl.numerics import Operand, Quantized, quantize_operand, quantize_weight
from support.numeric import relative_error

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)
pytest.importorskip("triton", reason="triton is not installed")

GPU = torch.device("cuda")
BACKENDS = {b.name: b for b in builtin_backends() if b.name != "reference"}
FLOAT32, BFLOAT16 = 2e-3, 2**-8  # measured on an H100: 2e-4 to 1e-3
SHAPES = [
    GemmShape(256, 384, 512),
    GemmShape(1024, 1536, 4096),
    GemmShape(200, 256, 640),
    GemmShape(132, 400, 336),
    GemmShape(37, 200, 300),
    GemmShape(300, 960, 576),
    GemmShape(132, 576, 1536),
    GemmShape(64, 192, 64),
    GemmShape(1, 128, 128),
]


def _exact(q: Quantized, blocks: bool) -> torch.Tensor:
    factors = q.scale_inv.double().repeat_interleave(128, 1)[:, : q.codes.shape[1]]
    if blocks:
        factors = factors.repeat_interleave(128, 0)[: len(q.codes)]
    return q.codes.double() * factors


def _operands(shape: GemmShape, scale_format: str) -> tuple[Operand, Operand, Operand]:
    torch.manual_seed(0)
    x = (
        torch.randn(shape.tokens, shape.in_features, device=GPU)
        * torch.rand(shape.in_features, device=GPU).mul(6).exp()
    )  # some channels much larger, as in language models
    w = torch.randn(shape.out_features, shape.in_features, device=GPU) * 0.02
    grad = torch.randn(shape.tokens, shape.out_features, device=GPU) * 1e-5
    return (
        quantize_operand(x.bfloat16(), scale_format),
        quantize_weight(w.bfloat16(), scale_format),
        quantize_operand(grad.bfloat16(), scale_format),
    )


def _backend(name: str, shape: GemmShape, scale_format: str):
    backend = BACKENDS[name]
    reason = backend.supports(GPU, shape, scale_format)
    if reason is not None:
        pytest.skip(f"{name}: {reason}")
    return backend


@pytest.mark.parametrize("scale_format", ["fp32", "pow2"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", BACKENDS)
def test_every_direction(name, shape, scale_format):
    backend = _backend(name, shape, scale_format)
    x, w, grad = _operands(shape, scale_format)
    y = _exact(x.rowwise, False) @ _exact(w.rowwise, True).t()
    dx = _exact(grad.rowwise, False) @ _exact(w.columnwise, True).t()
    dw = _exact(grad.columnwise, False) @ _exact(x.columnwise, False).t()
    assert relative_error(backend.fprop(x.rowwise, w.rowwise, torch.bfloat16), y) < BFLOAT16
    assert relative_error(backend.dgrad(grad.rowwise, w.columnwise, torch.bfloat16), dx) < BFLOAT16
    for dtype, tolerance in ((torch.bfloat16, BFLOAT16), (torch.float32, FLOAT32)):
        got = backend.wgrad(grad.columnwise, x.columnwise, dtype)
        assert got.dtype == dtype
        assert relative_error(got, dw) < tolerance
        out = dw.to(dtype).mul(3).contiguous()
        assert backend.wgrad(grad.columnwise, x.columnwise, dtype, out) is out
        assert relative_error(out, 4 * dw) < tolerance


@pytest.mark.parametrize("name", BACKENDS)
def test_a_sum_that_does_not_start_where_tma_can_write(name):
    backend = _backend(name, SHAPES[0], "fp32")
    x, _, grad = _operands(SHAPES[0], "fp32")
    rows, cols = SHAPES[0].out_features, SHAPES[0].in_features
    total = torch.zeros(rows * cols + 1, device=GPU)[1:].view(rows, cols)
    product = backend.wgrad(grad.columnwise, x.columnwise, torch.float32)
    assert backend.wgrad(grad.columnwise, x.columnwise, torch.float32, total) is total
    assert relative_error(total, product) < 1e-5


@pytest.mark.parametrize("name", ["scaled_mm", "triton"])
def test_float32_results(name):
    shape = SHAPES[1]
    backend = _backend(name, shape, "fp32")
    x, w, _ = _operands(shape, "fp32")
    y = _exact(x.rowwise, False) @ _exact(w.rowwise, True).t()
    assert relative_error(backend.fprop(x.rowwise, w.rowwise, torch.float32), y) < FLOAT32


@pytest.mark.parametrize("name", BACKENDS)
def test_a_nan_code_shows_in_its_row(name):
    shape = GemmShape(256, 256, 256)
    backend = _backend(name, shape, "fp32")
    x, w, _ = _operands(shape, "fp32")
    x.rowwise.codes.view(torch.uint8)[17, 5] = 0x7F
    y = backend.fprop(x.rowwise, w.rowwise, torch.bfloat16)
    assert y.isnan().all(1).nonzero().flatten().tolist() == [17]
    assert y.isnan().any(1).sum() == 1


@pytest.mark.parametrize("name", BACKENDS)
def test_scales_with_groups_innermost(name):
    shape = GemmShape(256, 256, 512)
    backend = _backend(name, shape, "fp32")
    x, w, _ = _operands(shape, "fp32")
    other = Quantized(x.rowwise.codes, x.rowwise.scale_inv.contiguous())
    assert torch.equal(
        backend.fprop(other, w.rowwise, torch.bfloat16),
        backend.fprop(x.rowwise, w.rowwise, torch.bfloat16),
    )


def test_the_table_names_a_backend_that_serves_this_gpu():
    shape, choice = GemmShape(512, 512, 512), BackendChoice(BACKENDS, ["fp32", "pow2"])
    for direction in DIRECTIONS:
        order = table_row(GPU, grouped=False)[direction]
        ready = [name for name in order if BACKENDS[name].supports(GPU, shape, "fp32") is None]
        assert choice.pick(GPU, shape, "m", direction).name == ready[0]

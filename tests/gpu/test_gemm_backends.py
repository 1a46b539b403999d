"""GPU backends against float64 products of the dequantized operands, in every direction.

Tensor cores sum FP8 products with fewer bits than float32; every backend here restarts the sum
after 128 products, which bounds the error.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fp8rl.gemm import BackendChoice, GemmShape, GroupedShape, builtin_backends
from fp8rl.gemm.table import DIRECTIONS, table_row
from fp8rl.numerics import ExpertRows, Quantized, quantize_grouped, row_alignment
from support.gemm import operands, product_error
from support.numeric import relative_error
from support.shapes import SPLITS

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)
pytest.importorskip("triton", reason="triton is not installed")

GPU = torch.device("cuda")
BACKENDS = {b.name: b for b in builtin_backends() if b.name != "reference"}
GROUPED = {name: b for name, b in BACKENDS.items() if hasattr(b, "grouped_fprop")}
LIMITS = {torch.bfloat16: 2**-8, torch.float32: 2e-3}  # measured on an H100: 2e-4 to 1e-3
OUT, IN = 256, 640
ALONE = [
    GemmShape(256, 384, 512),
    GemmShape(1024, 1536, 4096),
    GemmShape(37, 200, 300),
    GemmShape(300, 960, 576),
    GemmShape(64, 192, 64),
    GemmShape(1, 128, 128),
]
OF_EXPERTS = [GroupedShape(tuple(splits), OUT, IN) for splits in SPLITS]


def _backend(name: str, shape: Any) -> Any:
    backend = BACKENDS[name]
    supports = getattr(backend, f"supports{'_grouped' * isinstance(shape, GroupedShape)}")
    reason = supports(GPU, shape, "fp32")
    if reason is not None:
        pytest.skip(f"{name}: {reason}")
    return backend


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize(
    ("name", "shape"),
    [*((n, s) for n in BACKENDS for s in ALONE), *((n, s) for n in GROUPED for s in OF_EXPERTS)],
    ids=str,
)
def test_every_direction(name, shape, dtype):
    shape = shape._replace(dtype=dtype)
    backend = _backend(name, shape)
    for direction in DIRECTIONS:
        assert product_error(backend, direction, shape, GPU) < LIMITS[dtype], direction


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("name", BACKENDS)
def test_a_sum_that_does_not_start_where_tma_can_write(name, dtype):
    backend = _backend(name, ALONE[0])
    a, b, _ = operands("wgrad", ALONE[0], GPU)
    rows, columns = ALONE[0].out_features, ALONE[0].in_features
    product = backend.wgrad(a, b, torch.float32)
    total = torch.empty(rows * columns + 1, device=GPU, dtype=dtype)[1:].view(rows, columns)
    total.copy_(3 * product)
    assert backend.wgrad(a, b, dtype, total) is total
    assert relative_error(total, 4 * product) < LIMITS[dtype]


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("name", GROUPED)
def test_sums_of_experts_lie_anywhere_in_any_order(name, dtype):
    """Last expert first, as in megatron's buffers, behind something else or each on its own."""
    backend = _backend(name, OF_EXPERTS[0])
    splits = OF_EXPERTS[0].sizes
    rows = ExpertRows(splits, row_alignment(GPU), list(reversed(range(len(splits)))))
    torch.manual_seed(0)
    grad, x = (
        quantize_grouped(torch.randn(sum(splits), n, device=GPU).bfloat16(), rows)[1]
        for n in (OUT, IN)
    )
    products = [product.clone() for product in backend.grouped_wgrad(grad, x, torch.float32)]
    buffer = torch.empty(64 + len(splits) * OUT * IN, device=GPU, dtype=dtype)
    together = list(buffer[64:].view(len(splits), OUT, IN).unbind())
    for totals in (together, [torch.empty_like(total) for total in together]):
        for total, product in zip(totals, products, strict=True):
            total.copy_(3 * product)
        backend.grouped_wgrad(grad, x, dtype, totals)
        for total, product in zip(totals, products, strict=True):
            assert relative_error(total, 4 * product) < LIMITS[dtype]


def _nan_row(y):
    assert y.isnan().any(1).sum() == 1
    return y.isnan().all(1).nonzero().item()


@pytest.mark.parametrize("name", BACKENDS)
def test_a_nan_code_shows_in_its_row_alone(name):
    shape = GemmShape(300, OUT, IN)
    a, b, _ = operands("fprop", shape, GPU)
    a.codes.view(torch.uint8)[17, 5] = 0x7F
    assert _nan_row(_backend(name, shape).fprop(a, b, torch.bfloat16)) == 17


@pytest.mark.parametrize("name", GROUPED)
def test_an_infinite_input_shows_in_its_row_alone(name):
    """Of a row that two experts' blocks share, so that its codes lie there twice."""
    expert_rows = ExpertRows((100, 0, 200, 0, 0), row_alignment(GPU))
    backend = _backend(name, GroupedShape(expert_rows.splits, OUT, IN))
    x = torch.randn(300, IN, device=GPU).bfloat16()
    x[117, 5] = torch.inf
    rows, _ = quantize_grouped(x, expert_rows, columnwise=False)
    _, weights, _ = operands("fprop", GroupedShape(expert_rows.splits, OUT, IN), GPU)
    assert _nan_row(backend.grouped_fprop(rows, weights, torch.bfloat16)) == 117


@pytest.mark.parametrize("name", BACKENDS)
def test_scales_with_groups_innermost(name):
    backend = _backend(name, ALONE[0])
    a, b, _ = operands("fprop", ALONE[0], GPU)
    other = Quantized(a.codes, a.scale_inv.contiguous())
    y = backend.fprop(a, b, torch.bfloat16)
    assert torch.equal(backend.fprop(other, b, torch.bfloat16), y)


def test_the_table_names_a_backend_that_serves_this_gpu():
    shape, choice = GemmShape(512, 512, 512), BackendChoice(BACKENDS, ["fp32", "pow2"])
    for direction in DIRECTIONS:
        order = table_row(GPU, grouped=False)[direction]
        ready = [name for name in order if BACKENDS[name].supports(GPU, shape, "fp32") is None]
        assert choice.pick(GPU, shape, "m", direction).name == ready[0]

"""One FP8 linear layer, forward and backward, with each backend's kernels: every result against
float64 products of operands that the CPU's reference quantizes."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)
pytest.importorskip("megatron.core")

from fp8rl.gemm import BackendChoice, GemmBackend, GemmShape, builtin_backends
from fp8rl.numerics import dequantize_block, dequantize_group, quantize_block, quantize_group
from fp8rl.training.layout import RowLayout, plain_layout, qkv_layout
from fp8rl.training.linear import Call, Fp8State
from fp8rl.training.weight_codes import KeepingCodes, WeightCodes, WeightEpoch
from megatron_fp8rl.layers.linear import fp8_linear
from support.numeric import relative_error

GPU = torch.device("cuda")
BACKENDS = [b for b in builtin_backends() if b.name != "reference"]
BFLOAT16, SUM = 2**-8, 2e-3  # of a result's rounding; of FP8 tensor cores' sums, 2e-4 to 1e-3
CASES = {
    "ragged tokens": (plain_layout("o_proj", 256), 640, 300),
    "interleaved rows": (qkv_layout(4, 2, 64), 256, 256),  # blocks part query groups
    "half groups": (qkv_layout(9, 3, 64), 576, 300),  # SmolLM2-135M's
    "odd sizes": (plain_layout("o_proj", 200), 300, 37),
}


def _groups(x: torch.Tensor, scale_format: str) -> torch.Tensor:
    return dequantize_group(*quantize_group(x.cpu(), scale_format=scale_format)).double()


def _exact(
    layout: RowLayout, weight: torch.Tensor, x: torch.Tensor, grad: torch.Tensor, scale_format: str
) -> list[torch.Tensor]:
    """y, dx and dw."""
    blocks = quantize_block(layout.to_hf(weight.cpu()), scale_format=scale_format)
    w = dequantize_block(*blocks).double()
    return [
        _groups(x, scale_format) @ layout.from_hf(w).t(),
        _groups(layout.to_hf(grad.cpu(), -1), scale_format) @ w,
        _groups(grad.t(), scale_format) @ _groups(x.t(), scale_format).t(),
    ]


@pytest.mark.parametrize(
    ("scale_format", "keep", "main_grad"),
    [("fp32", False, True), ("pow2", True, False)],
    ids=["default", "kept"],
)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
def test_every_direction(
    backend: GemmBackend, case: str, scale_format: str, keep: bool, main_grad: bool
) -> None:
    layout, in_features, tokens = CASES[case]
    shape = GemmShape(tokens, layout.rows, in_features)
    reason = backend.supports(GPU, shape, scale_format)
    if reason is not None:
        pytest.skip(f"{backend.name}: {reason}")
    generator = torch.Generator().manual_seed(0)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator).bfloat16().to(GPU)

    weight = torch.nn.Parameter(random(layout.rows, in_features) * 0.02)
    # Gradients as small as those of a mean over a large batch.
    x, grad = random(tokens, in_features).requires_grad_(), random(tokens, layout.rows) * 1e-6
    total = torch.full(weight.shape, 1e-6, device=GPU)
    if main_grad:
        weight.main_grad, weight.grad_added_to_main_grad = total.clone(), False
    choice = BackendChoice({backend.name: backend}, [scale_format], backend.name)
    epoch = WeightEpoch()
    codes = WeightCodes(layout, scale_format, epoch)
    state = Fp8State("model.layers.0.x", codes, choice, scale_format)
    call = Call(state=state, fusion=False, training=True)
    with KeepingCodes([epoch]) if keep else nullcontext():
        for _ in range(2):  # kept codes serve the second
            y = fp8_linear(x, weight, None, call)
            y.backward(grad)
    expected_y, expected_dx, expected_dw = _exact(
        layout, weight.detach(), x.detach(), grad, scale_format
    )
    assert y.dtype == x.grad.dtype == torch.bfloat16
    assert relative_error(y.detach().cpu(), expected_y) < BFLOAT16
    assert relative_error(x.grad.cpu(), 2 * expected_dx) < 2 * BFLOAT16
    if main_grad:
        assert relative_error((weight.main_grad - total).cpu(), 2 * expected_dw) < SUM
    else:
        assert relative_error(weight.grad.cpu(), 2 * expected_dw) < 2 * BFLOAT16

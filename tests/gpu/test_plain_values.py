"""Values of plain loads on a GPU: seen at the next step, without a wait at each load."""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from fp8rl.errors import RefitError
from vllm_fp8rl.engine.finite_weights import PlainValues

MODEL = torch.nn.Linear(1, 1)


@pytest.mark.parametrize(
    ("count", "value", "contiguous"), [(1, float("nan"), True), (20, float("-inf"), False)]
)
def test_the_bad_one_is_named_until_it_comes_again(
    count: int, value: float, contiguous: bool
) -> None:
    tensors = [torch.randn(300, 200, device="cuda", dtype=torch.bfloat16) for _ in range(count)]
    if not contiguous:
        tensors = [tensor.T for tensor in tensors]
    good = tensors[count // 2].clone()
    tensors[count // 2].view_as(good)[3, 5] = value
    values = PlainValues()
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert values.look([(str(n), t) for n, t in enumerate(tensors)], MODEL)
        for tensor in tensors:
            tensor.fill_(1.0)  # the sender reuses its memory
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for _ in range(2):
        with pytest.raises(RefitError, match=f"'{count // 2}' came with NaN .*1 such"):
            values.require_finite()
    values.look([(str(count // 2), good)], MODEL)
    values.require_finite()

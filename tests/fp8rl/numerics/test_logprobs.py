"""Log-probabilities of chosen words and their gradient in one pass each, against float64."""

from __future__ import annotations

import importlib

import pytest
import torch

from support.triton_device import DEVICE, INTERPRETED

kernels = importlib.import_module("fp8rl.numerics.triton.logprobs")
row_sums, logprob_gradient = kernels.row_sums, kernels.logprob_gradient

CHOSEN = 5


def made(words: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits ``[3, 7, V]`` with strides of ``[7, 3, V]``, as Megatron's head has them."""
    generator = torch.Generator().manual_seed(words)
    logits = 4 * torch.randn(7, 3, words, generator=generator)
    logits[0, 0, CHOSEN] = 40.0  # a word that is all but certain
    chosen = torch.randint(0, words, (3, 7), generator=generator)
    chosen[0, 0] = CHOSEN
    return logits.to(DEVICE, dtype).transpose(0, 1), chosen.to(DEVICE)


@pytest.mark.parametrize(
    ("words", "dtype", "offset"),
    [(100, torch.float32, 0.0), (4096, torch.bfloat16, 1000.0), (9000, torch.float32, 1000.0)],
)
def test_log_probabilities_and_gradients_are_those_of_float64(
    words: int, dtype: torch.dtype, offset: float
) -> None:
    """Also of large logits, which must not round the sum of the small differences."""
    logits, chosen = made(words, dtype)
    logits = logits + offset
    logits[1, 3, 7:90] = float("-inf")  # words that a mask forbids
    chosen[1, 3] = CHOSEN
    exact = logits.double().requires_grad_(True)
    expected = exact.log_softmax(-1).gather(-1, chosen[..., None])[..., 0]
    most, total, logit = row_sums(logits, chosen)
    found = (logit - most) - total.log()
    assert found.dtype == torch.float32
    assert (found - expected).abs().max() < 4e-6
    grad = torch.randn(7, 3, device=DEVICE).T
    expected.backward(grad.double())
    gradient = logprob_gradient(logits, chosen, most, total.log(), grad)
    assert gradient.dtype == dtype
    assert gradient.transpose(0, 1).is_contiguous()  # as Megatron's head multiplies it
    # One rounding to the logits' dtype, of values of any size; triton's interpreter cuts off.
    unit = torch.finfo(dtype).eps / (1 if INTERPRETED else 2)
    error = (gradient.double() - exact.grad).abs()
    assert (error <= 1.01 * unit * exact.grad.abs() + 1e-6 * grad.abs().max()).all()


def test_parts_of_the_vocabulary_add_up() -> None:
    """As on ranks that share it: the largest of all, and sums over the ranks."""
    logits, chosen = made(9000, torch.bfloat16)
    whole = row_sums(logits, chosen)
    parts = [row_sums(logits[..., at : at + 4500], chosen - at) for at in (0, 4500)]
    most = torch.maximum(parts[0][0], parts[1][0])
    assert torch.equal(most, whole[0])
    total = sum(each[1] * (each[0] - most).exp() for each in parts)
    assert torch.allclose(total, whole[1], rtol=1e-5)
    assert torch.equal(parts[0][2] + parts[1][2], whole[2])


def test_a_nan_stays_one_and_each_row_needs_a_word() -> None:
    logits, chosen = made(100, torch.float32)
    with pytest.raises(ValueError, match="one word for each row"):
        row_sums(logits, chosen[:, :3])
    logits[1, 2, 50] = float("nan")
    most, total, logit = row_sums(logits, chosen)
    found = logit - most - total.log()
    assert found[1, 2].isnan() and found.isnan().sum() == 1

"""Log ratios of two policies on the same tokens, in float32, at token or sequence level."""

from __future__ import annotations

from typing import Literal

import torch

from fp8rl.errors import BatchError

Level = Literal["token", "sequence", "geometric"]

SATURATION = 1.0e4
"""Stands for an infinite log ratio, so that two of opposite sign do not sum to NaN."""


def check_batch(mask: torch.Tensor, **logprobs: torch.Tensor) -> None:
    """Raise BatchError unless ``mask`` and floating-point ``logprobs`` fit together.

    A mask of floats may hold 0 and 1 alone: a NaN, or a weight in its place, would count as 1.
    """
    check_shapes(**logprobs, mask=mask)
    for name, tensor in logprobs.items():
        if not tensor.is_floating_point():
            raise BatchError(f"{name} must be floating-point numbers, not {tensor.dtype}.")
    if mask.is_complex() or (mask.is_floating_point() and ((mask != 0) & (mask != 1)).any()):
        raise BatchError(
            "mask must say which tokens count, and it holds other numbers than 0 and 1; give a "
            "bool tensor."
        )


def check_tensors(**tensors: torch.Tensor) -> None:
    """Raise BatchError unless all are dense tensors, on one device."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise BatchError(
                f"{name} must be a tensor, not {type(tensor).__name__}; make one with "
                "torch.as_tensor."
            )
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
            raise BatchError(f"{name} must be a dense tensor with values.")
    if len({tensor.device for tensor in tensors.values()}) > 1:
        given = ", ".join(f"{name} on {tensor.device}" for name, tensor in tensors.items())
        raise BatchError(f"All of these must be on one device: {given}.")


def check_shapes(**tensors: torch.Tensor) -> None:
    """Raise BatchError unless all are tensors on one device, two-dimensional and of one shape."""
    check_tensors(**tensors)
    shapes = {tuple(t.shape) for t in tensors.values()}
    if len(shapes) != 1 or len(next(iter(shapes))) != 2:
        given = ", ".join(f"{name} {tuple(t.shape)}" for name, t in tensors.items())
        raise BatchError(f"All of these must have one shape [B, T]: {given}.")


def counted(x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    """``x`` in float32 with 0 where ``keep`` is false; no gradient or NaN crosses from there."""
    return torch.where(keep, x.float(), 0.0)


def refuse(bad: torch.Tensor, x: torch.Tensor, what: str) -> None:
    """Raise BatchError with the first value of ``x`` where ``bad`` (bool ``[B, T]``) is true."""
    if bad.any():
        row, column = bad.nonzero()[0].tolist()
        value = str(x[row, column].item()).replace("nan", "NaN")
        raise BatchError(
            f"{what} is {value} at row {row}, token {column}, which the mask "
            f"counts ({int(bad.sum())} such in all); mask it out, or find the step that made it."
        )


def token_log_ratio(
    numerator: torch.Tensor, denominator: torch.Tensor, keep: torch.Tensor, what: str
) -> torch.Tensor:
    """``numerator - denominator``, both upcast to float32 before the subtraction.

    Args:
        numerator: logprobs ``[B, T]``, any float dtype; gradients flow.
        denominator: logprobs ``[B, T]``.
        keep: bool ``[B, T]``; values elsewhere are never read and give 0.
        what: name of the difference in an error.

    Returns:
        float32 ``[B, T]``; infinite differences are held at plus or minus :data:`SATURATION`.

    Raises:
        BatchError: the difference is NaN at a kept place.
    """
    difference = counted(numerator, keep) - counted(denominator, keep)
    refuse(difference.isnan(), difference, what)
    return difference.clamp(-SATURATION, SATURATION)


def reduce_level(log_ratio: torch.Tensor, keep: torch.Tensor, level: Level) -> torch.Tensor:
    """Log ratio of the unit each token belongs to.

    Args:
        log_ratio: float32 ``[B, T]``, 0 where ``keep`` is false.
        keep: bool ``[B, T]``.
        level: ``token``: the token's own; ``sequence``: the sum over its row (log of the product
            of ratios); ``geometric``: the mean over its row (log of their geometric mean).

    Returns:
        float32 ``[B, T]``, constant along a row but for ``token``. A row without tokens gives 0.
    """
    if level == "token":
        return log_ratio
    value = log_ratio.sum(dim=1, keepdim=True)
    if level == "geometric":
        value = value / keep.sum(dim=1, keepdim=True).clamp(min=1)
    return value.expand_as(log_ratio)


def bounded_exp(log_ratio: torch.Tensor, clamp: float) -> torch.Tensor:
    """``exp`` after clamping to ``[-clamp, clamp]``: finite and above 0 whatever the input."""
    return log_ratio.clamp(-clamp, clamp).exp()


def bounded_k3(log_ratio: torch.Tensor, clamp: float) -> torch.Tensor:
    """Return the k3 estimator of a KL, ``exp(x) - 1 - x``, clamped likewise: finite as well."""
    x = log_ratio.clamp(-clamp, clamp)
    return torch.expm1(x) - x

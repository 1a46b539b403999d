"""The shared functions in plain torch, for a CPU: tests, and runs without a GPU.

The modules of this package describe those that both devices have.

Sums are in float64 and rounded once to the tensors' 16 bits, so that their order does not show.
"""

from __future__ import annotations

import torch

from fp8rl.numerics.reference import quantize_operand
from fp8rl.numerics.reference import swiglu as swiglu  # the trainer's, before its quantization
from fp8rl.recipe import ScaleFormat


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    wide = x.double()
    scale = (wide.square().mean(-1, keepdim=True) + epsilon).rsqrt()
    return (wide * scale * weight.double()).to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    total = x + residual
    return rms_norm(total, weight, epsilon), total


def rms_norm_quantize(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    epsilon: float,
    scale_format: ScaleFormat,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """See :func:`fp8rl.kernels.norm.rms_norm_quantize`; scales are not padded."""
    total = x if residual is None else x + residual
    side = quantize_operand(rms_norm(total, weight, epsilon), scale_format, True, False).rowwise
    assert side is not None
    return side.codes, side.scale_inv.t(), None if residual is None else total


def rotate(
    query: torch.Tensor,
    key: torch.Tensor,
    positions: torch.Tensor,
    table: torch.Tensor,
    *,
    norms: tuple[torch.Tensor, torch.Tensor, float] | None = None,
    back: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    if norms is not None:
        query, key = rms_norm(query, norms[0], norms[2]), rms_norm(key, norms[1], norms[2])
    cos, sin = table[positions].unsqueeze(1).chunk(2, -1)
    sin = -sin if back else sin
    return _rotated(query, cos, sin), _rotated(key, cos, sin)


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


def multiply(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return ``x @ weight.T`` in the dtype of ``x`` ``[.., K]``; ``weight`` is ``[N, K]``."""
    return (x.double() @ weight.double().t()).to(x.dtype)


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, softmax_scale: float
) -> torch.Tensor:
    """Compute causal attention of the last tokens of one sequence.

    Args:
        query: ``[tokens, heads, head_size]``.
        key, value: ``[keys, kv_heads, head_size]`` of the whole sequence, as its cache holds them.
        softmax_scale: factor of the scores.

    Returns:
        like ``query``.
    """
    grouped = query.double().unflatten(1, (key.shape[1], -1))
    scores = torch.einsum("thgd,khd->hgtk", grouped, key.double()) * softmax_scale
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1 + len(key) - len(query))
    weights = scores.masked_fill(later, float("-inf")).softmax(-1)
    return torch.einsum("hgtk,khd->thgd", weights, value.double()).flatten(1, 2).to(query.dtype)


def token_logprobs(
    logits: torch.Tensor, ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See :func:`fp8rl.kernels.logprobs.token_logprobs`; by the function of vLLM's sampler."""
    here = (ids >= 0) & (ids < logits.shape[-1])
    target_ids = ids.where(here, 0).long()[..., None]
    found = (
        logits.log_softmax(-1, dtype=torch.float32).gather(-1, target_ids)[..., 0].where(here, 0.0)
    )
    largest = logits.amax(-1).float()
    return found, largest, (logits.float() - largest[..., None]).logsumexp(-1)


def logprob_gradient(
    logits: torch.Tensor,
    target_ids: torch.Tensor,
    row_max: torch.Tensor,
    logsumexp: torch.Tensor,
    grad: torch.Tensor,
) -> torch.Tensor:
    is_chosen = torch.arange(logits.shape[-1]) == target_ids[..., None]
    share = (logits.float() - row_max[..., None] - logsumexp[..., None]).exp()
    return ((is_chosen.float() - share) * grad[..., None]).to(logits.dtype)

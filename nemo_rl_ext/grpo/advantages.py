"""Group-relative advantages: the reward of each answer against the answers to the same prompt."""

from __future__ import annotations

import math
from numbers import Real

import torch

from fp8rl.errors import BatchError
from nemo_rl_ext.grpo.log_ratio import check_tensors


def group_relative_advantages(
    rewards: torch.Tensor,
    group_ids: torch.Tensor,
    *,
    normalize_std: bool = True,
    leave_one_out: bool = False,
    eps: float = 1e-6,
) -> torch.Tensor:
    """Advantage of each answer within its group.

    With ``r`` the rewards of one group of ``n`` answers:

    - default: ``(r_i - mean(r)) / (std(r) + eps)``, GRPO (DeepSeekMath, arXiv 2402.03300, 4.1.2),
      where std is the sample standard deviation (divisor ``n - 1``);
    - ``normalize_std=False``: ``r_i - mean(r)``, Dr. GRPO (arXiv 2503.20783), which does not
      favour prompts whose rewards hardly vary;
    - ``leave_one_out=True``: the mean is that of the other ``n - 1`` answers, RLOO (arXiv
      2402.14740; without std). With ``normalize_std`` it is divided by the std of all ``n``.

    Args:
        rewards: float or integer, ``[B]``.
        group_ids: integer, ``[B]``; equal ids form a group, of any size and in any order.
        normalize_std: divide by the group's standard deviation.
        leave_one_out: leave an answer out of its own baseline.
        eps: added to the standard deviation.

    Returns:
        float32 ``[B]`` on the rewards' device, detached. A group of one answer, or of answers with
        one reward, has advantage exactly 0: it carries no signal.

    Raises:
        BatchError: no tensors, or on two devices; wrong shapes; group ids that are no integers; a
            reward that is not finite; or an impossible ``eps``.
    """
    check_tensors(rewards=rewards, group_ids=group_ids)
    if rewards.is_complex():
        raise BatchError(f"rewards must be real numbers, not {rewards.dtype}.")
    if not (isinstance(eps, Real) and 0 <= eps < math.inf):
        raise BatchError(f"eps is {eps!r}; give a number of at least 0.")
    if rewards.ndim != 1 or rewards.shape != group_ids.shape:
        raise BatchError(
            f"rewards {tuple(rewards.shape)} and group_ids {tuple(group_ids.shape)} must both be "
            "[B]."
        )
    if group_ids.is_floating_point() or group_ids.is_complex() or group_ids.dtype == torch.bool:
        raise BatchError(f"group_ids must be integers, not {group_ids.dtype}.")
    values = rewards.detach().double()
    if not torch.isfinite(values).all():
        row = int((~torch.isfinite(values)).nonzero()[0])
        raise BatchError(
            f"rewards[{row}] is {values[row].item()}; give every answer a finite reward."
        )
    _, group = torch.unique(group_ids.to(values.device), return_inverse=True)
    groups = int(group.max()) + 1 if group.numel() else 0

    def total(x: torch.Tensor) -> torch.Tensor:
        return x.new_zeros(groups).index_add_(0, group, x)

    def extreme(how: str) -> torch.Tensor:
        return values.new_zeros(groups).scatter_reduce_(0, group, values, how, include_self=False)

    size = total(torch.ones_like(values))
    centred = values - (total(values) / size)[group]
    others = (size - 1).clamp(min=1)
    advantages = centred
    if leave_one_out:
        advantages = centred * (size / others)[group]
    if normalize_std:
        std = (total(centred.square()) / others).sqrt()
        advantages = advantages / (std + eps)[group]
    # Rounding of the mean must not become a signal once it is divided by a std near zero.
    flat = extreme("amax") == extreme("amin")
    return torch.where(flat[group], 0.0, advantages).float()

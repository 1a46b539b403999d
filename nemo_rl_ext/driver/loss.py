"""`CorrectedPGLossFn`: upstream's clipped loss with our importance weights instead of its own.

This module imports NeMo RL; :mod:`nemo_rl_ext.patches.loss` imports it where ``loss_fn.fp8rl`` is
set.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from nemo_rl.algorithms.loss.interfaces import MetricNormalizer
from nemo_rl.algorithms.loss.loss_functions import ClippedPGLossFn

from fp8rl.errors import BatchError, UnsupportedError
from nemo_rl_ext.config.drivers import BLOCK, LOSS
from nemo_rl_ext.config.plan import RunPlan
from nemo_rl_ext.driver.batch_correction import WEIGHTS, BatchCorrection
from nemo_rl_ext.driver.mismatch_guard import MismatchGuard
from nemo_rl_ext.grpo.importance_sampling import correct, resolve_corrector

if TYPE_CHECKING:
    from nemo_rl_ext.driver.run_state import RunState


class CorrectedPGLossFn(ClippedPGLossFn):
    """``ClippedPGLossFn`` corrected by ``loss_fn.fp8rl.importance_sampling``.

    Every form of upstream's policy term (PPO clip, dual clip, GSPO, CISPO, on-policy) is linear in
    a non-negative factor of the advantage, so the weights go there and upstream's code runs
    unchanged, with its own correction off; KL, the loss on positive examples and metrics are
    untouched. Weights are the whole
    batch's (:data:`nemo_rl_ext.driver.batch_correction.WEIGHTS`) where the loop carries them to the
    workers. Otherwise they are made here from the sequences at hand, which gives the same for every
    setting but ``self_normalize``.

    Metrics are upstream's, and ``fp8rl_is_weight_mean``. It travels by reference: a worker without
    this package fails with a ModuleNotFoundError that names it.
    """

    run_of_process: Callable[[], RunState]
    """Set by :mod:`nemo_rl_ext.patches.loss`; it travels with the loss."""

    def __init__(self, cfg: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(cfg, *args, **kwargs)
        if getattr(self, "opd_full", None) is not None:  # newer than 7ea279a
            raise UnsupportedError(
                f"'{LOSS}.{BLOCK}' corrects a policy gradient, and on_policy_distillation_full has "
                f"none; remove '{LOSS}.{BLOCK}' or on_policy_distillation_full."
            )
        plan = RunPlan.of(cfg)
        assert plan is not None  # by which upstream's class became this one
        self.plan = plan
        self.use_importance_sampling_correction = False
        self.truncated_importance_sampling_type = None
        self.truncated_importance_sampling_ratio = None
        self.metric_normalizations.pop("is_oob_ratio", None)
        self.metric_normalizations["fp8rl_is_weight_mean"] = MetricNormalizer.TOKENS
        self._begin()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k != "_corrector"}

    def _begin(self) -> None:
        """Prepare the correction of whole batches in this process.

        Both the driver and the single controller's actor hold the loss and correct batches.
        """
        plan, run = self.plan, self.run_of_process()
        run.plan = run.plan or plan
        settings = plan.recipe.importance_sampling
        self._corrector = resolve_corrector(settings.corrector)
        if run.correction is None or run.correction.settings != settings:
            guard = None
            if plan.guard is not None:
                guard = MismatchGuard(plan.guard, bf16=not plan.recipe.rollout)
            run.correction = BatchCorrection(settings, guard, in_pieces=plan.in_pieces)

    def __call__(
        self,
        next_token_logprobs: torch.Tensor,
        data: Any,
        global_valid_seqs: torch.Tensor,
        global_valid_toks: torch.Tensor,
        *more: Any,
        **options: Any,
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """As ``ClippedPGLossFn.__call__``.

        Raises:
            BatchError: a counted logprob is NaN, or ``self_normalize`` without the whole batch's
                weights.
        """
        mask = data["token_mask"][:, 1:] * data["sample_mask"].unsqueeze(-1)
        weights = self._weights(next_token_logprobs, data, mask)
        advantages = data["advantages"].clone()
        advantages[:, 1:] *= weights.to(advantages.dtype)
        loss, metrics = super().__call__(
            next_token_logprobs,
            {**data, "advantages": advantages},
            global_valid_seqs,
            global_valid_toks,
            *more,
            **options,
        )
        mean = (weights * mask).sum() / (global_valid_toks + 1e-8)
        return loss, {**metrics, "fp8rl_is_weight_mean": float(mean)}

    def _weights(
        self, next_token_logprobs: torch.Tensor, data: Any, mask: torch.Tensor
    ) -> torch.Tensor:
        settings = self.plan.recipe.importance_sampling
        if WEIGHTS in data:
            return data[WEIGHTS][:, 1:]
        if settings.self_normalize:
            raise BatchError(
                f"{LOSS}.{BLOCK}.importance_sampling.self_normalize is a mean over the whole "
                f"batch, which came without '{WEIGHTS}'; set it to false in this loop."
            )
        if not mask.any():
            return torch.zeros_like(mask, dtype=torch.float32)
        if self.force_on_policy_ratio:
            trainer = next_token_logprobs.detach()
        else:
            trainer = data["prev_logprobs"][:, 1:]
        rollout = data["generation_logprobs"][:, 1:]
        return correct(rollout, trainer, mask != 0, settings, self._corrector).weights

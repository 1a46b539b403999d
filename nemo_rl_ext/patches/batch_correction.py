"""The whole batch before its advantages: correction, rejection, guard.

Why: with sequence packing the loss is called for one sequence at a time; rejection must leave the
denominators, and self-normalisation, ESS and the guard need the whole batch.
How: wraps ``compute_and_apply_seq_logprob_error_masking``, which the synchronous, asynchronous and
single-controller loops all call with masks and both engines' logprobs; what it returns is logged.
Upstream: ``nemo_rl/algorithms/grpo.py``.
Until: NeMo RL has a hook for a batch before its advantages.
"""

from __future__ import annotations

import functools
import inspect
import math
from types import ModuleType
from typing import Any

from nemo_rl_ext.patch_finder import PatchFinder
from nemo_rl_ext.patches.upstream import Upstream, resolve

_THRESHOLD = "seq_logprob_error_threshold"
UPSTREAM = (
    Upstream(
        "nemo_rl.algorithms.grpo",
        "compute_and_apply_seq_logprob_error_masking",
        f"train_data, rewards, {_THRESHOLD}",
    ),
)


def apply(module: ModuleType, finder: PatchFinder) -> None:
    masking = resolve(module, UPSTREAM[0])

    @functools.wraps(masking)
    def correcting(*args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(masking).bind(*args, **kwargs)
        if (
            given.arguments.get(_THRESHOLD) == math.inf
        ):  # by config/upstream.py: it would drop NaN first
            given.arguments[_THRESHOLD] = None
        data, run, equal = given.arguments["train_data"], finder.run, {}
        plan = run.plan
        if plan is not None and plan.recipe.exact:
            # Before upstream masks sequences that differ.
            from nemo_rl_ext.driver.exactness import equal_logprobs

            equal = equal_logprobs(data, plan.model, plan.recipe, on_policy=not plan.queues_batches)
            if run.correction is not None and run.correction.in_pieces:
                run.correction.count_equal(data)
        metrics = masking(*given.args, **given.kwargs)
        metrics.update(equal)
        if run.correction is not None:
            masked = metrics["mean_seq_mult_prob_error"] if metrics["num_masked_seqs"] else None
            metrics.update(run.correction.correct(data, masked=masked))
        return metrics

    setattr(module, UPSTREAM[0].name, correcting)

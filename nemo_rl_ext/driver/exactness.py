"""Whether ``exact`` holds: which sampled tokens have the trainer's log-probabilities."""

from __future__ import annotations

import json
import logging
import shlex
from collections.abc import Mapping
from typing import Any

from fp8rl import Recipe
from nemo_rl_ext.names import LOGGER

logger = logging.getLogger(LOGGER)


def equal_logprobs(
    train_data: Mapping[str, Any], model: str, recipe: Recipe, *, on_policy: bool
) -> dict[str, float]:
    """Return the share of the tokens in the loss whose log-probabilities are equal to the bit.

    Args:
        train_data: ``token_mask``, ``prev_logprobs``, ``generation_logprobs`` ``[B, S]``,
            ``sample_mask`` ``[B]``.
        on_policy: the batch was sampled with the trainer's weights; a share below 1 is then an
            error in the log.
    """
    equal, total = count_equal(train_data)
    if not total:
        return {}
    if on_policy and equal < total:
        logger.error(
            "fp8rl: exact does not hold: %d of %d tokens have other log-probabilities in the "
            "trainer than in the rollout; the first module that differs is found by: %s",
            total - equal,
            total,
            _command(model, recipe),
        )
    return {"fp8rl/equal_logprobs": equal / total}


def count_equal(train_data: Mapping[str, Any]) -> tuple[int, int]:
    """Count the tokens in the loss: those with equal log-probabilities, and all."""
    counts = (train_data["token_mask"] * train_data["sample_mask"].unsqueeze(-1)) != 0
    counts[:, 0] = False  # a first token has no log-probability
    equal = train_data["generation_logprobs"] == train_data["prev_logprobs"]
    return int((equal & counts).sum()), int(counts.sum())


def _command(model: str, recipe: Recipe) -> str:
    """Return the command line that compares the modules of a model under the recipe of a run."""
    given = recipe.model_dump(mode="json", exclude_defaults=True)
    options = [] if given == {"exact": True} else ["--recipe", json.dumps(given)]
    return shlex.join(["fp8rl", "exact", model, *options])

"""Checks of a run's model and pins in the driver, before Ray starts workers that would fail."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from fp8rl import PluginManager, Recipe
from fp8rl.errors import ModelError, PinError, RecipeError, UnsupportedError
from fp8rl.families import config_module_names
from nemo_rl_ext.driver.mismatch_guard import LOGGER

logger = logging.getLogger(LOGGER)

_MEDIA = ("vision_config", "audio_config", "thinker_config")
"""Keys of the ``config.json`` of a model that takes more than text."""


def check_pins(recipe: Recipe, where: str, policy: Mapping[str, Any]) -> None:
    """Refuse a multimodal model, and pins that match nothing or half of a fused module.

    Where the model's config cannot be read here, or its modules are unknown, the workers check.

    Args:
        recipe: the run's recipe.
        where: full path of the key that holds it.
        policy: NeMo RL's section, with ``model_name`` and perhaps ``hf_config_overrides``.

    Raises:
        RecipeError: with the path of the pin.
        ModelError: the config has numbers that no model can have.
        UnsupportedError: a multimodal model is to run in FP8.
    """
    config = _model_config(policy)
    if (recipe.rollout or recipe.training) and any(key in config for key in _MEDIA):
        raise UnsupportedError(
            f"'{where}' does not serve '{policy['model_name']}', a multimodal model; remove the "
            "block."
        )
    try:
        names = config_module_names(config)
    except KeyError:
        names = None
    except ModelError as error:
        raise ModelError(f"'{policy['model_name']}': {error}") from None
    if names is None:
        logger.warning(
            "fp8rl: the modules of '%s' cannot be told here; pins are checked by the workers.",
            policy.get("model_name"),
        )
        return
    try:
        PluginManager().pin_policy(recipe.pins, names)
    except PinError as error:
        raise RecipeError(f"{where}.{error} ('{policy['model_name']}')") from error


def _model_config(policy: Mapping[str, Any]) -> dict[str, Any]:
    """Empty where it cannot be read."""
    from transformers import PretrainedConfig

    try:
        data, _ = PretrainedConfig.get_config_dict(policy["model_name"])
    except (OSError, KeyError):
        return {}
    return {**data, **(policy.get("hf_config_overrides") or {})}

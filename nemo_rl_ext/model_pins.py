"""Pins of a run against its model, in the driver, before Ray has workers that would refuse them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from fp8rl import PluginManager, Recipe
from fp8rl.errors import ModelError, PinError, RecipeError
from fp8rl.pinning import config_module_names
from nemo_rl_ext.guard import LOGGER

logger = logging.getLogger(LOGGER)


def check_pins(recipe: Recipe, where: str, policy: Mapping[str, Any]) -> None:
    """Refuse pins that match nothing of the model, or half of a fused module.

    Where the model's config cannot be read here, or its modules are not known, the workers check.

    Args:
        recipe: of the run.
        where: full path of the key that holds it.
        policy: NeMo RL's section, with ``model_name`` and perhaps ``hf_config_overrides``.

    Raises:
        RecipeError: with the path of the pin.
        ModelError: a config with numbers that no model has.
    """
    names = _module_names(policy)
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


def _module_names(policy: Mapping[str, Any]) -> list[str] | None:
    from transformers import PretrainedConfig

    try:
        data, _ = PretrainedConfig.get_config_dict(policy["model_name"])
        return config_module_names({**data, **(policy.get("hf_config_overrides") or {})})
    except (OSError, KeyError):
        return None
    except ModelError as error:
        raise ModelError(f"'{policy['model_name']}': {error}") from None

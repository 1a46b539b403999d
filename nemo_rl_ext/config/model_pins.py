"""Checks of a run's model and pins in the driver, before Ray starts workers that would fail."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from fp8rl import PluginManager, Recipe
from fp8rl.errors import ModelError, PinError, RecipeError, UnsupportedError
from fp8rl.families import config_module_names
from nemo_rl_ext.config.drivers import MEGATRON
from nemo_rl_ext.names import LOGGER

logger = logging.getLogger(LOGGER)

_MEDIA = ("vision_config", "audio_config", "thinker_config")
"""Keys of the ``config.json`` of a model that takes more than text."""


def check_pins(recipe: Recipe, where: str, policy: Mapping[str, Any]) -> None:
    """Refuse a multimodal model, and pins that match nothing or half of a fused module.

    Where the model's config cannot be read here, or its modules are unknown, the workers check.
    A warning names what grouped experts in FP8 need, since the worker's environment cannot be
    examined from here.

    Args:
        recipe: the run's recipe.
        where: full path of the key that holds it.
        policy: NeMo RL's section, with ``model_name`` and perhaps ``hf_config_overrides``.

    Raises:
        RecipeError: with the path of the pin.
        ModelError: the config has numbers that no model can have.
        UnsupportedError: a multimodal model is to run in FP8.
    """
    config = model_config(policy)
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
    grouped = (policy.get("megatron_cfg") or {}).get("moe_grouped_gemm")
    if names is None:
        logger.warning(
            "fp8rl: the modules of '%s' are not known here; pins are checked by the workers.",
            policy.get("model_name"),
        )
        fp8_experts = bool(grouped) and "experts" not in recipe.pins.kinds
    else:
        try:
            pins = PluginManager().pin_policy(recipe.pins, names)
        except PinError as error:
            raise RecipeError(f"{where}.{error} ('{policy['model_name']}')") from error
        experts = (name for name in names if ".experts." in name)
        fp8_experts = any(pins.precision(name) == "fp8" for name in experts)
    # Megatron-Bridge groups the experts of Qwen3-MoE where the key is not set.
    if recipe.training and fp8_experts and grouped in (None, True):
        logger.warning(
            "fp8rl: grouped experts in FP8 need DeepGEMM in the trainer's environment, which NeMo "
            "RL's own 'mcore' environment lacks; install it there, set '%s.moe_grouped_gemm' to "
            "false, or add 'experts' to '%s.pins.kinds'.",
            MEGATRON,
            where,
        )


def model_config(policy: Mapping[str, Any]) -> dict[str, Any]:
    """The ``config.json`` of a run's model with the run's overrides; empty if unreadable."""
    from transformers import PretrainedConfig

    try:
        data, _ = PretrainedConfig.get_config_dict(policy["model_name"])
    except (OSError, KeyError):
        return {}
    return {**data, **(policy.get("hf_config_overrides") or {})}

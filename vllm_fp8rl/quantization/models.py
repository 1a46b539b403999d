"""Models that ``quantization="fp8rl"`` serves, and the HF names of their modules."""

from __future__ import annotations

from typing import Any

from fp8rl.errors import UnsupportedError
from fp8rl.families import (
    WIDEST,
    WIDTH_KEYS,
    Family,
    check_count,
    expert_count,
    family_of,
    has_experts,
    known_family,
    language_config,
    served_types,
    unsupported_reason,
    value_of,
)
from vllm_fp8rl.names import NAME

_WIDTHS = (
    *(key for keys in WIDTH_KEYS.values() for key in keys),
    *("moe_intermediate_size", "num_key_value_heads", "head_dim"),
)
_MTP_COUNTS = ("num_nextn_predict_layers", "num_mtp_modules")


def is_moe(hf_config: Any) -> bool:
    """Return whether a transformers config is that of a MoE model."""
    family = family_of(hf_config)
    return family is None or expert_count(family, language_config(hf_config)) > 0


def check_architecture(hf_config: Any) -> Family:
    """Return a model's family, and refuse one that is not known or not served yet.

    Args:
        hf_config: config of the whole model.

    Raises:
        UnsupportedError: names the family and what is missing.
    """
    reason = unsupported_reason(hf_config, rollout=True, training=False)
    if reason is not None:
        served = "" if family_of(hf_config) else f" The types served are {served_types()}."
        raise UnsupportedError(
            f"quantization='{NAME}' does not serve {reason}; start it without, or add what is "
            f"missing (docs/extending.md).{served}"
        )
    return known_family(hf_config)


def check_cpu_scoring(hf_config: Any) -> None:
    """Refuse a router that fails on a CPU at the first request.

    Args:
        hf_config: config of the language model.

    Raises:
        UnsupportedError: the router takes sigmoids, without groups.
    """
    if value_of(hf_config, "scoring_func") == "sigmoid" and not value_of(hf_config, "n_group"):
        raise UnsupportedError(
            f"vLLM's router for CPUs has no sigmoid without groups, which '{hf_config.model_type}' "
            "needs; run this model on a GPU."
        )


def check_sizes(hf_config: Any) -> None:
    """Refuse sizes that no model has; vLLM accepts some of them and divides by others.

    Raises:
        ModelError: names the key.
    """
    for key in _WIDTHS:
        value = getattr(hf_config, key, None)
        if value is not None:
            check_count(key, value, WIDEST)


def mtp_layers(hf_config: Any) -> range:
    """Return the layers for multi-token prediction, which follow on the decoder layers.

    Args:
        hf_config: the language model's config.
    """
    first = hf_config.num_hidden_layers
    counts = (getattr(hf_config, key, None) or 0 for key in _MTP_COUNTS)
    return range(first, first + max(counts))


def check_widths(hf_config: Any, ranks: int, *, expert_parallel: bool) -> None:
    """Refuse a number of ranks that does not divide the widths that are split.

    Raises:
        UnsupportedError: names the intermediate size of MLPs, or of experts.
    """
    family = known_family(hf_config)
    config = language_config(hf_config)
    experts = [has_experts(family, config, layer) for layer in range(config.num_hidden_layers)]
    widths = {}
    if not all(experts):
        widths["mlp.gate_up_proj"] = "intermediate_size"
    if any(experts) and family.experts and not expert_parallel:
        widths[f"{family.experts.block}.experts"] = family.experts.width
    for module, key in widths.items():
        width = getattr(config, key)
        if width % ranks:
            raise UnsupportedError(
                f"'model.layers.*.{module}' cannot be split: {key}={width} is no multiple of "
                f"tensor_parallel_size={ranks}; choose another tensor parallel size."
            )

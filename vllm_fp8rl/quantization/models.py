"""Models that ``quantization="fp8rl"`` serves."""

from __future__ import annotations

from fp8rl.errors import UnsupportedError
from fp8rl.models.families import served_types
from fp8rl.models.spec import ModelSpec
from vllm_fp8rl.engine.names import NAME


def check_architecture(spec: ModelSpec) -> None:
    """Refuse a model of a family that is not known or not served yet.

    Raises:
        UnsupportedError: names the family and what is missing.
    """
    reason = spec.refused(rollout=True, training=False)
    if reason is not None:
        served = "" if spec.entry else f" The types served are {served_types()}."
        raise UnsupportedError(
            f"quantization='{NAME}' does not serve {reason}; start it without, or add what is "
            f"missing (docs/extending.md).{served}"
        )


def check_cpu_scoring(spec: ModelSpec) -> None:
    """Refuse a router that fails on a CPU at the first request.

    Raises:
        UnsupportedError: the router takes sigmoids, without groups.
    """
    if spec.value("scoring_func") == "sigmoid" and not spec.value("n_group"):
        raise UnsupportedError(
            f"vLLM's router for CPUs has no sigmoid without groups, which '{spec.model_type}' "
            "needs; run this model on a GPU."
        )


def check_widths(spec: ModelSpec, ranks: int, *, expert_parallel: bool) -> None:
    """Refuse sizes that no model has, and ranks that do not divide the widths that are split.

    vLLM accepts some of the sizes and divides by others.

    Raises:
        ModelError: names the key.
        UnsupportedError: names the intermediate size of MLPs, or of experts.
    """
    numbers, experts, widths = spec.numbers, spec.family.experts, {}
    if not all(layer.sparse for layer in spec.layers):
        widths["mlp.gate_up_proj"] = "intermediate_size"
    if experts and any(layer.sparse for layer in spec.layers) and not expert_parallel:
        widths[f"{experts.block}.experts"] = experts.width
    for module, key in widths.items():
        if numbers[key] % ranks:
            raise UnsupportedError(
                f"'model.layers.*.{module}' cannot be split: {key}={numbers[key]} is no multiple "
                f"of tensor_parallel_size={ranks}; choose another tensor parallel size."
            )

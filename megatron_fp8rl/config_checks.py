"""What FP8 training refuses by the config of a model, before anything is changed."""

from __future__ import annotations

from typing import Any

from fp8rl.errors import UnsupportedError
from megatron_fp8rl import compat


def check_config(config: Any) -> None:
    """Refuse a release of megatron-core, or a model's config, that FP8 linears do not serve."""
    compat.check_forward_impl()
    refused = {
        "fp8": "megatron's own FP8 would quantize the same layers",
        "fp4": "megatron's own FP4 would quantize the same layers",
        "enable_autocast": "FP8 linears have no autocast rule",
        "delay_wgrad_compute": "FP8 linears compute weight gradients at once",
        "tp_comm_overlap": "user buffers hold BF16 operands, FP8 linears gather codes",
        "cache_mla_latents": "absorption takes linear_kv_up_proj out of the model",
        "mla_down_proj_fusion": "two HF matrices in one parameter are two matrices of the rollout",
        "heterogeneous_block_specs": "its layers differ in shape, the names of pins do not tell",
        "moe_latent_size": "latent projections around the experts are not served",
    }
    remedy = "set recipe.training to false"
    for option, reason in refused.items():
        value = getattr(config, option, None)
        if value:
            raise UnsupportedError(
                f"config.{option}={value!r}: {reason}; switch it off, or {remedy}."
            )
    if (variant := unknown_attention(config)) is not None:
        raise UnsupportedError(
            f"config.experimental_attention_variant={variant!r}: its linear layers are not known; "
            f"{remedy}."
        )
    check_no_cuda_graphs(
        config, "a replayed graph would go on with the codes of old weights", remedy
    )
    check_router_replay(config)


def check_no_cuda_graphs(config: Any, reason: str, remedy: str) -> None:
    """Refuse a model that megatron-core would run in CUDA graphs.

    Args:
        reason: what a replayed graph would do wrong, for the error.
        remedy: what to do instead of switching graphs off.
    """
    for option in compat.CUDA_GRAPHS:
        value = getattr(config, option, None)
        if value and value != "none":
            raise UnsupportedError(
                f"config.{option}={value!r}: {reason}; switch it off, or {remedy}."
            )


def unknown_attention(config: Any) -> str | None:
    """Return the name of an attention variant whose linear layers are not known here."""
    variant = getattr(config, "experimental_attention_variant", None)
    return None if variant in compat.GATED_DELTA_NETS else variant


def check_router_replay(config: Any) -> None:
    """Refuse routers that would ignore replayed routes without a word.

    Raises:
        UnsupportedError: the router is fused or balances by Sinkhorn: neither asks RouterReplay.
    """
    if not getattr(config, "moe_enable_routing_replay", False):
        return
    reason = None
    if config.moe_router_fusion:
        reason = "moe_router_fusion=True: the fused kernel chooses the experts itself"
    elif "sinkhorn" in config.moe_router_load_balancing_type:  # a name, or a list of names
        reason = "moe_router_load_balancing_type='sinkhorn': it chooses the experts itself"
    if reason:
        raise UnsupportedError(
            f"config.{reason} and would ignore the replayed routes; change it, or set "
            "moe_enable_routing_replay to false."
        )

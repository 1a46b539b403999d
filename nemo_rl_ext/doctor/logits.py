"""Logits that a Megatron trainer goes over in many operations, where fp8rl has one for all."""

from __future__ import annotations

from collections.abc import Iterator

from nemo_rl_ext.config.drivers import LOSS
from nemo_rl_ext.config.keys import Sections
from nemo_rl_ext.names import FUSED_ENV


def logits_in_many_operations(sections: Sections) -> Iterator[str]:
    """Yield a sentence if log-probabilities are not computed in chunks, as fp8rl's kernel needs.

    Args:
        sections: the config of a Megatron trainer in FP8.
    """
    megatron, policy = sections.megatron, sections.policy
    switched_off = str((megatron.get("env_vars") or {}).get(FUSED_ENV)) == "0"
    if (
        LOSS in sections.driver.serves  # which compares log-probabilities
        and policy.get("logprob_chunk_size") is None
        and not switched_off
    ):
        yield (
            "Log-probabilities and the loss take about ten operations over float32 logits. Set "
            "policy.logprob_chunk_size (256, say) and policy.megatron_cfg.defer_fp32_logits: true, "
            "and fp8rl goes over the logits once (docs/nemo_rl.md)."
        )

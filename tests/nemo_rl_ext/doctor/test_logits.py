"""When the doctor says that the trainer could go over the logits once."""

from __future__ import annotations

from typing import Any

import pytest

from nemo_rl_ext.config.drivers import DRIVERS
from nemo_rl_ext.config.keys import Sections
from nemo_rl_ext.doctor.logits import logits_in_many_operations


def told(driver: str = "grpo", chunk: int | None = None, **env: Any) -> list[str]:
    megatron = {"enabled": True} | ({"env_vars": env} if env else {})
    policy = {"megatron_cfg": megatron, "logprob_chunk_size": chunk}
    return list(logits_in_many_operations(Sections({"policy": policy}, DRIVERS[driver])))


@pytest.mark.parametrize("driver", ["grpo", "single_controller", "ppo"])
def test_without_chunks_it_names_the_keys(driver: str) -> None:
    (line,) = told(driver)
    assert "policy.logprob_chunk_size" in line
    assert "policy.megatron_cfg.defer_fp32_logits: true" in line


def test_nothing_is_said_where_nothing_would_change() -> None:
    assert not told(chunk=256)
    assert not told("sft")
    assert not told(FP8RL_FUSED_LOGPROBS="0")
    assert told(FP8RL_FUSED_LOGPROBS="1") and told(OTHER="0")

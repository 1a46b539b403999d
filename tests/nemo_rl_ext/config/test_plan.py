"""What is decided once for a run, and that every worker reads the plan that was made."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from nemo_rl_ext.config.drivers import DRIVERS, PLAN
from nemo_rl_ext.config.keys import Sections
from nemo_rl_ext.config.merge import read
from nemo_rl_ext.config.plan import RunPlan

INT8 = {"kv_cache": {"dtype": "int8_per_token_head"}}


def plan(
    block: dict[str, Any], driver: str = "grpo", *, megatron: bool = True, trainer: bool = True
) -> RunPlan:
    """The plan of a config with the block in the rollouts and, unless told, in the trainer."""
    ours = {"fp8rl": block} if trainer else {}
    policy = {
        "model_name": "a/model",
        "generation": {"vllm_cfg": {"fp8rl": block}},
        "megatron_cfg": {"enabled": megatron, **ours},
    }
    loss = {"use_importance_sampling_correction": True}
    found = read(Sections({"policy": policy, "loss_fn": loss}, DRIVERS[driver]))
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("made", "kv_scales", "rounded_as"),
    [
        (plan({}), "trainer", "fp8_e4m3"),
        (plan({}, trainer=False), "trainer", "fp8_e4m3"),
        (plan({}, megatron=False), "engine", "auto"),
        (plan({}, "ppo"), "engine", "auto"),
        (plan({"kv_cache": {"in_training": False}}), "trainer", "auto"),
        (plan({"kv_cache": {"dtype": "auto"}}), None, "auto"),
        (plan({"rollout": False}), None, "auto"),
        (plan(INT8), None, "int8_per_token_head"),
        (plan(INT8, "ppo"), None, "int8_per_token_head"),
        (plan(INT8, megatron=False), None, "auto"),
    ],
)
def test_who_makes_kv_scales_and_what_the_trainer_rounds(
    made: RunPlan, kv_scales: str | None, rounded_as: str
) -> None:
    assert (made.kv_scales, made.rounded_as) == (kv_scales, rounded_as)


def test_whose_trainer_it_is() -> None:
    whole, rollouts = plan({}), plan({}, trainer=False)
    assert (whole.of_trainer, whole.replaces_trainer) == (whole.recipe, True)
    assert (rollouts.of_trainer, rollouts.replaces_trainer) == (None, True), "it may send KV scales"
    assert not plan({}, megatron=False).replaces_trainer


def test_a_plan_is_read_as_it_was_made_and_stays_so() -> None:
    made = plan({"pins": {"layers": [1]}, "kv_cache": {"recalibrate": "grow"}})
    sent = json.loads(json.dumps({PLAN: made.to_dict()}))
    assert RunPlan.of(sent) == made
    assert RunPlan.of({}) is None
    with pytest.raises(ValidationError, match="frozen"):
        made.driver = "ppo"  # type: ignore[misc]

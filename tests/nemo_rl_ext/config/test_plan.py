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


def plan(block: dict[str, Any], *, megatron: bool = True, trainer: bool = True) -> RunPlan:
    """The plan of a config with the block in the rollouts and, unless told, in the trainer."""
    ours = {"fp8rl": block} if trainer else {}
    policy = {
        "model_name": "a/model",
        "generation": {"vllm_cfg": {"fp8rl": block}},
        "megatron_cfg": {"enabled": megatron, **ours},
    }
    loss = {"use_importance_sampling_correction": True}
    found = read(Sections({"policy": policy, "loss_fn": loss}, DRIVERS["grpo"]))
    assert found is not None
    return found


def test_whose_trainer_it_is() -> None:
    whole, rollouts = plan({}), plan({}, trainer=False)
    assert (whole.of_trainer, whole.replaces_trainer) == (whole.recipe, True)
    assert (rollouts.of_trainer, rollouts.replaces_trainer) == (None, True), "it may send KV scales"
    assert not plan({}, megatron=False).replaces_trainer
    assert whole.kv_scales == rollouts.kv_scales == "trainer"
    own, none = plan({"kv_cache": {"in_training": False}}), plan({"rollout": False})
    assert (own.kv_scales, own.rounded_as) == ("trainer", "auto")
    assert (none.kv_scales, none.rounded_as) == (None, "auto")


def test_a_plan_is_read_as_it_was_made_and_stays_so() -> None:
    made = plan({"pins": {"layers": [1]}, "kv_cache": {"recalibrate": "grow"}})
    sent = json.loads(json.dumps({PLAN: made.to_dict()}))
    assert RunPlan.of(sent) == made
    assert RunPlan.of({}) is None
    with pytest.raises(ValidationError, match="frozen"):
        made.driver = "ppo"  # type: ignore[misc]

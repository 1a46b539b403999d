"""The Megatron worker's metrics of router replay, on a real GPTModel with experts."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")

from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

from megatron_fp8rl.testing.models import build_gpt
from nemo_rl_ext.workers.training import Fp8Training
from support.megatron import LENGTH, losses, moe, one_process, tokens
from support.nemo_rl import planned

CONFIG = moe(4)
ROUTES = [torch.tensor([[3, 2]] * LENGTH + [[0, 1]] * LENGTH)] * 2
"""Of two sequences; the second is padding."""


@pytest.fixture(autouse=True)
def megatron_world() -> Iterator[None]:
    RouterReplay.clear_global_router_replay_instances()
    with one_process() as shim, shim.active():
        yield
    RouterReplay.clear_global_router_replay_instances()


def upstream_setup(
    policy_cfg: Any, megatron_cfg: Any, load_optimizer: bool = True, **options: Any
) -> Any:
    """NeMo RL's, which switches Megatron's replay on by the same key."""
    replay = policy_cfg.get("router_replay", {}).get("enabled", False)
    return SimpleNamespace(model=build_gpt(CONFIG, moe_enable_routing_replay=replay))


upstream = SimpleNamespace(setup_model_and_optimizer=upstream_setup)


class MegatronPolicyWorkerImpl:
    def __init__(self, config: dict[str, Any]) -> None:
        self.cfg = config
        self.model = upstream.setup_model_and_optimizer(config, None, True).model

    def train(self, data: Any, *, eval_mode: bool = False) -> dict[str, Any]:
        RouterReplay.clear_global_indices()
        RouterReplay.set_replay_data(ROUTES)
        RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        losses(self.model, data)
        return {"loss": 1.0, "moe_metrics": {"load_balancing_loss": 2.0}}

    def finish_train_step(self) -> dict[str, Any]:
        return {"loss": 1.0}


class Worker(Fp8Training, MegatronPolicyWorkerImpl):
    upstream_module = upstream


def policy(**changes: Any) -> dict[str, Any]:
    return planned({"megatron_cfg": {"enabled": True, "fp8rl": {"training": False}}, **changes})


def test_a_step_reports_what_was_replayed() -> None:
    worker = Worker(policy(router_replay={"enabled": True}))
    metrics = worker.train(tokens())["moe_metrics"]
    assert metrics.keys() == {
        "load_balancing_loss",
        "fp8rl/replayed_route_share",
        "fp8rl/replay_changed_route_share",
        "fp8rl/replay_changed_expert_share",
    }
    assert metrics["fp8rl/replayed_route_share"] == 1.0
    assert 0 < metrics["fp8rl/replay_changed_expert_share"] < 1
    assert worker.finish_train_step() == {"loss": 1.0, "moe_metrics": {}}, "told once"


def test_without_replay_the_results_are_upstreams() -> None:
    worker = Worker(policy())
    assert worker.finish_train_step() == {"loss": 1.0}
    assert worker._replayed_routes is None

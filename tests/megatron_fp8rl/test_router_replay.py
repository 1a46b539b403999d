"""Megatron's router replay in an FP8 model: who gets which tokens, gradients, metrics, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

from fp8rl.errors import UnsupportedError
from megatron_fp8rl.router_replay import ReplayedRoutes
from megatron_fp8rl.testing.models import build_gpt
from support.megatron import LENGTH, convert_alone, losses, moe, tokens

pytestmark = pytest.mark.usefixtures("mcore")

EXPERTS, TOPK, LAYERS = 4, 2, 2
CONFIG = moe(EXPERTS)


@pytest.fixture(autouse=True)
def no_routers_of_other_tests():
    RouterReplay.clear_global_router_replay_instances()
    yield
    RouterReplay.clear_global_router_replay_instances()


def _build(**options: Any) -> Any:
    return build_gpt(CONFIG, moe_enable_routing_replay=True, **options)


def _routes(rows: int = 2 * LENGTH, seed: int = 1) -> list[torch.Tensor]:
    """Random experts, without repetition, for each MoE layer."""
    g = torch.Generator().manual_seed(seed)
    return [torch.rand(rows, EXPERTS, generator=g).argsort(dim=1)[:, :TOPK] for _ in range(LAYERS)]


def _replay(routes: list[torch.Tensor]) -> None:
    RouterReplay.clear_global_indices()
    RouterReplay.set_replay_data(routes)
    RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)


def _record(gpt: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
    RouterReplay.set_global_router_replay_action(RouterReplayAction.RECORD)
    with torch.no_grad():
        found = losses(gpt, tokens())
    return found, RouterReplay.get_recorded_data()


def test_fp8_experts_get_the_tokens_of_the_replayed_routes():
    gpt = _build()
    conversion = convert_alone(gpt)
    own, _ = _record(gpt)
    seen: dict[tuple[int, int], int] = {}
    for layer, block in enumerate(gpt.decoder.layers):
        assert block.mlp.router.weight.dtype == torch.bfloat16
        for expert, mlp in enumerate(block.mlp.experts.local_experts):
            assert mlp.linear_fc1 in conversion.modules.values()
            mlp.linear_fc1.register_forward_pre_hook(
                lambda module, args, key=(layer, expert): seen.update({key: len(args[0])})
            )
    routes = _routes()
    _replay(routes)
    replayed = losses(gpt, tokens())
    assert not torch.equal(replayed, own)
    for layer, chosen in enumerate(routes):
        assert [seen[layer, e] for e in range(EXPERTS)] == chosen.flatten().bincount().tolist()
    replayed.mean().backward()
    assert all(block.mlp.router.weight.grad.any() for block in gpt.decoder.layers)


def test_metrics_are_those_of_a_count_by_hand():
    gpt = _build()
    convert_alone(gpt)
    _, own = _record(gpt)
    routes = [chosen.clone() for chosen in own]
    routes[0][3] = routes[0][3].flip(0)  # the same experts in another order
    foreign = torch.tensor([e for e in range(EXPERTS) if e not in own[1][7].tolist()])
    routes[1][7, 0] = foreign[0]  # one expert of another
    routes[1][9] = torch.tensor([e for e in range(EXPERTS) if e not in own[1][9].tolist()])
    counter = ReplayedRoutes(gpt)
    assert counter.metrics() == {}
    _replay(routes)
    with torch.no_grad():
        losses(gpt, tokens())
    total = LAYERS * 2 * LENGTH
    found = counter.metrics()
    # Later layers follow the routes of earlier ones, and these alone differ: both are in the last.
    assert found == {
        "replayed_route_share": 1.0,
        "replay_changed_route_share": pytest.approx(2 / total),
        "replay_changed_expert_share": pytest.approx(3 / (total * TOPK)),
    }
    assert counter.metrics() == {}, "it starts anew"
    RouterReplay.clear_global_router_replay_action()
    with torch.no_grad():
        losses(gpt, tokens())
    assert counter.metrics() == {}, "nothing was replayed"


def test_missing_routes_and_placeholders_are_not_counted_as_replayed():
    counter = ReplayedRoutes(_build(), skip_placeholders=True)
    own = torch.tensor([[2, 3]] * 6)
    replayed = torch.tensor([[2, 3], [3, 2], [1, 0], [0, 1], [-1, -1], [2, 0]])
    counter.add(replayed, own)
    assert counter.metrics() == {
        "replayed_route_share": 4 / 5,
        "replay_changed_route_share": 2 / 4,
        "replay_changed_expert_share": 3 / 8,
    }


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("moe_router_fusion", True, "moe_router_fusion=True: the fused kernel chooses"),
        ("moe_router_load_balancing_type", "sinkhorn", "'sinkhorn': it chooses the experts"),
    ],
)
def test_routers_that_would_ignore_the_routes_are_refused(name, value, message):
    gpt = _build()
    setattr(gpt.config, name, value)
    for refused in (convert_alone, ReplayedRoutes):
        with pytest.raises(UnsupportedError, match=message):
            refused(gpt)
    gpt.config.moe_enable_routing_replay = False
    convert_alone(gpt)
    with pytest.raises(UnsupportedError, match="build it with moe_enable_routing_replay=True"):
        ReplayedRoutes(gpt)

"""NeMo RL's own router replay in a Megatron model in FP8: test_nemo_rl.py runs this file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("nemo_rl.models.megatron.router_replay", exc_type=ImportError)
pytest.importorskip("megatron.core.transformer.moe.router_replay", exc_type=ImportError)
from megatron.core.transformer.moe.router_replay import RouterReplay
from nemo_rl.models.generation.interfaces import ROUTED_EXPERTS_MISSING_ROUTE_SENTINEL
from nemo_rl.models.megatron import router_replay as upstream

from megatron_fp8rl.router_replay import ReplayedRoutes
from megatron_fp8rl.testing.models import build_gpt
from support.megatron import LENGTH, convert_alone, losses, moe, one_process, tokens

EXPERTS, TOPK, LAYERS, BATCH = 4, 2, 2, 2


@pytest.fixture(scope="module", autouse=True)
def megatron_world() -> Iterator[None]:
    original = RouterReplay.get_replay_topk
    with one_process() as shim, shim.active():
        yield
    RouterReplay.get_replay_topk = original  # upstream patches it for missing routes


@pytest.mark.parametrize("layers", ["moe layers", "all layers"])
def test_the_payload_of_the_rollout_reaches_fp8_experts(layers: str) -> None:
    """With missing routes, padding, and the recomputation of the backward."""
    config = moe(EXPERTS, mlp_only_layers=[0] if layers == "all layers" else [])
    gpt = build_gpt(config, moe_enable_routing_replay=True)
    convert_alone(gpt)
    counter = ReplayedRoutes(gpt, skip_placeholders=True)
    g = torch.Generator().manual_seed(0)
    chosen = torch.rand(BATCH, LENGTH, LAYERS, EXPERTS, generator=g).argsort(-1)[..., :TOPK]
    chosen[1, -4:] = torch.arange(TOPK)  # padding
    chosen[0, 3] = ROUTED_EXPERTS_MISSING_ROUTE_SENTINEL
    sparse = [i for i, block in enumerate(gpt.decoder.layers) if hasattr(block.mlp, "router")]
    found: list[Any] = []
    for number in sparse:
        gpt.decoder.layers[number].mlp.router.register_forward_hook(
            lambda router, args, output: found.append(output[1])
        )
    upstream.set_router_replay_forward(gpt, chosen)
    loss = losses(gpt, tokens()).mean()
    upstream.set_router_replay_backward(gpt)
    loss.backward()
    upstream.clear_router_replay(gpt)
    for number, mapped in zip(sparse, found, strict=True):
        wanted = chosen[:, :, number].transpose(0, 1).flatten(0, 1)  # Megatron's order
        given = (wanted >= 0).all(dim=1)
        expected = torch.zeros_like(mapped[given]).scatter(1, wanted[given], True)
        assert torch.equal(mapped[given], expected)
        assert (mapped.sum(dim=1) == TOPK).all()
    metrics = counter.metrics()
    placeholders = (chosen == torch.arange(TOPK)).all(-1)[:, :, sparse].sum().item()
    counted = BATCH * LENGTH * len(sparse) - placeholders
    missing = len(sparse)
    assert metrics["replayed_route_share"] == pytest.approx((counted - missing) / counted)
    assert 0 < metrics["replay_changed_expert_share"] < 1

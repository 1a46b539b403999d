"""Router replay (R3, arXiv 2510.11370) in a trainer: what hides the router, what replay changes.

Megatron's ``RouterReplay`` puts the experts that the rollout chose in the place of the router's own
top-k; their weights are still the trainer's. FP8 linears see only the tokens that are dispatched to
them, so replay needs nothing of them.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from torch import Tensor

from fp8rl.errors import UnsupportedError
from megatron_fp8rl.config_checks import check_router_replay
from megatron_fp8rl.export import ModelChunks, device_of, unwrap_chunks


class ReplayedRoutes:
    """Count what router replay takes over from the rollout, in forwards that run anyway.

    A route is the set of experts of one token in one MoE layer. In each replayed forward the
    trainer's own top-k is taken too and compared; recomputed activations are not counted twice.
    The device is not synchronised until :meth:`metrics`.

    Args:
        model_chunks: this rank's GPTModel or virtual-pipeline chunks, plain or wrapped.
        skip_placeholders: do not count tokens whose route is the first experts in their order,
            0, 1, and so on: NeMo RL gives it to padding and to the last token of each sequence. (A
            router chooses just these by chance once in a number that grows with top-k: 1e-16 for 8
            of 128.)

    Raises:
        UnsupportedError: the model was built without ``moe_enable_routing_replay``, or its routers
            would ignore replayed routes.
    """

    def __init__(self, model_chunks: ModelChunks, *, skip_placeholders: bool = False) -> None:
        chunks = unwrap_chunks(model_chunks)
        config = chunks[0].config
        if not config.moe_enable_routing_replay:
            raise UnsupportedError(
                "The model has no RouterReplay; build it with moe_enable_routing_replay=True."
            )
        check_router_replay(config)
        device = device_of(chunks)
        self._placeholder = None
        if skip_placeholders:
            self._placeholder = torch.arange(config.moe_router_topk, device=device)
        self._counts = torch.zeros(5, dtype=torch.int64, device=device)
        """Routes replayed, missing, changed; experts replayed, changed."""
        for chunk in chunks:
            for module in chunk.modules():
                replay = getattr(module, "router_replay", None)
                if replay is not None:
                    replay.__class__ = _CountedReplay
                    replay.replayed_routes = self

    def metrics(self, group: torch.distributed.ProcessGroup | None = None) -> dict[str, float]:
        """Sum over all ranks by one all-reduce, and count from zero again; every rank must join.

        Args:
            group: process group with the ranks of this model; the world by default.

        Returns:
            ``replayed_route_share`` (routes that came from the rollout; of the rest the rollout
            returned none, and the trainer chose itself); of the replayed ones
            ``replay_changed_route_share`` (the trainer would have chosen another set of experts)
            and ``replay_changed_expert_share`` (experts that it would not have chosen). Empty if
            nothing was replayed.
        """
        counts = self._counts.clone()
        self._counts.zero_()
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(counts, group=group)
        routes, missing, changed, experts, changed_experts = counts.tolist()
        if routes + missing == 0:
            return {}
        return {
            "replayed_route_share": routes / (routes + missing),
            "replay_changed_route_share": changed / max(routes, 1),
            "replay_changed_expert_share": changed_experts / max(experts, 1),
        }

    @torch.no_grad()
    def add(self, replayed: Tensor, own: Tensor) -> None:
        """Count the routes of one layer.

        Args:
            replayed: ``[tokens, top-k]`` experts; -1 throughout a row whose route is missing.
            own: ``[tokens, top-k]`` experts that the trainer's router would choose.
        """
        missing = (replayed < 0).all(dim=1)
        counted = ~missing
        if self._placeholder is not None:
            counted &= (replayed != self._placeholder).any(dim=1)
        foreign = (replayed[:, :, None] != own[:, None, :]).all(dim=2) & counted[:, None]
        self._counts += torch.stack(
            [
                counted.sum(),
                missing.sum(),
                foreign.any(dim=1).sum(),
                counted.sum() * replayed.shape[1],
                foreign.sum(),
            ]
        )


class _CountedReplay(RouterReplay):
    """A router's replay that tells a :class:`ReplayedRoutes` about each replayed forward."""

    replayed_routes: ReplayedRoutes

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Any = None,
    ) -> tuple[Tensor, Tensor]:
        replayed = self.target_topk_idx
        if self.router_replay_action == RouterReplayAction.REPLAY_FORWARD:
            _, own = default_compute_topk(
                scores.detach(), topk, num_groups=num_groups, group_topk=group_topk
            )
            self.replayed_routes.add(replayed.to(scores.device), own)
        found: tuple[Tensor, Tensor] = super().get_replay_topk(
            scores, topk, num_groups, group_topk, default_compute_topk
        )
        return found

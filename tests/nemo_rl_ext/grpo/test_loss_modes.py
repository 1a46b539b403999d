"""GSPO and CISPO against autograd of the papers' formulas in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fp8rl import PluginManager
from fp8rl.errors import BatchError
from fp8rl.recipe import ImportanceSampling, Rejection
from nemo_rl_ext import hooks
from nemo_rl_ext.grpo.loss import GRPOConfig, GRPOLoss

PLUGINS = PluginManager(discover=False)
PLUGINS.register(hooks)

OFF = ImportanceSampling(mode="off")
CORRECTIONS = {
    "off": OFF,
    "token": ImportanceSampling(high=1.2),
    "sequence": ImportanceSampling(
        level="sequence",
        mode="clip",
        low=0.5,
        high=2.0,
        self_normalize=True,
        rejection=Rejection(level="token", low=0.6, high=1.6),
    ),
}
GSPO = GRPOConfig(loss_mode="gspo", loss_aggregation="sequence", clip_low=0.05, clip_high=0.08)
GSPO_TOKEN = GSPO.model_copy(update={"loss_mode": "gspo_token"})
CISPO = GRPOConfig(loss_mode="cispo", clip_low=1.0, clip_high=0.2)
MODES = {
    "gspo": GSPO,
    "gspo with dual clip": GSPO.model_copy(update={"dual_clip": 1.1}),
    "gspo_token": GSPO_TOKEN,
    "cispo": CISPO,
    "cispo with a lower bound": CISPO.model_copy(update={"clip_low": 0.2}),
    "cispo, sequence": CISPO.model_copy(update={"loss_aggregation": "sequence"}),
}


class Batch:
    """Random float64 logprobs ``[B, T]``, one advantage a sequence."""

    def __init__(self, seed: int, rows: int = 6, columns: int = 8) -> None:
        g = torch.Generator().manual_seed(seed)

        def noise(scale: float) -> torch.Tensor:
            return scale * torch.randn(rows, columns, generator=g, dtype=torch.float64)

        self.old = -1 - noise(0.3).abs()
        self.rollout = self.old + noise(0.3)
        self.current = (self.old + noise(0.3)).requires_grad_()
        self.advantages = noise(1.0)[:, 0]
        self.mask = torch.rand(rows, columns, generator=g) < 0.8

    def args(self, rows: slice = slice(None)) -> tuple[torch.Tensor, ...]:
        parts = (self.current, self.old, self.rollout, self.advantages, self.mask)
        return tuple(x[rows] for x in parts)


def sequences(b: Batch, mask: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
    """Number and kept tokens of each sequence that has any."""
    return [(i, row.nonzero()[:, 0]) for i, row in enumerate(mask) if row.any()]


def gspo(b: Batch, weights: torch.Tensor, mask: torch.Tensor, c: GRPOConfig) -> torch.Tensor:
    """Minus the objective J_GSPO of arXiv 2507.18071, weighted token by token."""
    objectives = []
    for i, tokens in sequences(b, mask):
        old, current, a = b.old[i, tokens], b.current[i, tokens], b.advantages[i]
        s = (current.sum() - old.sum()).div(len(tokens)).exp()
        clipped = torch.minimum(s * a, s.clamp(1 - c.clip_low, 1 + c.clip_high) * a)
        if c.dual_clip is not None and a < 0:
            clipped = torch.maximum(clipped, c.dual_clip * a)
        objectives.append(weights[i, tokens].mean() * clipped)
    return -torch.stack(objectives).mean()


def gspo_token(b: Batch, weights: torch.Tensor, mask: torch.Tensor, c: GRPOConfig) -> torch.Tensor:
    """Minus J_GSPO-token of the same paper, in probabilities as the paper has them."""
    objectives = []
    for i, tokens in sequences(b, mask):
        p, q = b.current[i, tokens].exp(), b.old[i, tokens].exp()
        s = (p / q).prod().pow(1 / len(tokens)).detach() * p / p.detach()
        a = b.advantages[i]
        clipped = torch.minimum(s * a, s.clamp(1 - c.clip_low, 1 + c.clip_high) * a)
        objectives.append((weights[i, tokens] * clipped).mean())
    return -torch.stack(objectives).mean()


def cispo(b: Batch, weights: torch.Tensor, mask: torch.Tensor, c: GRPOConfig) -> torch.Tensor:
    """Minus the objective J_CISPO of arXiv 2506.13585."""
    objectives = []
    for i, tokens in sequences(b, mask):
        ratio = b.current[i, tokens].exp() / b.old[i, tokens].exp()
        clipped = ratio.clip(1 - c.clip_low, 1 + c.clip_high).detach()
        objectives.append(weights[i, tokens] * clipped * b.advantages[i] * b.current[i, tokens])
    if c.loss_aggregation == "sequence":
        return -torch.stack([x.mean() for x in objectives]).mean()
    return -torch.cat(objectives).mean()


FORMULAS = {"gspo": gspo, "gspo_token": gspo_token, "cispo": cispo}


@pytest.mark.parametrize("correction_name", CORRECTIONS)
@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_value_and_gradient_are_the_papers(mode: str, correction_name: str, seed: int) -> None:
    config, b = MODES[mode], Batch(seed)
    loss_fn = GRPOLoss(config, CORRECTIONS[correction_name], PLUGINS)
    correction = loss_fn.correct(b.rollout, b.old, b.mask)
    assume(bool(correction.mask.any()))
    loss, _ = loss_fn(*b.args())
    (got,) = torch.autograd.grad(loss, b.current)

    formula = FORMULAS[config.loss_mode]
    expected = formula(b, correction.weights.double(), correction.mask, config)
    (gradient,) = torch.autograd.grad(expected, b.current)
    # The loss is computed in float32, so a ratio this close to a bound may fall on either side.
    ratio = loss_fn._ratio(b.current.detach() - b.old, correction.mask)
    for bound in (1 - config.clip_low, 1 + config.clip_high, config.dual_clip or 9.0):
        assume(not ((ratio - bound).abs() < 1e-5).any())
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got, gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_every_clip_decides_somewhere(mode: str) -> None:
    """Guards the test above: its batches reach the branches it is about."""
    config = MODES[mode]
    _, metrics = GRPOLoss(config, OFF, PLUGINS)(*Batch(0, 32, 8).args())
    assert metrics["clip_high_share"] > 0
    assert (metrics["clip_low_share"] > 0) == (config.clip_low < 1)
    if config.dual_clip is not None:
        assert metrics["dual_clip_share"] > 0


@pytest.mark.parametrize("mode", MODES)
def test_the_first_update_has_the_gradient_of_ppo(mode: str) -> None:
    b = Batch(4)
    b.current = b.old.clone().requires_grad_()
    config = MODES[mode]
    ppo = GRPOConfig(loss_aggregation=config.loss_aggregation)
    first, _ = GRPOLoss(config, CORRECTIONS["off"], PLUGINS)(*b.args())
    second, _ = GRPOLoss(ppo, CORRECTIONS["off"], PLUGINS)(*b.args())
    torch.testing.assert_close(
        torch.autograd.grad(first, b.current), torch.autograd.grad(second, b.current)
    )


def test_advantages_that_differ_inside_a_sequence_need_gspo_token() -> None:
    b = Batch(3)
    wide = b.advantages[:, None].expand_as(b.mask).clone()
    wide[~b.mask] = torch.nan  # masked places may hold anything
    current, old, rollout, _, mask = b.args()
    expected, _ = GRPOLoss(GSPO, OFF, PLUGINS)(*b.args())
    assert GRPOLoss(GSPO, OFF, PLUGINS)(current, old, rollout, wide, mask)[0] == expected
    wide[2, mask[2].nonzero()[-1]] += 1
    with pytest.raises(BatchError, match=r"one advantage for each sequence.*'gspo_token'"):
        GRPOLoss(GSPO, OFF, PLUGINS)(current, old, rollout, wide, mask)
    loss, _ = GRPOLoss(GSPO_TOKEN, OFF, PLUGINS)(current, old, rollout, wide, mask)
    assert loss.isfinite() and loss != expected


@pytest.mark.parametrize("config", [*MODES.values(), GRPOConfig()], ids=[*MODES, "ppo"])
@pytest.mark.parametrize("advantage", [0.0, 1.0, -1.0])
def test_infinite_logprobs_give_finite_gradients(config: GRPOConfig, advantage: float) -> None:
    inf = torch.inf
    current = torch.tensor([[-inf, 0.0, -2.0]], requires_grad=True)
    old = torch.tensor([[0.0, -inf, -1.0]])
    loss, metrics = GRPOLoss(config, ImportanceSampling(), PLUGINS)(
        current, old, torch.full((1, 3), -1.0), torch.tensor([advantage]), torch.ones(1, 3)
    )
    loss.backward()
    assert loss.isfinite() and current.grad.isfinite().all()
    assert metrics["ratio_max"] < 1e9

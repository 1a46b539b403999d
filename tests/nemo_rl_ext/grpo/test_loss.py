"""The loss and its gradient against sums written out with Python floats."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from fp8rl import PluginManager, Recipe, hookimpl
from fp8rl.errors import BatchError, PluginError, RecipeError
from fp8rl.mismatch import mismatch_metrics
from fp8rl.recipe import ImportanceSampling, Rejection
from nemo_rl_ext import hooks
from nemo_rl_ext.grpo.importance_sampling import Correction
from nemo_rl_ext.grpo.loss import GRPOConfig, GRPOLoss, merge_metrics

PLUGINS = PluginManager(discover=False)
PLUGINS.register(hooks)

OFF = ImportanceSampling(mode="off")
HARD = ImportanceSampling(
    level="sequence",
    mode="clip",
    low=0.5,
    high=2.0,
    self_normalize=True,
    rejection=Rejection(level="token", low=0.6, high=1.6),
    token_veto=0.4,
)
VARIANTS = {
    "ppo": GRPOConfig(),
    "clip higher": GRPOConfig(clip_low=0.1, clip_high=0.3),
    "dual clip": GRPOConfig(dual_clip=1.5),
    "kl": GRPOConfig(kl_coefficient=0.3),
    "sequence": GRPOConfig(loss_aggregation="sequence"),
    "all": GRPOConfig(
        clip_low=0.1,
        clip_high=0.3,
        dual_clip=1.5,
        kl_coefficient=0.3,
        loss_aggregation="sequence",
    ),
}


@dataclass
class Batch:
    current: torch.Tensor
    old: torch.Tensor
    rollout: torch.Tensor
    reference: torch.Tensor
    advantages: torch.Tensor
    mask: torch.Tensor

    def args(self, rows: slice = slice(None)) -> tuple[torch.Tensor, ...]:
        return (
            self.current[rows],
            self.old[rows],
            self.rollout[rows],
            self.advantages[rows],
            self.mask[rows],
            self.reference[rows],
        )


def make(seed: int, rows: int, columns: int, density: float = 0.75) -> Batch:
    g = torch.Generator().manual_seed(seed)

    def near(x: torch.Tensor) -> torch.Tensor:
        return x + 0.3 * torch.randn(rows, columns, generator=g)

    old = -2 * torch.rand(rows, columns, generator=g)
    return Batch(
        near(old).requires_grad_(),
        old,
        near(old),
        near(old),
        torch.randn(rows, generator=g),
        torch.rand(rows, columns, generator=g) < density,
    )


batches = st.builds(
    make,
    seed=st.integers(0, 2**31),
    rows=st.integers(1, 5),
    columns=st.integers(1, 6),
    density=st.sampled_from([0.3, 0.8, 1.1]),
)


def written_out(
    b: Batch, correction: Correction, config: GRPOConfig
) -> tuple[float, list[list[float]], dict[str, float]]:
    """Loss, its gradient and the metrics, given weights and mask."""
    lengths = [sum(row) for row in correction.mask.tolist()]
    tokens, sequences = sum(lengths), sum(n > 0 for n in lengths)
    low, high = 1 - config.clip_low, 1 + config.clip_high
    loss = policy = 0.0
    gradient = [[0.0] * b.mask.shape[1] for _ in lengths]
    count = dict.fromkeys(("clip_low", "clip_high", "dual", "kl", "approx", "entropy", "ratio"), 0)
    for i, j in correction.mask.nonzero().tolist():
        current, old = b.current[i, j].item(), b.old[i, j].item()
        advantage, weight = b.advantages[i].item(), correction.weights[i, j].item()
        share = 1 / tokens if config.loss_aggregation == "token" else 1 / (lengths[i] * sequences)
        ratio = math.exp(current - old)
        if advantage >= 0:
            active = ratio <= high
            term = -advantage * min(ratio, high)
            count["clip_high"] += advantage > 0 and not active
        else:
            active = ratio >= low
            term = -advantage * max(ratio, low)
            count["clip_low"] += not active
            if config.dual_clip is not None and ratio > config.dual_clip:
                active, term = False, -advantage * config.dual_clip
                count["dual"] += 1
        x = b.reference[i, j].item() - current
        kl = math.exp(x) - 1 - x
        policy += share * weight * term
        loss += share * (weight * term + config.kl_coefficient * kl)
        slope = -advantage * ratio if active else 0.0
        gradient[i][j] = share * (weight * slope + config.kl_coefficient * (1 - math.exp(x)))
        count["kl"] += kl
        count["approx"] += ratio - 1 - (current - old)
        count["entropy"] -= current
        count["ratio"] += ratio
    metrics = {
        "loss": loss,
        "policy_loss": policy,
        "loss_tokens": tokens,
        "loss_sequences": sequences,
        "clip_low_share": count["clip_low"] / max(tokens, 1),
        "clip_high_share": count["clip_high"] / max(tokens, 1),
        "kl_reference": count["kl"] / max(tokens, 1),
        "approx_kl": count["approx"] / max(tokens, 1),
        "entropy_proxy": count["entropy"] / max(tokens, 1),
        "ratio_mean": count["ratio"] / max(tokens, 1),
    }
    if config.dual_clip is not None:
        metrics["dual_clip_share"] = count["dual"] / max(tokens, 1)
    return loss, gradient, metrics


@pytest.mark.parametrize("correction_config", [OFF, ImportanceSampling(), HARD])
@pytest.mark.parametrize("variant", VARIANTS)
@settings(max_examples=12, deadline=None)
@given(b=batches)
def test_loss_gradient_and_metrics_equal_the_formula(
    variant: str, correction_config: ImportanceSampling, b: Batch
) -> None:
    assume(bool(b.mask.any()))
    config = VARIANTS[variant]
    loss_fn = GRPOLoss(config, correction_config, PLUGINS)

    loss, metrics = loss_fn(*b.args())
    loss.backward()

    correction = loss_fn.correct(b.rollout, b.old, b.mask)
    expected, gradient, expected_metrics = written_out(b, correction, config)
    assert loss.dtype == torch.float32
    assert loss.shape == ()
    assert loss.item() == pytest.approx(expected, rel=1e-4, abs=1e-6)
    for got_row, row in zip(b.current.grad.tolist(), gradient, strict=True):
        assert got_row == pytest.approx(row, rel=1e-4, abs=1e-6)
    for name, value in expected_metrics.items():
        assert metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    assert correction.metrics.items() <= metrics.items()
    assert all(type(v) in (int, float) for v in metrics.values())


def test_every_clip_decides_somewhere() -> None:
    """Guards the test above: its batches reach the branches it is about."""
    b = make(0, 16, 16)
    _, metrics = GRPOLoss(VARIANTS["all"], OFF, PLUGINS)(*b.args())
    assert metrics["clip_low_share"] > 0
    assert metrics["clip_high_share"] > 0
    assert metrics["dual_clip_share"] > 0
    assert metrics["ratio_min"] < 0.9
    assert metrics["ratio_max"] > 1.5


OF_SEQUENCES = {"loss_aggregation": "sequence", "clip_low": 0.05, "clip_high": 0.08}
MODES = {
    "gspo": GRPOConfig(loss_mode="gspo", dual_clip=1.1, **OF_SEQUENCES),
    "gspo_token": GRPOConfig(loss_mode="gspo_token", **OF_SEQUENCES),
    "cispo": GRPOConfig(loss_mode="cispo", clip_low=1.0),
    "cispo, sequence": GRPOConfig(loss_mode="cispo", loss_aggregation="sequence"),
}


@pytest.mark.parametrize("config", [*VARIANTS.values(), *MODES.values()], ids=[*VARIANTS, *MODES])
@settings(max_examples=10, deadline=None)
@given(b=batches, cut=st.integers(0, 5))
def test_micro_batches_add_up_to_the_whole_batch(config: GRPOConfig, b: Batch, cut: int) -> None:
    assume(bool(b.mask.any()))
    loss_fn = GRPOLoss(config, HARD, PLUGINS)
    whole, whole_metrics = loss_fn(*b.args())
    whole.backward()
    gradient, b.current.grad = b.current.grad, None

    correction = loss_fn.correct(b.rollout, b.old, b.mask)
    cuts = (slice(0, cut), slice(cut, cut + 1), slice(cut + 1, None))
    normalizer = sum(loss_fn.normalizer(correction.mask[rows]) for rows in cuts)  # as over ranks
    total, parts = 0.0, []
    for rows in cuts:
        loss, metrics = loss_fn(
            *b.args(rows), correction=correction.rows(rows), normalizer=normalizer
        )
        loss.backward()
        total += loss.item()
        parts.append(metrics)

    assert torch.equal(b.current.grad, gradient)
    assert total == pytest.approx(whole.item(), rel=1e-5, abs=1e-6)
    merged = {**correction.metrics, **merge_metrics(parts)}
    assert merged == pytest.approx(whole_metrics, rel=1e-4, abs=1e-6)


def test_a_constant_normalizer_is_dr_grpo() -> None:
    b = make(2, 3, 5)
    loss_fn = GRPOLoss(GRPOConfig(), OFF, PLUGINS)
    loss, _ = loss_fn(*b.args(), normalizer=3 * 5)
    expected = 0.0
    for i, j in b.mask.nonzero().tolist():
        ratio = math.exp(b.current[i, j].item() - b.old[i, j].item())
        a = b.advantages[i].item()
        expected -= min(ratio * a, max(0.8, min(1.2, ratio)) * a) / 15
    assert loss.item() == pytest.approx(expected, rel=1e-5)


def test_only_the_current_policy_gets_a_gradient() -> None:
    b = make(7, 3, 4)
    others = [x.clone().requires_grad_() for x in (b.old, b.rollout, b.advantages, b.reference)]
    old, rollout, advantages, reference = others
    loss_fn = GRPOLoss(VARIANTS["all"], HARD, PLUGINS)
    loss, _ = loss_fn(b.current, old, rollout, advantages, b.mask, reference)
    others.append(torch.ones(3, 4, requires_grad=True))
    given, _ = loss_fn(*b.args(), correction=Correction(others[-1], b.mask, {}))
    (loss + given).backward()
    assert b.current.grad.abs().sum() > 0
    assert all(x.grad is None for x in others)


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e30])
def test_masked_places_never_leak(garbage: float, level: str) -> None:
    b = make(3, 4, 5)
    loss_fn = GRPOLoss(VARIANTS["all"], HARD.model_copy(update={"level": level}), PLUGINS)
    loss, metrics = loss_fn(*b.args())
    loss.backward()
    dirty = [x.detach().masked_fill(~b.mask, garbage) for x in (b.current, b.old, b.rollout)]
    current = dirty[0].requires_grad_()
    wide = b.advantages[:, None].expand(4, 5).masked_fill(~b.mask, garbage)
    got, got_metrics = loss_fn(
        current, *dirty[1:], wide, b.mask, b.reference.masked_fill(~b.mask, garbage)
    )
    got.backward()
    assert torch.equal(got, loss)
    assert torch.equal(current.grad, b.current.grad)
    assert got_metrics == metrics


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_all_rejected_batch_gives_zero_and_says_so(variant: str) -> None:
    b = make(3, 4, 5)
    nothing = ImportanceSampling(
        self_normalize=True, rejection=Rejection(level="sequence", low=1e6)
    )
    loss, metrics = GRPOLoss(VARIANTS[variant], nothing, PLUGINS)(*b.args())
    loss.backward()
    assert loss.item() == 0.0
    assert b.current.grad.abs().sum() == 0.0
    assert metrics["all_rejected"] == 1.0
    assert metrics["loss_tokens"] == 0
    assert all(math.isfinite(v) for v in metrics.values())


def test_an_empty_micro_batch_gives_zero() -> None:
    b = make(3, 2, 5)
    empty = torch.zeros(2, 5, dtype=torch.bool)
    loss, metrics = GRPOLoss(GRPOConfig(), OFF, PLUGINS)(
        b.current,
        b.old,
        b.rollout,
        b.advantages,
        empty,
        correction=Correction(torch.zeros(2, 5), empty, {}),
        normalizer=8,
    )
    loss.backward()
    assert loss.item() == 0.0
    assert b.current.grad.abs().sum() == 0.0
    assert merge_metrics([metrics])["ratio_mean"] == 0.0
    assert merge_metrics([]) == {}


def test_bfloat16_logprobs_give_a_float32_loss() -> None:
    b = make(4, 3, 4)
    low = [x.detach().bfloat16() for x in (b.current, b.old, b.rollout)]
    full = [x.float() for x in low]
    current = low[0].requires_grad_()
    loss_fn = GRPOLoss(GRPOConfig(), ImportanceSampling(), PLUGINS)
    loss, metrics = loss_fn(current, *low[1:], b.advantages, b.mask)
    expected, expected_metrics = loss_fn(*full, b.advantages, b.mask)
    loss.backward()
    assert loss.dtype == torch.float32
    assert torch.equal(loss, expected)
    assert metrics == expected_metrics
    assert "kl_reference" not in metrics
    assert current.grad.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"clip_lo": 0.2}, "clip_lo"),
        ({"clip_low": 0.0}, "clip_low"),
        ({"clip_low": 1.5}, "clip_low"),
        ({"clip_high": math.inf}, "clip_high"),
        ({"dual_clip": 1.0}, "dual_clip"),
        ({"kl_coefficient": -0.1}, "kl_coefficient"),
        ({"loss_aggregation": "mean"}, "loss_aggregation"),
        ({"loss_mode": "gspo"}, "'gspo' clips whole .*loss_aggregation"),
        ({"loss_mode": "gspo_token"}, "'gspo_token' clips whole .*loss_aggregation"),
        ({"loss_mode": "cispo", "dual_clip": 3.0}, "'cispo' .*remove dual_clip"),
    ],
)
def test_bad_settings_are_errors(bad: dict, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        GRPOConfig(**bad)


@pytest.mark.parametrize("gap", [87.0, 89.0, 1e3, 1e30])
@pytest.mark.parametrize("clamp", [20.0, 88.0])
def test_the_kl_term_is_finite_at_any_distance(clamp: float, gap: float) -> None:
    """Each way, forwards and backwards, whatever the recipe lets the clamp be."""
    settings = ImportanceSampling(log_ratio_clamp=clamp)
    loss_fn = GRPOLoss(GRPOConfig(kl_coefficient=0.5), settings, PLUGINS)
    for sign in (1.0, -1.0):
        current = torch.tensor([[0.0]]).add(min(0.0, -sign * gap)).requires_grad_()
        reference = torch.tensor([[0.0]]).add(min(0.0, sign * gap))
        fixed = current.detach()
        loss, metrics = loss_fn(current, fixed, fixed, torch.ones(1), torch.ones(1, 1), reference)
        loss.backward()
        assert current.grad is not None and current.grad.isfinite().all()
        x = max(-clamp, min(clamp, sign * gap))
        expected = math.expm1(x) - x
        assert metrics["kl_reference"] == pytest.approx(expected, rel=1e-5)
        assert loss.item() == pytest.approx(-1 + 0.5 * expected, rel=1e-5)


def test_a_clamp_whose_exp_is_infinite_is_refused() -> None:
    for clamp in (88.001, 100.0, 1e6):
        with pytest.raises(RecipeError, match=r"log_ratio_clamp' must be less than or equal to 88"):
            Recipe.from_dict({"importance_sampling": {"log_ratio_clamp": clamp}})


def test_a_loss_beyond_float32_is_an_error() -> None:
    settings = ImportanceSampling(log_ratio_clamp=88.0)
    loss_fn = GRPOLoss(GRPOConfig(), settings, PLUGINS)
    old, mask = torch.full((1, 1), -100.0), torch.ones(1, 1)
    with pytest.raises(BatchError, match=r"The loss is inf .*up to 1\.65164e\+38.*log_ratio_clamp"):
        loss_fn(torch.zeros(1, 1), old, old, torch.tensor([-4.0]), mask)


class Strange:
    @hookimpl
    def register_is_correctors(self) -> dict:
        return {
            "none": lambda rollout, trainer, mask, config: None,
            "narrow": lambda rollout, trainer, mask, config: Correction(
                mask[:, :1].float(), mask[:, :1], {}
            ),
            "twice": lambda rollout, trainer, mask, config: Correction(
                2 * mask.float(), mask, {"mine": 1.0}
            ),
        }


def test_a_plugins_corrector_is_used_and_checked() -> None:
    plugins = PluginManager(discover=False)
    plugins.register(hooks)
    plugins.register(Strange())
    b = make(0, 2, 3)

    def loss_of(name: str) -> tuple[torch.Tensor, dict[str, float]]:
        config = ImportanceSampling(corrector=name, mode="off")
        return GRPOLoss(GRPOConfig(), config, plugins)(*b.args())

    loss, metrics = loss_of("twice")
    assert loss.item() == pytest.approx(2 * loss_of("is")[0].item(), rel=1e-6)
    assert metrics["mine"] == 1.0
    # A training loop may log the mismatch whoever corrects.
    mismatch = mismatch_metrics(b.rollout, b.old, b.mask).to_dict()
    assert mismatch.items() <= metrics.items()
    with pytest.raises(PluginError, match="'none' must return a Correction, not NoneType"):
        loss_of("none")
    with pytest.raises(PluginError, match=r"'narrow' returned weights \(2, 1\)"):
        loss_of("narrow")
    with pytest.raises(RecipeError, match="'other' is not known"):
        loss_of("other")

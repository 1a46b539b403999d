"""What the loss promises beside its formulas (test_formulas.py): parts, gradients, refusals."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fp8rl import PluginManager, Recipe, hookimpl
from fp8rl.errors import BatchError, PluginError, RecipeError
from fp8rl.mismatch import mismatch_metrics
from fp8rl.recipe import ImportanceSampling, Rejection
from nemo_rl_ext import hooks
from nemo_rl_ext.grpo.importance_sampling import Correction
from nemo_rl_ext.grpo.loss import GRPOConfig, GRPOLoss, merge_metrics
from support.grpo import Batch, batches, loss_of, make

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
OF_SEQUENCES = {"loss_aggregation": "sequence", "clip_low": 0.05, "clip_high": 0.08}
MODES = {
    "ppo": GRPOConfig(clip_low=0.1, clip_high=0.3, dual_clip=1.5, kl_coefficient=0.3),
    "ppo, sequence": GRPOConfig(loss_aggregation="sequence"),
    "gspo": GRPOConfig(loss_mode="gspo", dual_clip=1.1, **OF_SEQUENCES),
    "gspo_token": GRPOConfig(loss_mode="gspo_token", **OF_SEQUENCES),
    "cispo": GRPOConfig(loss_mode="cispo", clip_low=1.0),
    "cispo, sequence": GRPOConfig(loss_mode="cispo", loss_aggregation="sequence"),
}


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=10)
@given(b=batches(0.3), cut=st.integers(0, 5))
def test_micro_batches_add_up_to_the_whole_batch(mode: str, b: Batch, cut: int) -> None:
    assume(bool(b.mask.any()))
    loss_fn = GRPOLoss(MODES[mode], HARD, PLUGINS)
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
    loss, _ = GRPOLoss(GRPOConfig(), OFF, PLUGINS)(*b.args(), normalizer=3 * 5)
    mean = loss_of(b, 20.0, GRPOConfig(), torch.ones(3, 5), b.mask).loss
    assert loss.item() == pytest.approx(mean.item() * int(b.mask.sum()) / 15, rel=1e-5)


def test_only_the_current_policy_gets_a_gradient() -> None:
    b = make(7, 3, 4)
    others = [x.clone().requires_grad_() for x in (b.old, b.rollout, b.advantages, b.reference)]
    old, rollout, advantages, reference = others
    loss_fn = GRPOLoss(MODES["ppo"], HARD, PLUGINS)
    loss, _ = loss_fn(b.current, old, rollout, advantages, b.mask, reference)
    others.append(torch.ones(3, 4, requires_grad=True))
    given, _ = loss_fn(*b.args(), correction=Correction(others[-1], b.mask, {}))
    (loss + given).backward()
    assert b.current.grad.abs().sum() > 0
    assert all(x.grad is None for x in others)


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("garbage", [math.nan, -math.inf])
def test_masked_places_never_leak(garbage: float, level: str) -> None:
    b = make(3, 4, 5)
    loss_fn = GRPOLoss(MODES["ppo"], HARD.model_copy(update={"level": level}), PLUGINS)
    loss, metrics = loss_fn(*b.args())
    loss.backward()
    wide = b.advantages[:, None].expand(4, 5)
    given = (b.current, b.old, b.rollout, wide, b.reference)
    current, *others, reference = (x.detach().masked_fill(~b.mask, garbage) for x in given)
    got, got_metrics = loss_fn(current.requires_grad_(), *others, b.mask, reference)
    got.backward()
    assert torch.equal(got, loss)
    assert torch.equal(current.grad, b.current.grad)
    assert got_metrics == metrics


@pytest.mark.parametrize("mode", MODES)
def test_an_all_rejected_batch_gives_zero_and_says_so(mode: str) -> None:
    b = make(3, 4, 5)
    nothing = HARD.model_copy(update={"rejection": Rejection(level="sequence", low=1e6)})
    loss, metrics = GRPOLoss(MODES[mode], nothing, PLUGINS)(*b.args())
    loss.backward()
    assert loss.item() == b.current.grad.abs().sum() == metrics["loss_tokens"] == 0
    assert metrics["all_rejected"] == 1.0
    assert all(math.isfinite(v) for v in metrics.values())


def test_an_empty_micro_batch_gives_zero() -> None:
    b, empty = make(3, 2, 5), torch.zeros(2, 5, dtype=torch.bool)
    correction = Correction(torch.zeros(2, 5), empty, {})
    loss_fn = GRPOLoss(GRPOConfig(), OFF, PLUGINS)
    loss, metrics = loss_fn(*b.args()[:4], empty, correction=correction, normalizer=8)
    loss.backward()
    assert loss.item() == b.current.grad.abs().sum() == 0.0
    assert merge_metrics([metrics])["ratio_mean"] == 0.0
    assert merge_metrics([]) == {}


def test_bfloat16_logprobs_give_a_float32_loss() -> None:
    b = make(4, 3, 4)
    low = [x.detach().bfloat16() for x in (b.current, b.old, b.rollout)]
    current = low[0].requires_grad_()
    loss_fn = GRPOLoss(GRPOConfig(), ImportanceSampling(), PLUGINS)
    loss, metrics = loss_fn(current, *low[1:], b.advantages, b.mask)
    expected, expected_metrics = loss_fn(*(x.float() for x in low), b.advantages, b.mask)
    loss.backward()
    assert loss.dtype == torch.float32
    assert torch.equal(loss, expected)
    assert metrics == expected_metrics
    assert "kl_reference" not in metrics
    assert current.grad.dtype == torch.bfloat16


def test_a_clamp_or_a_loss_beyond_float32_is_an_error() -> None:
    with pytest.raises(RecipeError, match=r"log_ratio_clamp' must be less than or equal to 88"):
        Recipe.from_dict({"importance_sampling": {"log_ratio_clamp": 88.001}})
    settings = ImportanceSampling(log_ratio_clamp=88.0)
    loss_fn = GRPOLoss(GRPOConfig(), settings, PLUGINS)
    old, mask = torch.full((1, 1), -100.0), torch.ones(1, 1)
    with pytest.raises(BatchError, match=r"The loss is inf .*up to 1\.65164e\+38.*log_ratio_clamp"):
        loss_fn(torch.zeros(1, 1), old, old, torch.tensor([-4.0]), mask)


def test_advantages_that_differ_inside_a_sequence_need_gspo_token() -> None:
    current, old, rollout, advantages, mask, _ = make(3, 6, 8).args()
    gspo, gspo_token = (GRPOLoss(MODES[name], OFF, PLUGINS) for name in ("gspo", "gspo_token"))
    wide = advantages[:, None].expand_as(mask).clone()
    wide[~mask] = torch.nan  # masked places may hold anything
    expected, _ = gspo(current, old, rollout, advantages, mask)
    assert gspo(current, old, rollout, wide, mask)[0] == expected
    wide[2, mask[2].nonzero()[-1]] += 1
    with pytest.raises(BatchError, match=r"one advantage for each sequence.*'gspo_token'"):
        gspo(current, old, rollout, wide, mask)
    loss, _ = gspo_token(current, old, rollout, wide, mask)
    assert loss.isfinite() and loss != expected


def test_a_plugins_corrector_is_used_and_checked() -> None:
    def twice(rollout, trainer, mask, config):
        return Correction(2 * mask.float(), mask, {"mine": 1.0})

    class Strange:
        @hookimpl
        def register_is_correctors(self) -> dict:
            return {"none": lambda *given: None, "twice": twice}

    plugins = PluginManager(discover=False)
    plugins.register(hooks)
    plugins.register(Strange())
    b = make(0, 2, 3)

    def loss_of_corrector(name: str) -> tuple[torch.Tensor, dict[str, float]]:
        config = ImportanceSampling(corrector=name, mode="off")
        return GRPOLoss(GRPOConfig(), config, plugins)(*b.args())

    loss, metrics = loss_of_corrector("twice")
    assert loss.item() == pytest.approx(2 * loss_of_corrector("is")[0].item(), rel=1e-6)
    assert metrics["mine"] == 1.0
    # A training loop may log the mismatch whoever corrects.
    assert mismatch_metrics(b.rollout, b.old, b.mask).to_dict().items() <= metrics.items()
    with pytest.raises(PluginError, match="'none' must return a Correction, not NoneType"):
        loss_of_corrector("none")
    with pytest.raises(RecipeError, match="'other' is not known"):
        loss_of_corrector("other")

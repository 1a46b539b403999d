"""Whole batches in the driver: correction, rejection, skipped steps, the guard."""

from __future__ import annotations

import math

import pytest
import torch

from fp8rl.errors import BatchError, UnsupportedError
from fp8rl.recipe import ImportanceSampling, Rejection
from nemo_rl_ext import correct
from nemo_rl_ext.config.guard import GuardConfig
from nemo_rl_ext.driver.batch_correction import WEIGHTS, BatchCorrection
from nemo_rl_ext.driver.mismatch_guard import LEVELS, MismatchGuard
from nemo_rl_ext.grpo.importance_sampling import Correction


def bounds(**keys: int) -> GuardConfig:
    """Bounds between which the gaps of these tests lie."""
    return GuardConfig(tighten_above=1.1, skip_above=1.5, release_below=1.05, **keys)


def batch(gaps: list[float], tokens: int = 4) -> dict[str, torch.Tensor]:
    """One sequence per gap, the log ratio of each of its tokens; column 0 is the prompt's."""
    rows = len(gaps)
    rollout = torch.full((rows, tokens + 1), -1.0)
    trainer = rollout + torch.tensor(gaps)[:, None]
    mask = torch.ones(rows, tokens + 1)
    mask[:, 0] = 0
    return {
        "token_mask": mask,
        "sample_mask": torch.ones(rows),
        "prev_logprobs": trainer,
        "generation_logprobs": rollout,
    }


def test_weights_are_those_of_the_whole_batch_at_upstreams_positions() -> None:
    settings = ImportanceSampling(self_normalize=True)
    data = batch([0.1, -0.3, 2.0])
    metrics = BatchCorrection(settings).correct(data)
    expected = correct(
        data["generation_logprobs"][:, 1:],
        data["prev_logprobs"][:, 1:],
        torch.ones(3, 4),
        settings,
    )
    assert torch.equal(data[WEIGHTS][:, 1:], expected.weights)
    assert not data[WEIGHTS][:, 0].any()
    assert metrics["fp8rl/is_weight_ess"] == expected.metrics["is_weight_ess"]
    assert metrics["fp8rl/step_skipped"] == 0


def test_a_step_in_pieces_has_the_share_of_equal_tokens_before_any_is_masked() -> None:
    run = BatchCorrection(ImportanceSampling(), in_pieces=True)
    for piece in (batch([0.0, 0.0]), batch([0.0, 1e-6], tokens=4)):
        run.count_equal(piece)
        piece["sample_mask"][1] = 0  # as upstream's threshold
        run.correct(piece)
    assert run.end_step()[1]["fp8rl/equal_logprobs"] == 0.75
    run.correct(batch([0.0]))
    assert "fp8rl/equal_logprobs" not in run.end_step()[1]


@pytest.mark.parametrize("in_pieces", [False, True])
def test_scales_that_were_outgrown_are_counted(in_pieces: bool) -> None:
    run = BatchCorrection(ImportanceSampling(), in_pieces=in_pieces)
    for outgrown in (None, 0, 3):
        run.outgrown = outgrown
        metrics = run.correct(batch([0.1]))
        if in_pieces:
            _, metrics = run.end_step()
        assert metrics.get("fp8rl/kv_scales_outgrown") == outgrown


def test_rejected_sequences_leave_the_sample_mask_and_tokens_the_token_mask() -> None:
    def rejected(level: str) -> dict[str, torch.Tensor]:
        data = batch([0.0, 1.0])
        data["prev_logprobs"][1, 3:] -= 1.0
        rejection = Rejection(level=level, high=1.5)
        BatchCorrection(ImportanceSampling(rejection=rejection)).correct(data)
        return data

    assert rejected("geometric")["sample_mask"].tolist() == [1.0, 0.0]
    data = rejected("token")
    assert data["sample_mask"].tolist() == [1.0, 1.0]
    assert data["token_mask"].tolist() == [[0, 1, 1, 1, 1], [0, 0, 0, 1, 1]]


def test_a_batch_that_is_rejected_whole_leaves_the_step_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    settings = ImportanceSampling(rejection=Rejection(level="sequence", high=1.5))
    data, run = batch([1.0, 1.0]), BatchCorrection(settings)
    metrics = run.correct(data)
    assert metrics["fp8rl/all_rejected"] == metrics["fp8rl/step_skipped"] == 1.0
    assert data["sample_mask"].tolist() == [1.0, 1.0]
    assert run.skips
    assert "widen the bounds of loss_fn.fp8rl.importance_sampling" in caplog.text
    run.correct(batch([0.0, 0.0]))
    assert not run.skips


def test_a_step_in_pieces_is_judged_once_by_all_its_tokens() -> None:
    guard = MismatchGuard(bounds(fallback_after=1))
    run = BatchCorrection(ImportanceSampling(), guard, in_pieces=True)
    data = batch([0.0, 0.2])
    run.correct(data)
    assert data["sample_mask"].tolist() == [1.0, 0.0]  # the piece alone is above tighten_above
    assert guard.level == "normal"
    run.correct(batch([0.0] * 6))
    skips, metrics = run.end_step()
    assert not skips
    assert metrics["fp8rl/token_mult_prob_error"] == pytest.approx((math.exp(0.2) + 7) / 8)
    assert metrics["fp8rl/tokens"] == 32
    assert metrics["fp8rl/guard_rejected_share"] == pytest.approx(0.5 * 8 / 32)
    assert (metrics["fp8rl/guard_level"], metrics["fp8rl/step_skipped"]) == (0.0, 0.0)
    assert (guard.level, guard.good) == ("normal", 1)  # (e^0.2 + 7) / 8 = 1.03
    for gaps in ([1.0, 1.0], [0.0], [1.0]):
        run.correct(batch(gaps))
    assert guard.level == "normal"
    assert run.end_step()[0]
    assert guard.level == "skip"


def test_the_metrics_of_a_step_in_pieces_are_those_of_its_whole_batch() -> None:
    settings = ImportanceSampling(rejection=Rejection(level="sequence", high=1.5))
    run = BatchCorrection(settings, in_pieces=True)
    long, short, far = batch([0.05, -0.2], tokens=6), batch([0.0, 0.1], tokens=3), batch([1.0])
    for piece in (long, short, far):
        run.correct(piece)
    skips, metrics = run.end_step()
    assert not skips

    gaps = torch.zeros(5, 6)
    mask = torch.zeros(5, 6)
    for row, (gap, tokens) in enumerate([(0.05, 6), (-0.2, 6), (0.0, 3), (0.1, 3), (1.0, 4)]):
        gaps[row], mask[row, :tokens] = gap, 1
    rollout = torch.full((5, 6), -1.0)
    expected = correct(rollout, rollout + gaps, mask, settings).metrics
    for name, value in expected.items():
        assert metrics[f"fp8rl/{name}"] == pytest.approx(value, rel=1e-5, abs=1e-7), name


FAR = 0.2
"""Outside the guard's geometric bounds; its error, 1.22, tightens and does not skip."""


@pytest.mark.parametrize("tight", [True, False])
@pytest.mark.parametrize("empty_first", [True, False])
def test_a_piece_of_which_nothing_is_left_is_not_trained_on(empty_first: bool, tight: bool) -> None:
    """Naively the piece is. Only the first piece of a step leaves the step out."""
    rejecting = ImportanceSampling(rejection=Rejection(level="sequence", high=1.5))
    run = BatchCorrection(rejecting, in_pieces=True)
    if tight:
        run = BatchCorrection(ImportanceSampling(), MismatchGuard(bounds()), in_pieces=True)
    far, near = batch([FAR, FAR]), batch([0.0, 0.0])
    for piece in (far, near) if empty_first else (near, far):
        run.correct(piece)
    # The loop cannot end a step of empty pieces.
    assert far["sample_mask"].tolist() == [1.0 * empty_first] * 2
    skips, metrics = run.end_step()
    assert skips is empty_first
    assert metrics["fp8rl/step_skipped"] == empty_first
    assert metrics["fp8rl/guard_rejected_share" if tight else "fp8rl/rejected_share"] == 0.5
    if tight:
        assert metrics["fp8rl/guard_level"] == LEVELS.index("skip" if empty_first else "tight")
    assert run.end_step() == (False, {}), "what follows is another step"


SETTINGS_THAT_EMPTY = {
    "tight": ImportanceSampling(),
    "sequence": ImportanceSampling(rejection=Rejection(level="sequence", high=1.0001)),
    "veto": ImportanceSampling(token_veto=0.9999),
    "weights": ImportanceSampling(mode="mask", low=0.9999, high=1.0001),
}


@pytest.mark.parametrize("in_pieces", [False, True])
@pytest.mark.parametrize("name", SETTINGS_THAT_EMPTY)
def test_steps_that_the_recipe_empties_reach_the_guards_end(name: str, in_pieces: bool) -> None:
    """Naively they are left out, or trained with weights of 0 or as they are, for ever."""
    gap = {"veto": -0.01, "tight": FAR}.get(name, 0.01)
    guard = MismatchGuard(bounds(fallback_after=3))
    run = BatchCorrection(SETTINGS_THAT_EMPTY[name], guard, in_pieces=in_pieces)

    def step() -> None:
        data = batch([gap, gap])
        metrics = run.correct(data)
        if in_pieces:
            skips, metrics = run.end_step()
            assert skips
        assert metrics["fp8rl/step_skipped"] == 1.0
        assert not data[WEIGHTS].any()
        assert data["sample_mask"].tolist() == [1.0, 1.0]  # the loops cannot take an empty batch

    for _ in range(3):
        step()
    with pytest.raises(UnsupportedError, match=r"4 steps .*rejection left no token .* 4\).* widen"):
        step()


def test_steps_left_out_for_either_reason_make_one_row_and_a_step_that_trains_ends_it() -> None:
    guard = MismatchGuard(bounds(fallback_after=2))
    run = BatchCorrection(ImportanceSampling(), guard)
    for gap in (FAR, 1.0, 0.0, 1.0, FAR):
        run.correct(batch([gap]))
    with pytest.raises(UnsupportedError, match=r"skip_above=1\.5 in 2 and rejection .* in 1\)"):
        run.correct(batch([1.0]))


def test_a_batch_that_upstreams_threshold_has_emptied_is_left_out_and_counts() -> None:
    """Naively the guard never sees a run of which nothing is left."""
    data = batch([0.9, 0.9])
    data["sample_mask"].zero_()
    run = BatchCorrection(
        ImportanceSampling(self_normalize=True), MismatchGuard(bounds(fallback_after=1))
    )
    assert run.correct(data, masked=math.exp(0.9))["fp8rl/step_skipped"] == 1.0
    assert run.skips
    assert data[WEIGHTS].shape == data["token_mask"].shape
    assert run.correct(data) == {}, "the loop's own filters have nothing to do with the engines"
    with pytest.raises(UnsupportedError, match="2 steps in a row were left out"):
        run.correct(data, masked=1.2)


def test_the_guard_tightens_whatever_the_corrector_rejects() -> None:
    """Naively a plugin that gives no metrics ends the run, and one that rejects nothing goes on."""
    run = BatchCorrection(ImportanceSampling(), MismatchGuard(bounds()))
    run._corrector = lambda rollout, trainer, mask, config: Correction(mask.float(), mask != 0, {})
    data = batch([0.0, 0.3])  # e^0.3 is outside the guard's bounds
    metrics = run.correct(data)
    assert metrics["fp8rl/guard_level"] == 1.0
    assert metrics["fp8rl/guard_rejected_share"] == 0.5
    assert data["sample_mask"].tolist() == [1.0, 0.0]
    assert data[WEIGHTS][0, 1:].tolist() == [1.0] * 4
    assert not data[WEIGHTS][1].any()


def test_an_empty_batch_is_left_alone_and_nan_is_told() -> None:
    data = batch([0.0])
    data["sample_mask"].zero_()
    assert BatchCorrection(ImportanceSampling()).correct(data) == {}
    data = batch([float("nan")])
    with pytest.raises(BatchError, match="NaN"):
        BatchCorrection(ImportanceSampling()).correct(data)


@pytest.mark.parametrize(
    ("errors", "levels"),
    [
        ((1.01, 1.2, 1.01, 1.07, 1.01, 1.01, 1.01), "normal tight tight tight tight normal normal"),
        ((1.6, 1.6, 1.2, 1.6, math.inf, 1.6), "skip skip tight skip skip stop"),
    ],
)
def test_the_guard_rises_at_once_falls_after_good_steps_and_ends_the_run_after_skips(
    errors: tuple[float, ...], levels: str, caplog: pytest.LogCaptureFixture
) -> None:
    guard = MismatchGuard(bounds(fallback_after=2, release_after=2))
    assert [guard.observe(error) for error in errors] == levels.split()
    first = next(error for error in errors if error > 1.1)
    change = f"normal -> {'tight' if first < 1.5 else 'skip'}"
    assert f"{change}: capped_prob_error is {first:.4f}" in caplog.text


@pytest.mark.parametrize(
    ("bf16", "message"),
    [
        (False, r"rollout=false in the fp8rl block and .*\.precision=bfloat16\.$"),
        (True, "with rollouts in BF16, so FP8 rollouts are not"),
    ],
)
def test_a_step_far_off_is_left_out_and_then_the_run_ends(bf16: bool, message: str) -> None:
    run = BatchCorrection(ImportanceSampling(), MismatchGuard(bounds(fallback_after=1), bf16=bf16))
    assert run.correct(batch([1.0]))["fp8rl/step_skipped"] == 1.0
    assert run.skips
    with pytest.raises(UnsupportedError, match=message):
        run.correct(batch([1.0]))


@pytest.mark.parametrize(
    ("gap", "level"), [(15.0, "normal"), (math.inf, "skip"), (-math.inf, "skip")]
)
def test_one_token_far_off_leaves_the_guard_normal_unless_it_is_impossible(
    gap: float, level: str
) -> None:
    """As in a healthy run of SmolLM2, whose mean error a few tokens lifted to 1,050."""
    guard = MismatchGuard(GuardConfig())
    run = BatchCorrection(ImportanceSampling(), guard, in_pieces=True)
    data = batch([0.05] * 8, tokens=512)
    data["prev_logprobs"][3, 7] += gap
    run.correct(data)
    metrics = run.end_step()[1]
    assert metrics["fp8rl/token_mult_prob_error"] > 800
    assert guard.level == level and metrics["fp8rl/step_skipped"] == (level == "skip")


@pytest.mark.parametrize(
    ("start", "times", "then", "level"),
    [
        (1.04, 3.0, 1.115, "normal"),  # healthy runs stay within 1.3 times their start's distance
        (1.04, 3.0, 1.13, "tight"),
        (1.04, 3.0, 1.45, "skip"),
        (1.04, None, 1.25, "normal"),
        (1.004, 3.0, 1.019, "normal"),  # rollouts in BF16
        (1.004, 3.0, 1.021, "tight"),
        (1.2, 3.0, 1.31, "tight"),  # never above the configured bound
    ],
)
def test_the_first_ten_trained_steps_lower_the_bounds(
    start: float, times: float | None, then: float, level: str
) -> None:
    guard = MismatchGuard(GuardConfig(times_start=times))
    errors = [start] * 5 + [math.inf, 2.5] + [start] * 5  # the two are left out
    assert [guard.observe(error) for error in errors].count("skip") == 2
    for _ in range(5):  # back to normal
        guard.observe(start)
    assert guard.level == "normal" and guard.asks(then) == level


def test_a_lowered_bound_is_named_with_its_key() -> None:
    guard = MismatchGuard(GuardConfig(fallback_after=1))
    run = BatchCorrection(ImportanceSampling(), guard)
    for _ in range(10):
        run.correct(batch([0.01]))
    run.correct(batch([0.3]))
    with pytest.raises(UnsupportedError, match=r"above 1\.1.*times_start lowers.*skip_above=2 "):
        run.correct(batch([0.3]))

"""The mismatch guard over runs of any batches, against its rules written out in numpy.

Whatever comes: a rejected sequence never has weight, a step of which nothing is left is left out
and counts, and the guard's end is reached after the number of steps that the guide gives.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fp8rl.errors import BatchError, UnsupportedError
from fp8rl.recipe import ImportanceSampling, Rejection
from nemo_rl_ext.config.guard import GuardConfig
from nemo_rl_ext.driver.batch_correction import WEIGHTS, BatchCorrection
from nemo_rl_ext.driver.mismatch_guard import LEVELS, MismatchGuard
from nemo_rl_ext.grpo.log_ratio import SATURATION

Array = np.ndarray

near = st.sampled_from((0.0, 1e-4, -0.003, 0.02, -0.03))
far = st.sampled_from((0.06, -0.07, 0.2, -0.25, 0.35, 0.6, -1.0, 5.0, -30.0))
extreme = st.sampled_from((100.0, -100.0, 1e4, -1e30, math.inf, -math.inf))
never_read = st.sampled_from((math.nan, math.inf, -math.inf, 1e30, 7.0))


@dataclass
class Piece:
    """Float32 ``[B, T]``; what ``counts`` leaves out may be anything."""

    rollout: Array
    trainer: Array
    counts: Array
    sampled: Array
    """``[B]``, upstream's mask of sequences."""


@st.composite
def pieces(draw: st.DrawFn) -> Piece:
    rows, columns = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    kind = draw(st.sampled_from((near, near, far, near | far, near | far | extreme)))
    lengths = [draw(st.integers(0, columns)) for _ in range(rows)]
    counts = np.array([[draw(st.booleans()) or n == 0 for _ in range(columns)] for n in lengths])
    counts &= np.arange(columns)[None] < np.array(lengths)[:, None]
    same = draw(st.booleans())  # all tokens of a sequence
    gaps = np.array([[draw(kind)] * columns if same else [draw(kind) for _ in range(columns)]
                     for _ in range(rows)], dtype=np.float32)  # fmt: skip
    rollout = np.full((rows, columns), -1.0, dtype=np.float32)
    if draw(st.integers(0, 9)) == 0:
        rollout[0, 0] = -math.inf
    sampled = np.array([draw(st.integers(0, 5)) > 0 for _ in range(rows)])
    with np.errstate(invalid="ignore"):
        trainer = rollout + gaps
    ignored = ~(counts & sampled[:, None])
    for values in (rollout, trainer):
        values[ignored] = draw(never_read)
    return Piece(rollout, trainer, counts, sampled)


configs = st.builds(
    lambda bounds, geometric, release, fallback_after: GuardConfig(
        release_below=bounds[0],
        tighten_above=bounds[1],
        skip_above=bounds[2],
        geometric=geometric,
        release_after=release,
        fallback_after=fallback_after,
    ),
    bounds=st.sampled_from(((1.05, 1.1, 1.5), (1.01, 1.01, 1.3), (1.1, 1.1, 1.1), (1.3, 1e6, 1e9))),
    geometric=st.sampled_from((1.000001, 1.05, 1e6)),
    release=st.integers(1, 3),
    fallback_after=st.integers(1, 3),
)
corrections = st.builds(
    lambda mode, rejection, veto: ImportanceSampling(
        mode=mode, low=0.5 if mode == "mask" else None, rejection=rejection, token_veto=veto
    ),
    mode=st.sampled_from(("truncate", "mask", "off")),
    rejection=st.none()
    | st.builds(
        Rejection,
        level=st.sampled_from(("sequence", "geometric")),
        low=st.sampled_from((0.5, 0.99)),
        high=st.sampled_from((1.001, 1.5)),
    ),
    veto=st.none() | st.sampled_from((0.3, 0.98)),
)


def no_tie(value: float, bound: float) -> None:
    """Leave out what float32 cannot tell apart from a bound."""
    assume(not abs(value - bound) < 1e-5 * (1 + abs(bound)))


@dataclass
class Rules:
    """The table of docs/nemo_rl.md, for whole steps."""

    config: GuardConfig
    settings: ImportanceSampling
    level: str = "normal"
    good: int = 0
    left_out: int = 0
    kept: list[Array] = field(default_factory=list)

    def error(self, log_ratio: Array) -> float:
        with np.errstate(over="ignore"):
            found = float(np.exp(np.abs(log_ratio)).mean())
        for bound in (
            self.config.release_below,
            self.config.tighten_above,
            self.config.skip_above,
        ):
            if math.isfinite(found):
                no_tie(found, bound)
        return found

    def is_far(self, error: float) -> bool:
        return not error <= self.config.skip_above or math.isinf(error)

    def asks_for_tight(self, error: float) -> bool:
        if error > self.config.tighten_above:
            return True
        good = error < self.config.release_below and self.good + 1 >= self.config.release_after
        return self.level != "normal" and not good

    def stays(self, piece: Piece, tight: bool) -> Array:
        """Tokens that no rule rejects."""
        counts = piece.counts & piece.sampled[:, None]
        log_ratio = ratio_of(piece)
        kept = counts.copy()
        for row in range(len(counts)):
            own = log_ratio[row][counts[row]]
            if not own.size:
                continue
            c = self.settings
            dropped = False
            if c.rejection is not None:
                value = own.sum() if c.rejection.level == "sequence" else own.mean()
                assert c.rejection.low is not None and c.rejection.high is not None
                for bound in (c.rejection.low, c.rejection.high):
                    no_tie(value, math.log(bound))
                dropped = not math.log(c.rejection.low) <= value <= math.log(c.rejection.high)
            if c.token_veto is not None:
                for value in own:
                    no_tie(value, math.log(c.token_veto))
                dropped |= bool((own < math.log(c.token_veto)).any())
            if tight:
                bound = math.log(self.config.geometric)
                no_tie(abs(own.mean()), bound)
                dropped |= abs(own.mean()) > bound
            if dropped:
                kept[row] = False
        return kept

    def has_weight(self, piece: Piece, kept: Array) -> bool:
        values = ratio_of(piece)[kept]
        if self.settings.mode == "mask":
            assert self.settings.low is not None
            for value in values:
                for bound in (self.settings.low, self.settings.high):
                    no_tie(value, math.log(bound))
            inside = (values >= math.log(self.settings.low)) & (
                values <= math.log(self.settings.high)
            )
            return bool(inside.any())
        return bool(values.size)

    def end_step(self, error: float, emptied: bool) -> str:
        """The level of a step, whose batch has this error."""
        if not emptied and error < self.config.release_below:
            self.good += 1
        else:
            self.good = 0
        if emptied or self.is_far(error):
            self.level = "skip"
            self.left_out += 1
            if self.left_out > self.config.fallback_after:
                self.level = "stop"
            return self.level
        self.left_out = 0
        if error > self.config.tighten_above:
            self.level = "tight"
        elif self.level != "normal":
            self.level = "normal" if self.good >= self.config.release_after else "tight"
        return self.level


def ratio_of(piece: Piece) -> Array:
    """Log ratio in float64, bounded; NaN where two infinities meet, 0 where nothing counts."""
    counts = piece.counts & piece.sampled[:, None]
    with np.errstate(invalid="ignore"):
        found = piece.trainer.astype(np.float64) - piece.rollout.astype(np.float64)
    return np.clip(np.where(counts, found, 0.0), -SATURATION, SATURATION)


def unbounded(piece: Piece) -> Array:
    counts = piece.counts & piece.sampled[:, None]
    return piece.trainer[counts].astype(np.float64) - piece.rollout[counts].astype(np.float64)


def data_of(piece: Piece) -> dict[str, torch.Tensor]:
    """As upstream has it: column 0 is the prompt's."""

    def shifted(values: Array) -> torch.Tensor:
        found = torch.zeros(values.shape[0], values.shape[1] + 1)
        found[:, 1:] = torch.from_numpy(values.astype(np.float32))
        return found

    return {
        "token_mask": shifted(piece.counts),
        "sample_mask": torch.from_numpy(piece.sampled.astype(np.float32)),
        "prev_logprobs": shifted(piece.trainer),
        "generation_logprobs": shifted(piece.rollout),
    }


def tokens_left(data: dict[str, torch.Tensor]) -> Array:
    mask = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
    return (mask != 0).numpy()


@pytest.mark.parametrize("in_pieces", [False, True], ids=["whole", "pieces"])
def test_runs_of_the_guard(
    budget: Callable[[int], settings], counts: Counter[str], in_pieces: bool
) -> None:
    step_of = st.lists(pieces(), min_size=1, max_size=3 if in_pieces else 1)

    @settings(parent=budget(120))
    @given(
        steps=st.lists(step_of, min_size=1, max_size=8),
        repeat=st.integers(1, 4),
        config=configs,
        settings_of=corrections,
    )
    def check(
        steps: list[list[Piece]],
        repeat: int,
        config: GuardConfig,
        settings_of: ImportanceSampling,
    ) -> None:
        guard = MismatchGuard(config)
        run = BatchCorrection(settings_of, guard, in_pieces=in_pieces)
        rules = Rules(config, settings_of)
        for step in [step for step in steps for _ in range(repeat)]:
            counts["guard: steps"] += 1
            if any(np.isnan(ratio_of(piece)).any() for piece in step):
                with pytest.raises(BatchError, match="NaN"):
                    for piece in step:
                        run.correct(data_of(piece))
                assert guard.level == rules.level
                return
            if play(run, rules, step, in_pieces, counts):
                return

    check()


def play(
    run: BatchCorrection, rules: Rules, step: list[Piece], in_pieces: bool, counts: Counter[str]
) -> bool:
    """Give a step to the driver's part and to the rules; return whether the run has ended."""
    counting = [p for p in step if (p.counts & p.sampled[:, None]).any()]
    if not counting:
        assert all(run.correct(data_of(piece)) == {} for piece in step)
        assert not in_pieces or run.end_step() == (False, {})
        return False
    error = rules.error(np.concatenate([unbounded(p) for p in counting]))
    # What each piece must keep, by the level before the step ends.
    expected: list[Array] = []
    for piece in counting:
        own = rules.error(unbounded(piece))
        tight = rules.asks_for_tight(own) and (in_pieces or not rules.is_far(own))
        expected.append(rules.stays(piece, tight))
    first_empty = in_pieces and not expected[0].any()
    emptied = first_empty or not any(
        rules.has_weight(p, k) for p, k in zip(counting, expected, strict=True)
    )
    level = rules.end_step(error, emptied)
    data = [data_of(piece) for piece in counting]
    if level == "stop":
        counts["guard: runs ended"] += 1
        with pytest.raises(
            UnsupportedError, match=f"{rules.left_out} steps in a row were left out"
        ):
            for part in data:
                run.correct(part)
            run.end_step()
        return True
    metrics = [run.correct(part) for part in data]
    skips = run.skips
    if in_pieces:
        skips, told = run.end_step()
    else:
        told = metrics[0]
    must_skip = emptied or level == "skip"
    assert skips is must_skip
    assert told["fp8rl/step_skipped"] == must_skip
    assert told["fp8rl/guard_level"] == LEVELS.index(level)  # type: ignore[arg-type]
    assert run.guard is not None
    assert (run.guard.level, run.guard.skipped) == (level, rules.left_out)
    counts["guard: steps left out"] += must_skip
    counts["guard: steps emptied"] += emptied
    for piece, kept, part in zip(counting, expected, data, strict=True):
        weights = part[WEIGHTS][:, 1:].numpy()
        assert not weights[~kept].any(), "a rejected token has weight"
        assert np.isfinite(weights).all()
        left = tokens_left(part)
        # A step in pieces is judged when they have been trained on.
        known_to_skip = first_empty if in_pieces else must_skip
        sampled = piece.counts & piece.sampled[:, None]
        assert (left == (sampled if known_to_skip else kept)).all()
    return False


def test_every_rejected_batch_of_one_reaches_the_end_that_the_guide_gives(
    budget: Callable[[int], settings], counts: Counter[str]
) -> None:
    @settings(parent=budget(40))
    @given(
        gap=st.floats(0.06, 0.39) | st.floats(-0.39, -0.06),
        tokens=st.integers(1, 5),
        after=st.integers(1, 5),
        in_pieces=st.booleans(),
    )
    def check(gap: float, tokens: int, after: int, in_pieces: bool) -> None:
        config = GuardConfig(
            tighten_above=1.05, fallback_after=after
        )  # a gap of 0.06 is above tighten_above and outside of geometric, one of 0.4 is skipped
        run = BatchCorrection(ImportanceSampling(), MismatchGuard(config), in_pieces=in_pieces)
        values = np.full((1, tokens), -1.0, dtype=np.float32)
        piece = Piece(values, values + np.float32(gap), values < 0, np.array([True]))
        for number in range(1, after + 2):
            counts["guard: steps"] += 1
            if number > after:
                with pytest.raises(UnsupportedError, match=f"{after + 1} steps in a row"):
                    run.correct(data_of(piece))
                    run.end_step()
                return
            told = run.correct(data_of(piece))
            if in_pieces:
                _, told = run.end_step()
            assert told["fp8rl/step_skipped"] == 1.0
            assert told["fp8rl/guard_level"] == LEVELS.index("skip")

    check()

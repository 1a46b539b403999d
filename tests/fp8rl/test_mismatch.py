"""Mismatch metrics against plain Python loops in float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8rl.errors import BatchError
from fp8rl.mismatch import MismatchMetrics, mismatch_metrics


def quantile(values: list[float], level: float) -> float:
    ordered, position = sorted(values), level * (len(values) - 1)
    below, above = math.floor(position), math.ceil(position)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])


def expected(pairs: list[tuple[float, float]], low: float, high: float) -> dict[str, float]:
    n = len(pairs)
    d = [trainer - rollout for rollout, trainer in pairs]
    w = [math.exp(x) for x in d]
    rollout, trainer = (math.fsum(side) / n for side in zip(*pairs, strict=True))
    return {
        "tokens": n,
        "token_mult_prob_error": math.fsum(math.exp(abs(x)) for x in d) / n,
        "capped_prob_error": math.fsum(min(math.exp(abs(x)), 10) for x in d) / n,
        "kl_k1": -math.fsum(d) / n,
        "kl_k2": math.fsum(x * x / 2 for x in d) / n,
        "kl_k3": math.fsum(math.expm1(x) - x for x in d) / n,
        "chi_square": math.fsum(x * x for x in w) / n - 1,
        "ess": math.fsum(w) ** 2 / (n * math.fsum(x * x for x in w)),
        "ppl_rollout": math.exp(-rollout),
        "ppl_trainer": math.exp(-trainer),
        "ppl_gap": rollout - trainer,
        "log_ratio_q01": quantile(d, 0.01),
        "log_ratio_q50": quantile(d, 0.5),
        "log_ratio_q99": quantile(d, 0.99),
        "share_low": sum(x < low for x in w) / n,
        "share_high": sum(x > high for x in w) / n,
    }


def assert_close(actual: MismatchMetrics, wanted: dict[str, float]) -> None:
    found = actual.to_dict()
    assert set(found) == set(wanted)
    for name, value in wanted.items():
        assert found[name] == pytest.approx(value, rel=1e-9, abs=1e-12), name


@settings(max_examples=50)
@given(
    shape=st.tuples(st.integers(1, 5), st.integers(1, 40)),
    seed=st.integers(0, 2**31),
    noise=st.sampled_from([0.0, 1e-4, 0.1, 3.0]),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
    mask_dtype=st.sampled_from([torch.bool, torch.float32, torch.int64]),
    poison=st.sampled_from([math.nan, math.inf, -math.inf]),
)
def test_equal_to_the_loops(shape, seed, noise, dtype, mask_dtype, poison):
    g = torch.Generator().manual_seed(seed)
    rollout = -torch.rand(shape, generator=g) * 5
    trainer = (rollout + noise * torch.randn(shape, generator=g)).to(dtype)
    rollout = rollout.to(dtype)
    mask = torch.rand(shape, generator=g) < 0.7
    mask[0, 0] = True
    pairs = list(zip(rollout[mask].tolist(), trainer[mask].tolist(), strict=True))
    rollout[~mask] = poison
    trainer[~mask] = math.nan
    actual = mismatch_metrics(rollout, trainer, mask.to(mask_dtype), low=0.8, high=1.3)
    assert_close(actual, expected(pairs, 0.8, 1.3))


def test_effective_sample_size_does_not_overflow():
    found = mismatch_metrics(torch.zeros(4), torch.tensor([400.0, 400, -400, -400]), torch.ones(4))
    assert found.ess == pytest.approx(0.5)
    assert found.chi_square == math.inf


@pytest.mark.parametrize("side", [0, 1])
def test_nan_of_a_counted_token_shows_everywhere(side):
    pair = [torch.zeros(5), torch.zeros(5)]
    pair[side][3] = math.nan
    found = mismatch_metrics(*pair, torch.ones(5)).to_dict()
    assert found.pop("tokens") == 5
    assert all(math.isnan(value) for value in found.values()), found


LOGPROBS = torch.full((2, 3), -1.0)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"mask": LOGPROBS * 0}, "selects no token"),
        ({"trainer_logprobs": torch.zeros(2, 4)}, "must have one shape"),
        ({"mask": torch.ones(3)}, "must have one shape"),
        ({"rollout_logprobs": [1.0]}, "^rollout_logprobs is a .* give a torch.Tensor"),
        ({"trainer_logprobs": LOGPROBS.to_sparse()}, "^trainer_logprobs is a .* give a torch"),
        ({"mask": LOGPROBS.to("meta")}, "^mask is a .* give a torch.Tensor"),
        # Token numbers, which would be counted as log-probabilities.
        ({"trainer_logprobs": LOGPROBS.long()}, "trainer_logprobs came in torch.int64"),
        ({"low": 2.0, "high": 0.5}, "are no bounds of a ratio"),
        ({"low": math.nan}, "are no bounds of a ratio"),
    ],
)
def test_refused(changes, match):
    given = dict.fromkeys(("rollout_logprobs", "trainer_logprobs", "mask"), LOGPROBS)
    with pytest.raises(BatchError, match=match):
        mismatch_metrics(**given | changes)

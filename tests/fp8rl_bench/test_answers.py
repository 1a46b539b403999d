from __future__ import annotations

import math

import numpy as np
import pytest

from fp8rl.errors import UnsupportedError
from fp8rl_bench.answers import compared
from fp8rl_bench.rollouts import sender_size


def test_log_probabilities_are_compared_as_in_float64() -> None:
    draw = np.random.default_rng(0)
    sampled = [-draw.random(n).astype(np.float32) for n in (3, 5)]
    other = [row + draw.normal(0, 0.1, len(row)).astype(np.float32) for row in sampled]
    other[0][1] = sampled[0][1]
    other[1][4] -= 3  # one outlier, which the cap bounds
    found = compared([row.tolist() for row in sampled], [row.tolist() for row in other])
    ratio = np.concatenate(other).astype(float) - np.concatenate(sampled).astype(float)
    assert found["tokens"] == 8 and found["equal"] == 1 / 8
    assert found["kl_k3"] == pytest.approx(np.mean(np.exp(ratio) - 1 - ratio), rel=1e-6)
    error = np.exp(abs(ratio))
    assert found["token_mult_prob_error"] == pytest.approx(np.mean(error), rel=1e-6)
    assert found["capped_prob_error"] == pytest.approx(np.mean(error.clip(max=10)), rel=1e-6)
    assert error.max() > 10


VOCABULARY, GIB = 622_000_000, 1 << 30  # elements of Qwen3-8B's largest tensor


@pytest.mark.parametrize(
    ("sizes", "free", "size"),
    [
        ([VOCABULARY] * 13, math.inf, 2 * VOCABULARY + (1 << 28)),
        ([1 << 20] * 5, math.inf, 5 << 20),
        ([1 << 24] * 999, 64 * GIB, GIB),
        ([VOCABULARY] * 13, 4 * GIB, GIB),
        ([VOCABULARY] * 13, 2 * GIB, None),
    ],
)
def test_a_sender_takes_half_of_the_free_memory_at_most(
    sizes: list[int], free: float, size: int | None
) -> None:
    if size is not None:
        assert sender_size(sizes, free) == size
        return
    with pytest.raises(UnsupportedError, match=r"needs 2.3 GiB .* has 2.0; give --memory less"):
        sender_size(sizes, free)

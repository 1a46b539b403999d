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
    found = compared([row.tolist() for row in sampled], [row.tolist() for row in other])
    ratio = np.concatenate(other).astype(float) - np.concatenate(sampled).astype(float)
    assert found["tokens"] == 8 and found["equal"] == 1 / 8
    assert found["kl_k3"] == pytest.approx(np.mean(np.exp(ratio) - 1 - ratio), rel=1e-6)
    assert found["token_mult_prob_error"] == pytest.approx(np.mean(np.exp(abs(ratio))), rel=1e-6)


@pytest.mark.parametrize(
    ("sizes", "free", "size"),
    [
        ([1 << 20] * 5, math.inf, 5 << 20),
        ([1 << 24] * 999, 64 << 30, 1 << 30),
        ([622_000_000] * 13, 2 << 30, None),  # elements of Qwen3-8B's largest tensor
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

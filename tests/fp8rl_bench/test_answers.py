from __future__ import annotations

import numpy as np
import pytest

from fp8rl_bench.answers import compared


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

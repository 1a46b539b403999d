"""Frequencies against transformers; the table: ``test_reference.py``."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from fp8rl.kernels.rotary_table import LLAMA3, inverse_frequencies


@pytest.mark.parametrize(("factor", "dim"), [(8.0, 128), (32.0, 64)])
def test_the_scaling_of_llama_3_is_that_of_transformers(factor: float, dim: int) -> None:
    low, high, length = LLAMA3
    config = LlamaConfig(
        head_dim=dim,
        max_position_embeddings=131_072,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500_000.0,
            "factor": factor,
            "low_freq_factor": low,
            "high_freq_factor": high,
            "original_max_position_embeddings": length,
        },
    )
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    found, plain = inverse_frequencies(5e5, dim, factor), inverse_frequencies(5e5, dim)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found.float(), expected, rtol=1e-6, atol=0)
    kept, divided = found == plain, found == plain / factor
    assert kept[0] and divided[-1] and 0 < (~kept & ~divided).sum() < dim // 4

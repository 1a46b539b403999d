"""The shared functions of a CPU; both engines' bits: ``tests/vllm_fp8rl/test_exact.py``."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from fp8rl.kernels import reference
from fp8rl.kernels.rotary_table import LLAMA3, cos_sin_table, inverse_frequencies

MAKE = torch.Generator().manual_seed(0)


def normal(*size: int) -> torch.Tensor:
    return torch.randn(size, generator=MAKE).bfloat16()


def test_the_last_tokens_attend_as_in_the_whole_sequence() -> None:
    query, key, value = normal(40, 4, 64), normal(40, 2, 64), normal(40, 2, 64)
    whole = reference.attend(query, key, value, 0.125)
    by_head = [x.double().transpose(0, 1) for x in (query, key, value)]
    expected = torch.nn.functional.scaled_dot_product_attention(
        *by_head, is_causal=True, enable_gqa=True
    )
    assert torch.equal(whole, expected.transpose(0, 1).bfloat16())
    for first, end in ((39, 40), (7, 19), (0, 1)):
        part = reference.attend(query[first:end], key[:end], value[:end], 0.125)
        assert torch.equal(part, whole[first:end])


def test_norm_and_rotation_are_one_after_the_other() -> None:
    query, key, weights = normal(6, 4, 64), normal(6, 2, 64), normal(2, 64)
    table = cos_sin_table(inverse_frequencies(1e4, 64), 9, torch.device("cpu"))
    positions = torch.tensor([0, 3, 8, 1, 1, 2])
    ready = [reference.rms_norm(x, w, 1e-6) for x, w in zip((query, key), weights, strict=True)]
    apart = reference.rotate(*ready, positions, table)
    norms = (weights[0], weights[1], 1e-6)
    for a, b in zip(
        apart, reference.rotate(query, key, positions, table, norms=norms), strict=True
    ):
        assert torch.equal(a, b)
    angle = (positions[:, None] * inverse_frequencies(1e4, 64))[:, None]
    pairs = torch.complex(*ready[0].double().chunk(2, -1)) * torch.polar(angle * 0 + 1, angle)
    torch.testing.assert_close(
        apart[0].double(), torch.cat((pairs.real, pairs.imag), -1), rtol=2**-8, atol=1e-5
    )
    back = reference.rotate(*apart, positions, table, back=True)
    torch.testing.assert_close(back[1], ready[1], rtol=2**-6, atol=0.03)


def test_a_token_outside_of_the_vocabulary_has_no_logprob() -> None:
    logits, ids = normal(2, 3, 50), torch.tensor([[0, 49, -1], [50, 7, 8]])
    found, largest, log_sum = reference.token_logprobs(logits, ids)
    assert torch.equal(found[0, 2:], torch.zeros(1)) and found[1, 0] == 0
    assert found[0, 1] == logits[0, 1].float().log_softmax(-1)[49]
    torch.testing.assert_close(found[1, 1], logits[1, 1, 7].float() - largest[1, 1] - log_sum[1, 1])


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

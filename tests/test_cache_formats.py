"""Formats of a KV cache in ``benchmarks/cache_formats.py``: the codes, and a live model."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from fp8rl.numerics import fake_quantize_kv
from support.benchmarks import imported


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return imported("cache_formats", monkeypatch)


def nearest(x: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Distance in float64 from each number to the nearest code or its negative."""
    codes = torch.cat((codes, -codes)).double()
    return (x.double()[..., None] - codes).abs().amin(-1)


def keys() -> torch.Tensor:
    """``[batch, heads, tokens, head_size]``, the second head a tenth as large."""
    torch.manual_seed(0)
    return torch.randn(2, 2, 5, 8) * torch.tensor([1.0, 0.1])[None, :, None, None]


def test_floating_formats_take_the_nearest_code(program: ModuleType) -> None:
    """All codes of a format, counted out: mantissas of each exponent, and those below."""
    x = keys()
    for name, exponents, mantissa, largest in (
        ("e4m3", range(-6, 9), 3, 448),
        ("e3m4", range(-2, 4), 4, 15.5),
    ):
        steps = 2**mantissa
        normal = [(1 + m / steps) * 2.0**e for e in exponents for m in range(steps)]
        below = [m / steps * 2.0 ** exponents[0] for m in range(steps)]
        codes = torch.tensor([code for code in (*normal, *below) if code <= largest])
        scale = program.power_of_two(x.abs().amax(), float(largest))
        assert (
            math.log2(scale) % 1 == 0
            and scale / 2 * largest < x.abs().amax() * 1.05 <= scale * largest
        )
        rounded = program.FORMATS[name](x)
        assert nearest(rounded / scale, codes).amax() == 0
        assert torch.equal((rounded / scale - x / scale).abs().double(), nearest(x / scale, codes))


def test_e4m3_is_what_the_trainer_attends_over(program: ModuleType) -> None:
    x = keys()
    scale = program.power_of_two(x.abs().amax(), 448.0)
    clipped = torch.zeros(2, dtype=torch.int64)
    for one in fake_quantize_kv(x, x, torch.tensor([scale, scale]), clipped):
        assert torch.equal(program.e4m3(x), one)
    assert not clipped.any()


def test_int8_has_a_scale_for_each_head_or_token(program: ModuleType) -> None:
    x = keys()
    for name, largest in (
        ("int8, a scale a head", x.abs().amax(dim=(0, 2, 3), keepdim=True) * 1.05),
        ("int8, a scale a token and head", x.abs().amax(-1, keepdim=True)),
    ):
        step = (largest / 127).expand_as(x)
        error = (program.FORMATS[name](x) - x).abs()
        assert (error <= step * 0.5001).all() and error.amax() > 0
        codes = program.FORMATS[name](x) / step
        torch.testing.assert_close(codes, codes.round())


def test_a_rotation_is_undone_and_spreads_a_large_channel(program: ModuleType) -> None:
    torch.manual_seed(1)
    x = torch.randn(2, 2, 5, 64)
    x[..., 3] *= 30
    steps = x.abs().amax(-1, keepdim=True) / 127
    rotated = program.int8_rotated(x) - x
    assert rotated.abs().max() < 2 * steps.max()
    plain = program.int8_of_token_and_head(x) - x
    assert rotated.square().mean() < 0.3 * plain.square().mean()


def test_rounding_reaches_the_attention_of_the_layers_asked_for(
    program: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    long_model = imported("long_model", monkeypatch)
    given = {"folder": tmp_path, "size": "tiny", "longest": 2, "slips": 0.0, "limit": 1e9}
    given |= {"steps": 1, "stop_at": 1.0, "tokens": 512, "learning_rate": 3e-2, "seed": 0}
    start = long_model.WarmStart(argparse.Namespace(**given))
    start.step()
    start.save_model()

    probe = program.Probe(tmp_path)
    assert list(probe.layers) == [0, 1]
    tokens = torch.randint(8, 60, (3, 40), generator=torch.Generator().manual_seed(1))

    def told(rounds: dict[str, Any], layer: int | None = None) -> torch.Tensor:
        probe.rounds, probe.layer = rounds, layer
        return probe.logprobs(tokens, 10)

    exact = told({})
    assert exact.shape == (3, 30, start.tokenizer.vocab_size)
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        own = plain(input_ids=tokens).logits[:, 9:-1].log_softmax(-1)
    torch.testing.assert_close(exact, own, atol=1e-4, rtol=0)
    seen = [told({part: program.e4m3}, layer) for part in program.PARTS for layer in (None, 0, 1)]
    assert all(not torch.equal(exact, one) for one in seen)
    assert torch.equal(exact, told({"keys": program.e4m3}, 2))  # there is no such layer
    zero = told({"values": torch.zeros_like})
    assert (exact - zero).abs().amax() > (exact - seen[3]).abs().amax()

    before = probe.model.model.layers[1].self_attn.k_norm.weight.clone()
    probe.enlarge(16)
    changed = probe.model.model.layers[1].self_attn.k_norm.weight / before
    assert sorted(changed.tolist())[-5:] == [1, 16, 16, 16, 16]
    torch.testing.assert_close(told({}), exact, atol=1e-4, rtol=0)
    int8 = program.int8_of_token_and_head
    assert (told({"keys": int8}) - exact).abs().mean() > 2 * (
        told({"keys": program.bf16}) - exact
    ).abs().mean()


def test_differences_are_those_of_torch(program: ModuleType) -> None:
    torch.manual_seed(2)
    exact, rounded = torch.randn(2, 2, 3, 5).log_softmax(-1)
    sampled = torch.randint(0, 5, (2, 3))
    told = program.differences(exact, rounded, sampled, ["word", "digit", "digit"])
    kl = torch.nn.functional.kl_div(rounded, exact, log_target=True, reduction="none").sum(-1)
    assert told["kl"] == pytest.approx(kl.mean().item(), rel=1e-5)
    assert told["kinds"]["digit"] == pytest.approx(kl[:, 1:].mean().item(), rel=1e-5)
    assert list(told["kinds"]) == ["word", "digit"] and told["tokens"] == 6
    at = torch.nn.functional.one_hot(sampled, 5).bool()
    assert told["far"] == int(((exact - rounded)[at].abs() >= 1).sum()) > 0

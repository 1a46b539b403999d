"""The norm inside a TransformerEngine layer, against float64."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megatron_fp8rl.layers.norms import normalize

EPS = 1e-6


@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("kind", ["RMSNorm", "LayerNorm"])
def test_the_norm_in_bf16_is_float64_rounded_once(kind: str, centered: bool) -> None:
    """Also where the zero-centered weight is far below the spacing of BF16 at 1."""
    generator = torch.Generator().manual_seed(0)
    x, weight, bias, upstream = (
        torch.randn(shape, generator=generator).bfloat16()
        for shape in ((512, 256), (256,), (256,), (512, 256))
    )
    weight = weight / 64 if centered else weight
    module = SimpleNamespace(
        layer_norm_weight=weight.clone().requires_grad_(),
        layer_norm_bias=bias,
        zero_centered_gamma=centered,
        normalization=kind,
        eps=EPS,
    )
    inside = x.clone().requires_grad_()
    found = normalize(module, inside)
    found.backward(upstream)
    assert found.dtype == torch.bfloat16

    exact, gamma = x.double().requires_grad_(), weight.double().requires_grad_()
    mean = 0 if kind == "RMSNorm" else exact.mean(-1, keepdim=True)
    offset = exact - mean
    normalized = offset * torch.rsqrt(offset.square().mean(-1, keepdim=True) + EPS)
    expected = normalized * (gamma + centered) + (0 if kind == "RMSNorm" else bias.double())
    expected.backward(upstream.double())
    # Half a spacing of BF16, and what float32 adds near a tie.
    off = (found.double() - expected).abs() / expected.abs().clamp(min=1e-3)
    assert off.max() < 2**-8
    limit = 4e-3 if centered else 0.05  # torch's backward on a CPU adds up in BF16
    for ours, theirs in ((inside.grad, exact.grad), (module.layer_norm_weight.grad, gamma.grad)):
        assert (ours.double() - theirs).norm() < limit * theirs.norm()

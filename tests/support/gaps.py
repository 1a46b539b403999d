"""How far logprobs may be from the reference's, and the KV scales of a checkpoint for some prompts.

The eager and SDPA attention of transformers, under equal fake quantization, show how far rounding
alone separates logprobs: a difference in the last bit of a float32 sometimes flips an FP8 code, and
the flip spreads.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from transformers import DynamicCache

from fp8rl import Recipe
from fp8rl.kv_scales import Role, scale_name
from fp8rl.numerics import E4M3_MAX
from support.hf_reference import load_reference

FLIPPED = 1e-4
"""Difference of a logprob in nats: a hundred times the error of float32 rounding, and a hundredth
of the error of one flipped code."""


@dataclass(frozen=True)
class Gap:
    """Absolute differences between two vectors of logprobs, in nats."""

    mean: float
    p99: float
    max: float
    flipped: float
    """Share of positions above :data:`FLIPPED`, where an earlier FP8 code was rounded otherwise."""

    def within(self, floor: Gap, factor: float) -> bool:
        """Return whether mean and flipped share are at most ``factor`` times those of ``floor``.

        The share of flipped positions is the sharper test. Flips make the mean heavy-tailed, and
        high quantiles measure the size of one flip, which a wrong scale hardly changes. An error in
        the numerics of any layer moves nearly every position, while correct engines agree to
        float32 rounding on all but a few.
        """
        return self.mean <= factor * floor.mean and self.flipped <= factor * floor.flipped


def gap(a: torch.Tensor, b: torch.Tensor) -> Gap:
    """Return statistics of ``|a - b|``."""
    difference = (a.double() - b.double()).abs()
    return Gap(
        mean=difference.mean().item(),
        p99=difference.quantile(0.99).item(),
        max=difference.max().item(),
        flipped=(difference > FLIPPED).double().mean().item(),
    )


def expected_and_floor(
    path: str | os.PathLike[str],
    recipe: Recipe,
    prompts: Sequence[Sequence[int]],
    *,
    kv_scales: Mapping[str, float] | None = None,
) -> tuple[torch.Tensor, Gap]:
    """Return logprobs of transformers' eager attention, and their gap to those of its SDPA."""
    eager, sdpa = (
        load_reference(path, recipe, kv_scales=kv_scales, attention=name).many(prompts)
        for name in ("eager", "sdpa")
    )
    return eager, gap(eager, sdpa)


def noise_floor(
    path: str | os.PathLike[str], recipe: Recipe, prompts: Sequence[Sequence[int]]
) -> Gap:
    """Return the gap between transformers' eager and SDPA attention, equally fake-quantized."""
    return expected_and_floor(path, recipe, prompts)[1]


def observed_kv_scales(
    path: str | os.PathLike[str],
    recipe: Recipe,
    prompts: Sequence[Sequence[int]],
    *,
    device: str = "cpu",
) -> dict[str, float]:
    """Return scales for the largest |K| and |V| of the prompts, with the recipe's margin."""
    model = load_reference(path, recipe, device=device).model
    roles: tuple[Role, ...] = ("k", "v")
    amax: dict[tuple[int, Role], float] = {}
    for prompt in prompts:
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(
                torch.tensor([list(prompt)], device=device), past_key_values=cache, use_cache=True
            )
        for layer, stored in enumerate(cache.layers):
            if not hasattr(stored, "keys"):  # the state of linear attention
                continue
            for role, tensor in zip(roles, (stored.keys, stored.values), strict=True):
                amax[layer, role] = max(amax.get((layer, role), 0.0), tensor.abs().max().item())
    factor = recipe.kv_cache.margin / E4M3_MAX
    return {
        scale_name(layer, role): 2.0 ** math.ceil(math.log2(value * factor))
        for (layer, role), value in amax.items()
    }

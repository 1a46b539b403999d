"""How much of a long answer's probabilities each format of a KV cache costs, with equal weights.

    python benchmarks/cache_formats.py --model FOLDER [--lines 10] [--count 256] [--outliers 16]
                                       [--out FILE.json]

A model of ``long_model.py`` reads demonstrations (``long_tasks.py``) in float32 by transformers, in
which nothing but keys, values or queries of its attention is rounded, as a cache of that format (or
a kernel in FP8) would hold them: in all layers, and keys and values in E4M3 in each layer alone.
Compared with the same model without rounding are KL (nats a token, over the whole vocabulary), by
kind of token too, and the tokens of the demonstration whose log-probabilities differ by a nat or
more. Keys are rounded after the rotation, as caches have them. A fixed scale is one that a
calibration would find: the largest magnitude of the layer, or of a head in it, over the 16 rows
that are read at once. ``--outliers`` multiplies four of a head's channels of K and divides those of
Q by the same power of two, in each layer: exactly the same model, but with keys that have a few
large channels, as those of many LLMs do.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from facts import versions
from long_tasks import KINDS, LongTokenizer, demonstration, problems, prompt_length, token_kinds
from nemo_rl_long import FAR
from processes import save

from fp8rl import Recipe
from fp8rl.kv_scales import power_of_two_scales

MARGIN = Recipe().kv_cache.margin
"""Of a fixed scale."""
BATCH = 16

Format = Callable[[torch.Tensor], torch.Tensor]
"""Round a float32 tensor ``[batch, heads, tokens, head_size]`` and return float32."""


def power_of_two(largest: torch.Tensor, code: float) -> float:
    """Return the smallest power of two with which ``code`` reaches ``largest`` and the margin."""
    return power_of_two_scales({"scale": largest.item() * MARGIN / code})["scale"]


def bf16(x: torch.Tensor) -> torch.Tensor:
    return x.bfloat16().float()


def e4m3(x: torch.Tensor) -> torch.Tensor:
    """E4M3 with one power of two for the layer: what fp8rl's cache has."""
    scale = power_of_two(x.abs().amax(), 448.0)
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


def e3m4(x: torch.Tensor) -> torch.Tensor:
    """One bit less of exponent and one more of mantissa than E4M3; the largest code is 15.5."""
    scale = power_of_two(x.abs().amax(), 15.5)
    codes = x / scale
    exponent = torch.frexp(codes).exponent.clamp(min=-1) - 1  # 2^-2 is the smallest normal number
    step = torch.ldexp(torch.ones_like(codes), exponent - 4)
    return torch.round(codes / step) * step * scale


def int8_of_head(x: torch.Tensor) -> torch.Tensor:
    """INT8 with one scale for each head of the layer."""
    return _int8(x, x.abs().amax(dim=(0, 2, 3), keepdim=True) * MARGIN)


def int8_of_token_and_head(x: torch.Tensor) -> torch.Tensor:
    """INT8 with a scale for each head of each token, as in vLLM's ``int8_per_token_head``."""
    return _int8(x, x.abs().amax(dim=-1, keepdim=True))


def int8_rotated(x: torch.Tensor) -> torch.Tensor:
    """The same after Hadamard's rotation of each head, which spreads channels over one another.

    Attention with queries rotated likewise is the same, so that a kernel need not rotate back.
    """
    size = x.shape[-1]
    rotation = torch.ones(1, 1)
    while len(rotation) < size:
        rotation = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), rotation)
    rotation /= size**0.5
    return int8_of_token_and_head(x @ rotation) @ rotation  # it is its own inverse


def _int8(x: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    scale = largest.clamp(min=1e-30) / 127
    return torch.round(x / scale).clamp(-127, 127) * scale


FORMATS: dict[str, Format] = {
    "bf16": bf16,
    "e4m3": e4m3,
    "e3m4": e3m4,
    "int8, a scale a head": int8_of_head,
    "int8, a scale a token and head": int8_of_token_and_head,
    "int8, the same of rotated ones": int8_rotated,
}
PARTS = ("keys", "values", "queries")


class Probe:
    """A model whose attention rounds one of its arguments.

    Args:
        folder: a model of ``long_model.py``.
    """

    def __init__(self, folder: Path) -> None:
        from transformers import (
            AttentionInterface,
            AttentionMaskInterface,
            AutoModelForCausalLM,
        )
        from transformers.masking_utils import eager_mask
        from transformers.models.qwen3.modeling_qwen3 import eager_attention_forward

        self.rounds: dict[str, Format] = {}
        self.layer: int | None = None
        """The only one that rounds; None for all."""

        def attend(
            module: torch.nn.Module,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            *more: Any,
            **options: Any,
        ) -> tuple[torch.Tensor, torch.Tensor | None]:
            parts = {"queries": query, "keys": key, "values": value}
            if self.layer in (None, module.layer_idx):
                parts |= {name: rounds(parts[name]) for name, rounds in self.rounds.items()}
            query, key, value = parts.values()
            return eager_attention_forward(module, query, key, value, *more, **options)

        AttentionInterface.register("cache_formats", attend)
        # Without a mask of its own the name would attend to later tokens too.
        AttentionMaskInterface.register("cache_formats", eager_mask)
        self.model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="cache_formats"
        )
        self.layers = range(self.model.config.num_hidden_layers)

    @torch.no_grad()
    def enlarge(self, factor: int) -> None:
        """Multiply two pairs of channels that rotate together, random ones of each layer.

        Args:
            factor: for keys, a power of two; queries get the inverse.
        """
        generator = torch.Generator().manual_seed(0)
        for layer in self.model.model.layers:
            attention = layer.self_attn
            half = attention.head_dim // 2
            chosen = torch.randperm(half, generator=generator)[:2]
            channels = torch.cat([chosen, chosen + half])
            attention.k_norm.weight[channels] *= factor
            attention.q_norm.weight[channels] /= factor

    @torch.no_grad()
    def logprobs(self, tokens: torch.Tensor, prompt: int) -> torch.Tensor:
        """Return log-probabilities of what follows the prompt, ``[rows, tokens, vocabulary]``."""
        parts = [
            self.model(input_ids=rows).logits[:, prompt - 1 : -1].log_softmax(-1)
            for rows in tokens.split(BATCH)
        ]
        return torch.cat(parts)


def differences(
    exact: torch.Tensor, rounded: torch.Tensor, sampled: torch.Tensor, kinds: list[str]
) -> dict[str, Any]:
    """Compare two models' log-probabilities, ``[rows, tokens, vocabulary]``.

    Args:
        exact, rounded: without and with rounding.
        sampled: int64 ``[rows, tokens]``, the tokens of the demonstrations.
        kinds: of each token.

    Returns:
        ``kl``, the mean of KL(exact, rounded) in nats a token; ``kinds``, the same for each; and
        the number of ``far`` tokens and of all ``tokens``.
    """
    kl = (exact.exp() * (exact - rounded)).sum(-1).double()
    at = sampled[..., None]
    moved = (exact.gather(-1, at) - rounded.gather(-1, at)).abs()
    places = defaultdict(list)
    for place, kind in enumerate(kinds):
        places[kind].append(place)
    return {
        "kl": kl.mean().item(),
        "kinds": {kind: kl[:, places[kind]].mean().item() for kind in KINDS if kind in places},
        "far": int((moved >= FAR).sum()),
        "tokens": sampled.numel(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Formats of a KV cache, with equal weights")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--lines", type=int, default=10, help="of each program")
    parser.add_argument("--count", type=int, default=256, help="programs")
    parser.add_argument("--outliers", type=int, default=1, help="factor, a power of two")
    parser.add_argument("--out", type=Path, default=Path("cache_formats.json"))
    options = parser.parse_args()
    lines, tokenizer, choose = options.lines, LongTokenizer(), random.Random("cache formats")
    asked = [p.prompt for p in problems("cache formats", options.count, 0, lines, lines)]
    texts = [prompt + demonstration(prompt, choose) for prompt in asked]
    tokens = torch.tensor([tokenizer.encode(text, add_bos=False) for text in texts])
    prompt = prompt_length(lines)
    kinds = token_kinds(lines)[: tokens.shape[1] - prompt]
    probe = Probe(options.model)
    probe.enlarge(options.outliers)
    exact = probe.logprobs(tokens, prompt)
    found = {"versions": versions(), "lines": lines, "count": options.count}
    found |= {"outliers": options.outliers, "results": []}
    cases: list[tuple[str, str, int | None]] = [
        (part, name, None) for name in FORMATS for part in PARTS
    ]
    cases += [(part, "e4m3", layer) for part in ("keys", "values") for layer in probe.layers]
    for part, name, layer in cases:
        probe.rounds, probe.layer = {part: FORMATS[name]}, layer
        told = differences(exact, probe.logprobs(tokens, prompt), tokens[:, prompt:], kinds)
        found["results"].append({"part": part, "format": name, "layer": layer, **told})
        save(found, options.out, found["results"][-1])


if __name__ == "__main__":
    sys.exit(main())

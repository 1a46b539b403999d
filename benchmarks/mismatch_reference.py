"""A Qwen3 in plain torch that rounds at each place as the rollout engine or the trainer does.

:class:`Ways` has one field for each place; a value is the name of a way to compute there. All ways
are the same function in real numbers. Weights are quantized as both engines do, so their codes are
equal. Each way: ``docs/measurements/places.md``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file

from fp8rl import PinPolicy, Recipe
from fp8rl.kv_scales import Role, scale_name
from fp8rl.numerics import (
    E4M3_MAX,
    FP8_DTYPE,
    GROUP,
    dequantize_block,
    dequantize_group,
    quantize_block,
    quantize_group,
)

BF16 = torch.bfloat16


@dataclass(frozen=True)
class Ways:
    """How each place computes. The defaults are those of vLLM with fp8rl on a CPU."""

    linears: Literal["fp8", "bf16"] = "fp8"
    """Decoder linears over FP8 operands, or in BF16."""
    accumulation: Literal["whole", "blocks"] = "whole"
    """A product in one float32 matrix product, or summed by blocks of 128 along its inner
    dimension, which stands for a GEMM with another order of sums."""
    kv: Literal["codes", "bf16", "dequantized"] = "codes"
    """K and V in attention: E4M3 codes times a float32 scale, unquantized, or codes times scale
    rounded to BF16 as a trainer's attention would read them."""
    kv_scales: Literal["fp32", "pow2"] = "fp32"
    """KV scales as calibrated, or rounded up to powers of two."""
    prompts: Literal["16bit", "fp8"] = "16bit"
    """Queries and probabilities of prompt tokens: 16 bits, or E4M3 as in FlashAttention 3."""
    probabilities: Literal["flash", "float32", "local"] = "float32"
    """Attention's products: ``flash`` rounds unnormalized probabilities to BF16, ``float32`` rounds
    nothing, ``local`` (Megatron's unfused kernel) rounds scores and probabilities to BF16."""
    output: Literal["twice", "once"] = "twice"
    """Attention's output is rounded to BF16 before and after the product with V's scale, or after
    it only. A power of two makes no difference."""
    norm_input: Literal["float32", "bf16"] = "float32"
    """A norm reads the sum of residual and branch before or after its rounding to BF16."""
    norm_weight: Literal["twice", "once"] = "twice"
    """A norm rounds to BF16 before and after the product with its weight, or after it only."""
    qk_norm_weight: Literal["twice", "once"] = "twice"
    """The same for the norms of queries and keys."""
    rope: Literal["once", "each", "float32"] = "once"
    """Rotation in float32 with cos and sin in BF16; in BF16 with every product rounded; or in
    float32 with cos and sin in float32 (TransformerEngine's fused kernel)."""
    silu: Literal["twice", "once"] = "twice"
    """``silu(gate)`` rounded to BF16 before the product with ``up``, or not."""
    logits: Literal["bf16", "float32"] = "bf16"
    """Dtype of the output projection and of its result."""

    def but(self, **places: str) -> Ways:
        """Return a copy with other ways at some places."""
        return replace(self, **places)


class Reference:
    """The model of a checkpoint folder, which must be a dense Qwen3 with untied embeddings.

    Args:
        path: folder with ``config.json`` and ``model.safetensors``.
        recipe: formats and pins.
        kv_scales: K and V scales by the name they are sent under.
        device: where to compute.
        prompt: number of prompt tokens in each sequence, for :attr:`Ways.prompts`.
    """

    def __init__(
        self,
        path: Path,
        recipe: Recipe,
        kv_scales: Mapping[str, float],
        device: str,
        prompt: int,
    ) -> None:
        from fp8rl.models.spec import ModelSpec

        config = _Config(json.loads((path / "config.json").read_text()))
        self.config, self.recipe, self.device, self.prompt = config, recipe, device, prompt
        self.kv_scales = dict(kv_scales)
        weights = {n: t.to(device) for n, t in load_file(path / "model.safetensors").items()}
        self._plain: dict[str, torch.Tensor] = {}
        self._fp8: dict[str, torch.Tensor] = {}
        policy = PinPolicy(recipe.pins, ModelSpec.of(config).names)
        for layer in range(config.num_hidden_layers):
            prefix = f"model.layers.{layer}"
            for fused, parts in _FUSED.items():
                names = [f"{prefix}.{part}.weight" for part in parts]
                name = f"{prefix}.{fused}"
                self._plain[name] = torch.cat([weights.pop(n) for n in names])
                if policy.precision(f"{prefix}.{parts[0]}") == "fp8":
                    codes = quantize_block(
                        self._plain[name], scale_format=recipe.weights.scale_format
                    )
                    self._fp8[name] = dequantize_block(*codes)
        self._plain |= weights
        half = config.head_dim // 2
        inv_freq = 1.0 / config.theta ** (torch.arange(half, device=device).float() / half)
        self._angles = torch.outer(
            torch.arange(config.max_position_embeddings, device=device).float(), inv_freq
        )

    @torch.no_grad()
    def logprobs(self, tokens: torch.Tensor, ways: Ways, rows: int = 32) -> torch.Tensor:
        """Return logprobs of the tokens after the prompt, float32 ``[B, T - prompt]`` on the CPU.

        Args:
            tokens: int64 ``[B, T]``.
            ways: how to compute.
            rows: sequences in one forward.
        """
        parts = []
        for batch in tokens.to(self.device).split(rows):
            logits = self._logits(batch, ways)[:, self.prompt - 1 : -1].float()
            chosen = batch[:, self.prompt :, None]
            parts.append(logits.log_softmax(-1).gather(-1, chosen).squeeze(-1).cpu())
        return torch.cat(parts)

    def _logits(self, tokens: torch.Tensor, ways: Ways) -> torch.Tensor:
        residual = self._plain["model.embed_tokens.weight"][tokens]
        total = residual.float()
        for layer in range(self.config.num_hidden_layers):
            prefix = f"model.layers.{layer}"
            x = self._norm(total, residual, f"{prefix}.input_layernorm", ways)
            total, residual = _add(residual, self._attention(x, layer, ways))
            x = self._norm(total, residual, f"{prefix}.post_attention_layernorm", ways)
            gate_up = self._linear(x, f"{prefix}.mlp.gate_up_proj", ways)
            x = self._linear(_swiglu(gate_up, ways), f"{prefix}.mlp.down_proj", ways)
            total, residual = _add(residual, x)
        x = self._norm(total, residual, "model.norm", ways)
        head = self._plain["lm_head.weight"]
        if ways.logits == "float32":
            return x.float() @ head.float().t()
        return torch.nn.functional.linear(x, head)

    def _norm(
        self, total: torch.Tensor, rounded: torch.Tensor, name: str, ways: Ways
    ) -> torch.Tensor:
        x = total if ways.norm_input == "float32" else rounded.float()
        weight = self._plain[f"{name}.weight"]
        return rms_norm(x, weight, self.config.rms_norm_eps, ways.norm_weight)

    def _linear(self, x: torch.Tensor, name: str, ways: Ways) -> torch.Tensor:
        weight = self._fp8.get(name)
        if ways.linears == "bf16" or weight is None:
            return torch.nn.functional.linear(x, self._plain[name])
        rows = x.reshape(-1, x.shape[-1])
        rows = dequantize_group(
            *quantize_group(rows, scale_format=self.recipe.activations.scale_format)
        )
        if ways.accumulation == "whole":
            y = rows @ weight.t()
        else:
            y = rows.new_zeros(len(rows), len(weight))
            for a, b in zip(rows.split(GROUP, 1), weight.split(GROUP, 1), strict=True):
                y += a @ b.t()
        return y.to(BF16).view(*x.shape[:-1], -1)

    def _attention(self, x: torch.Tensor, layer: int, ways: Ways) -> torch.Tensor:
        config, prefix = self.config, f"model.layers.{layer}.self_attn"
        heads, kv_heads, size = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        qkv = self._linear(x, f"{prefix}.qkv_proj", ways).unflatten(-1, (-1, size))
        q, k, v = qkv.split([heads, kv_heads, kv_heads], 2)
        q, k = (
            rms_norm(
                each.float(),
                self._plain[f"{prefix}.{name}.weight"],
                config.rms_norm_eps,
                ways.qk_norm_weight,
            )
            for each, name in ((q, "q_norm"), (k, "k_norm"))
        )
        angles = self._angles[: x.shape[1], None]
        q, k = rotate(q, angles, ways.rope), rotate(k, angles, ways.rope)
        # [B, heads, T, size]
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        k = self._cached(k, layer, "k", ways).repeat_interleave(heads // kv_heads, 1)
        v = self._cached(v, layer, "v", ways).repeat_interleave(heads // kv_heads, 1)
        out = attend(q, k, v, ways.probabilities)
        if ways.kv == "codes" and ways.output == "twice":
            scale = self._scale(layer, "v", ways)
            out = (out / scale).to(BF16).float() * scale
        out = out.to(BF16)
        if ways.prompts == "fp8":
            scale = self._scale(layer, "q", ways)
            codes = (q.float() / scale).clamp(-E4M3_MAX, E4M3_MAX).to(FP8_DTYPE)
            of_prompts = attend(codes.float() * scale, k, v, "fp8").to(BF16)
            out[:, :, : self.prompt] = of_prompts[:, :, : self.prompt]
        return self._linear(out.transpose(1, 2).flatten(2), f"{prefix}.o_proj", ways)

    def _cached(self, x: torch.Tensor, layer: int, role: Role, ways: Ways) -> torch.Tensor:
        """Return K or V as attention sees it, in float32."""
        if ways.kv == "bf16":
            return x.float()
        scale = self._scale(layer, role, ways)
        codes = (x.float() / scale).clamp(-E4M3_MAX, E4M3_MAX).to(FP8_DTYPE)
        values = codes.float() * scale
        return values if ways.kv == "codes" else values.to(BF16).float()

    def _scale(self, layer: int, role: Role, ways: Ways) -> float:
        scale = self.kv_scales[scale_name(layer, role)]
        return 2.0 ** math.ceil(math.log2(scale)) if ways.kv_scales == "pow2" else scale


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float, way: str) -> torch.Tensor:
    """Return the norm of float32 ``x`` in BF16, see :attr:`Ways.norm_weight`."""
    y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon)
    return y.to(BF16) * weight if way == "twice" else (y * weight.float()).to(BF16)


def rotate(x: torch.Tensor, angles: torch.Tensor, way: str) -> torch.Tensor:
    """Rotate ``[.., size]`` in BF16 by ``[.., size / 2]`` angles, see :attr:`Ways.rope`."""
    cos, sin = angles.cos(), angles.sin()
    if way != "float32":
        cos, sin = cos.to(BF16), sin.to(BF16)
    if way != "each":
        x, cos, sin = x.float(), cos.float(), sin.float()
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(BF16)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, way: str) -> torch.Tensor:
    """Return causal attention ``[B, heads, T, size]`` in float32, see :attr:`Ways.probabilities`.

    ``fp8`` rounds unnormalized probabilities, scaled to at most 256, to E4M3.
    """
    scores = (q.float() @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
    if way == "local":
        scores = scores.to(BF16).float()
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    scores = scores.masked_fill_(hidden, float("-inf"))
    if way == "local":
        return scores.softmax(-1).to(BF16).float() @ v
    weights = (scores - scores.amax(-1, keepdim=True)).exp_()
    total = weights.sum(-1, keepdim=True)
    if way == "flash":
        weights = weights.to(BF16).float()
    elif way == "fp8":
        weights = (weights * 256).to(FP8_DTYPE).float() / 256
    return (weights @ v) / total


def _add(residual: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    total = residual.float() + x.float()
    return total, total.to(BF16)


def _swiglu(gate_up: torch.Tensor, ways: Ways) -> torch.Tensor:
    gate, up = gate_up.chunk(2, -1)
    if ways.silu == "twice":
        return torch.nn.functional.silu(gate) * up
    return (torch.nn.functional.silu(gate.float()) * up.float()).to(BF16)


_FUSED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attn.o_proj": ("self_attn.o_proj",),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down_proj": ("mlp.down_proj",),
}


class _Config:
    """``config.json`` with its keys as attributes."""

    def __init__(self, fields: dict[str, Any]) -> None:
        vars(self).update(fields)
        rope = fields.get("rope_parameters") or fields
        self.theta: float = rope["rope_theta"]

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)

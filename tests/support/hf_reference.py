"""Hugging Face transformers as an independent reference for vLLM under ``fp8rl``.

The model runs in float32 with fake quantization: values are quantized and dequantized wherever the
engine stores or multiplies FP8, that is weights in blocks, activations in groups, K and V with one
scale per tensor. Everything else is transformers' own code.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from transformers import DynamicCache, PreTrainedModel

from fp8rl import PinPolicy, Recipe
from fp8rl.kv_scales import scale_name
from fp8rl.models.families import EXPERTS, Experts
from fp8rl.models.spec import ModelSpec
from fp8rl.numerics import BLOCK, E4M3_MAX, FP8_DTYPE, GROUP, dequantize_block, dequantize_group
from fp8rl.numerics.reference import quantize_block, quantize_group  # no kernel, on a GPU too
from fp8rl.recipe import ScaleFormat

Attention = Literal["eager", "sdpa"]


@dataclass(frozen=True)
class Reference:
    """A fake-quantized model and the K and V scales that its cache applies."""

    model: PreTrainedModel
    kv_scales: Mapping[str, float] | None
    """Scale by the name it is sent under, for every layer with K and V; None keeps them in
    float32."""

    @torch.no_grad()
    def teacher_forced_logprobs(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the logprob of each token but the first, given the tokens before it.

        Args:
            token_ids: int64 ``[prompts, tokens]``; all prompts have one length.

        Returns:
            float32 ``[prompts, tokens - 1]`` on the CPU.
        """
        token_ids = token_ids.to(self.model.device)
        cache = None
        if self.kv_scales is not None:
            cache = _FakeQuantCache(self.kv_scales, self.model.config)
        logits = self.model(token_ids, past_key_values=cache, use_cache=cache is not None).logits
        logprobs = torch.log_softmax(logits[:, :-1].float(), dim=-1)
        return logprobs.gather(2, token_ids[:, 1:, None])[..., 0].cpu()

    def many(self, prompts: Sequence[Sequence[int]]) -> torch.Tensor:
        """Return the logprobs of prompts of any lengths, concatenated in one vector."""
        parts: dict[int, torch.Tensor] = {}
        for length in {len(prompt) for prompt in prompts}:
            numbers = [i for i, prompt in enumerate(prompts) if len(prompt) == length]
            batch = torch.tensor([list(prompts[i]) for i in numbers])
            parts |= dict(zip(numbers, self.teacher_forced_logprobs(batch), strict=True))
        return torch.cat([parts[i] for i in range(len(prompts))])


def load_reference(
    path: str | os.PathLike[str],
    recipe: Recipe,
    *,
    kv_scales: Mapping[str, float] | None = None,
    attention: Attention = "eager",
    unquantized: Iterable[str] = (),
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> Reference:
    """Load a BF16 checkpoint with the recipe's fake quantization.

    Args:
        path: folder of a checkpoint of a family whose modules are known
            (:mod:`fp8rl.models.families`), also inside a vision wrapper.
        recipe: formats and pins; with ``rollout: false`` no linear layer is quantized.
        kv_scales: see :class:`Reference`.
        attention: attention implementation of transformers.
        unquantized: names of further modules that stay unquantized, for negative controls.
        dtype: dtype of everything else; bfloat16 shows the effect of an engine's own rounding.
        device: device of the model; every device uses the reference formulas.
    """
    kind, config = _model_class(Path(path))
    model = kind.from_pretrained(
        os.fspath(path), config=config, dtype=dtype, attn_implementation=attention
    )
    model.to(device).eval()  # type: ignore[arg-type]
    spec = ModelSpec.of(model.config)
    policy, experts = PinPolicy(recipe.pins, spec.names), spec.family.experts or EXPERTS
    left_alone = set(unquantized)
    for name, module in list(model.named_modules()):
        if name in left_alone or not recipe.rollout:
            continue
        if isinstance(module, torch.nn.Linear) and policy.precision(name) == "fp8":
            _fake_quantize(module, recipe)
        elif _holds_experts(module) and policy.precision(_first_matrix(name, experts)) == "fp8":
            model.set_submodule(name, _FakeQuantExperts(module, recipe))
    return Reference(model, kv_scales)


def _model_class(folder: Path) -> tuple[Any, Any]:
    """Return transformers' class of a checkpoint's model, and its config.

    The name of the class is the config's: for ``AutoConfig`` vLLM before 0.32 has registered some
    configs of its own, from which transformers cannot build a model.
    """
    stored = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    kind = getattr(transformers, stored["architectures"][0])
    config = kind.config_class.from_pretrained(folder)
    if (rotary_dim := stored.get("rotary_dim")) is not None:
        # MiniMax-M2's. transformers before 5.18 takes no notice of it and rotates whole heads
        # (huggingface/transformers#48241); vLLM and Megatron-Bridge rotate this part of each.
        share = rotary_dim / config.head_dim
        config.rope_parameters.setdefault("partial_rotary_factor", share)
    return kind, config


def _holds_experts(module: torch.nn.Module) -> bool:
    """Return whether a module of transformers 5 holds all experts of a layer."""
    return hasattr(module, "gate_up_proj") and not isinstance(module, torch.nn.Linear)


def _first_matrix(stack: str, experts: Experts) -> str:
    """Return the HF name of the first expert's gate, by transformers' name of all experts."""
    block = stack.replace(".mlp.", f".{experts.block}.")  # transformers has one name for all
    return f"{block}.0.{experts.leaves[0]}"


class _FakeQuantCache(DynamicCache):
    """A cache that returns K and V as an FP8 cache would."""

    def __init__(self, scales: Mapping[str, float], config: Any) -> None:
        super().__init__(config=config)
        self._scales = scales

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys = _fake_quantize_tensor(key_states, self._scales[scale_name(layer_idx, "k")])
        values = _fake_quantize_tensor(value_states, self._scales[scale_name(layer_idx, "v")])
        return super().update(keys, values, layer_idx, *args, **kwargs)


def _fake_quantize_tensor(x: torch.Tensor, scale: float) -> torch.Tensor:
    codes = (x.float() / scale).clamp(-E4M3_MAX, E4M3_MAX).to(FP8_DTYPE)
    return (codes.float() * scale).to(x.dtype)


def _fake_quantize(linear: torch.nn.Linear, recipe: Recipe) -> None:
    codes, scale_inv = quantize_block(linear.weight.data, BLOCK, recipe.weights.scale_format)
    dtype = linear.weight.dtype
    linear.weight.data = dequantize_block(codes, scale_inv, dtype=dtype)
    group_format: ScaleFormat = recipe.activations.scale_format

    def fake_quantize_input(
        module: torch.nn.Module, args: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...]:
        quantized = quantize_group(args[0], GROUP, group_format)
        return (dequantize_group(*quantized, dtype=dtype), *args[1:])

    linear.register_forward_pre_hook(fake_quantize_input)


class _FakeQuantExperts(torch.nn.Module):
    """Experts computed one after the other, as in transformers, over quantized operands.

    It replaces a class such as ``Qwen3MoeExperts`` of transformers 5, where no hook reaches the
    product of gate and up. In earlier releases experts are ordinary linear layers.
    """

    def __init__(self, experts: Any, recipe: Recipe) -> None:
        super().__init__()
        self._act = experts.act_fn
        self._format: ScaleFormat = recipe.activations.scale_format

        def fake_quantized(matrix: torch.Tensor) -> torch.Tensor:
            codes, scale_inv = quantize_block(matrix, BLOCK, recipe.weights.scale_format)
            return dequantize_block(codes, scale_inv, dtype=matrix.dtype)

        self._weights = [
            [fake_quantized(matrix) for matrix in (*gate_up.chunk(2), down)]
            for gate_up, down in zip(
                experts.gate_up_proj.detach(), experts.down_proj.detach(), strict=True
            )
        ]

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        result = torch.zeros_like(hidden_states)
        x = self._quantize(hidden_states)
        for number, (gate, up, down) in enumerate(self._weights):
            token, slot = torch.where(top_k_index == number)
            hidden = self._quantize(self._act(x[token] @ gate.t()) * (x[token] @ up.t()))
            part = (hidden @ down.t()) * top_k_weights[token, slot, None]
            result.index_add_(0, token, part.to(result.dtype))
        return result

    def _quantize(self, x: torch.Tensor) -> torch.Tensor:
        if not len(x):
            return x
        return dequantize_group(*quantize_group(x, GROUP, self._format), dtype=x.dtype)

"""Tiny models for the fuzz, and what an engine must hold after it was sent their tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import transformers

from fp8rl import Recipe
from fp8rl.kv_scales import parse_scale_name, scale_name
from fp8rl.numerics import Quantized
from fp8rl.numerics.reference import quantize_block
from support.engine import FUSED, Engine, keep_process_groups, start_engine
from vllm_fp8rl.refit import drop_requests

LAYERS = 2
SHAPE: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
BLOCK = (128, 128)
quantized = partial(quantize_block, block=BLOCK, scale_format="fp32")
"""As the numeric contract defines it."""
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Model:
    """One architecture with its recipe; the engine computes in ``dtype``."""

    name: str
    architecture: str
    dtype: torch.dtype
    recipe: Recipe
    shape: Mapping[str, Any] = field(default_factory=dict)
    pinned: frozenset[str] = frozenset()
    """Engine modules in BF16, without the prefix of their layer number."""
    experts: int = 0

    @cached_property
    def config(self) -> Any:
        return getattr(transformers, f"{self.architecture}Config")(**(SHAPE | self.shape))

    @property
    def ragged(self) -> bool:
        """Whether k and v share a block of 128 rows."""
        return (self.config.num_key_value_heads * self.config.head_dim) % BLOCK[0] != 0

    def tensors(self, seed: int) -> Tensors:
        """HF name -> float32 tensor, random; norms near 1."""
        generator = torch.Generator().manual_seed(seed)
        tensors: Tensors = {}
        for name, shape in self._parameters.items():
            value = 0.08 * torch.randn(shape, generator=generator)
            value = value + 1 if name.endswith("norm.weight") else value
            if name.endswith("mlp.experts.gate_up_proj"):
                tensors |= self._each(name.removesuffix("gate_up_proj"), value)
            elif name.endswith("mlp.experts.down_proj"):
                stem = name.removesuffix("down_proj")
                tensors |= {f"{stem}{e}.down_proj.weight": part for e, part in enumerate(value)}
            else:
                tensors[name] = value
        return tensors

    @cached_property
    def _parameters(self) -> dict[str, torch.Size]:
        """Those of transformers' own model."""
        with torch.device("meta"):
            made = getattr(transformers, f"{self.architecture}ForCausalLM")(self.config)
        return {name: parameter.shape for name, parameter in made.named_parameters()}

    def _each(self, stem: str, stack: torch.Tensor) -> Tensors:
        tensors: Tensors = {}
        for expert, both in enumerate(stack):
            gate, up = both.chunk(2)
            tensors[f"{stem}{expert}.gate_proj.weight"] = gate
            tensors[f"{stem}{expert}.up_proj.weight"] = up
        return tensors

    def is_fp8(self, name: str) -> bool:
        """Whether the engine keeps an HF weight as FP8 codes."""
        if ".experts." in name:
            return True
        parts = {part: whole for whole, names in FUSED.items() for part in names}
        module = name.removeprefix("model.layers.").removesuffix(".weight")
        layer, _, leaf = module.partition(".")
        return leaf in parts and f"{layer}.{parts[leaf]}" not in self.pinned

    def start(self, folder: Path) -> Engine:
        """A live engine with dummy weights."""
        folder.mkdir()
        config = self.config
        config.architectures = [f"{self.architecture}ForCausalLM"]
        config.save_pretrained(folder)
        engine = start_engine(
            folder,
            self.recipe,
            load_format="dummy",
            dtype=str(self.dtype).removeprefix("torch."),
        )
        keep_process_groups(engine)
        return engine

    def held(self, sent: Mapping[str, torch.Tensor]) -> Tensors:
        """Bytes of each parameter from the tensors sent, by README ("Numbers") and reference."""
        held: Tensors = {}
        for name in ("model.embed_tokens", "model.norm", "lm_head"):
            held[f"{name}.weight"] = self._plain(sent[f"{name}.weight"])
        for layer in range(LAYERS):
            prefix = f"model.layers.{layer}"
            for module, parts in FUSED.items():
                if self.experts and module.startswith("mlp."):
                    continue
                names = [f"{prefix}.{part}" for part in parts]
                whole = f"{prefix}.{module}"
                if f"{names[0]}.bias" in sent:
                    bias = torch.cat([sent[f"{name}.bias"].float() for name in names])
                    held[f"{whole}.bias"] = self._plain(bias)
                if f"{layer}.{module}" in self.pinned:
                    weight = torch.cat([sent[f"{name}.weight"].float() for name in names])
                    held[f"{whole}.weight"] = self._plain(weight)
                else:
                    codes, scale_inv = self._quantized(sent, names)
                    held[f"{whole}.weight"] = codes
                    held[f"{whole}.weight_scale_inv"] = scale_inv
            for norm in ("input_layernorm", "post_attention_layernorm", *self._head_norms):
                held[f"{prefix}.{norm}.weight"] = self._plain(sent[f"{prefix}.{norm}.weight"])
            if self.experts:
                held[f"{prefix}.mlp.gate.weight"] = self._plain(sent[f"{prefix}.mlp.gate.weight"])
                held |= self._experts(sent, f"{prefix}.mlp.experts")
        return {name: tensor.contiguous().view(torch.uint8) for name, tensor in held.items()}

    @property
    def _head_norms(self) -> tuple[str, ...]:
        return (
            ("self_attn.q_norm", "self_attn.k_norm")
            if self.architecture.startswith("Qwen3")
            else ()
        )

    def _plain(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.dtype)

    def _quantized(self, sent: Mapping[str, torch.Tensor], names: list[str]) -> Quantized:
        if not any(f"{name}.weight_scale_inv" in sent for name in names):
            whole = torch.cat([sent[f"{name}.weight"].float() for name in names])
            return quantized(whole)
        parts = [self._alone(sent, name) for name in names]
        return Quantized(torch.cat([p.codes for p in parts]), torch.cat([p[1] for p in parts]))

    def _alone(self, sent: Mapping[str, torch.Tensor], name: str) -> Quantized:
        weight, scale_inv = sent[f"{name}.weight"], sent.get(f"{name}.weight_scale_inv")
        if scale_inv is None:
            return quantized(weight)
        return Quantized(weight, scale_inv.float())

    def _experts(self, sent: Mapping[str, torch.Tensor], stem: str) -> Tensors:
        width, hidden = self.config.moe_intermediate_size, self.config.hidden_size
        padded = -(-width // BLOCK[0]) * BLOCK[0]
        fused = f"{stem}.gate_up_proj" in sent
        w13 = torch.zeros(self.experts, 2 * padded, hidden, dtype=torch.uint8)
        w2 = torch.zeros(self.experts, hidden, padded, dtype=torch.uint8)
        scales13, scales2 = [], []
        for expert in range(self.experts):
            if fused:
                gate, up = sent[f"{stem}.gate_up_proj"][expert].chunk(2)
                matrices = (gate, up, sent[f"{stem}.down_proj"][expert])
                each = [quantized(m) for m in matrices]
            else:
                leaves = ("gate_proj", "up_proj", "down_proj")
                each = [self._alone(sent, f"{stem}.{expert}.{leaf}") for leaf in leaves]
            for first, part in zip((0, padded), each, strict=False):
                w13[expert, first : first + width] = part.codes.view(torch.uint8)
            w2[expert, :, :width] = each[2].codes.view(torch.uint8)
            scales13.append(torch.cat([each[0].scale_inv, each[1].scale_inv]))
            scales2.append(each[2].scale_inv)
        return {
            f"{stem}.routed_experts.w13_weight": w13,
            f"{stem}.routed_experts.w13_weight_scale_inv": torch.stack(scales13),
            f"{stem}.routed_experts.w2_weight": w2,
            f"{stem}.routed_experts.w2_weight_scale_inv": torch.stack(scales2),
        }


MODELS = {
    model.name: model
    for model in (
        # k and v of 64 rows: one block of 128 rows for both.
        Model("qwen2", "Qwen2", torch.bfloat16, Recipe(), {"head_dim": 64, "hidden_size": 128}),
        Model(
            "qwen3",
            "Qwen3",
            torch.float32,
            Recipe.from_dict({"pins": {"names": ["model.layers.1.mlp.down_proj"]}}),
            pinned=frozenset({"1.mlp.down_proj"}),
        ),
        Model(
            "qwen3_moe",
            "Qwen3Moe",
            torch.bfloat16,
            Recipe(),
            {"moe_intermediate_size": 64, "num_experts": 2, "num_experts_per_tok": 1},
            experts=2,
        ),
    )
}


@dataclass(frozen=True)
class Live:
    """An engine, and what can be read of it."""

    model: Model
    engine: Engine

    def weights(self) -> Tensors:
        """Parameter -> bytes, without KV scales."""
        return {
            name: parameter.data.contiguous().view(torch.uint8).clone()
            for name, parameter in self.engine.model.named_parameters()
            if parse_scale_name(name) is None
        }

    def pointers(self) -> dict[str, int]:
        return {name: p.data_ptr() for name, p in self.engine.model.named_parameters()}

    def scales(self) -> dict[str, float]:
        """Every K and V scale that attention computes with; its copies must agree."""
        found: dict[str, float] = {}
        for layer in range(LAYERS):
            attention = self.engine.model.get_submodule(f"model.layers.{layer}.self_attn.attn")
            for role in ("k", "v"):
                value = getattr(attention, f"_{role}_scale_float")
                copies = (f"{role}_scale", f"_{role}_scale", f"_{role}_scale_cpu")
                for copy in copies:
                    if getattr(attention, copy, None) is not None:
                        kept = getattr(attention, copy).item()
                        assert kept == value, f"{copy} of layer {layer} is {kept}, not {value}"
                found[scale_name(layer, role)] = value
        return found

    def cached_tokens(self, prompt: list[int]) -> int:
        """How many tokens of a prompt the engine takes from its prefix cache."""
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
        request: Any = {"prompt_token_ids": prompt}
        (output,) = self.engine.llm.generate(request, sampling, use_tqdm=False)
        return output.num_cached_tokens or 0

    def serves(self) -> list[list[int]] | None:
        """What it says to a prompt; None where it refuses."""
        from fp8rl.errors import Fp8RLError

        try:
            return self.engine.greedy([[5, 6, 7], [9] * 20], 3)
        except Fp8RLError:
            drop_requests(self.engine.llm)
            return None


def differing(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> list[str]:
    """Names whose bytes are not the same in both."""
    names = one.keys() | other.keys()
    return sorted(
        name
        for name in names
        if name not in one
        or name not in other
        or not torch.equal(one[name].reshape(-1), other[name].reshape(-1))
    )

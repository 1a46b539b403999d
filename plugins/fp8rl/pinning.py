"""`PinPolicy`: which modules run in FP8 and which stay in BF16.

One policy drives trainer, refit and rollout, so it speaks *global* HF module names
(``model.layers.3.mlp.down_proj``); an engine translates its own names before asking. Everything is
decided when the policy is made, against the whole model, so that a pipeline rank that sees four
layers of it still notices a pin that matches nothing.
"""

from __future__ import annotations

import re
import reprlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

from fp8rl.errors import ModelError, PinError
from fp8rl.recipe import ModuleKind, Pins

Precision = Literal["fp8", "bf16"]

ALWAYS_BF16: frozenset[ModuleKind] = frozenset({"lm_head", "embed_tokens", "norm", "router"})
FUSED: dict[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
_KIND_OF_LEAF: dict[str, ModuleKind] = {
    **dict.fromkeys(("qkv_proj", *FUSED["qkv_proj"]), "qkv_proj"),
    **dict.fromkeys(("gate_up_proj", *FUSED["gate_up_proj"]), "gate_up_proj"),
    "o_proj": "o_proj",
    "down_proj": "down_proj",
    "lm_head": "lm_head",
    "embed_tokens": "embed_tokens",
}
_MOST = 10_000
"""Layers or experts; more is a mistake in a config, and their names would fill the memory."""
_EXPERT = re.compile(r"\.experts\.\d+\.")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def layer_of(name: str) -> int | None:
    """Global layer number in an HF module name, or None outside the decoder stack.

    Multi-token-prediction layers (``mtp.layers.N``) are none of the decoder's: pins reach them by
    name and kind alone.
    """
    match = None if name.startswith("mtp.") else _LAYER.search(name)
    return int(match.group(1)) if match else None


def kind_of(name: str) -> ModuleKind:
    """Kind of a module, from its HF name; a linear layer nobody knows is ``linear``."""
    parts = name.split(".")
    leaf = parts[-1]
    if "experts" in parts:
        return "experts"
    if leaf in ("gate", "router", "shared_expert_gate"):
        return "router"
    if leaf.endswith(("norm", "layernorm")):
        return "norm"
    return _KIND_OF_LEAF.get(leaf, "linear")


def dense_module_names(num_layers: int) -> list[str]:
    """HF names of the modules with weights of a dense Llama/Qwen3-style model, in order.

    Raises:
        ModelError: no number of layers that a model has.
    """
    check_count("num_hidden_layers", num_layers)
    inner = layer_module_names()
    layers = [f"model.layers.{i}.{name}" for i in range(num_layers) for name in inner]
    return ["model.embed_tokens", *layers, "model.norm", "lm_head"]


def layer_module_names(
    *, gated: bool = True, num_experts: int | None = None, shared_expert: str | None = None
) -> list[str]:
    """HF names of one decoder layer's modules, within the layer and in order.

    Args:
        gated: the MLP has a gate.
        num_experts: a mixture of so many experts (Qwen3-MoE's names) instead of an MLP.
        shared_expert: name of the expert that all tokens visit, if the mixture has one.
    """
    mlp = ("gate_proj", "up_proj", "down_proj") if gated else ("up_proj", "down_proj")
    blocks = ["mlp"]
    if num_experts is not None:
        blocks = [f"mlp.experts.{number}" for number in range(num_experts)]
        blocks += [f"mlp.{shared_expert}"] if shared_expert else []
    names = ["input_layernorm", *(f"self_attn.{part}_proj" for part in "qkvo")]
    names.append("post_attention_layernorm")
    if num_experts is not None:
        names.append("mlp.gate")
        names += ["mlp.shared_expert_gate"] if shared_expert == "shared_expert" else []
    return names + [f"{block}.{part}" for block in blocks for part in mlp]


def mixture_module_names(num_experts: int, layers: Sequence[bool]) -> list[str]:
    """HF names of the modules with weights of a Qwen3-MoE-style model, in order.

    Args:
        num_experts: of a layer that has experts.
        layers: whether each decoder layer has.

    Raises:
        ModelError: no number of layers or experts that a model has.
    """
    check_count("num_hidden_layers", len(layers))
    check_count("num_experts", num_experts)
    check_count("number of experts in all layers", max(1, num_experts * sum(layers)), 100 * _MOST)
    names = [
        f"model.layers.{layer}.{name}"
        for layer, mixture in enumerate(layers)
        for name in layer_module_names(num_experts=num_experts if mixture else None)
    ]
    return ["model.embed_tokens", *names, "model.norm", "lm_head"]


def check_count(key: str, value: Any, most: int = _MOST) -> int:
    """The value of a key of a ``config.json`` that counts layers, experts or what makes a width.

    Raises:
        ModelError: no integer from 1 to ``most``.
    """
    if type(value) is not int or not 1 <= value <= most:
        raise ModelError(
            f"The model's {key} is {reprlib.repr(value)}; correct it to an integer from 1 to "
            f"{most}."
        )
    return value


def has_experts(config: Mapping[str, Any], layer: int) -> bool:
    """Whether a decoder layer of a mixture has experts, by the keys of its ``config.json``."""
    return (
        layer not in (config.get("mlp_only_layers") or ())
        and (layer + 1) % config.get("decoder_sparse_step", 1) == 0
    )


def config_module_names(config: Mapping[str, Any]) -> list[str] | None:
    """HF names of the modules with weights, in order, as far as a ``config.json`` tells.

    Returns:
        None of a mixture of experts other than Qwen3-MoE.

    Raises:
        KeyError: the config lacks a number that they follow from.
        ModelError: a value that no model has.
    """
    config = config.get("text_config") or config
    if not isinstance(config, Mapping):
        raise ModelError(
            f"The model's text_config is {reprlib.repr(config)}; correct it to an object."
        )
    layers = range(check_count("num_hidden_layers", config["num_hidden_layers"]))
    if config.get("model_type") == "qwen3_moe":
        key = "num_local_experts" if "num_local_experts" in config else "num_experts"
        experts = check_count(key, config[key])  # transformers 5 writes the first
        check_count("decoder_sparse_step", config.get("decoder_sparse_step", 1))
        dense = config.get("mlp_only_layers")
        if not isinstance(dense, list | tuple | None):
            raise ModelError(
                f"The model's mlp_only_layers is {reprlib.repr(dense)}; correct it to a list."
            )
        return mixture_module_names(experts, [has_experts(config, layer) for layer in layers])
    if any("experts" in key for key in config):
        return None
    return dense_module_names(len(layers))


@dataclass(frozen=True)
class PinRow:
    """One module of the resolved table."""

    name: str
    layer: int | None
    kind: ModuleKind
    precision: Precision
    reason: str
    """The pin that decided, e.g. ``layers: -1``; empty for FP8."""


class PinPolicy:
    """Resolved pins of one model.

    Args:
        pins: what the recipe (and plugins) keep in BF16.
        module_names: HF names of *all* modules of the model, of every pipeline rank.

    Raises:
        PinError: a pin matches nothing, a layer number is out of range, or a pin covers only a
            part of a fused module (qkv, gate_up).
    """

    def __init__(self, pins: Pins, module_names: Iterable[str]) -> None:
        self.pins = pins
        names = list(dict.fromkeys(module_names))
        layers = sorted({n for n in map(layer_of, names) if n is not None})
        self.num_layers = layers[-1] + 1 if layers else 0
        self._rules = self._compile(pins)
        self._rows = {name: self._resolve(name) for name in names}
        self._check_every_pin_matched(names)
        self._check_fused()

    @classmethod
    def for_dense_model(cls, pins: Pins, num_layers: int) -> PinPolicy:
        """Policy of a dense Llama/Qwen3-style model with ``num_layers`` decoder layers."""
        return cls(pins, dense_module_names(num_layers))

    def precision(self, name: str) -> Precision:
        """``fp8`` or ``bf16`` for a global module name; fused names (``qkv_proj``) are known.

        Raises:
            PinError: the model has no module of that name.
        """
        return self.row(name).precision

    def row(self, name: str) -> PinRow:
        """The resolved row of a module; for a fused name that of its first part."""
        if name in self._rows:
            return self._rows[name]
        prefix, _, leaf = name.rpartition(".")
        for part in FUSED.get(leaf, ())[:1]:
            unfused = f"{prefix}.{part}" if prefix else part
            if unfused in self._rows:
                return self._rows[unfused]
        raise PinError(
            f"Module '{name}' is not in the model that the pins were resolved for "
            f"({self.num_layers} layers); give PinPolicy the names of the whole model."
        )

    def report(self) -> list[PinRow]:
        """One row a module, in model order."""
        return list(self._rows.values())

    def bf16_linears(self) -> list[str]:
        """Names of the pinned modules, without those that are always BF16."""
        return [
            row.name
            for row in self._rows.values()
            if row.precision == "bf16" and row.kind not in ALWAYS_BF16
        ]

    def summary(self) -> str:
        """One line for a log."""
        linears = [row for row in self._rows.values() if row.kind not in ALWAYS_BF16]
        fp8 = sum(row.precision == "fp8" for row in linears)
        pinned = ", ".join(self._without_expert_numbers(self.bf16_linears())) or "none"
        return f"fp8rl: {fp8} of {len(linears)} linear modules in FP8; pinned to BF16: {pinned}"

    def _without_expert_numbers(self, names: Iterable[str]) -> list[str]:
        """One name, with a star, for a module that is listed for every expert of its layer."""
        starred = {name: _EXPERT.sub(".experts.*.", name) for name in self._rows}
        names = list(names)
        all_of, listed = Counter(starred.values()), Counter(starred[name] for name in names)
        whole = {star for star, count in listed.items() if count == all_of[star]}
        return list(dict.fromkeys(s if (s := starred[name]) in whole else name for name in names))

    def _compile(self, pins: Pins) -> dict[str, _Rule]:
        rules: dict[str, _Rule] = {}
        for number in pins.layers:
            index = number + self.num_layers if number < 0 else number
            if not 0 <= index < self.num_layers:
                raise PinError(
                    f"pins.layers: {number} matches nothing, the model has layers 0 to "
                    f"{self.num_layers - 1} (or -{self.num_layers} to -1)."
                )
            rules[f"layers: {number}"] = _Rule(layers=range(index, index + 1))
        for key, count, first in (
            ("first", pins.first, 0),
            ("last", pins.last, self.num_layers - pins.last),
        ):
            if count > self.num_layers:
                raise PinError(
                    f"pins.{key}: {count} is more than the model's {self.num_layers} layers."
                )
            if count:
                rules[f"{key}: {count}"] = _Rule(layers=range(first, first + count))
        rules |= {f"names: {glob}": _Rule(glob=glob) for glob in pins.names}
        rules |= {f"kinds: {kind}": _Rule(kind=kind) for kind in pins.kinds}
        return rules

    def _resolve(self, name: str) -> PinRow:
        layer, kind = layer_of(name), kind_of(name)
        if kind in ALWAYS_BF16:
            return PinRow(name, layer, kind, "bf16", f"always: {kind}")
        for reason, rule in self._rules.items():
            if rule.matches(name, layer, kind):
                return PinRow(name, layer, kind, "bf16", reason)
        return PinRow(name, layer, kind, "fp8", "")

    def _check_every_pin_matched(self, names: Sequence[str]) -> None:
        for reason, rule in self._rules.items():
            if not any(rule.matches(n, layer_of(n), kind_of(n)) for n in names):
                example = next((n for n in names if layer_of(n) is not None), "none")
                raise PinError(
                    f"pins.{reason} matches no module of the model; names look like '{example}'."
                )

    def _check_fused(self) -> None:
        for name, row in self._rows.items():
            leaf = name.rpartition(".")[2]
            prefix = name.removesuffix(leaf)
            for fused, parts in FUSED.items():
                if leaf != parts[0]:
                    continue
                group = [self._rows.get(prefix + part) for part in parts]
                differing = [r for r in group if r is not None and r.precision != row.precision]
                if differing:
                    pinned = row if row.precision == "bf16" else differing[0]
                    raise PinError(
                        f"pins.{pinned.reason} pins '{pinned.name}' but not all parts of the fused "
                        f"'{prefix}{fused}'; pin all of {', '.join(parts)} or use kinds: {fused}."
                    )


@dataclass(frozen=True)
class _Rule:
    layers: range | None = None
    glob: str | None = None
    kind: ModuleKind | None = None

    def matches(self, name: str, layer: int | None, kind: ModuleKind) -> bool:
        if self.layers is not None:
            return layer is not None and layer in self.layers
        if self.glob is not None:
            return fnmatchcase(name, self.glob)
        return kind == self.kind

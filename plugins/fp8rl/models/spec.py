"""`ModelSpec`: what the config of a model tells about it, read once and handed on."""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from fp8rl.errors import ModelError, UnsupportedError
from fp8rl.models.families import (
    LLAMA,
    WIDTH_KEYS,
    Block,
    Family,
    Module,
    Parameter,
    entry_of,
    mlp_modules,
    served_types,
)

WIDEST = 2**31 - 1
"""Largest width of a matrix."""
_MOST = 10_000
"""Largest number of layers or experts; a larger one is a mistake in a config."""
_MEDIA = ("vision_config", "audio_config", "thinker_config")
"""Keys of the config of a model that takes more than text."""
_RECURRENT = ("linear_", "mamba_")
"""How keys of the config of a model with layers of linear attention or Mamba begin."""
_MTP_COUNTS = ("num_nextn_predict_layers", "num_mtp_modules")
"""Keys of the number of layers for multi-token prediction."""
_WIDTHS = (
    *("num_key_value_heads", "head_dim", "moe_intermediate_size"),
    *(key for keys in WIDTH_KEYS.values() for key in keys),
)
"""Keys that are checked wherever a config has them."""


@dataclass(frozen=True)
class Layer:
    """A decoder layer; all that are alike share one object. Names are within the layer."""

    mixer: Block
    sparse: bool
    """It has experts."""
    modules: tuple[Module, ...]
    """In order; ``bias`` is ``always`` or empty."""
    parameters: tuple[Parameter, ...]
    """Tensors that are no module's weight or bias."""


@dataclass(frozen=True, eq=False)
class ModelSpec:
    """A model as its config describes it; :meth:`of` makes it."""

    model_type: str | None
    """Type of the language model."""
    stem: str
    """What precedes ``layers`` in the names of the language model."""
    multimodal: bool
    """The model takes more than text."""
    unknown: str
    """What kind of model it is, where the table does not describe it, e.g. ``an MoE model``."""
    missing: str
    """Key of the config without which the modules are not known; empty: it has all."""
    layers: tuple[Layer, ...]
    """Decoder layers; empty where the modules are not known."""
    tied: bool
    """The output layer is the embedding."""
    vision: Any
    """Config of the vision tower, or None."""
    text: Any = field(repr=False)
    """Config of the language model; :meth:`value` reads what only one engine asks for."""
    entry: Family | None
    """Entry of the table; None where the family is not known."""

    @classmethod
    def of(cls, config: Any, entry: Family | None = None) -> ModelSpec:
        """Read a config.

        Args:
            config: values of a ``config.json``, or a transformers config; that of a multimodal
                wrapper included.
            entry: the family, where it is known; by default ``model_type`` says it. A config
                without a type counts as Llama's.

        Raises:
            ModelError: a value that no model has.
        """
        text = value_of(config, "text_config") or config
        if isinstance(text, str | int | float | list):
            raise ModelError(
                f"The model's text_config is {reprlib.repr(text)}; correct it to an object."
            )
        kind, tied, unknown = value_of(text, "model_type"), "tie_word_embeddings", ""
        if entry is None:
            entry = entry_of(kind)
            unknown = _lacking(text, entry)
        layers: tuple[Layer, ...] = ()
        missing = ""
        if entry is not None and not unknown:
            try:
                layers = tuple(_layers(entry, text))
            except KeyError as error:
                missing = error.args[0]
        return cls(
            kind,
            stem=(entry.wrapper if entry and text is not config else "") or "model.",
            multimodal=text is not config or any(value_of(config, k) is not None for k in _MEDIA),
            unknown=unknown,
            missing=missing,
            layers=layers,
            tied=bool(value_of(config, tied, value_of(text, tied))),
            vision=value_of(config, "vision_config"),
            text=text,
            entry=None if unknown else entry,
        )

    @classmethod
    def dense(cls, layers: int) -> ModelSpec:
        """Make up a dense Llama-style model of 1 to 10,000 layers; more are a ModelError."""
        return cls.of({"num_hidden_layers": layers})

    @property
    def family(self) -> Family:
        """Entry of the table.

        Raises:
            UnsupportedError: the family is not known.
        """
        if self.entry is None:
            raise UnsupportedError(
                f"The modules of '{self.model_type or 'this model'}' are not known (known: "
                f"{served_types()}); add an entry to fp8rl/models/families.py (docs/extending.md), "
                "or run it without FP8."
            )
        return self.entry

    @cached_property
    def modules(self) -> tuple[Module, ...]:
        """Modules with weights of the whole model under their global names, in order.

        Each tower of a multimodal model is one module without a shape. An unknown family is an
        UnsupportedError, a key that is missing a ModelError.
        """
        family, stem = self.family, self.stem
        if self.missing:
            raise _lacks(self.missing)
        return (
            *(Module(tower, "tower", ()) for tower in family.towers if stem != "model."),
            Module(f"{stem}embed_tokens", "embed_tokens", ("vocab", "hidden")),
            *(
                module._replace(name=f"{stem}layers.{number}.{module.name}")
                for number, layer in enumerate(self.layers)
                for module in layer.modules
            ),
            Module(f"{stem}norm", "norm", ("hidden",)),
            Module("lm_head", "lm_head", ("vocab", "hidden")),
        )

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Global names of :attr:`modules`, which says what is raised."""
        return tuple(module.name for module in self.modules)

    @property
    def has_names(self) -> bool:
        """The modules are known."""
        return self.entry is not None and not self.missing

    @cached_property
    def experts(self) -> int:
        """Number of experts of a layer that has experts; 0 for a dense model."""
        return 0 if self.entry is None else _expert_count(self.entry, self.text)

    @cached_property
    def numbers(self) -> Mapping[str, int]:
        """Numbers that widths follow from, by key of the config.

        Raises:
            ModelError: a key that they follow from is missing or no positive integer.
            UnsupportedError: the family is not known.
        """
        used = {width for module in self.modules for width in module.shape}
        needed = ["num_hidden_layers", "num_attention_heads"]
        needed += [key for width, keys in WIDTH_KEYS.items() if width in used for key in keys]
        if self.family.experts and "expert" in used:
            needed.append(self.family.experts.width)
        given = [key for key in _WIDTHS if self.value(key) is not None]
        for key in needed:
            if self.value(key) is None and key not in _keys(self.text):
                raise _lacks(key)
        keys = dict.fromkeys((*needed, *given))
        return {key: check_count(key, self.value(key), WIDEST) for key in keys}

    @property
    def mtp_layers(self) -> range:
        """Numbers of the layers for multi-token prediction, which follow on the decoder layers."""
        first = len(self.layers)
        return range(first, first + max(self.value(key, 0) for key in _MTP_COUNTS))

    @property
    def shared_width(self) -> int:
        """Intermediate size of a layer's shared expert; 0 where there is none."""
        experts = self.family.experts
        if experts is None or not experts.shared:
            return 0
        if experts.shared_width:
            return _number(self.text, experts.shared_width)
        return _number(self.text, experts.shared_count) * int(self.value(experts.width, 0))

    def value(self, key: str, default: Any = None) -> Any:
        """Return a key of the language model's config; ``default`` where it is missing or null."""
        return value_of(self.text, key, default)

    def refused(self, *, rollout: bool, training: bool) -> str | None:
        """Say why rollout engine or trainer cannot run the model in FP8; None if they can."""
        if not (rollout or training):
            return None
        kind = self.model_type or "no model_type"
        if self.multimodal and not (self.entry and self.entry.wrapper):
            return f"a multimodal model ('{kind}') of an unknown family"
        if self.entry is None:
            if rollout or self.value("kv_lora_rank"):
                return f"{self.unknown} ('{kind}') of an unknown family"
            return None
        for side, wanted in (("rollout", rollout), ("training", training)):
            if wanted and (what := self.entry.missing.get(side)):
                return f"a {self.entry.name} model ('{kind}'): FP8 {side} does not serve {what} yet"
        return None


def _lacks(key: str) -> ModelError:
    return ModelError(f"The model's config.json has no key '{key}'; correct it.")


def value_of(config: Any, key: str, default: Any = None) -> Any:
    """Return the value of a key of a config; ``default`` where it is missing or null."""
    found = config.get(key) if isinstance(config, Mapping) else getattr(config, key, None)
    return default if found is None else found


def check_count(key: str, value: Any, most: int = _MOST, *, least: int = 1) -> int:
    """Return the value of a key of a config that counts layers or experts, or gives a width.

    Raises:
        ModelError: the value is no integer from ``least`` to ``most``.
    """
    if type(value) is not int or not least <= value <= most:
        raise ModelError(
            f"The model's {key} is {reprlib.repr(value)}; correct it to an integer from "
            f"{least} to {most}."
        )
    return value


def _keys(text: Any) -> Collection[str]:
    return text if isinstance(text, Mapping) else vars(text)


def _lacking(text: Any, entry: Family | None) -> str:
    """Say what kind of model the entry of its type does not describe; empty: it describes it."""
    found = entry or LLAMA
    if bool(value_of(text, "kv_lora_rank")) != (found.attention.kv == "latent"):
        latent = found.attention.kv != "latent"
        return f"a model {'with' if latent else 'without'} multi-latent attention"
    counts = (value_of(text, key) for key in _keys(text) if "experts" in key)
    if found.experts is None and any(isinstance(n, int) and n for n in counts):
        return "an MoE model"
    if found.linear_attention is None and _is_recurrent(text):
        return "a model with linear attention or Mamba"
    return "" if entry else "a dense model"


def _is_recurrent(text: Any) -> bool:
    """Tell whether a config has layers that are no attention over keys and values."""
    kinds = value_of(text, "layer_types")
    if isinstance(kinds, list | tuple) and any(
        isinstance(kind, str) and (kind == "linear_attention" or "attention" not in kind)
        for kind in kinds
    ):
        return True
    return any(key.startswith(_RECURRENT) and value_of(text, key) for key in _keys(text))


def _layers(family: Family, text: Any) -> Iterator[Layer]:
    """Yield the decoder layers; KeyError for a number that is missing."""
    count = value_of(text, key := "num_hidden_layers")
    if count is None and key not in _keys(text):
        raise KeyError(key)
    numbers = range(check_count(key, count))
    if family.experts and not any(key in _keys(text) for key in family.experts.count):
        raise KeyError(family.experts.count[-1])
    sparse = [_is_sparse(family, text, number) for number in numbers]
    if any(sparse):
        total = sum(sparse) * _expert_count(family, text)
        check_count("number of experts in all layers", total, 100 * _MOST)
    alike: dict[tuple[bool, bool], Layer] = {}
    for number in numbers:
        mixer = _mixer(family, text, number)
        kind = mixer is family.attention, sparse[number]
        if kind not in alike:
            modules = tuple(_layer_modules(family, text, mixer, sparse[number]))
            parameters = mixer.parameters
            if family.experts and family.experts.bias and sparse[number]:
                name = f"{family.experts.block}.{family.experts.bias}"
                parameters = (*parameters, Parameter(name, ("experts",), float32=True))
            alike[kind] = Layer(mixer, sparse[number], modules, parameters)
        yield alike[kind]


def _layer_modules(family: Family, text: Any, mixer: Block, sparse: bool) -> Iterator[Module]:
    """Yield the modules of a decoder layer in order."""
    first, *others = family.norms
    yield Module(first, "norm", ("hidden",))
    for module in mixer.modules:
        wanted = not module.when.startswith("!")
        if not module.when or bool(value_of(text, module.when.lstrip("!"))) == wanted:
            yield module._replace(bias=_bias(module.bias, text))
    yield from (Module(name, "norm", ("hidden",)) for name in others)
    experts = family.experts
    if experts is None or not sparse:
        yield from mlp_modules("mlp", family.mlp, "mlp", _bias(family.mlp_bias, text))
        return
    yield Module(f"{experts.block}.gate", "router", ("experts", "hidden"))
    if experts.shared_gate:
        yield Module(f"{experts.block}.{experts.shared_gate}", "router", ("one", "hidden"))
    leaves = experts.leaves if family.mlp[0] == "gate_proj" else experts.leaves[1:]
    for number in range(_expert_count(family, text)):
        yield from mlp_modules(f"{experts.block}.experts.{number}", leaves, "expert")
    shared = experts.shared_width or experts.shared_count
    if shared and _number(text, shared):
        yield from mlp_modules(f"{experts.block}.{experts.shared}", family.mlp, "shared")


def _bias(key: str, text: Any) -> str:
    """Return ``always`` if the config gives modules with this key a bias, or nothing."""
    return "always" if key == "always" or (key and value_of(text, key)) else ""


def _mixer(family: Family, text: Any, layer: int) -> Block:
    """Return the token mixer of a decoder layer."""
    if family.linear_attention is None:
        return family.attention
    kind = _kind_of_layer(text, "layer_types", layer)
    if kind is not None:
        linear = kind == "linear_attention"
    else:
        every = value_of(text, "full_attention_interval", 4)
        linear = (layer + 1) % check_count("full_attention_interval", every) != 0
    return family.linear_attention if linear else family.attention


def _is_sparse(family: Family, text: Any, layer: int) -> bool:
    """Tell whether a decoder layer has experts."""
    if _expert_count(family, text) == 0:
        return False
    kind = _kind_of_layer(text, "mlp_layer_types", layer)
    if kind is not None:
        return bool(kind == "sparse")
    dense = value_of(text, "mlp_only_layers", ())
    if not isinstance(dense, list | tuple):
        raise ModelError(
            f"The model's mlp_only_layers is {reprlib.repr(dense)}; correct it to a list."
        )
    step = check_count("decoder_sparse_step", value_of(text, "decoder_sparse_step", 1))
    every = check_count("moe_layer_freq", value_of(text, "moe_layer_freq", 1))
    return (
        layer not in dense
        and (layer + 1) % step == 0
        and layer >= _number(text, "first_k_dense_replace")
        and layer % every == 0
    )


def _kind_of_layer(text: Any, key: str, layer: int) -> Any:
    """Return a layer's entry in a list of the config; None where the config has no such list."""
    kinds = value_of(text, key)
    if kinds is None:
        return None
    if not isinstance(kinds, list | tuple) or layer >= len(kinds):
        raise ModelError(
            f"The model's {key} is {reprlib.repr(kinds)}; correct it to a list with an entry for "
            "each layer."
        )
    return kinds[layer]


def _expert_count(family: Family, text: Any) -> int:
    """Return the number of experts of a layer that has experts; 0 for a dense family."""
    for key in family.experts.count if family.experts else ():
        if (count := value_of(text, key)) is not None:
            return check_count(key, count)
    return 0


def _number(text: Any, key: str) -> int:
    """Return the value of a key that may be 0 or missing."""
    return check_count(key, value_of(text, key, 0), WIDEST, least=0)

"""Streams of tensors as a sender makes them, whole or with something wrong in them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from fp8rl.kv_scales import scale_name
from fp8rl.numerics.reference import quantize_block
from support.models import BLOCK, LAYERS, Model, Tensors

SOURCES = (torch.bfloat16, torch.float16, torch.float32)
Stream = list[tuple[str, Any]]


class SenderDied(Exception):
    """What a sender's generator raises."""


@dataclass
class Wire:
    """One refit's tensors, in the order of the wire."""

    model: Model
    stream: Stream
    kv_scales: dict[str, float]
    """What the stream's KV scales say, by the names on the wire; empty: none are announced."""
    faults: list[str] = field(default_factory=list)
    """What is wrong; empty: the refit must succeed."""

    @property
    def announced(self) -> bool:
        return bool(self.kv_scales) or "unannounced KV scales" in self.faults

    def sent(self) -> Tensors:
        return dict(self.stream)


def make_wire(model: Model, seed: int, codes: bool, kv_scales: bool, *, calm: bool = False) -> Wire:
    """A complete stream, all from ``seed``; ``calm``: no value that could overflow activations."""
    rng = random.Random(seed)
    tensors: Tensors = {}
    fused_experts = bool(model.experts) and not codes and rng.random() < 0.5
    for name, value in model.tensors(seed).items():
        shaped = value if calm else _values(name, value, rng)
        if model.is_fp8(name) and codes and rng.random() < 0.6 and not _ragged(model, name):
            made = quantize_block(shaped, BLOCK, model.scale_format)
            tensors[name], tensors[f"{name}_scale_inv"] = made
        else:
            dtype = rng.choice(SOURCES)
            tensors[name] = shaped.clamp(-6e4, 6e4).to(dtype)
    if fused_experts:
        tensors = _fuse_experts(model, tensors)
    if model.tied and rng.random() < 0.5:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    stream: Stream = list(tensors.items())
    scales: dict[str, float] = {}
    if kv_scales:
        for layer in range(LAYERS):
            for role in ("k", "v"):
                value = torch.tensor(rng.choice((0.01, 0.05, 0.3, 2.0)) * (1 + rng.random()))
                scales[scale_name(layer, role)] = value.item()
                form = rng.choice(("self_attn", "self_attn.attn"))
                shape = rng.choice(((), (1,)))
                stream.append((f"model.layers.{layer}.{form}.{role}_scale", value.reshape(shape)))
    rng.shuffle(stream)
    return Wire(model, stream, scales)


def _ragged(model: Model, name: str) -> bool:
    return model.ragged and any(f".{part}_proj." in name for part in "qkv")


def _values(name: str, value: torch.Tensor, rng: random.Random) -> torch.Tensor:
    """Mostly as they are; some full of ties between codes, tiny, large or zero."""
    if not name.endswith("proj.weight"):
        return value
    kind = rng.choice(("normal",) * 8 + ("ties", "tiny", "large", "zero"))
    if kind == "ties":  # odd numbers lie in the middle of two codes; 448 makes the scale 1
        value = (value * 200).round() * 2 + 1
        value.view(-1)[:: BLOCK[1]] = 448.0
    elif kind == "tiny":
        value = value * 1e-30
    elif kind == "large":
        value = value * 5e4
    elif kind == "zero":
        value = torch.zeros_like(value)
    return value


def _fuse_experts(model: Model, tensors: Tensors) -> Tensors:
    """With transformers' own tensors of all experts in one."""
    fused = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for layer in range(LAYERS):
        stem = f"model.layers.{layer}.mlp.experts"

        def stack(leaf: str, stem: str = stem) -> torch.Tensor:
            names = [f"{stem}.{expert}.{leaf}.weight" for expert in range(model.experts)]
            return torch.stack([tensors[name].float() for name in names])

        fused[f"{stem}.gate_up_proj"] = torch.cat([stack("gate_proj"), stack("up_proj")], 1)
        fused[f"{stem}.down_proj"] = stack("down_proj")
    return fused


Fault = Callable[[Wire, random.Random], bool]
"""Spoils a wire in place; False where it could not."""
Wanted = Callable[[Wire, str, torch.Tensor], bool]
FAULTS: dict[str, Fault] = {}
NOT_IN_FILES = set[str]()
"""Faults that no safetensors file can hold."""


def spoil(wire: Wire, name: str, rng: random.Random) -> None:
    if FAULTS[name](wire, rng):
        wire.faults.append(name)


def fault(name: str) -> Callable[[Fault], Fault]:
    """Register a way to spoil a wire."""

    def register(spoil: Fault) -> Fault:
        FAULTS[name] = spoil
        return spoil

    return register


def pick(wire: Wire, rng: random.Random, wanted: Wanted) -> int | None:
    """A place in the stream whose tensor is one; KV scales are none."""
    places = [
        place
        for place, (name, value) in enumerate(wire.stream)
        if isinstance(value, torch.Tensor) and value.ndim and value.numel() > 1
        and wanted(wire, name, value)
    ]  # fmt: skip
    return rng.choice(places) if places else None


def replaced(
    name: str, wanted: Wanted, change: Callable[[Wire, random.Random, torch.Tensor], Any]
) -> None:
    """Register a fault that changes one tensor of a kind."""

    @fault(name)
    def _(wire: Wire, rng: random.Random) -> bool:
        if (place := pick(wire, rng, wanted)) is None:
            return False
        sent, tensor = wire.stream[place]
        wire.stream[place] = (sent, change(wire, rng, tensor))
        return True


def inserted(name: str, item: Callable[[Wire, random.Random], tuple[str, Any] | None]) -> None:
    """Register a fault that puts one more item into the stream."""

    @fault(name)
    def _(wire: Wire, rng: random.Random) -> bool:
        if (more := item(wire, rng)) is None:
            return False
        wire.stream.insert(rng.randrange(len(wire.stream) + 1), more)
        return True


def _source(wire: Wire, name: str, tensor: torch.Tensor) -> bool:
    return tensor.dtype in SOURCES and not name.endswith("_scale_inv")


def _scales(wire: Wire, name: str, tensor: torch.Tensor) -> bool:
    return name.endswith("_scale_inv")


def _codes(wire: Wire, name: str, tensor: torch.Tensor) -> bool:
    return tensor.dtype == torch.float8_e4m3fn


def _tied(wire: Wire, name: str) -> bool:
    return wire.model.tied and name in ("lm_head.weight", "model.embed_tokens.weight")


def _with(tensor: torch.Tensor, value: float) -> torch.Tensor:
    changed = tensor.clone()
    changed.view(-1)[changed.numel() // 2] = value
    return changed


def _with_a_nan_code(wire: Wire, rng: random.Random, tensor: torch.Tensor) -> torch.Tensor:
    bits = tensor.view(torch.uint8).clone()
    bits.view(-1)[rng.randrange(bits.numel())] = rng.choice((0x7F, 0xFF))
    return bits.view(torch.float8_e4m3fn)


def _not_in_files(name: str) -> str:
    NOT_IN_FILES.add(name)
    return name


for _value in ("nan", "inf", "-inf"):
    replaced(_value, _source, lambda w, rng, t, value=_value: _with(t, float(value)))
for _dtype in (torch.int8, torch.float64, torch.bool, torch.float8_e5m2):
    replaced(f"dtype {_dtype}", _source, lambda w, rng, t, dtype=_dtype: t.to(dtype))
for _bad in (0.0, -1.0, float("nan"), float("inf")):
    name = f"a block's scale of {_bad}"
    replaced(name, _scales, lambda w, rng, t, value=_bad: torch.full_like(t, value))
replaced("scales without codes", _codes, lambda w, rng, t: t.bfloat16())
replaced("a NaN code", _codes, _with_a_nan_code)
replaced(
    "a wrong shape",
    lambda w, n, t: t.shape[0] > 1,
    lambda w, rng, t: rng.choice((t[:1], t[None], t.reshape(-1, 1), t[:-1])).clone(),
)
replaced(
    "a value beyond the engine's dtype",
    lambda w, n, t: w.model.dtype != torch.float32 and _source(w, n, t) and "_proj" not in n,
    lambda w, rng, t: _with(t.float(), 3.4e38 if w.model.dtype == torch.bfloat16 else 7e4),
)
replaced(
    "codes for a plain tensor",
    lambda w, n, t: _source(w, n, t) and not w.model.is_fp8(n),
    lambda w, rng, t: t.to(torch.float8_e4m3fn),
)
replaced(
    "free scales for an engine of powers of two",
    lambda w, n, t: w.model.scale_format == "pow2" and _scales(w, n, t),
    lambda w, rng, t: t * 0.7,
)
replaced(
    "a tied tensor with other values",
    lambda w, n, t: w.model.tied and n == "lm_head.weight",
    lambda w, rng, t: t + 1,
)
for _name, _change in {
    "dtype torch.complex64": lambda w, rng, t: t.to(torch.complex64),
    "a sparse tensor": lambda w, rng, t: t.to_sparse(),
    "a tensor without memory": lambda w, rng, t: t.to("meta"),
    "a numpy array": lambda w, rng, t: t.float().numpy(),
    "no tensor at all": lambda w, rng, t: rng.choice((None, 3.0, "weights", [1.0], object())),
}.items():
    replaced(_not_in_files(_name), _source, _change)

UNKNOWN = ("model.layers.9.mlp.up_proj.weight", "rope.inv_freq", "model", "lm_head")
inserted("an unknown tensor", lambda w, rng: (rng.choice(UNKNOWN), torch.ones(3)))
inserted(_not_in_files("a repeated tensor"), lambda w, rng: rng.choice(w.stream))
inserted(_not_in_files("a sender that dies"), lambda w, rng: ("", SenderDied("trainer gone")))
inserted(
    "a KV scale of a layer that is not there",
    lambda w, rng: (scale_name(LAYERS, "k"), torch.tensor([0.1])),
)


def _expert(wire: Wire, rng: random.Random) -> tuple[str, Any] | None:
    stem = "model.layers.1.mlp.experts"
    stacked = wire.sent().get(f"{stem}.down_proj")
    return None if stacked is None else (f"{stem}.1.down_proj.weight", stacked[1].clone())


inserted("an expert in both forms", _expert)


@fault("a missing tensor")
def _(wire: Wire, rng: random.Random) -> bool:
    # An alias need not be sent, and scales without codes are the matter of another fault.
    place = pick(wire, rng, lambda w, n, t: not _scales(w, n, t) and not _tied(w, n))
    if place is None:
        return False
    name = wire.stream[place][0]
    wire.stream = [item for item in wire.stream if not item[0].startswith(name)]
    return True


@fault("a renamed tensor")
def _(wire: Wire, rng: random.Random) -> bool:
    place = pick(wire, rng, lambda w, n, t: not _tied(w, n))
    if place is None:
        return False
    name, tensor = wire.stream[place]
    wire.stream[place] = (rng.choice((f"module.{name}", f"{name}.more", name[1:], "")), tensor)
    return True


@fault("codes without scales")
def _(wire: Wire, rng: random.Random) -> bool:
    place = pick(wire, rng, _scales)
    if place is None:
        return False
    del wire.stream[place]
    return True


@fault("codes of rows that share a block")
def _(wire: Wire, rng: random.Random) -> bool:
    place = pick(wire, rng, lambda w, n, t: _source(w, n, t) and _ragged(w.model, n)
                 and n.endswith((".k_proj.weight", ".v_proj.weight")))  # fmt: skip
    if place is None:
        return False
    name, tensor = wire.stream[place]
    made = quantize_block(tensor, BLOCK, wire.model.scale_format)
    wire.stream[place] = (name, made.codes)
    wire.stream.append((f"{name}_scale_inv", made.scale_inv))
    return True


def replaced_kv(name: str, value: torch.Tensor | None) -> None:
    """Register a fault that changes, or with None drops, one KV scale."""

    @fault(name)
    def _(wire: Wire, rng: random.Random) -> bool:
        places = [i for i, (n, _) in enumerate(wire.stream) if n.endswith(("k_scale", "v_scale"))]
        if not places:
            return False
        place = rng.choice(places)
        sent = wire.stream.pop(place)[0]
        if value is not None:
            wire.stream.insert(place, (sent, value))
        return True


for _bad in (0.0, -1.0, float("nan"), float("inf"), 1e-45, 3e38):
    replaced_kv(f"a KV scale of {_bad}", torch.tensor([_bad]))
replaced_kv("a KV scale for each head", torch.full((2,), 0.05))
replaced_kv("a missing KV scale", None)


@fault("unannounced KV scales")
def _(wire: Wire, rng: random.Random) -> bool:
    if not wire.kv_scales:
        return False
    wire.kv_scales = {}
    wire.faults.append("announced: False")
    return True


@fault(_not_in_files("a KV scale under both its names"))
def _(wire: Wire, rng: random.Random) -> bool:
    if not wire.kv_scales:
        return False
    for form in ("self_attn", "self_attn.attn"):
        wire.stream.append((f"model.layers.0.{form}.k_scale", torch.tensor([0.1])))
    return True


def items(wire: Wire) -> Iterator[tuple[str, Any]]:
    """The stream as a generator gives it."""
    for name, value in wire.stream:
        if isinstance(value, SenderDied):
            raise value
        yield name, value


def refilled(wire: Wire) -> Iterator[tuple[str, Any]]:
    """The same in one buffer, filled again for each tensor."""
    dense = [t for _, t in wire.stream if isinstance(t, torch.Tensor) and t.layout == torch.strided]
    memory = torch.empty(max(tensor.nbytes for tensor in dense) + 16, dtype=torch.uint8)
    for name, value in items(wire):
        if not any(value is tensor for tensor in dense) or value.is_meta or not value.numel():
            yield name, value
            continue
        place = memory[: value.nbytes].view(value.dtype).view(value.shape)
        yield name, place.copy_(value)

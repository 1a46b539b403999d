"""Streams of tensors as a sender makes them, whole or with something wrong in them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from fp8rl.kv_scales import scale_name
from support.models import LAYERS, Model, Tensors, quantized

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
    names: frozenset[str]
    """Of the stream before anything was spoiled."""
    faults: list[str] = field(default_factory=list)
    """What is wrong; empty: the refit must succeed."""

    def sent(self) -> Tensors:
        return dict(self.stream)


def make_wire(model: Model, seed: int, codes: bool, kv_scales: bool) -> Wire:
    """A complete stream, all from ``seed``."""
    rng = random.Random(seed)
    tensors: Tensors = {}
    fused_experts = bool(model.experts) and not codes and rng.random() < 0.5
    for name, value in model.tensors(seed).items():
        if model.is_fp8(name) and codes and rng.random() < 0.6 and not _ragged(model, name):
            made = quantized(value)
            tensors[name], tensors[f"{name}_scale_inv"] = made
        else:
            dtype = rng.choice(SOURCES)
            tensors[name] = value.to(dtype)
    if fused_experts:
        tensors = _fuse_experts(model, tensors)
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
    return Wire(model, stream, scales, frozenset(name for name, _ in stream))


def _ragged(model: Model, name: str) -> bool:
    return model.ragged and any(f".{part}_proj." in name for part in "qkv")


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


def spoil(wire: Wire, name: str, rng: random.Random) -> None:
    if FAULTS[name](wire, rng):
        wire.faults.append(name)


def one(
    wanted: Wanted, change: Callable[[Wire, random.Random, str, torch.Tensor], Stream]
) -> Fault:
    """Put other items in the place of one of a kind, which no earlier fault has added."""

    def spoil(wire: Wire, rng: random.Random) -> bool:
        sent = Counter(name for name, _ in wire.stream)
        places = [
            place
            for place, (name, value) in enumerate(wire.stream)
            if name in wire.names
            and sent[name] == 1
            and isinstance(value, torch.Tensor)
            and value.layout == torch.strided
            and wanted(wire, name, value)
        ]
        if places:
            place = rng.choice(places)
            wire.stream[place : place + 1] = change(wire, rng, *wire.stream[place])
        return bool(places)

    return spoil


def other(wanted: Wanted, change: Callable[[Wire, random.Random, torch.Tensor], Any]) -> Fault:
    """Put another value in the place of a tensor of a kind."""
    return one(wanted, lambda wire, rng, name, tensor: [(name, change(wire, rng, tensor))])


def more(item: Callable[[Wire, random.Random], tuple[str, Any] | None]) -> Fault:
    """Put one more item into the stream."""

    def spoil(wire: Wire, rng: random.Random) -> bool:
        added = item(wire, rng)
        if added is not None:
            wire.stream.insert(rng.randrange(len(wire.stream) + 1), added)
        return added is not None

    return spoil


def _source(wire: Wire, name: str, tensor: torch.Tensor) -> bool:
    return tensor.numel() > 1 and tensor.dtype in SOURCES and not name.endswith("_scale_inv")


def _scales(wire: Wire, name: str, tensor: torch.Tensor) -> bool:
    return name.endswith("_scale_inv")


def _codes(wire: Wire, name: str, tensor: torch.Tensor) -> bool:
    return tensor.dtype == torch.float8_e4m3fn and wire.model.is_fp8(name)


def _kv(wire: Wire, name: str, tensor: torch.Tensor) -> bool:
    return name.endswith(("k_scale", "v_scale"))


def _with(tensor: torch.Tensor, value: float) -> torch.Tensor:
    changed = tensor.clone()
    changed.view(-1)[changed.numel() // 2] = value
    return changed


def _with_a_nan_code(wire: Wire, rng: random.Random, tensor: torch.Tensor) -> torch.Tensor:
    bits = tensor.view(torch.uint8).clone()
    bits.view(-1)[rng.randrange(bits.numel())] = rng.choice((0x7F, 0xFF))
    return bits.view(torch.float8_e4m3fn)


def _in_codes(wire: Wire, rng: random.Random, name: str, tensor: torch.Tensor) -> Stream:
    made = quantized(tensor)
    return [(name, made.codes), (f"{name}_scale_inv", made.scale_inv)]


def _expert(wire: Wire, rng: random.Random) -> tuple[str, Any] | None:
    stem = "model.layers.1.mlp.experts"
    stacked = dict(wire.stream).get(f"{stem}.down_proj")
    whole = isinstance(stacked, torch.Tensor) and stacked.ndim == 3 and len(stacked) > 1
    return (f"{stem}.1.down_proj.weight", stacked[1].clone()) if whole else None


def _unannounced(wire: Wire, rng: random.Random) -> bool:
    had, wire.kv_scales = bool(wire.kv_scales), {}
    return had


FAULTS: dict[str, Fault] = {
    "nan": other(_source, lambda w, rng, t: _with(t, float("nan"))),
    "a dtype": other(_source, lambda w, rng, t: t.to(rng.choice((torch.int8, torch.float64)))),
    "a wrong shape": other(
        lambda w, n, t: t.ndim > 0 and t.shape[0] > 1,
        lambda w, rng, t: rng.choice((t[:1], t[None], t.reshape(-1, 1), t[:-1])).clone(),
    ),
    "a block's scale of 0": other(_scales, lambda w, rng, t: torch.zeros_like(t)),
    "a NaN code": other(_codes, _with_a_nan_code),
    "codes without scales": one(_scales, lambda w, rng, n, t: []),
    "codes of rows that share a block": one(
        lambda w, n, t: (
            w.model.ragged
            and n.endswith((".k_proj.weight", ".v_proj.weight"))
            and t.dtype in SOURCES
        ),
        _in_codes,
    ),
    "a KV scale of NaN": other(_kv, lambda w, rng, t: torch.full_like(t, float("nan"))),
    "a missing KV scale": one(_kv, lambda w, rng, n, t: []),
    "unannounced KV scales": _unannounced,
    "a missing tensor": one(_source, lambda w, rng, n, t: []),
    "a renamed tensor": one(
        _source,
        lambda w, rng, n, t: [(rng.choice((f"module.{n}", f"{n}.more", n[1:], "")), t)],
    ),
    "an unknown tensor": more(
        lambda w, rng: (rng.choice(("model.layers.9.mlp.up_proj.weight", "model")), torch.ones(3))
    ),
    "a repeated tensor": more(lambda w, rng: rng.choice(w.stream)),
    "an expert in both forms": more(_expert),
    "no tensor at all": other(_source, lambda w, rng, t: rng.choice((None, 3.0, "weights"))),
    "a sender that dies": more(lambda w, rng: ("", SenderDied("trainer gone"))),
}
"""Each refusal by itself: tests/vllm_fp8rl/refit/test_refusals.py."""


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
        if any(value is tensor for tensor in dense) and value.numel():
            place = memory[: value.nbytes].view(value.dtype).view(value.shape)
            value = place.copy_(value)
        yield name, value

"""`ModelIndex`: what a refit asks of a model, found by one walk through it and kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from vllm_fp8rl.quantization.kv_cache import required_kv_scales
from vllm_fp8rl.refit.inventory import Entry, inventory
from vllm_fp8rl.state import state_of


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a model keeps a parameter."""

    owner: dict[str, torch.nn.Parameter | None]
    leaf: str
    parameter: torch.nn.Parameter
    name: str

    @property
    def live(self) -> bool:
        """The model still has this very parameter, with memory."""
        return self.owner.get(self.leaf) is self.parameter and not self.parameter.is_meta


def slots_of(model: torch.nn.Module) -> tuple[Slot, ...]:
    """Every parameter once, a tied one under its first owner."""
    seen: set[int] = set()
    slots = []
    for path, module in model.named_modules():
        for leaf, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                name = f"{path}.{leaf}" if path else leaf
                slots.append(Slot(module._parameters, leaf, parameter, name))
    return tuple(slots)


@dataclass(frozen=True)
class ModelIndex:
    """What a refit must bring, and where it goes."""

    entries: dict[str, Entry]
    """By HF name, see :mod:`vllm_fp8rl.refit.inventory`."""
    kv_scales: frozenset[str]
    """Names on the wire of the KV scales that generation needs."""
    grids: tuple[Any, ...]
    """What writes the FP8 parameters, each once."""
    slots: tuple[Slot, ...]

    @classmethod
    def of(cls, model: torch.nn.Module) -> ModelIndex:
        """The model's index, made anew whenever a parameter has been replaced.

        Raises:
            UnsupportedError: see :func:`vllm_fp8rl.refit.inventory.inventory`.
        """
        state = state_of(model)
        known: ModelIndex | None = state.index
        with torch._C.DisableTorchFunctionSubclass():  # vLLM's parameters would answer in Python
            if known is not None and all(slot.live for slot in known.slots):
                return known
        state.index = cls._make(model)
        return state.index

    @classmethod
    def _make(cls, model: torch.nn.Module) -> ModelIndex:
        slots = slots_of(model)
        owners = [getattr(slot.parameter, "grid", None) for slot in slots]
        grids = {id(grid): grid for grid in owners if hasattr(grid, "forget_unpaired")}
        return cls(
            inventory(model), frozenset(required_kv_scales(model)), tuple(grids.values()), slots
        )

"""`RankState`: everything that one rank knows of its engine, in one object.

:class:`~vllm_fp8rl.quantization.config.Fp8RLConfig`, which vLLM hands to every layer of an engine,
owns it. The state is found again through the quantization method of a layer (:func:`state_of`);
``docs/upgrading.md`` lists the few attributes that are set on vLLM's objects.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from fp8rl import PinPolicy, Recipe
from fp8rl.errors import PinError, RefitError, UnsupportedError
from fp8rl.kv_scales import ROLES, Role, scale_name
from fp8rl.models.spec import ModelSpec
from vllm_fp8rl.engine.guard import RefitGuard
from vllm_fp8rl.engine.hf_names import HfNames
from vllm_fp8rl.engine.names import NAME

if TYPE_CHECKING:  # they import vLLM, which a trainer that sends a refit may not have
    from vllm_fp8rl.kernels.replaced_modules import ModuleReplacement
    from vllm_fp8rl.warmup import KernelWarmup

UNSET = 1.0
"""Stands for a KV scale that no loader has set. Only vLLM's dummy runs at the start compute with
it: the guard refuses every other step. A NaN would become token numbers outside the vocabulary
there, and those an assertion that kills the process's CUDA context."""


@dataclass
class LayerKVScales:
    """KV scales that loaders have set so far for one attention layer; float32 values by role."""

    index: int
    """Global number of the decoder layer."""
    values: dict[Role, float] = field(default_factory=dict)
    provisional: dict[Role, float] | None = None
    """Scales that attention computes with during a calibration; they never count as loaded."""

    def in_use(self, role: Role) -> float:
        """Return the scale that attention computes with."""
        values = self.values if self.provisional is None else self.provisional
        return values.get(role, UNSET)

    def required(self, layer: torch.nn.Module) -> tuple[Role, ...]:
        """Return the roles that ``layer`` needs; q only where queries may be quantized."""
        by_layer = getattr(layer, "query_quant", None) is not None
        by_backend = getattr(getattr(layer, "impl", None), "requires_q_scale", False)
        return ROLES if by_layer or by_backend else ("k", "v")

    def missing(self, layer: torch.nn.Module) -> list[str]:
        """Return the wire names of the scales that ``layer`` needs and that no loader has set."""
        return [scale_name(self.index, r) for r in self.required(layer) if r not in self.values]


@dataclass(eq=False)
class RankState:
    """A recipe applied to the model of one rank, and what has happened to that model since."""

    recipe: Recipe
    policy: PinPolicy
    spec: ModelSpec
    """The whole model, by its config."""
    dummy: bool
    """The engine loads no checkpoint at its start."""
    layers: dict[str, Any]
    """vLLM's table of layers by name (``compilation_config.static_forward_context``)."""
    guard: RefitGuard
    """Decides in every step whether the model may run; it also holds the open refit session."""
    warmup: KernelWarmup
    replacement: ModuleReplacement
    hf_names: HfNames = field(default_factory=HfNames)
    """HF names of the engine's modules, which is what the policy knows."""
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Shapes of whole HF tensors beside the linear layers, by name: a rank may hold a part."""
    kv_scales: dict[str, LayerKVScales] = field(default_factory=dict)
    """By the name of the attention layer, for those with an FP8 KV cache."""
    loaded: bool = False
    """The engine has the weights of its checkpoint, or starts without one."""
    inventory: Any = None
    """:class:`~vllm_fp8rl.refit.receiver.inventory.Inventory` of the model, made by
    the first load."""

    def __post_init__(self) -> None:
        self.loaded = self.dummy

    def built(self) -> None:
        """Note that all layers have been built; may be called any number of times."""
        self.warmup.close()
        self.replacement.close()

    def precision(self, name: str) -> str:
        """Return ``fp8`` or ``bf16`` for a linear module, by its name in the engine."""
        try:
            pinned = self.policy.precision(self.hf_names.of(name))
        except PinError:
            raise UnsupportedError(
                f"'{name}' is no layer of a {self.spec.family.name} model, as which this model "
                "runs; add it to fp8rl/models/families.py (docs/extending.md), or start this model "
                f"without quantization='{NAME}'."
            ) from None
        return pinned if self.recipe.rollout else "bf16"

    def experts_precision(self, name: str) -> str:
        """Return ``fp8`` or ``bf16`` for all experts of a layer, which one kernel runs."""
        stem = f"{self.hf_names.of(name)}."
        rows = [row for row in self.policy.report() if row.name.startswith(stem)]
        pinned = next((row for row in rows if row.precision == "bf16"), None)
        if pinned and any(row.precision == "fp8" for row in rows):
            raise PinError(
                f"pins.{pinned.reason} pins '{pinned.name}' but not all experts of its layer; pin "
                f"all with names: ['{name}.*'], or use kinds: [experts]."
            )
        return "bf16" if pinned or not self.recipe.rollout else "fp8"


def find_state(model: torch.nn.Module) -> RankState | None:
    """Return the state of a model's engine; None if that runs another quantization."""
    for module in model.modules():
        state = getattr(getattr(module, "quant_method", None), "state", None)
        if isinstance(state, RankState):
            return state
    return None


def state_of(model: torch.nn.Module) -> RankState:
    """Return the state of a model's engine.

    Raises:
        RefitError: the engine was not started with ``quantization="fp8rl"``.
    """
    state = find_state(model)
    if state is None:
        raise RefitError("This engine has no quantization='fp8rl'; start it with that to refit it.")
    return state

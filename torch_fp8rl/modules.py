"""The linear layers of a Hugging Face model, under the global names that pins and rollout use.

transformers 5 holds the experts of a layer in two parameters of three dimensions, earlier releases
each expert as three linears; both are found.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from fp8rl import PinPolicy
from fp8rl.errors import PinError, UnsupportedError
from fp8rl.models.families import FUSED, LLAMA, QWEN2, QWEN3, QWEN3_MOE
from fp8rl.models.pins import ALWAYS_BF16
from fp8rl.models.spec import ModelSpec
from fp8rl.numerics import BLOCK
from fp8rl.training.layout import ROW_PARALLEL, RowLayout, gate_up_layout, plain_layout

SERVED = (LLAMA, QWEN2, QWEN3, QWEN3_MOE)
"""Families whose FP8 training in torch has tests."""
DTYPES = (torch.bfloat16, torch.float32)
"""Dtypes of parameters: what travels to the rollout is BF16, or rounded to it."""
_WRAPPERS = {"module", "_orig_mod", "_checkpoint_wrapped_module", "base_layer"}
"""Names that DDP, ``torch.compile``, the checkpoint wrapper and LoRA put into a module's path."""
_PEFT = "base_model.model."
_FUSED_OF = {part: fused for fused, parts in FUSED.items() for part in parts}


@dataclass(frozen=True)
class Linears:
    """Linears that the rollout holds in one matrix, or one linear by itself."""

    name: str
    """Global HF name, of several the fused one (``..qkv_proj``)."""
    modules: dict[str, nn.Linear]
    """Modules by global HF name, in the order of their rows."""

    @property
    def layout(self) -> RowLayout:
        rows = (module.out_features for module in self.modules.values())
        return RowLayout(tuple(name.rpartition(".")[2] for name in self.modules), tuple(rows))

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return {f"{name}.weight": module.weight for name, module in self.modules.items()}

    @property
    def ragged(self) -> bool:
        """Whether the rollout's ranks have other blocks than one process."""
        leaf = next(iter(self.modules)).rpartition(".")[2]
        rows, columns = self.layout.part_rows.values(), next(iter(self.weights.values())).shape[1]
        cut = (columns,) if leaf in ROW_PARALLEL else rows
        return any(width % BLOCK[0] for width in cut)


@dataclass(frozen=True)
class Experts:
    """All experts of a layer, as one module with two parameters."""

    name: str
    """Global HF name, e.g. ``model.layers.0.mlp.experts``."""
    module: nn.Module
    parameters: tuple[str, str]
    """Names of the two parameters: gate and up, and down."""
    count: int

    def names(self, parameter: str) -> tuple[str, ...]:
        """Return the global HF name of each expert's matrix; gate and up have the fused one."""
        return tuple(f"{self.name}.{number}.{parameter}" for number in range(self.count))

    def layout(self, parameter: str) -> RowLayout:
        rows = getattr(self.module, parameter).shape[1]
        if parameter == self.parameters[0]:  # two matrices in the rollout, each with its own blocks
            return gate_up_layout(rows // 2, apart=True)
        return plain_layout(parameter, rows)

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return {f"{self.name}.{each}": getattr(self.module, each) for each in self.parameters}

    @property
    def ragged(self) -> bool:
        """As :attr:`Linears.ragged`; the intermediate size is cut."""
        return getattr(self.module, self.parameters[1]).shape[2] % BLOCK[0] != 0


Site = Linears | Experts


def sites(model: nn.Module, spec: ModelSpec, policy: PinPolicy) -> Iterator[Site]:
    """Yield the FP8 modules of a model."""
    modules = by_global_name(model, spec)
    groups: dict[str, dict[str, nn.Linear]] = {}
    stacks: dict[str, dict[str, str]] = {}
    for row in policy.report():
        if row.kind in ALWAYS_BF16:
            continue
        prefix, _, leaf = row.name.rpartition(".")
        if row.kind == "experts" and row.name not in modules:
            stack = prefix.rpartition(".")[0]
            stacks.setdefault(stack, {})[row.name] = row.precision
        elif row.precision == "fp8":
            fused = leaf if row.kind == "experts" else _FUSED_OF.get(leaf, leaf)
            groups.setdefault(f"{prefix}.{fused}", {})[row.name] = _linear(row.name, modules)
    yield from (Linears(name, members) for name, members in groups.items())
    for name, precisions in stacks.items():
        if "fp8" not in precisions.values():
            continue
        if odd := next((each for each, what in precisions.items() if what == "bf16"), None):
            raise PinError(
                f"pins.{policy.row(odd).reason} pins '{odd}' but not all experts of '{name}', "
                "which torch multiplies together; pin all experts of a layer or none."
            )
        yield _experts(name, modules, spec)


def gated_mlps(model: nn.Module, spec: ModelSpec, fp8: Collection[str]) -> list[nn.Module]:
    """Return the MLPs with SwiGLU between matrices in FP8, gate and up without a bias."""
    if spec.value("hidden_act") not in ("silu", "swish"):
        return []
    modules = by_global_name(model, spec)
    first, second = ".gate_up_proj", ".down_proj"
    blocks = (name.removesuffix(first) for name in fp8 if name.endswith(first))
    mlps = [modules[block] for block in blocks if f"{block}{second}" in fp8]
    parts = ("gate_proj", "up_proj")
    return [
        m for m in mlps if all(getattr(m.get_submodule(p), "bias", None) is None for p in parts)
    ]


def by_global_name(model: nn.Module, spec: ModelSpec) -> dict[str, nn.Module]:
    """Return the modules of a model by global HF name, whatever wraps it."""
    modules = {global_name(path): module for path, module in model.named_modules()}
    if not any(name in modules for name in spec.names):  # a model without a head, or with its own
        modules |= {f"{spec.stem}{name}": module for name, module in modules.items()}
    return modules


def spec_of(model: nn.Module) -> ModelSpec:
    """Describe a model by its config.

    Raises:
        UnsupportedError: it has no config, or its family is not served.
    """
    config = next((m.config for m in model.modules() if hasattr(m, "config")), None)
    if config is None:
        raise UnsupportedError(
            f"{type(model).__name__} has no config; give a model of transformers."
        )
    spec = ModelSpec.of(config)
    if spec.multimodal or not any(spec.entry is family for family in SERVED):
        served = ", ".join(kind for family in SERVED for kind in family.model_types)
        raise UnsupportedError(
            f"'{spec.model_type}' is not served in torch yet, but text models of the types "
            f"{served}; set training to false in the recipe, or train with Megatron."
        )
    return spec


def global_name(path: str) -> str:
    """Return the path of a module or parameter without what wrappers put into it."""
    return ".".join(part for part in path.split(".") if part not in _WRAPPERS).removeprefix(_PEFT)


def _linear(name: str, modules: dict[str, nn.Module]) -> nn.Linear:
    module = modules.get(name)
    if type(module) is nn.Linear:
        return module
    if module is None:
        raise UnsupportedError(
            f"The model has no '{name}', which its config describes; give convert the model of "
            "transformers, or pin the module to BF16."
        )
    raise UnsupportedError(
        f"'{name}' is a {type(module).__name__}; FP8 training replaces torch.nn.Linear alone: give "
        "whole decoder layers to fully_shard, build the model without another replacement, or pin "
        "the module to BF16."
    )


def _experts(name: str, modules: dict[str, nn.Module], spec: ModelSpec) -> Experts:
    module, family = modules.get(name), spec.family
    assert family.experts is not None  # names of experts are of a family that has some
    first, second = family.experts.fused
    shapes = [tuple(getattr(getattr(module, each, None), "shape", ())) for each in (first, second)]
    expected = len(shapes[0]) == len(shapes[1]) == 3 and shapes[0][::2] == (
        spec.experts,
        shapes[1][1],
    )
    # What transformers writes on a class of experts that lie in another way.
    other = [each for each in ("is_transposed", "has_bias") if getattr(module, each, False)]
    other += [each for each in ("is_concatenated", "has_gate") if not getattr(module, each, True)]
    if module is None or not expected or other or not hasattr(module, "_apply_gate"):
        kind = f"a {type(module).__name__} with {other or shapes}"
        what = "not there" if module is None else kind
        raise UnsupportedError(
            f"'{name}' is {what}; FP8 training knows the experts of transformers 5, with '{first}' "
            f"[experts, 2 x width, hidden] and '{second}' [experts, hidden, width] without biases; "
            "pin kind experts to BF16."
        )
    return Experts(name, module, (first, second), spec.experts)

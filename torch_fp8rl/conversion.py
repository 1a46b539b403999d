"""Swap the linear layers of a built Hugging Face model for FP8 ones, in place."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from fp8rl import PinPolicy, PluginManager, Recipe
from fp8rl.errors import RecipeError, UnsupportedError
from fp8rl.gemm import BackendChoice, GemmShape, GroupedShape
from fp8rl.listing import listed
from fp8rl.numerics import GROUP, LastExpertRows, Quantized
from fp8rl.precision_report import precision_text
from fp8rl.training.layout import RowLayout
from fp8rl.training.linear import Fp8State
from fp8rl.training.weight_codes import KeepingCodes, WeightEpoch
from torch_fp8rl.layers import Fp8Experts, Fp8GatedMLP, Fp8Linear, Fp8Torch, Matrix, TorchCodes
from torch_fp8rl.modules import DTYPES, Experts, Linears, Site, gated_mlps, sites, spec_of

logger = logging.getLogger(__name__)


class Conversion:
    """Handle of a converted model.

    ``recipe`` and ``policy`` are those of the conversion; both cover the whole model.
    """

    def __init__(
        self, recipe: Recipe, policy: PinPolicy, epoch: WeightEpoch, modules: Mapping[str, Fp8Torch]
    ) -> None:
        self.recipe = recipe
        self.policy = policy
        self._epoch = epoch
        self._modules = modules

    @property
    def modules(self) -> Mapping[str, nn.Module]:
        """FP8 modules by global HF name, e.g. ``model.layers.0.self_attn.qkv_proj``, which is
        ``q_proj`` here: several linears are under their fused name, as the first of them."""
        return MappingProxyType(self._modules)

    def weight_codes(self) -> dict[str, Quantized]:
        """Quantize the weights as the rollout engine does, and keep nothing.

        Under FSDP2 every process must call it, because weights are gathered one after another.

        Returns:
            By global HF module name codes ``float8_e4m3fn [out, in]`` and scale_inv ``float32
            [ceil(out/128), ceil(in/128)]``. Where the parts of a fused module do not start on block
            boundaries, one entry under the fused name (``..qkv_proj``).
        """
        found: dict[str, Quantized] = {}
        for module in self._modules.values():
            found |= module.codes_by_name()
        return found

    def keeping_codes(self) -> AbstractContextManager[None]:
        """Keep weight codes within this context and free them at its end.

        This saves their quantization in all micro-batches of a step but the first, for 2 bytes a
        parameter of the *whole* model on each process. Outside of it nothing is kept. Within it
        these changes of a weight are noticed: optimizer steps, ``load_state_dict``, a move to
        another device, ``train()`` and ``eval()``, and without FSDP2 in-place operations on the
        parameter. Others leave no trace, and the old codes would go on: ``parameter.data``,
        collectives and messages that write into a parameter, and under FSDP2 operations on the
        sharded parameter. Make them outside of it, or call :meth:`invalidate` after them.
        """
        return KeepingCodes([self._epoch])

    def invalidate(self) -> None:
        """Quantize every weight again at its next use, within :meth:`keeping_codes`."""
        self._epoch.turn()


def convert(
    model: nn.Module,
    recipe: Recipe,
    *,
    plugins: PluginManager | None = None,
    gemm_backend: str | None = None,
    report: Callable[[str], None] | None = None,
) -> Conversion:
    """Let the linear layers of a model run in FP8, but for the recipe's pins.

    Parameters, their names, dtypes, hooks and state dicts stay as they are; a pinned module keeps
    its exact class. Works before or after ``fully_shard`` of whole decoder layers, DDP, the making
    of an optimizer and LoRA adapters, which stay in the model's dtype.

    Args:
        model: a model of transformers (Llama, Mistral, Qwen2, Qwen3, Qwen3-MoE), or what wraps it,
            with parameters in bfloat16 or float32; float32 ones are rounded to bfloat16 before they
            are quantized, as on their way to the rollout.
        recipe: what runs in FP8; with ``training=False`` nothing is converted.
        plugins: where pins and GEMM backends come from; the installed plugins by default.
        gemm_backend: name of the backend for every product; by default :mod:`fp8rl.gemm.table`
            chooses one for each.
        report: function that takes the table of pins, once; by default it is logged.

    Raises:
        PinError: a pin matches nothing, or only some experts of a layer.
        PluginError: two plugins offer a GEMM backend of one name.
        RecipeError: ``recipe`` is no Recipe.
        UnsupportedError: the model, a module or ``exact`` is not served, or the model is converted
            already. Nothing has been changed then.
    """
    if not isinstance(recipe, Recipe):
        raise RecipeError(
            f"The recipe is a {type(recipe).__name__}; make one with Recipe.load(path) or "
            "Recipe.from_dict(mapping)."
        )
    spec = spec_of(model)
    plugins = PluginManager() if plugins is None else plugins
    policy = plugins.pin_policy(recipe.pins, spec.names)
    epoch, modules = WeightEpoch(), dict[str, Fp8Torch]()
    if recipe.training:
        _check_model(model, recipe)
        formats = (recipe.weights.scale_format, recipe.activations.scale_format)
        backends = BackendChoice(plugins.gemm_backends(), formats, gemm_backend)
        found = list(sites(model, spec, policy))
        for site in found:
            _check(site, backends)
        swap = _Swap(recipe, backends, epoch)
        for site in found:
            fp8 = swap.linears(site) if isinstance(site, Linears) else swap.experts(site)
            modules[site.name] = fp8
        for mlp in gated_mlps(model, spec, modules):
            kind = type(mlp)
            mlp.__class__ = type(f"Fp8{kind.__name__}", (Fp8GatedMLP, kind), {})
        _warn_of_ragged_widths(found)
        names = ", ".join(backends.names)
        text = f"fp8rl: precision of each module; GEMM backends: {names}\n"
        (report or logger.info)(text + precision_text(policy.report()))
    return Conversion(recipe, policy, epoch, modules)


def _check_model(model: nn.Module, recipe: Recipe) -> None:
    if recipe.exact:
        raise UnsupportedError(
            "exact needs Megatron's trainer, whose norms and attention can be the rollout's; set "
            "exact to false in the recipe."
        )
    for path, module in model.named_modules():
        if isinstance(module, Fp8Torch):
            raise UnsupportedError(f"'{path}' runs in FP8 already; convert a model once.")
        if getattr(module, "quantization_method", None):
            raise UnsupportedError(
                f"The model is quantized ({module.quantization_method}); load it in bfloat16 or "
                "float32, or set training to false in the recipe."
            )


def _check(site: Site, backends: BackendChoice) -> None:
    """Refuse a dtype, dtypes that differ, or a shape that no GEMM backend serves."""
    dtypes = {name: weight.dtype for name, weight in site.weights.items()}
    if len(set(dtypes.values())) > 1:
        raise UnsupportedError(
            f"Weights that are multiplied as one matrix differ in dtype ({dtypes}); load all in "
            "bfloat16, or all in float32."
        )
    for name, weight in site.weights.items():
        if weight.dtype not in DTYPES:
            raise UnsupportedError(
                f"'{name}' is {weight.dtype}; load the model in bfloat16 or float32, or pin the "
                "module to BF16."
            )
        if weight.device.type == "meta":
            continue  # the model gets its memory, and its device, later
        *_, out_features, in_features = weight.shape
        if isinstance(site, Experts):
            shape = GroupedShape((GROUP,) * site.count, out_features, in_features)
            backends.pick_grouped(weight.device, shape, name)
        else:
            backends.pick(weight.device, GemmShape(GROUP, out_features, in_features), name)


@dataclass(frozen=True, eq=False)
class _Swap:
    """Turn modules into FP8 ones, which share a recipe, backends and an epoch."""

    recipe: Recipe
    backends: BackendChoice
    epoch: WeightEpoch
    last_rows: LastExpertRows = field(default_factory=LastExpertRows)

    def linears(self, site: Linears) -> Fp8Torch:
        matrix = Matrix(self._state(site.name, site.layout), site.modules)
        module: Any
        for part, module in enumerate(site.modules.values()):
            module.__class__ = Fp8Linear
            module.fp8_matrix, module.fp8_part = matrix, part
        first: Any = next(iter(site.modules.values()))
        return first

    def experts(self, site: Experts) -> Fp8Torch:
        module: Any = site.module
        kind = type(module)
        module.__class__ = type(f"Fp8{kind.__name__}", (Fp8Experts, kind), {})
        module.fp8_parameters = site.parameters
        module.fp8_grouped = tuple(
            self._state(f"{site.name}.{each}", site.layout(each), site.names(each))
            for each in site.parameters
        )
        return module

    def _state(self, name: str, layout: RowLayout, experts: tuple[str, ...] = ()) -> Fp8State:
        codes = TorchCodes(
            layout,
            self.recipe.weights.scale_format,
            self.epoch,
            stacked=bool(experts),
            dtype=torch.bfloat16,
        )
        form = self.recipe.activations.scale_format
        return Fp8State(name, codes, self.backends, form, experts, self.last_rows)


def _warn_of_ragged_widths(found: list[Site]) -> None:
    if ragged := listed(site.name for site in found if site.ragged):
        logger.warning(
            "fp8rl: widths that are no multiple of 128 make FP8 codes depend on the "
            "tensor-parallel size: %s. Run the rollout with tensor_parallel_size=1, or pin these "
            "modules to BF16.",
            ragged,
        )

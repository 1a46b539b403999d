"""Swap the linear layers of a built GPTModel for FP8 ones, in place."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType
from typing import Any

import torch

from fp8rl import PinPolicy, PluginManager, Recipe
from fp8rl.errors import RecipeError, UnsupportedError
from fp8rl.gemm import BackendChoice
from fp8rl.gemm.reference import Float64Backend
from fp8rl.kernels import require_fp8_linears
from fp8rl.listing import listed
from fp8rl.numerics import BLOCK, LastExpertRows
from fp8rl.precision_report import precision_text
from fp8rl.recipe import Pins
from fp8rl.training.weight_codes import KeepingCodes, WeightEpoch
from megatron_fp8rl import compat
from megatron_fp8rl.config_checks import check_config
from megatron_fp8rl.export import ModelChunks, in_wrapper, path_of_adapter, unwrap_chunks
from megatron_fp8rl.hf_names import module_names
from megatron_fp8rl.layers import exact
from megatron_fp8rl.layers.linear import FP8_CLASSES, Fp8Linear, Fp8Module, change_of
from megatron_fp8rl.layers.linear_modules import Site, sites
from megatron_fp8rl.layers.swiglu import Fp8SwigluMLP, can_fuse

logger = logging.getLogger(__name__)

Report = Callable[[str], None]


@dataclass(frozen=True, eq=False)
class Setup:
    """What all modules of one conversion share; each holds it as ``fp8_setup``."""

    recipe: Recipe
    policy: PinPolicy
    backends: BackendChoice
    epoch: WeightEpoch
    last_rows: LastExpertRows
    wrapped: bool
    """The model is the language model of a multimodal one."""


class Conversion:
    """Handle of a converted model.

    ``recipe`` and ``policy`` are those of the conversion; the policy covers the whole model, the
    modules are those of this rank. After :meth:`close`, or after another handle has given a module
    back, every method but :meth:`close` raises UnsupportedError.
    """

    def __init__(
        self, recipe: Recipe, policy: PinPolicy, chunks: Iterable[torch.nn.Module] = ()
    ) -> None:
        self.recipe = recipe
        self.policy = policy
        inside: list[Any] = [module for chunk in chunks for module in chunk.modules()]
        linears = (module for module in inside if isinstance(module, Fp8Linear))
        self._modules: dict[str, Any] = {linear.fp8_state.name: linear for linear in linears}
        self._setups = {module: _setup_of(module) for module in inside}
        self._closed = False

    @property
    def modules(self) -> Mapping[str, torch.nn.Module]:
        """FP8 linears of this rank by global HF name, e.g. ``model.layers.0.mlp.down_proj``; the
        name of a grouped module leaves out the numbers of its experts."""
        self._require_current()
        return MappingProxyType(self._modules)

    def invalidate(self) -> None:
        """Quantize every weight again at its next use.

        This is needed only within :meth:`keeping_codes`, after a write that leaves no trace.
        """
        self._require_current()
        for module in self._modules.values():
            module.fp8_setup.epoch.turn()

    def keeping_codes(self) -> AbstractContextManager[None]:
        """Keep weight codes within this context and free them at its end, also after an error or
        an interrupt.

        This saves their quantization in all micro-batches of a batch but the first, for 2 bytes a
        parameter. Outside of it nothing is kept, and stale codes are impossible. Within it these
        changes of a weight are noticed: optimizer steps, ``load_state_dict``, in-place operations
        on the parameter, a move to another device, ``train()`` and ``eval()``. Others leave no
        trace, and the old codes would go on: collectives and messages that write into a parameter
        (``torch.distributed.broadcast``, ``all_reduce``, ``recv`` ..), writes through
        ``parameter.data``, numpy or the buffer that it is a view of. Make them outside of it, or
        call :meth:`invalidate` after them.

        Chunks that were converted together keep codes together: use a handle of all of them.
        """
        self._require_current()
        return KeepingCodes({module.fp8_setup.epoch for module in self._modules.values()})

    def drop_codes(self) -> None:
        """Free the weight codes that are kept, e.g. before offloading."""
        self._require_current()
        for module in self._modules.values():
            module.drop_codes()

    def close(self) -> None:
        """Give the modules their upstream classes back; may be called again.

        Raises:
            UnsupportedError: another conversion owns a module by now, and another handle closes it.
                Nothing has been changed then.
        """
        for name, module in self._modules.items():
            if _setup_of(module) not in (None, self._setups[module]):
                raise UnsupportedError(
                    f"'{name}' was converted again after this handle; close the later conversion "
                    "(conversion_of(model).close())."
                )
        for module, setup in self._setups.items():
            if setup is not None and _setup_of(module) is setup:  # no other handle closed it
                module.give_back()
        self._closed = True
        self._modules.clear()
        self._setups.clear()  # an epoch's hook goes with the last module of the last model

    def _require_current(self) -> None:
        changed = any(_setup_of(module) is not setup for module, setup in self._setups.items())
        if self._closed or changed:
            raise UnsupportedError(
                "This handle of a conversion is closed: modules of its model were converted, or "
                "given back, after it was made; use the handle of the last convert(model, recipe), "
                "or conversion_of(model)."
            )


def convert(
    model: ModelChunks,
    recipe: Recipe,
    *,
    plugins: PluginManager | None = None,
    gemm_backend: str | None = None,
    report: Report | None = None,
) -> Conversion:
    """Let the linear layers that the recipe does not pin run in FP8.

    Parameters, their names, shapes, hooks and ``sharded_state_dict`` keys stay as they are; a
    pinned module keeps its exact class. Works before or after the model is wrapped in
    Float16Module and DDP, and before or after its optimizer is made.

    Args:
        model: a GPTModel, whatever wraps it, or the list of a rank's virtual-pipeline chunks; or
            a multimodal model of Megatron-Bridge, whose ``language_model`` is meant.
        recipe: what runs in FP8; with ``training=False`` nothing is converted.
        plugins: where pins and GEMM backends come from; the installed plugins by default.
        gemm_backend: name of the backend for every product; by default
            :mod:`fp8rl.gemm.table` chooses one for each.
        report: function that takes the table of pins, once; by default it is logged.

    Raises:
        PinError: a pin matches nothing, or only some experts of a grouped module.
        PluginError: two plugins offer a GEMM backend of one name.
        RecipeError: ``recipe`` is no Recipe.
        UnsupportedError: FP8 linears do not serve a module, a config option or the model, or it is
            converted already (also with other pins), or chunks hold one layer twice. Nothing has
            been changed then.
    """
    if not isinstance(recipe, Recipe):
        raise RecipeError(
            f"The recipe is a {type(recipe).__name__}; make one with Recipe.load(path) or "
            "Recipe.from_dict(mapping)."
        )
    chunks, wrapped = unwrap_chunks(model), in_wrapper(model)
    for chunk in chunks:
        for path, module in chunk.named_modules():
            if _setup_of(module):
                raise UnsupportedError(
                    f"'{path}' runs in FP8 already; close() the first Conversion "
                    "(conversion_of(model)) before converting again."
                )
    plugins = PluginManager() if plugins is None else plugins
    config = chunks[0].config
    policy = plugins.pin_policy(recipe.pins, module_names(config, wrapped=wrapped))
    if recipe.training:
        check_config(config)
        setup = _setup(recipe, policy, plugins, gemm_backend, wrapped=wrapped)
        adopt(setup, chunks)
        (report or logger.info)(describe(setup))
    return Conversion(recipe, policy, chunks)


def prepare(config: Any, recipe: Recipe, more_pins: Pins | None = None) -> Setup:
    """Resolve pins and backends for a model of this config, for :func:`adopt`; change nothing.

    Args:
        more_pins: pins to join with the recipe's.

    Raises:
        As :func:`convert`.
    """
    plugins = PluginManager()
    policy = plugins.pin_policy(recipe.pins.merged(more_pins or Pins()), module_names(config))
    check_config(config)
    return _setup(recipe, policy, plugins)


def _setup(
    recipe: Recipe,
    policy: PinPolicy,
    plugins: PluginManager,
    gemm_backend: str | None = None,
    *,
    wrapped: bool = False,
) -> Setup:
    """Choose GEMM backends, and gather what the modules share."""
    offered = plugins.gemm_backends()
    if recipe.exact:
        require_fp8_linears(policy)
        # A CPU's sums in float32 would show their order.
        offered[Float64Backend.name] = Float64Backend()
    formats = recipe.weights.scale_format, recipe.activations.scale_format
    backends = BackendChoice(offered, formats, gemm_backend)
    return Setup(recipe, policy, backends, WeightEpoch(), LastExpertRows(), wrapped)


def adopt(setup: Setup, roots: Sequence[torch.nn.Module]) -> None:
    """Turn the linear modules of model chunks, or of one layer, into FP8 ones.

    With ``exact`` also what :func:`megatron_fp8rl.layers.exact.plan` lists of the chunks.

    Raises:
        As :func:`convert`; nothing has been changed then.
    """
    shared = exact.plan(roots) if setup.recipe.exact else []
    for root in roots:
        if path := path_of_adapter(root):
            raise UnsupportedError(
                f"'{path}' is a {type(root.get_submodule(path)).__name__}: FP8 "
                "training does not serve LoRA, whose adapters read the output of a norm that FP8 "
                "linears keep inside; set training to false in the recipe, or train without "
                "adapters."
            )
    found = sites(roots, wrapped=setup.wrapped)
    plan = [site for site in found if site.runs_in_fp8(setup.policy)]
    classes = fp8_classes()
    changes = [change_of(site, classes, setup) for site in plan]
    inside: list[Any] = [module for root in roots for module in root.modules()]
    try:
        for module, ours, attributes in chain(changes, shared):
            module.__class__ = ours
            module.__dict__.update(attributes, fp8_setup=setup)
        for module in inside:
            if can_fuse(module):
                module.__class__ = Fp8SwigluMLP
                module.fp8_setup = setup
    except BaseException:  # an interrupt: no handle would ever close what is converted
        for module in inside:
            if isinstance(module, Fp8Module):
                module.give_back()
        raise
    _warn_of_ragged_widths(plan)


def describe(setup: Setup) -> str:
    """Write the resolved pins of the whole model as a text for the log."""
    backends, text = ", ".join(setup.backends.names), precision_text(setup.policy.report())
    return (
        f"fp8rl [rank {global_rank()}]: precision of each module; GEMM backends: {backends}\n{text}"
    )


def conversion_of(model: ModelChunks) -> Conversion:
    """Return a handle of a converted model, e.g. of one that ``--spec`` or Megatron-Bridge built.

    All handles of one model act on the same state: after :meth:`Conversion.close` of one the others
    are closed too.

    Args:
        model: as in :func:`convert`; with virtual pipelining all chunks of the rank.

    Raises:
        UnsupportedError: no module of the model was converted, or the chunks hold one layer twice
            or were converted one by one with different recipes.
    """
    chunks = unwrap_chunks(model)
    setups = [s for chunk in chunks for m in chunk.modules() if (s := _setup_of(m))]
    if not setups:
        raise UnsupportedError(
            "No module of this model was converted to FP8; call convert(model, recipe) or build it "
            "from a spec of megatron_fp8rl.integrations.megatron_lm."
        )
    first = setups[0]
    for site in sites(chunks, wrapped=first.wrapped):
        setup = _setup_of(site.module) or first
        converted = isinstance(site.module, Fp8Linear)
        if setup.recipe != first.recipe or site.runs_in_fp8(first.policy) != converted:
            raise UnsupportedError(
                f"'{site.path}' was converted with another recipe than the rest of the model, or "
                "given back alone, so one table cannot tell what runs in FP8; close all and "
                "convert them together: convert([chunk, ..], recipe)."
            )
    return Conversion(first.recipe, first.policy, chunks)


def _setup_of(module: Any) -> Setup | None:
    """Return the setup of the conversion that a module belongs to."""
    return module.fp8_setup if isinstance(module, Fp8Module) else None


def fp8_classes() -> dict[type, type[Fp8Linear]]:
    """Map each upstream class that is served here to its FP8 class."""
    if not compat.has_transformer_engine():
        return FP8_CLASSES
    from megatron_fp8rl.layers.te_classes import TE_CLASSES  # needs TransformerEngine

    return FP8_CLASSES | TE_CLASSES


def _warn_of_ragged_widths(plan: list[Site]) -> None:
    ragged = {
        site.name: [f"{part} {width}" for part, width in site.sharded.items() if width % BLOCK[0]]
        for site in plan
    }
    found = listed(f"{name} ({', '.join(parts)})" for name, parts in ragged.items() if parts)
    if found:
        logger.warning(
            "[rank %d] widths on this rank that are no multiple of %d make FP8 codes depend on the "
            "tensor-parallel size: %s. Use one TP size for trainer and rollout, or pin these "
            "modules to BF16.",
            global_rank(),
            BLOCK[0],
            found,
        )


def global_rank() -> int:
    """Return the rank of this process, 0 without torch.distributed."""
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0

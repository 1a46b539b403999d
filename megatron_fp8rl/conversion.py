"""Swap the linear layers of a built GPTModel for FP8 ones, in place."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from fp8rl import PinPolicy, PluginManager, Recipe
from fp8rl.errors import RecipeError, UnsupportedError
from fp8rl.gemm import BackendChoice, GemmBackend, GemmShape, GroupedBackend, GroupedShape
from fp8rl.gemm.reference import Float64Backend
from fp8rl.kernels import REMEDY, require_fp8_linears
from fp8rl.listing import listed
from fp8rl.numerics import BLOCK, GROUP, LastExpertRows, Quantized
from fp8rl.precision_report import precision_text
from fp8rl.recipe import Pins
from fp8rl.training.layout import REPLICATED
from fp8rl.training.linear import Fp8State
from fp8rl.training.weight_codes import KeepingCodes, WeightCodes, WeightEpoch
from megatron_fp8rl import compat, precision_file
from megatron_fp8rl.config_checks import check_config
from megatron_fp8rl.export import ModelChunks, in_wrapper, path_of_adapter, unwrap_chunks
from megatron_fp8rl.hf_names import module_names
from megatron_fp8rl.layers import exact
from megatron_fp8rl.layers.linear import FP8_CLASSES, Fp8Linear, Fp8Module, check_weight
from megatron_fp8rl.layers.linear_modules import Site, sites, weights_of
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
        self,
        recipe: Recipe,
        policy: PinPolicy,
        chunks: Iterable[torch.nn.Module] = (),
    ) -> None:
        self.recipe = recipe
        self.policy = policy
        inside: list[Any] = [module for chunk in chunks for module in chunk.modules()]
        linears = (module for module in inside if isinstance(module, Fp8Linear))
        self._modules = _by_name((linear.fp8_state.name, linear) for linear in linears)
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

    def save_table(self, folder: str | os.PathLike[str]) -> Path | None:
        """Write the resolved pins to ``folder/fp8rl_precision.json``, beside a checkpoint.

        Global rank 0 writes, other ranks do nothing.

        Returns:
            The file, or None on other ranks.

        Raises:
            CheckpointError: it cannot be written.
        """
        self._require_current()
        return precision_file.save(folder, self.recipe, self.policy) if global_rank() == 0 else None

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
        config: ``TransformerConfig`` of the model.
        recipe: what runs in FP8.
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
    backends = BackendChoice(
        offered,
        (recipe.weights.scale_format, recipe.activations.scale_format),
        gemm_backend,
    )
    return Setup(recipe, policy, backends, WeightEpoch(), LastExpertRows(), wrapped)


def adopt(setup: Setup, roots: Sequence[torch.nn.Module]) -> None:
    """Turn the linear modules of model chunks, or of one layer, into FP8 ones.

    With ``exact`` also what :func:`megatron_fp8rl.layers.exact.plan` lists of the chunks.

    Args:
        setup: of the conversion.
        roots: the chunks, or the layer.

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
    found = (site for root in roots for site in sites(root, wrapped=setup.wrapped))
    plan = [site for site in found if site.runs_in_fp8(setup.policy)]
    _by_name((site.name, site.module) for site in plan)
    for site in plan:
        _check(site, setup)
    inside = [module for root in roots for module in root.modules()]
    try:
        for site in plan:
            _swap(site, setup)
        for module in inside:
            if can_fuse(module):
                _become(module, Fp8SwigluMLP, setup)
        for module, ours, attributes in shared:
            _become(module, ours, setup)
            module.__dict__.update(attributes)
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
    for site in (site for chunk in chunks for site in sites(chunk, wrapped=first.wrapped)):
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


def _by_name(modules: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Map global names to modules.

    Raises:
        UnsupportedError: a name comes twice.
    """
    found: dict[str, Any] = {}
    for name, module in modules:
        if name in found:
            raise UnsupportedError(
                f"The model chunks hold '{name}' twice; give each chunk of one model once, and "
                "another model by itself."
            )
        found[name] = module
    return found


def weight_codes_hf(module: Any) -> dict[str, Quantized]:
    """Quantize a converted module's weights as the rollout engine does.

    The weights are taken as they are in memory: under DDP's ``overlap_param_gather`` those of the
    last step are gathered by the next forward, by ``export_hf`` or by
    ``start_param_sync(force_sync=True)``. Nothing is kept, so the next forward is not disturbed.

    Returns:
        By global HF module name, this rank's rows (or columns) of each HF tensor on its own grid:
        ``quantize_block`` of the exported shard gives the same. Where a fused module's parts do
        not start on block boundaries, one entry under the fused name (``..qkv_proj``): the grid of
        the rank's ``[q; k; v]`` or ``[gate; up]``.

    Raises:
        UnsupportedError: the module was not converted.
    """
    if not isinstance(module, Fp8Linear):
        raise UnsupportedError(
            f"{type(module).__name__} has no FP8 codes; pass a module of Conversion.modules."
        )
    found: dict[str, Quantized] = {}
    state, layout = module.fp8_state, module.fp8_state.codes.layout
    for name, weight in zip(state.experts or (state.name,), weights_of(module), strict=True):
        codes = state.codes.fresh(weight)
        if layout.in_place:
            codes = layout.codes_to_hf(codes)
        found |= layout.by_name(name, codes)
    return found


def _check(site: Site, setup: Setup) -> None:
    kind = type(site.module)
    ours = fp8_classes().get(kind)
    if ours is None:
        raise UnsupportedError(
            f"'{site.path}' is a {kind.__name__}; FP8 linears replace ColumnParallelLinear, "
            "RowParallelLinear and TransformerEngine's linear classes alone (pin the module to "
            "BF16, or build the model from another layer spec)."
        )
    ours.check_options(site.path, site.module)
    for weight in site.weights:
        expected = site.layout.rows + site.other_rows
        if len(weight) != expected:
            raise UnsupportedError(
                f"'{site.path}' has {len(weight)} rows where its config says {expected}; pin it "
                "to BF16."
            )
        check_weight(site.path, weight)
    for part, rows in site.sharded.items():
        if part in REPLICATED and rows % BLOCK[0]:
            raise UnsupportedError(
                f"'{site.path}' has {rows} rows of '{part}' on this rank, no multiple of "
                f"{BLOCK[0]}, and a rank of the rollout has all of them, so their codes would "
                "differ; pin kind a_proj to BF16, or use TransformerEngine's spec."
            )
    first = site.weights[0]
    out_features, in_features = len(first) - site.other_rows, first.shape[1]
    if first.device.type == "meta":
        return  # the model gets its memory, and its device, later
    backend: GemmBackend | GroupedBackend
    if site.grouped:
        sizes = (GROUP,) * len(site.weights)
        experts = GroupedShape(sizes, out_features, in_features, first.dtype)
        backend = setup.backends.pick_grouped(first.device, experts, site.name)
    else:
        shape = GemmShape(GROUP, out_features, in_features, first.dtype)
        backend = setup.backends.pick(first.device, shape, site.name)
    if setup.recipe.exact:
        _require_exact_backend(backend.name, site.name, first)


def _require_exact_backend(backend: str, name: str, weight: torch.Tensor) -> None:
    """Raise UnsupportedError for a backend of a linear layer whose sums are not the rollout's."""
    needed = "reference" if weight.is_cpu else "deep_gemm"
    if backend != needed:
        raise UnsupportedError(
            f"exact needs the GEMM backend '{needed}' for '{name}' {list(weight.shape)} in the "
            f"trainer, and '{backend}' would multiply it; install DeepGEMM on a GPU (a vLLM wheel "
            "carries it), name no other backend, choose a model with multiples of 64 features on "
            f"each rank (128 in experts), {REMEDY}"
        )


def _swap(site: Site, setup: Setup) -> None:
    codes = WeightCodes(
        site.layout,
        setup.recipe.weights.scale_format,
        setup.epoch,
        stacked=site.grouped,
    )
    _become(site.module, fp8_classes()[type(site.module)], setup)
    site.module.fp8_state = Fp8State(
        site.name,
        codes,
        setup.backends,
        setup.recipe.activations.scale_format,
        experts=site.names if site.grouped else (),
        last_rows=setup.last_rows,
    )


def _become(module: Any, ours: type[Fp8Module], setup: Setup) -> None:
    module.__class__ = ours
    module.fp8_setup = setup


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

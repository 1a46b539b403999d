"""Layer specs that build FP8 models, for Megatron-LM and Megatron-Bridge.

Megatron-LM, for any GPT model, with ``--transformer-impl`` local or TransformerEngine::

    FP8RL_RECIPE=recipe.yaml torchrun pretrain_gpt.py \\
        --spec megatron_fp8rl.integrations.megatron_lm gpt_layer ...

Megatron-Bridge and nemo-toolkit, whose saved configs name the function::

    provider.transformer_layer_spec = layer_spec

A layer is built as megatron builds it and then converted, so parameters, names and checkpoints are
the same; ``conversion_of(model)`` gives the handle of the built model. The recipe is read from
``FP8RL_RECIPE`` when the first layer is built.
"""

from __future__ import annotations

import sys
import weakref
from dataclasses import replace
from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_decoder_layer_specs,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    get_transformer_layer_offset,
)
from megatron.core.utils import get_pg_rank

from fp8rl import Recipe
from fp8rl.errors import UnsupportedError
from fp8rl.recipe import Pins
from megatron_fp8rl import compat
from megatron_fp8rl.conversion import Setup, adopt, describe, prepare
from megatron_fp8rl.layers.linear import Fp8Module

LayerSpec = Any
"""A ``ModuleSpec`` of one layer or the ``TransformerBlockSubmodules`` of a stage."""


def say(text: str) -> None:
    """Print the text: megatron's launchers hide INFO records of other packages."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


class SpecConverter:
    """Convert layers as they are built; the layers of one model share a :class:`Setup`.

    The table of pins is printed once for each different one.
    """

    def __init__(self) -> None:
        self._reported: set[str] = set()
        # Layers own the setup, and their config, so an id cannot come back while an entry lives.
        self._setups: weakref.WeakValueDictionary[tuple[int, bool], Setup] = (
            weakref.WeakValueDictionary()
        )

    def adopt(self, layer: Fp8TransformerLayer, *, reaches_mtp: bool) -> None:
        """Convert one layer that was just built.

        Args:
            reaches_mtp: whether multi-token-prediction layers are built from the same spec.

        Raises:
            As :func:`megatron_fp8rl.convert`.
        """
        recipe = Recipe.from_env() or Recipe()
        if not recipe.training:
            return
        key = id(layer.config), reaches_mtp
        setup = self._setups.get(key)
        if setup is None:
            setup = self._setups[key] = self._prepare(layer.config, recipe, reaches_mtp)
        layer.fp8_setup = setup
        adopt(setup, [layer])

    def _prepare(self, config: Any, recipe: Recipe, reaches_mtp: bool) -> Setup:
        unreached = bool(config.mtp_num_layers) and not reaches_mtp
        if recipe.exact:
            raise UnsupportedError(
                "exact is served by convert(model, recipe) of a built model, not by a spec; "
                "convert the model, or set exact to false in the recipe."
            )
        setup = prepare(config, recipe, Pins(names=("mtp.*",)) if unreached else None)
        text = describe(setup)
        if text not in self._reported:
            self._reported.add(text)
            say(text)
        return setup


class Fp8TransformerLayer(Fp8Module, TransformerLayer):
    """A ``TransformerLayer`` whose linear layers run in FP8 where the recipe does not pin them.

    Args:
        fp8: what converts the layer.
        reaches_mtp: see :meth:`SpecConverter.adopt`.
    """

    def __init__(
        self,
        config: Any,
        submodules: Any = None,
        layer_number: int = 1,
        *,
        fp8: SpecConverter,
        reaches_mtp: bool = True,
        **options: Any,
    ) -> None:
        if submodules is None:
            submodules = _submodules(config, layer_number, **options)
        super().__init__(config, submodules, layer_number, **options)
        fp8.adopt(self, reaches_mtp=reaches_mtp)


def layer_spec(config: Any, vp_stage: int | None = None) -> LayerSpec:
    """Build megatron's GPT layers in FP8; a callable spec that a config can name.

    The layers are TransformerEngine's or local, as ``config.transformer_impl`` says.
    """
    return _with_fp8(_block_spec(config, vp_stage), gpt_layer.params["fp8"])


def _with_fp8(spec: LayerSpec, converter: SpecConverter) -> LayerSpec:
    if isinstance(spec, TransformerBlockSubmodules):
        layers = [_with_fp8(layer, converter) for layer in spec.layer_specs or ()]
        return replace(spec, layer_specs=layers)
    if spec.module is not TransformerLayer:
        name = getattr(spec.module, "__name__", spec.module)
        raise UnsupportedError(
            f"The layer spec builds {name}, FP8 layers replace TransformerLayer alone; convert the "
            "built model instead (megatron_fp8rl.convert or Megatron-Bridge's pre-wrap hook)."
        )
    params = {**spec.params, "fp8": converter}
    return replace(spec, module=Fp8TransformerLayer, params=params)


def _block_spec(config: Any, vp_stage: int | None) -> LayerSpec:
    if config.num_moe_experts is None:  # Bridge edits the one spec of a dense model
        return _layer_specs(config)[0]
    return get_gpt_decoder_block_spec(config, **_spec_options(config), vp_stage=vp_stage)


def _layer_specs(config: Any) -> list[ModuleSpec]:
    return get_gpt_decoder_layer_specs(config, **_spec_options(config))


def _spec_options(config: Any) -> dict[str, Any]:
    transformer_engine = config.transformer_impl == "transformer_engine"
    if config.transformer_impl != "local" and not (
        transformer_engine and compat.has_transformer_engine()
    ):
        raise UnsupportedError(
            f"config.transformer_impl='{config.transformer_impl}' cannot be built here; set it to "
            "'local' (--transformer-impl local), or install TransformerEngine and set "
            "'transformer_engine'."
        )
    return {
        "use_transformer_engine": transformer_engine,
        "normalization": config.normalization,
        "qk_l2_norm": config.qk_l2_norm,
    }


def _submodules(config: Any, layer_number: int, **options: Any) -> Any:
    pg_collection = options.get("pg_collection")
    pp_rank = get_pg_rank(pg_collection.pp) if pg_collection is not None else None
    offset = get_transformer_layer_offset(config, options.get("vp_stage"), pp_rank)
    return _layer_specs(config)[layer_number - 1 + offset].submodules


gpt_layer = ModuleSpec(
    module=Fp8TransformerLayer, params={"fp8": SpecConverter(), "reaches_mtp": False}
)
"""``--spec megatron_fp8rl.integrations.megatron_lm gpt_layer``: every decoder layer, decided by the
model's config.

Megatron-LM builds multi-token-prediction layers from a spec of its own, so they stay in BF16, and
the table says so; ``convert(model, recipe)`` reaches them.
"""

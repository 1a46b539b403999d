"""The layer spec that builds FP8 models, for Megatron-LM.

For any GPT model, with ``--transformer-impl`` local or TransformerEngine::

    FP8RL_RECIPE=recipe.yaml torchrun pretrain_gpt.py \\
        --spec megatron_fp8rl.integrations.megatron_lm gpt_layer ...

A layer is built as megatron builds it and then converted, so parameters, names and checkpoints are
the same; ``conversion_of(model)`` gives the handle of the built model. The recipe is read from
``FP8RL_RECIPE`` when the first layer is built.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_layer_specs
from megatron.core.transformer.spec_utils import ModuleSpec
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
        self._setups: weakref.WeakValueDictionary[int, Setup] = weakref.WeakValueDictionary()

    def adopt(self, layer: Fp8TransformerLayer) -> None:
        """Convert one layer that was just built.

        Raises:
            As :func:`megatron_fp8rl.convert`.
        """
        recipe = Recipe.from_env() or Recipe()
        if not recipe.training:
            return
        setup = self._setups.get(id(layer.config))
        if setup is None:
            setup = self._setups[id(layer.config)] = self._prepare(layer.config, recipe)
        layer.fp8_setup = setup
        adopt(setup, [layer])

    def _prepare(self, config: Any, recipe: Recipe) -> Setup:
        if recipe.exact:
            raise UnsupportedError(
                "exact is served by convert(model, recipe) of a built model, not by a spec; "
                "convert the model, or set exact to false in the recipe."
            )
        setup = prepare(config, recipe, Pins(names=("mtp.*",)) if config.mtp_num_layers else None)
        text = describe(setup)
        if text not in self._reported:
            self._reported.add(text)
            say(text)
        return setup


class Fp8TransformerLayer(Fp8Module, TransformerLayer):
    """A ``TransformerLayer`` whose linear layers run in FP8 where the recipe does not pin them.

    Args:
        fp8: what converts the layer.
    """

    def __init__(
        self,
        config: Any,
        submodules: Any = None,
        layer_number: int = 1,
        *,
        fp8: SpecConverter,
        **options: Any,
    ) -> None:
        if submodules is None:
            submodules = _submodules(config, layer_number, **options)
        super().__init__(config, submodules, layer_number, **options)
        fp8.adopt(self)


def _submodules(config: Any, layer_number: int, **options: Any) -> Any:
    """Return what megatron builds the layer of, TransformerEngine's or local as the config says."""
    transformer_engine = config.transformer_impl == "transformer_engine"
    if config.transformer_impl != "local" and not (
        transformer_engine and compat.has_transformer_engine()
    ):
        raise UnsupportedError(
            f"config.transformer_impl='{config.transformer_impl}' cannot be built here; set it to "
            "'local' (--transformer-impl local), or install TransformerEngine and set "
            "'transformer_engine'."
        )
    specs = get_gpt_decoder_layer_specs(
        config,
        use_transformer_engine=transformer_engine,
        normalization=config.normalization,
        qk_l2_norm=config.qk_l2_norm,
    )
    pg_collection = options.get("pg_collection")
    pp_rank = get_pg_rank(pg_collection.pp) if pg_collection is not None else None
    offset = get_transformer_layer_offset(config, options.get("vp_stage"), pp_rank)
    return specs[layer_number - 1 + offset].submodules


gpt_layer = ModuleSpec(module=Fp8TransformerLayer, params={"fp8": SpecConverter()})
"""``--spec megatron_fp8rl.integrations.megatron_lm gpt_layer``: every decoder layer, decided by the
model's config.

Megatron-LM builds multi-token-prediction layers from a spec of its own, so they stay in BF16, and
the table says so; ``convert(model, recipe)`` reaches them.
"""

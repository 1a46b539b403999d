"""`Fp8RLConfig`: vLLM's quantization method ``fp8rl``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from vllm.logger import init_logger
from vllm.model_executor.layers.quantization.base_config import (
    QuantizationConfig,
    QuantizeMethodBase,
)

from fp8rl import PinPolicy, PluginManager, Recipe
from fp8rl.errors import RecipeError, UnsupportedError
from fp8rl.models.sizes import Sizes
from fp8rl.models.spec import ModelSpec
from fp8rl.numerics import BLOCK
from fp8rl.precision_report import precision_text
from fp8rl.reading import near_miss
from fp8rl.recipe import RECIPE_ENV
from vllm_fp8rl.compat import expect_quantizing_loads, require_supported
from vllm_fp8rl.engine.guard import RefitGuard
from vllm_fp8rl.engine.hf_names import HfNames
from vllm_fp8rl.engine.names import NAME
from vllm_fp8rl.engine.rank_state import RankState
from vllm_fp8rl.kernels.moe.settings import offer_expert_tiles, set_activation_scales
from vllm_fp8rl.quantization.checks import check_engine, check_vllm
from vllm_fp8rl.refit.sender.client import Changes
from vllm_fp8rl.warmup import KernelWarmup

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# Under vLLM's name, so that its log level and format apply in every worker.
logger = init_logger("vllm.fp8rl")

SETTINGS_KEY = "fp8rl"


class Fp8RLConfig(QuantizationConfig):
    """Block-FP8 linear layers by recipe, loaded and refitted in place.

    The recipe is ``additional_config["fp8rl"]`` of the engine, else ``quantization_config.recipe``
    of the model's config, else the one ``FP8RL_RECIPE`` names, else the default. It is read when
    the first layer is built, because vLLM makes this object before its own configuration is
    complete.
    """

    weight_block_size = list(BLOCK)
    use_deep_gemm = False

    def __init__(self, recipe: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        require_supported()
        from vllm_fp8rl.patches.ledger import GATES, install

        # Here, because vLLM makes this object where requests come in, before any of them.
        install(patch for patch in GATES if patch.replacement is not None)
        self._recipe = recipe
        self._mapper: Any = None
        self._state: RankState | None = None
        self.changes: WeakKeyDictionary[Any, Changes] = WeakKeyDictionary()
        """The changes of each ``LLMEngine`` or ``AsyncLLM`` of this process with this config."""

    def __getstate__(self) -> dict[str, Any]:
        # A copied or unpickled config belongs to another engine or process: it starts anew.
        return self.__dict__ | {"_state": None, "changes": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state | {"changes": WeakKeyDictionary()}

    def check_gates(self) -> None:
        """Raise UnsupportedError if this vLLM lacks what request gates and refits' clients use."""
        from vllm_fp8rl.patches.probes import require

        require({"client"})

    def get_name(self) -> str:  # type: ignore[override]
        return NAME

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 89

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []  # so that quantization="fp8rl" alone makes a config, without arguments

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Fp8RLConfig:
        """Make the config of a model that describes its quantization.

        It is a block-FP8 checkpoint, or has ``{"quant_method": "fp8rl", "recipe": {...}}``: so a
        framework that has no argument for the quantization runs a BF16 checkpoint in FP8.

        Raises:
            UnsupportedError: the checkpoint is quantized in another way.
            RecipeError: a key that is a misspelling of ``recipe``, or belongs inside it.
        """
        _check_checkpoint(config)
        sections = Recipe.model_fields if config["quant_method"] == NAME else ()
        _refuse_lost_recipe(config, "quantization_config", "recipe", (SETTINGS_KEY, *sections))
        return cls(config.get("recipe"))

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """Take a block-FP8 checkpoint over when the user asks for ``fp8rl``, and only then.

        Raises:
            UnsupportedError: ``fp8rl`` is asked for, but the checkpoint is quantized otherwise.
        """
        if user_quant != NAME:
            return None
        _check_checkpoint(hf_quant_cfg)
        return NAME

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Keep the map from HF names to vLLM's, which vLLM hands over before it builds a model.

        The first one is the whole model's; a wrapper builds its language model as one more.
        """
        if self._mapper is None:
            self._mapper = hf_to_vllm_mapper

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Return the method of one layer.

        Raises:
            RecipeError: unknown or bad key in ``additional_config.fp8rl``.
            PinError: a pin that matches nothing or splits a fused layer.
            UnsupportedError: an architecture, layer or width that is not served.
        """
        # vLLM's layer modules are heavy: imported only where an engine is being built.
        from vllm.model_executor.layers.attention import Attention, MLAAttention
        from vllm.model_executor.layers.fused_moe import RoutedExperts
        from vllm.model_executor.layers.linear import LinearBase
        from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

        from vllm_fp8rl.quantization.kv_cache import Fp8RLKVCacheMethod
        from vllm_fp8rl.quantization.linear import (
            Fp8RLLinearMethod,
            RefitEmbeddingMethod,
            RefitLinearMethod,
        )
        from vllm_fp8rl.quantization.mla import Fp8RLMLAMethod

        state = self.resolve()
        if isinstance(layer, LinearBase):
            fp8 = state.precision(prefix) == "fp8"
            if state.recipe.exact and prefix.endswith(".mlp.gate"):
                from vllm_fp8rl.quantization.exact_experts import ExactRouterMethod  # needs Triton

                return ExactRouterMethod(state, prefix)
            return (Fp8RLLinearMethod if fp8 else RefitLinearMethod)(state, prefix)
        if isinstance(layer, RoutedExperts):
            # Imported here, because it is slow: a dense model does not need it.
            from vllm_fp8rl.quantization.moe import Fp8RLMoEMethod, RefitMoEMethod

            fp8 = state.experts_precision(prefix) == "fp8"
            if state.recipe.exact:
                from vllm_fp8rl.quantization.exact_experts import ExactMoEMethod  # needs Triton

                return ExactMoEMethod(layer, state, prefix)
            return (Fp8RLMoEMethod if fp8 else RefitMoEMethod)(layer, state, prefix)
        if isinstance(layer, VocabParallelEmbedding):
            from vllm_fp8rl.patches.packing import keep_refittable

            keep_refittable(state)  # the output projection is built last
            return RefitEmbeddingMethod(state, prefix)
        if isinstance(layer, Attention):
            return Fp8RLKVCacheMethod(self, state)
        if isinstance(layer, MLAAttention):
            return Fp8RLMLAMethod(self, state)
        raise UnsupportedError(
            f"'{prefix}' ({type(layer).__name__}) has no FP8 method in vllm_fp8rl; start this "
            f"model without quantization='{NAME}'."
        )

    def resolve(self) -> RankState:
        """Return the state of this rank: the recipe, read and logged once, and what follows."""
        if self._state is None:
            from vllm.config import get_current_vllm_config

            engine = get_current_vllm_config()
            # A tower that stays out of service is built first, and without memory: on "meta".
            with torch.device(engine.device_config.device_type):
                self._state = _resolve(engine, self._recipe, self._mapper)
            expect_quantizing_loads()
            logger.info("%s", _table(self._state.recipe, self._state.policy))
        return self._state


def read_recipe(additional_config: Any, of_model: Mapping[str, Any] | None = None) -> Recipe:
    """Return the recipe of an engine, see :class:`Fp8RLConfig`.

    Raises:
        RecipeError: unknown or bad key, with its full path; a misspelling of ``fp8rl``, or a key of
            the recipe beside it.
    """
    settings = additional_config if isinstance(additional_config, Mapping) else {}
    _refuse_lost_recipe(
        settings, "additional_config", SETTINGS_KEY, ("recipe", RECIPE_ENV, *Recipe.model_fields)
    )
    if SETTINGS_KEY in settings:
        return Recipe.from_dict(settings[SETTINGS_KEY], where=f"additional_config.{SETTINGS_KEY}")
    if of_model is not None:
        return Recipe.from_dict(of_model, where="quantization_config.recipe")
    return Recipe.from_env() or Recipe()


def _refuse_lost_recipe(
    config: Mapping[str, Any], where: str, own: str, misplaced: Iterable[str]
) -> None:
    """Raise RecipeError for a key that is meant for fp8rl but that nothing would read.

    Other plugins have keys in these mappings too, so only near misses of our keys are refused:
    of ``own``, which holds the recipe, and of names that are ``misplaced`` beside it.
    """
    for key in config:
        if key == own:
            continue
        if near_miss(key, [own]):
            raise RecipeError(f"'{where}.{key}' is read by nobody; write '{where}.{own}'.")
        if name := near_miss(key, misplaced, cutoff=1.0):
            inside = f".{name}" if name in Recipe.model_fields else ""
            raise RecipeError(f"'{where}.{key}' is read by nobody; write '{where}.{own}{inside}'.")


def _resolve(engine: VllmConfig, of_model: Mapping[str, Any] | None, mapper: Any) -> RankState:
    spec = ModelSpec.of(engine.model_config.hf_config)
    recipe = read_recipe(engine.additional_config, of_model)
    check_vllm(engine, spec, recipe)
    # vLLM's layer modules are heavy: imported only where an engine is being built, and once the
    # probes have found them.
    from vllm_fp8rl.engine.sleep import watch
    from vllm_fp8rl.kernels.replaced_modules import ModuleReplacement
    from vllm_fp8rl.patches.ledger import WORKER, install

    install(WORKER)
    check_engine(engine, spec, recipe)
    if engine.device_config.device_type == "cuda" and recipe.rollout:
        set_activation_scales(recipe, experts=spec.experts > 0)
        if spec.experts and engine.lora_config is None:
            offer_expert_tiles()
    policy = PluginManager().pin_policy(recipe.pins, spec.names)
    if recipe.exact:
        from vllm_fp8rl.kernels.exact import check_exact, check_experts

        check_exact(engine, policy)
        if spec.experts:
            check_experts(engine)
    if isinstance(engine.additional_config, dict):  # wherever it came from: part of vLLM's hash
        engine.additional_config[SETTINGS_KEY] = recipe.to_dict()
    layers = engine.compilation_config.static_forward_context
    guard = RefitGuard(layers)
    watch(engine.model_config, guard)
    return RankState(
        recipe,
        policy,
        spec,
        dummy=engine.load_config.load_format == "dummy",
        layers=layers,
        guard=guard,
        warmup=KernelWarmup(engine.scheduler_config.max_num_batched_tokens),
        replacement=ModuleReplacement(engine, recipe),
        hf_names=HfNames(spec.names, mapper, spec.family.experts),
        shapes=Sizes(spec, ranks=1).beside_linears(),
    )


def _check_checkpoint(config: Mapping[str, Any]) -> None:
    method = config.get("quant_method")
    if method == NAME:
        return
    block = config.get("weight_block_size")
    scheme = config.get("activation_scheme", "dynamic")
    if method != "fp8":
        raise UnsupportedError(
            f"The checkpoint is quantized with '{method}', but quantization='{NAME}' loads BF16 or "
            "block-FP8 (quant_method 'fp8') checkpoints; choose one of those."
        )
    if block is None or tuple(block) != BLOCK:
        what = "per-tensor FP8" if block is None else f"FP8 with weight_block_size {list(block)}"
        raise UnsupportedError(
            f"The checkpoint is {what}, but quantization='{NAME}' needs weight_block_size "
            f"{list(BLOCK)}; load a BF16 checkpoint or one in that format."
        )
    if scheme != "dynamic":
        raise UnsupportedError(
            f"The checkpoint has activation_scheme '{scheme}', but quantization='{NAME}' scales "
            "activations dynamically; load a BF16 checkpoint."
        )


def _table(recipe: Recipe, policy: PinPolicy) -> str:
    """Return the resolved precisions, for the log."""
    if not recipe.rollout:
        return "fp8rl: recipe.rollout is false, every linear layer is in the model's dtype"
    return f"{policy.summary()}\n{precision_text(policy.report())}"


__all__ = ["RECIPE_ENV", "Fp8RLConfig", "read_recipe"]

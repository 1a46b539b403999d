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
from vllm_fp8rl.compat import (
    expect_quantizing_loads,
    require_cpu_router,
    require_supported,
    untested,
)
from vllm_fp8rl.engine.guard import RefitGuard
from vllm_fp8rl.engine.hf_names import HfNames
from vllm_fp8rl.engine.names import NAME, WEIGHT_TRANSFER_BACKENDS
from vllm_fp8rl.engine.rank_state import RankState
from vllm_fp8rl.kernels.moe.settings import offer_expert_tiles, set_activation_scales
from vllm_fp8rl.quantization.kv_connectors import check_connector
from vllm_fp8rl.quantization.models import (
    check_architecture,
    check_cpu_scoring,
    check_widths,
)
from vllm_fp8rl.refit.sender.client import Changes
from vllm_fp8rl.warmup import KernelWarmup

if TYPE_CHECKING:
    from vllm.config import CacheConfig, VllmConfig
    from vllm.config.weight_transfer import WeightTransferConfig

    from vllm_fp8rl.kernels.replaced_modules import ModuleReplacement

# Under vLLM's name, so that its log level and format apply in every worker.
logger = init_logger("vllm.fp8rl")

SETTINGS_KEY = "fp8rl"
_KV_NAMES = {"fp8": "fp8_e4m3"}  # vLLM's alias
_DRAFT = "draft_model"
_WITHOUT_A_CACHE = ("ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator")
"""Methods of speculative decoding that look at tokens or at the model's own hidden states."""


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

    Args:
        additional_config: ``additional_config`` of the engine.
        of_model: ``quantization_config.recipe`` of the model's config.

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

    Other plugins have keys in these mappings too, so only near misses of our keys are refused.

    Args:
        config: a mapping that holds the recipe under ``own``.
        where: path of the mapping.
        own: the one key that is read.
        misplaced: names that have no meaning beside it.
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
    from vllm_fp8rl.patches.ledger import WORKER, install

    spec = ModelSpec.of(engine.model_config.hf_config)
    _probe(engine, spec)
    install(WORKER)
    recipe = read_recipe(engine.additional_config, of_model)
    parallel = engine.parallel_config
    check_architecture(spec)
    check_widths(
        spec, parallel.tensor_parallel_size, expert_parallel=parallel.enable_expert_parallel
    )
    if engine.device_config.device_type == "cpu" and spec.experts:
        require_cpu_router()
        check_cpu_scoring(spec)
    if engine.model_config.use_mla:
        from vllm_fp8rl.quantization.mla import check_cpu, check_latent_cache

        check_latent_cache(recipe.kv_cache.dtype)
        if engine.device_config.device_type == "cpu":
            check_cpu(spec)
    _check_weight_transfer(engine.weight_transfer_config)
    _check_adapters(engine)
    _check_kv_cache(recipe, engine.cache_config, engine.model_config.dtype)
    check_speculation(recipe.kv_cache.dtype, engine.speculative_config)
    check_scale_source(engine.cache_config)
    check_connector(engine.kv_transfer_config)
    if engine.device_config.device_type == "cuda" and recipe.rollout:
        set_activation_scales(recipe, experts=spec.experts > 0)
        if spec.experts and engine.lora_config is None:
            offer_expert_tiles()
    policy = PluginManager().pin_policy(recipe.pins, spec.names)
    if recipe.exact:
        _check_exact(engine, policy, experts=spec.experts > 0)
    if isinstance(engine.additional_config, dict):  # wherever it came from: part of vLLM's hash
        engine.additional_config[SETTINGS_KEY] = recipe.to_dict()
    return RankState(
        recipe,
        policy,
        spec,
        dummy=engine.load_config.load_format == "dummy",
        layers=engine.compilation_config.static_forward_context,
        guard=_guard(engine),
        warmup=KernelWarmup(engine.scheduler_config.max_num_batched_tokens),
        replacement=_replacement(engine, recipe),
        hf_names=HfNames(spec.names, mapper, spec.family.experts),
        shapes=Sizes(spec, ranks=1).beside_linears(),
    )


def _probe(engine: VllmConfig, spec: ModelSpec) -> None:
    """Refuse a vLLM that lacks what this engine relies on; warn once of one that was not tested."""
    from vllm.config import CompilationMode

    from vllm_fp8rl.patches.probes import require

    device = engine.device_config.device_type
    parts = {
        "experts": spec.entry is None or spec.experts > 0,
        "linear_attention": bool(spec.entry and spec.entry.linear_attention),
        "mla": engine.model_config.use_mla,
        "lora": engine.lora_config is not None,
        "compiled": engine.compilation_config.mode != CompilationMode.NONE,
        "sleep": engine.model_config.enable_sleep_mode,
        "transfer": engine.weight_transfer_config is not None,
    }
    require({"worker", device, *(part for part, used in parts.items() if used)})
    warning = untested(device)
    if warning is not None:
        logger.warning_once("%s", warning)


def _replacement(engine: VllmConfig, recipe: Recipe) -> ModuleReplacement:
    # vLLM's layer modules are heavy: imported only where an engine is being built.
    from vllm_fp8rl.kernels.replaced_modules import ModuleReplacement
    from vllm_fp8rl.patches.probes import require

    if recipe.rope_dtype == "float32":
        require({"rotary", engine.device_config.device_type})
    return ModuleReplacement(engine, recipe)


def _check_exact(engine: VllmConfig, policy: PinPolicy, *, experts: bool) -> None:
    from vllm_fp8rl.patches.probes import require

    parts = {"exact", "rotary", engine.device_config.device_type}
    require(parts | {"experts"} if experts else parts)
    from vllm_fp8rl.kernels.exact import check_exact, check_experts

    check_exact(engine, policy)
    if experts:
        check_experts(engine)


def _guard(engine: VllmConfig) -> RefitGuard:
    from vllm_fp8rl.engine.sleep import watch

    guard = RefitGuard(engine.compilation_config.static_forward_context)
    watch(engine.model_config, guard)
    return guard


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


def _check_weight_transfer(chosen: WeightTransferConfig | None) -> None:
    if chosen is None or chosen.backend in WEIGHT_TRANSFER_BACKENDS:
        return
    raise UnsupportedError(
        f"The weight-transfer backend '{chosen.backend}' takes an incomplete update for a complete "
        f"one, or writes BF16 into FP8 storage; with quantization='{NAME}' set it to one of "
        f"{sorted(WEIGHT_TRANSFER_BACKENDS)} (the trainer's side of 'fp8rl_nccl' is vLLM's 'nccl')."
    )


def _check_adapters(engine: VllmConfig) -> None:
    if engine.lora_config is not None and engine.load_config.load_format == "dummy":
        raise UnsupportedError(
            "enable_lora needs the weights of a checkpoint, because weights cannot be refitted "
            "under adapters; set load_format to 'auto', or start the engine without enable_lora."
        )


def _check_kv_cache(recipe: Recipe, cache: CacheConfig, model_dtype: torch.dtype) -> None:
    wanted, engine_dtype = recipe.kv_cache.dtype, cache.cache_dtype
    actual = _KV_NAMES.get(engine_dtype, engine_dtype)
    if actual == str(model_dtype).removeprefix("torch."):
        actual = "auto"
    if actual != wanted:
        raise RecipeError(
            f"The recipe has kv_cache.dtype '{wanted}', but the engine was started with "
            f"kv_cache_dtype '{engine_dtype}'; make them equal, e.g. with "
            "LLM(..., **vllm_fp8rl.engine_args(recipe))."
        )
    if wanted != "auto" and cache.kv_cache_dtype_skip_layers:
        reason = (
            "trainers send KV scales of every layer, and attend over FP8 K and V in every layer"
            if recipe.kv_cache.has_scales
            else "layers with pages of two sizes have not been run"
        )
        raise UnsupportedError(
            f"kv_cache_dtype_skip_layers={cache.kv_cache_dtype_skip_layers} keeps layers out of "
            f"the KV cache of 8 bits, but {reason}; leave it empty, or set kv_cache.dtype to "
            "'auto'."
        )


def check_speculation(cache_dtype: str, speculation: Any) -> None:
    """Refuse a draft model whose layers would have a KV cache of 8 bits that fp8rl does not know.

    Its layers are no part of the model that is refitted, so they have neither scales nor fp8rl's
    attention: their cache would stay at scale 1.0.

    Args:
        cache_dtype: ``kv_cache.dtype`` of the recipe.
        speculation: vLLM's ``SpeculativeConfig``, or None.

    Raises:
        UnsupportedError: names the method of speculation.
    """
    if speculation is None or cache_dtype == "auto" or speculation.method in _WITHOUT_A_CACHE:
        return
    # EAGLE's and MTP's layers have not been run under fp8rl, whatever the cache.
    cache = "set kv_cache.dtype to 'auto' in the recipe, " if speculation.method == _DRAFT else ""
    raise UnsupportedError(
        f"speculative_config has the method '{speculation.method}', whose layers keep a KV cache "
        f"of their own, without scales of fp8rl's '{cache_dtype}'; {cache}take the method 'ngram', "
        "which has no layers, or leave speculative_config out."
    )


def check_scale_source(cache: Any) -> None:
    """Raise UnsupportedError where vLLM would compute KV scales from the first batch.

    Args:
        cache: vLLM's ``CacheConfig``; 0.32 has no such setting any more.
    """
    if getattr(cache, "calculate_kv_scales", False):
        raise UnsupportedError(
            "calculate_kv_scales overwrites the KV scales that a checkpoint or a refit brought "
            "with those of the first batch; leave it off, and use "
            "vllm_fp8rl.calibration.calibrate_kv_scales."
        )


def _table(recipe: Recipe, policy: PinPolicy) -> str:
    """The resolved precisions, for the log."""
    if not recipe.rollout:
        return "fp8rl: recipe.rollout is false, every linear layer is in the model's dtype"
    return f"{policy.summary()}\n{precision_text(policy.report())}"


__all__ = ["RECIPE_ENV", "Fp8RLConfig", "read_recipe"]

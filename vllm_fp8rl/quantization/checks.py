"""What an engine must be for ``quantization="fp8rl"``: its vLLM, its model, its settings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from vllm.logger import init_logger

from fp8rl.errors import RecipeError, UnsupportedError
from fp8rl.models.families import served_types
from fp8rl.models.spec import ModelSpec
from fp8rl.recipe import Recipe
from vllm_fp8rl.compat import require_cpu_router, untested
from vllm_fp8rl.engine.names import NAME, WEIGHT_TRANSFER_BACKENDS

if TYPE_CHECKING:
    from vllm.config import CacheConfig, KVTransferConfig, VllmConfig
    from vllm.config.weight_transfer import WeightTransferConfig

logger = init_logger("vllm.fp8rl")

_KV_NAMES = {"fp8": "fp8_e4m3"}  # vLLM's alias
_DRAFT = "draft_model"
_WITHOUT_A_CACHE = ("ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator")
"""Methods of speculative decoding that look at tokens or at the model's own hidden states."""


def check_vllm(engine: VllmConfig, spec: ModelSpec, recipe: Recipe) -> None:
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
        "rotary": recipe.exact or recipe.rope_dtype == "float32",
        "exact": recipe.exact,
    }
    require({"worker", device, *(part for part, used in parts.items() if used)})
    warning = untested(device)
    if warning is not None:
        logger.warning_once("%s", warning)


def check_engine(engine: VllmConfig, spec: ModelSpec, recipe: Recipe) -> None:
    """Refuse a model or a setting with which the engine would compute something else.

    Call it while vLLM's current config is that of the engine.

    Raises:
        ModelError: the model has a size that no model has.
        RecipeError: the recipe has another KV cache than the engine.
        UnsupportedError: names the model or the setting.
    """
    parallel, on_cpu = engine.parallel_config, engine.device_config.device_type == "cpu"
    check_architecture(spec)
    check_widths(
        spec, parallel.tensor_parallel_size, expert_parallel=parallel.enable_expert_parallel
    )
    if on_cpu and spec.experts:
        require_cpu_router()
        check_cpu_scoring(spec)
    if engine.model_config.use_mla:
        # vLLM's layer modules are heavy: imported only where an engine is being built.
        from vllm_fp8rl.quantization.mla import check_cpu, check_latent_cache

        check_latent_cache(recipe.kv_cache.dtype)
        if on_cpu:
            check_cpu(spec)
    _check_weight_transfer(engine.weight_transfer_config)
    _check_adapters(engine)
    _check_kv_cache(recipe, engine.cache_config, engine.model_config.dtype)
    check_speculation(recipe.kv_cache.dtype, engine.speculative_config)
    check_scale_source(engine.cache_config)
    check_connector(engine.kv_transfer_config)


def check_architecture(spec: ModelSpec) -> None:
    """Raise UnsupportedError for a model of a family that is not known or not served yet."""
    reason = spec.refused(rollout=True, training=False)
    if reason is not None:
        served = "" if spec.entry else f" The types served are {served_types()}."
        raise UnsupportedError(
            f"quantization='{NAME}' does not serve {reason}; start it without, or add what is "
            f"missing (docs/extending.md).{served}"
        )


def check_cpu_scoring(spec: ModelSpec) -> None:
    """Raise UnsupportedError for a router of sigmoids without groups, which fails on a CPU."""
    if spec.value("scoring_func") == "sigmoid" and not spec.value("n_group"):
        raise UnsupportedError(
            f"vLLM's router for CPUs has no sigmoid without groups, which '{spec.model_type}' "
            "needs; run this model on a GPU."
        )


def check_widths(spec: ModelSpec, ranks: int, *, expert_parallel: bool) -> None:
    """Refuse sizes that no model has, and ranks that do not divide the widths that are split.

    vLLM accepts some of the sizes and divides by others.
    """
    numbers, experts, widths = spec.numbers, spec.family.experts, {}
    if not all(layer.sparse for layer in spec.layers):
        widths["mlp.gate_up_proj"] = "intermediate_size"
    if experts and any(layer.sparse for layer in spec.layers) and not expert_parallel:
        widths[f"{experts.block}.experts"] = experts.width
    for module, key in widths.items():
        if numbers[key] % ranks:
            raise UnsupportedError(
                f"'model.layers.*.{module}' cannot be split: {key}={numbers[key]} is no multiple "
                f"of tensor_parallel_size={ranks}; choose another tensor parallel size."
            )


def _check_weight_transfer(chosen: WeightTransferConfig | None) -> None:
    if chosen is None or chosen.backend in WEIGHT_TRANSFER_BACKENDS:
        return
    ours = f"{NAME}_{chosen.backend}"
    remedy = f"'{ours}', and leave the trainer's side as it is"
    if ours not in WEIGHT_TRANSFER_BACKENDS:
        remedy = f"one of {sorted(WEIGHT_TRANSFER_BACKENDS)} (docs/trainer.md)"
    raise UnsupportedError(
        f"The weight-transfer backend '{chosen.backend}' takes an incomplete update for a complete "
        f"one, or writes BF16 into FP8 storage; with quantization='{NAME}' set it to {remedy}."
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
    attention: their cache would stay at scale 1.0. It raises UnsupportedError.
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

    0.32 has no such setting any more.
    """
    if getattr(cache, "calculate_kv_scales", False):
        raise UnsupportedError(
            "calculate_kv_scales overwrites the KV scales that a checkpoint or a refit brought "
            "with those of the first batch; leave it off, and use "
            "vllm_fp8rl.calibration.calibrate_kv_scales."
        )


def check_connector(config: KVTransferConfig | None) -> None:
    """Raise UnsupportedError for a connector that does not drop its cache when it is reset.

    A connector keeps keys and values outside of the engine and returns them when a prompt comes
    again. After a refit, or new KV scales, they belong to older weights or scales. vLLM calls
    ``reset_cache``, whose base does nothing and returns None, and takes that for success.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    for one in _each(config):
        connector = KVConnectorFactory.get_connector_class(one)
        if connector.reset_cache is KVConnectorBase_V1.reset_cache:
            raise UnsupportedError(
                f"The KV connector '{one.kv_connector}' has no reset_cache of its own, so it would "
                "serve keys and values of older weights after a refit; start the engine without "
                "it, or with one that has, such as 'OffloadingConnector'."
            )


def _each(config: KVTransferConfig | None) -> Iterator[KVTransferConfig]:
    """Yield the connector, or those that a MultiConnector is made of."""
    from vllm.config import KVTransferConfig

    if config is None or config.kv_connector is None:
        return
    parts = (config.kv_connector_extra_config or {}).get("connectors")
    if config.kv_connector != "MultiConnector" or not parts:
        yield config
        return
    for part in parts:
        yield from _each(KVTransferConfig(**part))

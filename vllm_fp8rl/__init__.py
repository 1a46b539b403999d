"""Block-FP8 linear layers, in-place refit and live KV-cache scales for vLLM.

vLLM finds :func:`register` through the entry-point group ``vllm.general_plugins`` and calls it in
each of its processes. Importing this package does not import vLLM.
"""

from __future__ import annotations

import contextlib
import logging
from typing import Any

from fp8rl import Recipe
from fp8rl.errors import UnsupportedError
from vllm_fp8rl.engine.names import EXTENSION, NAME, WEIGHT_TRANSFER_BACKENDS

_BACKENDS = "vllm_fp8rl.attention.backends"


def register() -> None:
    """Register quantization ``fp8rl`` with vLLM; may be called any number of times.

    It also registers attention backends in place of ``CPU_ATTN`` (vLLM's CPU platform uses no other
    name) and, on a GPU, of ``FLASH_ATTN``. They behave like vLLM's own unless an engine uses
    ``fp8rl`` and an FP8 KV cache. vLLM imports them when they are used, and only then do the probes
    of a release run that was not tested.

    With a release that was not tested, an error here becomes a warning, so that engines without
    fp8rl start.
    """
    from vllm_fp8rl.compat import built_for_cpus, installed_version, supported, untested

    release = installed_version() or ""
    try:
        import vllm.v1.engine.core  # noqa: F401 (patched below)
        from vllm.model_executor.layers.quantization import register_quantization_config

        from vllm_fp8rl.patches.ledger import ENGINE_CORE, install
        from vllm_fp8rl.quantization.config import Fp8RLConfig
    except ImportError as error:  # engines without fp8rl must still start on an unknown vLLM
        _warn(release, error)
        return

    try:
        if supported(release):
            _register_weight_transfer()
            with contextlib.suppress(UnsupportedError):  # its probes refuse an engine with fp8rl
                install(ENGINE_CORE)
            _register_attention_backend()
        # This comes last: an error above ends the start of a process, but if it is caught, vLLM
        # does not call this function again there, and then an engine that asks for fp8rl must fail.
        # For a version that is not served, Fp8RLConfig raises.
        register_quantization_config(NAME)(Fp8RLConfig)
    except Exception as error:
        if untested("cpu" if built_for_cpus() else "cuda") is None:
            raise
        _warn(release, error)


def _warn(release: str, error: Exception) -> None:
    """Log that a vLLM, which starts engines without fp8rl, has no quantization of that name."""
    from vllm_fp8rl.compat import remedy

    logging.getLogger("vllm.fp8rl").warning(
        "There is no quantization='%s' with vLLM %s (%s: %s); %s.",
        NAME,
        release,
        type(error).__name__,
        error,
        remedy(),
    )


def _register_attention_backend() -> None:
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    # Every engine of this process gets this backend, those without fp8rl too. vLLM imports it, and
    # its probes run, when an engine chooses its attention.
    if current_platform.is_cpu():
        register_backend(AttentionBackendEnum.CPU_ATTN, f"{_BACKENDS}.CPU_ATTN")
    elif current_platform.is_cuda():
        for backend in (AttentionBackendEnum.FLASH_ATTN, AttentionBackendEnum.TRITON_ATTN):
            register_backend(backend, f"{_BACKENDS}.{backend.name}")


def _register_weight_transfer() -> None:
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    for backend, (module, engine) in WEIGHT_TRANSFER_BACKENDS.items():
        with contextlib.suppress(ValueError):  # registered already
            WeightTransferEngineFactory.register_engine(
                backend, f"vllm_fp8rl.refit.receiver.{module}", engine
            )


def engine_args(recipe: Recipe) -> dict[str, Any]:
    """Return the arguments with which ``vllm.LLM`` or ``AsyncEngineArgs`` runs a recipe.

    The worker extension among them has the steps of a refit. For one of yours, which should have
    :class:`vllm_fp8rl.refit.RefitMixin`, write
    ``engine_args(recipe) | {"worker_extension_cls": "my_package.Extension"}``.
    """
    return {
        "quantization": NAME,
        "kv_cache_dtype": recipe.kv_cache.dtype,
        "additional_config": {"fp8rl": recipe.to_dict()},
        "worker_extension_cls": EXTENSION,
    }


__all__ = ["NAME", "WEIGHT_TRANSFER_BACKENDS", "engine_args", "register"]

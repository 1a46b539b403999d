"""vLLM's ``reload_weights``, served by a refit session; see :mod:`vllm_fp8rl.patches.ledger`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from fp8rl.errors import UnsupportedError
from vllm_fp8rl.names import NAME, uses_fp8rl
from vllm_fp8rl.refit.intake import BATCH_BYTES, batches
from vllm_fp8rl.refit.session import RefitSession


def reload_in_place(reload: Callable[..., Any]) -> Callable[..., Any]:
    """Replace ``GPUModelRunner.reload_weights`` by a refit session, for models of fp8rl."""

    def reload_weights(runner: Any, *args: Any, **kwargs: Any) -> None:
        if uses_fp8rl(runner.vllm_config):
            _reload(runner, *args, **kwargs)
        else:
            reload(runner, *args, **kwargs)

    return reload_weights


def _reload(
    runner: Any,
    weights_iterator: Iterable[tuple[str, torch.Tensor]] | None = None,
    weights_path: str | None = None,
    is_checkpoint_format: bool = True,
) -> None:
    if not is_checkpoint_format:
        raise UnsupportedError(
            "reload_weights(is_checkpoint_format=False) copies tensors into FP8 storage unseen, "
            f"which quantization='{NAME}' does not serve; send HF tensors, without that argument "
            "or with vllm_fp8rl.refit.refit."
        )
    weights = _checkpoint(runner, weights_path) if weights_iterator is None else weights_iterator
    with RefitSession(runner.get_model(), expect_kv_scales=None, name="reload_weights") as session:
        for batch in batches(weights, BATCH_BYTES):
            session.load(batch)


def _checkpoint(runner: Any, path: str | None) -> Iterable[tuple[str, torch.Tensor]]:
    """Return the tensors of the engine's checkpoint, or of another one, which replaces it."""
    from vllm.model_executor.model_loader import get_model_loader

    loader: Any = get_model_loader(runner.vllm_config.load_config)
    if not hasattr(loader, "get_all_weights"):
        raise UnsupportedError(
            f"reload_weights has no checkpoint to read with load_format="
            f"'{runner.vllm_config.load_config.load_format}'; send tensors with "
            "vllm_fp8rl.refit.refit, or start the engine from a checkpoint."
        )
    model_config = runner.vllm_config.model_config
    if path is not None:
        model_config.model, model_config.model_weights, model_config.revision = path, "", None
    return loader.get_all_weights(model_config, runner.get_model())

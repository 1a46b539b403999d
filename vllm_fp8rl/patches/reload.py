"""vLLM's ``reload_weights(is_checkpoint_format=False)``, refused for models of fp8rl."""

from __future__ import annotations

import functools
import inspect
import sys
from typing import Any

from fp8rl.errors import UnsupportedError
from vllm_fp8rl.names import NAME

_RUNNERS = {
    "vllm.v1.worker.gpu_model_runner": "GPUModelRunner",
    "vllm.v1.worker.gpu.model_runner": "GPUModelRunner",
}
"""Module -> class, of 0.25.1 and 0.32.0; that of a CPU inherits from the first."""
_MARK = "fp8rl_refuses_kernel_format"


def install() -> None:
    """Refuse a reload that writes past every loader.

    Why: with ``is_checkpoint_format=False`` vLLM copies what comes into parameters as it is: BF16
    becomes FP8 by a cast, under the old scales, and nobody learns whether all came. How: the method
    of the runners that this process has imported is covered; it raises for engines of fp8rl.
    Upstream: the modules above; there is no door before the copy. It can go when vLLM asks
    parameters' loaders there too.
    """
    for module, name in _RUNNERS.items():
        runner: Any = getattr(sys.modules.get(module), name, None)
        reload = getattr(runner, "reload_weights", None)
        if reload is not None and not hasattr(reload, _MARK):
            runner.reload_weights = _refusing(reload)


def _refusing(reload: Any) -> Any:
    signature = inspect.signature(reload)

    @functools.wraps(reload)
    def reload_weights(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = self.vllm_config.quant_config
        of_fp8rl = config is not None and config.get_name() == NAME
        given = signature.bind(self, *args, **kwargs).arguments
        if of_fp8rl and not given.get("is_checkpoint_format", True):
            raise UnsupportedError(
                "reload_weights(is_checkpoint_format=False) copies tensors into FP8 storage "
                f"unseen, which quantization='{NAME}' does not serve; send HF tensors, without "
                "that argument or with vllm_fp8rl.refit.refit."
            )
        return reload(self, *args, **kwargs)

    setattr(reload_weights, _MARK, True)
    return reload_weights

"""vLLM's own block-FP8 GEMMs over storage that never moves.

vLLM prepares weights once, in each kernel's ``process_weights_after_loading``. Here that is never
called: on the GPUs served, all it would do is replace parameters (which ends refits in place) and,
with ``VLLM_USE_DEEP_GEMM_E8M0`` (its default), quantize the weights a second time to powers of two.
DeepGEMM, CUTLASS and Triton all read codes ``[N, K]`` and float32 scales ``[N/128, K/128]``
(``vllm/model_executor/kernels/linear/scaled_mm``), which is how :mod:`vllm_fp8rl.storage.block_grid` writes them.
"""

from __future__ import annotations

import os

import torch
from vllm.config import get_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.kernels.linear import (
    CutlassFp8BlockScaledMMKernel,
    DeepGemmFp8BlockScaledMMKernel,
    TritonFp8BlockScaledMMKernel,
    is_supported_and_can_implement_kernel,
)
from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import (
    FP8ScaledMMLinearLayerConfig,
)
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    GroupShape,
    create_fp8_quant_key,
)
from vllm.platforms import current_platform

from fp8rl.errors import UnsupportedError
from fp8rl.gemm import GemmShape
from fp8rl.numerics import BLOCK, GROUP, Quantized
from fp8rl.recipe import Recipe
from vllm_fp8rl.compat import require_gpu_supported, unsupported_reason
from vllm_fp8rl.deep_gemm_warmup.compile import NO_NVCC, find_nvcc

logger = init_logger("vllm.fp8rl")

_KERNELS = {
    "deep_gemm": DeepGemmFp8BlockScaledMMKernel,
    "cutlass": CutlassFp8BlockScaledMMKernel,
    "triton": TritonFp8BlockScaledMMKernel,
}
"""By vLLM's ``linear_backend``, the fastest first."""


class DelegatedKernel:
    """One of vLLM's kernels, as vLLM would run it on this layer, with the recipe's activations.

    Args:
        backend: a key of vLLM's ``linear_backend``.
        config: the layer, in vLLM's terms.
        recipe: scale formats.
    """

    traceable = True

    def __init__(self, backend: str, config: FP8ScaledMMLinearLayerConfig, recipe: Recipe) -> None:
        self.backend = backend
        self._kernel = _KERNELS[backend](config)
        self._pow2 = recipe.activations.scale_format == "pow2"
        if backend == "deep_gemm":
            self._kernel.use_deep_gemm_e8m0 = False

    def apply(self, x: torch.Tensor, weight: Quantized) -> torch.Tensor:
        """``x @ weight.T``."""
        rows = x.reshape(-1, x.shape[-1])
        codes, by_group = torch.ops.fp8rl.quantize(rows, self._pow2)
        scale_inv = by_group.t()[: rows.shape[0]]
        if self.backend == "cutlass":  # knows no padding
            scale_inv = scale_inv.t().contiguous().t()
        elif self.backend == "triton":  # reads the scales of a row side by side
            scale_inv = scale_inv.contiguous()
        y = self._kernel.apply_block_scaled_mm(
            A=codes, B=weight.codes, As=scale_inv, Bs=weight.scale_inv
        )
        return y.view(*x.shape[:-1], weight.codes.shape[0])


def delegate(shape: GemmShape, recipe: Recipe, dtype: torch.dtype) -> DelegatedKernel:
    """The fastest of vLLM's kernels that can run a layer, or the one ``linear_backend`` names.

    Args:
        shape: of the layer on this rank.
        recipe: scale formats.
        dtype: of the activations.

    Raises:
        UnsupportedError: the GPU, vLLM's version, the backend asked for, or the shape.
    """
    require_served_gpu()
    if shape.in_features % GROUP:
        raise UnsupportedError(
            f"vLLM's kernels need input features in multiples of {GROUP} on this rank, not "
            f"{shape.in_features}; pin the layer to BF16 or change the tensor parallel size."
        )
    config = _layer_config(shape, dtype)
    backend, reasons = _choose(shape, config)
    if NO_NVCC in reasons.values():
        logger.warning_once("fp8rl: DeepGEMM, the fastest FP8 kernel, is left out: %s.", NO_NVCC)
    if backend is not None:
        # Here, because it needs Triton: without a GPU the sentences above are the better answer.
        from vllm_fp8rl.kernels.fusion_pass import install

        install(get_current_vllm_config(), recipe)
        return DelegatedKernel(backend, config, recipe)
    raise UnsupportedError(
        f"No FP8 kernel takes a weight of shape [{shape.out_features}, {shape.in_features}] in "
        f"{dtype} ({'; '.join(f'{name}: {why}' for name, why in reasons.items())}); pin the layer "
        "to BF16."
    )


def obstacles(shape: GemmShape, dtype: torch.dtype) -> dict[str, str]:
    """Why the kernels that come before the one chosen cannot run a layer, by backend.

    Raises:
        UnsupportedError: the backend asked for is none of those here.
    """
    return _choose(shape, _layer_config(shape, dtype))[1]


def _choose(
    shape: GemmShape, config: FP8ScaledMMLinearLayerConfig
) -> tuple[str | None, dict[str, str]]:
    reasons: dict[str, str] = {}
    for backend in _backends():
        reason = _obstacle(backend, shape, config)
        if reason is None:
            return backend, reasons
        reasons[backend] = reason
    return None, reasons


def _layer_config(shape: GemmShape, dtype: torch.dtype) -> FP8ScaledMMLinearLayerConfig:
    return FP8ScaledMMLinearLayerConfig(
        weight_quant_key=create_fp8_quant_key(static=True, group_shape=GroupShape(*BLOCK)),
        activation_quant_key=create_fp8_quant_key(static=False, group_shape=GroupShape(1, GROUP)),
        weight_shape=(shape.out_features, shape.in_features),
        input_dtype=dtype,
        out_dtype=dtype,
    )


def require_served_gpu() -> None:
    """Raise UnsupportedError for a GPU or a vLLM whose kernels are not used here."""
    require_gpu_supported()
    capability = current_platform.get_device_capability()
    why = unsupported_reason(capability, rocm=current_platform.is_rocm())
    if why is not None:
        raise UnsupportedError(f"{why}; use recipe.rollout=false here.")


def _backends() -> tuple[str, ...]:
    asked = get_current_vllm_config().kernel_config.linear_backend
    if asked == "auto":
        return tuple(_KERNELS)
    if asked not in _KERNELS:
        raise UnsupportedError(
            f"linear_backend='{asked}' cannot run layers that are refitted in place; set it to "
            f"{', '.join(_KERNELS)} or auto."
        )
    return (asked,)


def _obstacle(backend: str, shape: GemmShape, config: FP8ScaledMMLinearLayerConfig) -> str | None:
    if backend == "cutlass" and shape.out_features % BLOCK[0]:
        return f"output features are no multiple of {BLOCK[0]}"  # vLLM does not check that
    if backend == "deep_gemm" and find_nvcc(os.environ) is None:  # nor that
        return NO_NVCC
    possible, reason = is_supported_and_can_implement_kernel(_KERNELS[backend], config, None)
    return None if possible else reason.strip()

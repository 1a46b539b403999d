"""vLLM's own block-FP8 GEMMs, over weights that are written in place.

vLLM prepares weights once, in each kernel's ``process_weights_after_loading``. That is never called
here: on the GPUs served, it would only replace parameters (which ends refits in place) and, with
``VLLM_USE_DEEP_GEMM_E8M0`` (its default), quantize the weights again with scales that are powers of
two. DeepGEMM, CUTLASS and Triton all read codes ``[N, K]`` and float32 scales ``[N/128, K/128]``
(``vllm/model_executor/kernels/linear/scaled_mm``), as :mod:`vllm_fp8rl.storage.block_grid` writes
them. They multiply whole groups: zeros fill the last group of each row of codes, of weights and
activations. On Blackwell DeepGEMM packs the exponents of such scales in each call, so that a refit
in place is seen there too.
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
    kFp8Dynamic128Sym,
    kFp8Static128BlockSym,
)
from vllm.platforms import current_platform

from fp8rl.errors import UnsupportedError
from fp8rl.gemm import GemmShape
from fp8rl.numerics import BLOCK, Quantized, whole_groups
from fp8rl.recipe import Recipe
from vllm_fp8rl.compat import PACKING_CAPABILITIES, unsupported_reason
from vllm_fp8rl.kernels.fusion import deep_gemm_op as deep_gemm_op  # registers fp8rl::deep_gemm
from vllm_fp8rl.warmup import NO_NVCC, find_nvcc

logger = init_logger("vllm.fp8rl")

_KERNELS = {
    "deep_gemm": DeepGemmFp8BlockScaledMMKernel,
    "cutlass": CutlassFp8BlockScaledMMKernel,
    "triton": TritonFp8BlockScaledMMKernel,
}
"""The value of vLLM's ``linear_backend`` for each kernel, the fastest first."""


class DelegatedKernel:
    """One of vLLM's kernels, over the recipe's activations."""

    def __init__(self, backend: str, config: FP8ScaledMMLinearLayerConfig, recipe: Recipe) -> None:
        self.backend = backend
        # DeepGEMM's is never called. Building it imports DeepGEMM and sets DG_JIT_CACHE_DIR, which
        # the warm-up needs.
        self._kernel = _KERNELS[backend](config)
        self._pow2 = recipe.activations.scale_format == "pow2"
        # On other GPUs DeepGEMM, told to pack, would round scales that are no powers of two.
        self._packs = packs_scales()

    @staticmethod
    def stored_columns(columns: int) -> int:
        """Return the columns of the codes that a weight of ``columns`` is stored in."""
        return whole_groups(columns)

    def apply(self, x: torch.Tensor, weight: Quantized) -> torch.Tensor:
        """Return ``x @ weight.T`` for ``x`` ``[.., K]``, and codes ``[N, stored columns of K]``."""
        flat = x.dim() == 2  # torch.compile takes longer for each operation that it traces
        rows = x if flat else x.reshape(-1, x.shape[-1])
        codes, by_group = torch.ops.fp8rl.quantize(rows, self._pow2)
        if self.backend == "deep_gemm":
            y = torch.ops.fp8rl.deep_gemm(
                codes, by_group, weight.codes, weight.scale_inv, self._packs
            )
        else:
            y = self._multiply(codes, by_group[:, : rows.shape[0]], weight)
        return y if flat else y.view(*x.shape[:-1], weight.codes.shape[0])

    def _multiply(
        self, codes: torch.Tensor, by_group: torch.Tensor, weight: Quantized
    ) -> torch.Tensor:
        """Call vLLM's CUTLASS or Triton kernel with scales ``[K/128, M]``."""
        if self.backend == "cutlass":  # takes no padding
            scale_inv = by_group.contiguous().t()
        else:  # the scales of a row lie side by side
            scale_inv = by_group.t().contiguous()
        return self._kernel.apply_block_scaled_mm(
            A=codes, B=weight.codes, As=scale_inv, Bs=weight.scale_inv
        )


def delegate(shape: GemmShape, recipe: Recipe, dtype: torch.dtype) -> DelegatedKernel:
    """Return the fastest of vLLM's kernels for a layer, or the one of ``linear_backend``."""
    require_served_gpu(recipe)
    config = layer_config(shape, dtype)
    backend, reasons = _choose(shape, config)
    if NO_NVCC in reasons.values():
        logger.warning_once("fp8rl: DeepGEMM, the fastest FP8 kernel, is left out: %s.", NO_NVCC)
    if recipe.exact and backend != "deep_gemm":
        raise UnsupportedError(
            f"exact needs DeepGEMM for a weight of shape [{shape.out_features}, "
            f"{shape.in_features}] ({reasons.get('deep_gemm', 'linear_backend names another')}); "
            "make it available, or set exact to false in the recipe."
        )
    if backend is not None:
        # Imported here, because it needs Triton: without a GPU the errors above are clearer.
        from vllm_fp8rl.kernels.fusion.fusion_pass import install

        install(get_current_vllm_config(), recipe)
        return DelegatedKernel(backend, config, recipe)
    raise UnsupportedError(
        f"No FP8 kernel takes a weight of shape [{shape.out_features}, {shape.in_features}] in "
        f"{dtype} ({'; '.join(f'{name}: {why}' for name, why in reasons.items())}); pin the layer "
        "to BF16."
    )


def unsupported_reasons(shape: GemmShape, dtype: torch.dtype) -> dict[str, str]:
    """Return why each backend that is faster than the chosen one does not serve a layer."""
    return _choose(shape, layer_config(shape, dtype))[1]


def layer_config(shape: GemmShape, dtype: torch.dtype) -> FP8ScaledMMLinearLayerConfig:
    """Return vLLM's description of a block-FP8 layer, as its weight is stored."""
    return FP8ScaledMMLinearLayerConfig(
        weight_quant_key=kFp8Static128BlockSym,
        activation_quant_key=kFp8Dynamic128Sym,
        weight_shape=(shape.out_features, whole_groups(shape.in_features)),
        input_dtype=dtype,
        out_dtype=dtype,
    )


def require_served_gpu(recipe: Recipe) -> None:
    """Raise UnsupportedError if the kernels of this GPU are not served."""
    capability = current_platform.get_device_capability()
    reason = unsupported_reason(
        capability, rocm=current_platform.is_rocm(), allow_untested=recipe.allow_untested_gpu
    )
    if reason is not None:
        raise UnsupportedError(f"{reason}; use recipe.rollout=false here.")
    if packs_scales():
        logger.warning_once(
            "fp8rl has never run on a Blackwell GPU: allow_untested_gpu starts FP8 layers that are "
            "written after the sources of vLLM's kernels, so compare logprobs with BF16 rollouts."
        )


def packs_scales() -> bool:
    """Whether DeepGEMM takes scales on this GPU as packed exponents."""
    return tuple(current_platform.get_device_capability() or ()) in PACKING_CAPABILITIES


def _choose(
    shape: GemmShape, config: FP8ScaledMMLinearLayerConfig
) -> tuple[str | None, dict[str, str]]:
    reasons: dict[str, str] = {}
    for backend in _backends():
        reason = _unsupported_reason(backend, shape, config)
        if reason is None:
            return backend, reasons
        reasons[backend] = reason
    return None, reasons


def _backends() -> tuple[str, ...]:
    chosen = get_current_vllm_config().kernel_config.linear_backend
    if chosen == "auto":
        return tuple(_KERNELS)
    if chosen not in _KERNELS:
        raise UnsupportedError(
            f"linear_backend='{chosen}' cannot run layers that are refitted in place; set it to "
            f"{', '.join(_KERNELS)} or auto."
        )
    return (chosen,)


def _unsupported_reason(
    backend: str, shape: GemmShape, config: FP8ScaledMMLinearLayerConfig
) -> str | None:
    if backend == "cutlass" and shape.out_features % BLOCK[0]:  # vLLM does not check it
        return f"output features are no multiple of {BLOCK[0]}"
    if backend == "deep_gemm" and find_nvcc(os.environ) is None:  # vLLM does not check it
        return NO_NVCC
    supported, reason = is_supported_and_can_implement_kernel(_KERNELS[backend], config, None)
    return None if supported else reason.strip()

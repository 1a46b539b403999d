"""A torch.compile pass that fuses a norm, or SiLU and multiply, with the quantization after it.

With ``exact`` it also fuses the norms of queries and keys with their rotation.

vLLM has such passes for its own quantization kernels
(``vllm/compilation/passes/fusion/{rms,act}_quant_fusion.py``). This one uses vLLM's public setting
for other passes, ``post_grad_custom_post_pass`` in ``inductor_compile_config``. Where no pattern
matches, the two kernels run separately, with the same result up to rounding; with ``exact``, whose
kernels Inductor cannot change, with the same bits.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
import vllm.ir.ops
from vllm.compilation.passes.fusion.matcher_utils import MatcherSiluAndMul
from vllm.compilation.passes.vllm_inductor_pass import (
    VllmFusionPatternMatcherPass,
    VllmPatternReplacement,
)
from vllm.config import CompilationMode, PassConfig, VllmConfig
from vllm.logger import init_logger

from fp8rl.kernels import norm as triton_norm
from fp8rl.numerics import GROUP
from fp8rl.numerics.triton import activations as triton_fused
from fp8rl.recipe import Recipe
from vllm_fp8rl.kernels.fusion import deep_gemm_op
from vllm_fp8rl.kernels.fusion import fused_ops as fused_ops  # registers operations named below

logger = init_logger("vllm.fp8rl.fusion_pass")

NAME = "fp8rl_quantize_fusion"
PASS_KEY = "post_grad_custom_post_pass"
_PASSES_OVER_RANKS = ("fuse_allreduce_rms", "enable_sp", "fuse_gemm_comms")
_EPSILONS = (1e-5, 1e-6)
Argument = tuple[torch.dtype, tuple[int, ...]]
_ROWS = 5  # rows of the tensors that patterns are traced with; any number would do


class _Fusion(VllmPatternReplacement):
    """A pattern and its replacement.

    Args:
        replacement: what takes its place, of the same arguments.
        arguments: dtype and shape of each argument that both are traced with.
    """

    def __init__(
        self, pattern: Callable[..., Any], replacement: Callable[..., Any], *arguments: Argument
    ) -> None:
        self._pattern, self._replacement, self._arguments = pattern, replacement, arguments

    @property
    def pattern(self) -> Callable[..., Any]:
        return self._pattern

    @property
    def replacement(self) -> Callable[..., Any]:
        return self._replacement

    def get_inputs(self) -> list[torch.Tensor]:
        return [self.empty(*shape, dtype=dtype) for dtype, shape in self._arguments]


def silu_mul_quantize(silu_and_mul: Any, dtype: torch.dtype, pow2: bool) -> _Fusion:
    """Fuse ``quantize(silu_and_mul(x))``."""

    def pattern(x: torch.Tensor) -> Any:
        return torch.ops.fp8rl.quantize(silu_and_mul(x), pow2)

    def replacement(x: torch.Tensor) -> Any:
        return torch.ops.fp8rl.silu_mul_quantize(x, pow2)

    return _Fusion(pattern, replacement, (dtype, (_ROWS, 2 * GROUP)))


def norm_quantize(norm: Any, dtype: torch.dtype, epsilon: float, pow2: bool) -> _Fusion:
    """Fuse ``quantize(norm(x, weight, epsilon))``."""

    def pattern(x: torch.Tensor, weight: torch.Tensor) -> Any:
        return torch.ops.fp8rl.quantize(norm(x, weight, epsilon), pow2)

    def replacement(x: torch.Tensor, weight: torch.Tensor) -> Any:
        return torch.ops.fp8rl.rms_norm_quantize(x, weight, epsilon, pow2)

    return _Fusion(pattern, replacement, (dtype, (_ROWS, GROUP)), (dtype, (GROUP,)))


def add_norm_quantize(norm: Any, dtype: torch.dtype, epsilon: float, pow2: bool) -> _Fusion:
    """Fuse ``quantize(norm(x, residual, weight, epsilon))``; the sum is a second result."""

    def pattern(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor) -> Any:
        normed, total = norm(x, residual, weight, epsilon)
        codes, scales = torch.ops.fp8rl.quantize(normed, pow2)
        return codes, scales, total

    def replacement(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor) -> Any:
        return torch.ops.fp8rl.add_rms_norm_quantize(x, residual, weight, epsilon, pow2)

    rows = (dtype, (_ROWS, GROUP))
    return _Fusion(pattern, replacement, rows, (dtype, (GROUP,)), rows)


def norm_rotate(dtype: torch.dtype, epsilon: float) -> _Fusion:
    """Fuse the norms of queries and keys of ``exact`` with the rotation after them."""

    def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        size = weight.shape[0]
        by_head = x.view(*x.shape[:-1], x.shape[-1] // size, size)
        return torch.ops.fp8rl.exact_norm(by_head, weight, epsilon).view(x.shape)

    def pattern(
        query: torch.Tensor,
        key: torch.Tensor,
        query_weight: torch.Tensor,
        key_weight: torch.Tensor,
        positions: torch.Tensor,
        table: torch.Tensor,
    ) -> Any:
        query, key = normed(query, query_weight), normed(key, key_weight)
        return torch.ops.fp8rl.exact_rotate(query, key, positions, table)

    def replacement(
        query: torch.Tensor,
        key: torch.Tensor,
        query_weight: torch.Tensor,
        key_weight: torch.Tensor,
        positions: torch.Tensor,
        table: torch.Tensor,
    ) -> Any:
        return torch.ops.fp8rl.exact_norm_rotate(
            query, key, query_weight, key_weight, epsilon, positions, table
        )

    heads, weight = [(dtype, (_ROWS, count * GROUP)) for count in (2, 1)], (dtype, (GROUP,))
    places = (torch.int64, (_ROWS,)), (torch.float32, (_ROWS, GROUP))
    return _Fusion(pattern, replacement, *heads, weight, weight, *places)


class FuseQuantization(VllmFusionPatternMatcherPass):
    """The pass: all patterns above, for one scale format, over vLLM's norms or those of exact."""

    def __init__(self, engine: VllmConfig, recipe: Recipe) -> None:
        super().__init__(engine, NAME)
        pow2 = recipe.activations.scale_format == "pow2"
        self._key = f"{pow2}, {recipe.exact}"
        self._sources = [sys.modules[__name__], deep_gemm_op, fused_ops, triton_fused, triton_norm]
        dtype = engine.model_config.dtype
        norm, add_norm = vllm.ir.ops.rms_norm, vllm.ir.ops.fused_add_rms_norm
        silu_and_mul: Any
        if recipe.exact:
            from fp8rl.kernels import rotary
            from vllm_fp8rl.kernels import exact  # needs more of vLLM

            self._sources += [exact, rotary]
            norm, add_norm = torch.ops.fp8rl.exact_norm, torch.ops.fp8rl.exact_add_norm
            silu_and_mul = torch.ops.fp8rl.exact_swiglu
        else:
            silu_and_mul = MatcherSiluAndMul()
        self.register(silu_mul_quantize(silu_and_mul, dtype, pow2))
        for epsilon in _EPSILONS:
            # First: it contains the next.
            self.register(add_norm_quantize(add_norm, dtype, epsilon, pow2))
            self.register(norm_quantize(norm, dtype, epsilon, pow2))
            if recipe.exact:
                self.register(norm_rotate(dtype, epsilon))

    def __deepcopy__(self, memo: dict[int, Any]) -> FuseQuantization:
        return self  # vLLM copies the dictionary that holds the pass; patterns do not change

    def uuid(self) -> str:
        """Return a key for the caches of vLLM and Inductor.

        It covers the patterns, their choice, and the source of the operations: compiled code
        depends on their shapes and strides, and Dynamo does not trace their files.
        """
        return self.hash_source(
            super().uuid(), self._key, *(inspect.getsource(module) for module in self._sources)
        )


def install(engine: VllmConfig, recipe: Recipe) -> None:
    """Add the pass to an engine that is being built, unless the user has set one of his own."""
    compilation = engine.compilation_config
    if compilation.mode == CompilationMode.NONE:
        return
    if recipe.exact:
        _leave_sums_alone(compilation.pass_config)
    passes = compilation.inductor_compile_config
    if PASS_KEY not in passes:
        passes[PASS_KEY] = FuseQuantization(engine, recipe)


def _leave_sums_alone(passes: PassConfig) -> None:
    """Switch off vLLM's passes that join sums over ranks with the norms or products beside them.

    The norms of ``exact`` are not vLLM's, so that they would find none; on Hopper GPUs the first
    is on by itself for several ranks.
    """
    for name in _PASSES_OVER_RANKS:
        if getattr(passes, name, None):  # some releases lack some
            setattr(passes, name, False)
            logger.info("fp8rl: exact switches compilation_config.pass_config.%s off.", name)

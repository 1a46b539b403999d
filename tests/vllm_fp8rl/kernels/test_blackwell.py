"""FP8 rollouts on Blackwell, by an emulation: no test has run on such a GPU.

What DeepGEMM does with scales there is in ``csrc/apis/layout.hpp`` and ``csrc/jit_kernels/impls/
smxx_layout.hpp`` of DeepGEMM 2.6; :func:`fp8_gemm_nt` does the same, and multiplies in float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import (
    FusedMoEConfig,
    FusedMoEParallelConfig,
    RoutingMethodType,
)
from vllm.model_executor.layers.fused_moe.experts import deep_gemm_moe
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability
from vllm.utils import deep_gemm

from fp8rl import Recipe
from fp8rl.errors import UnsupportedError
from fp8rl.gemm import GemmShape
from fp8rl.gemm.reference import multiply_rows
from fp8rl.numerics import (
    Quantized,
    dequantize_block,
    dequantize_group,
    quantize_block,
    quantize_group,
)
from support.block_gemm import quantize
from vllm_fp8rl.compat import one_class
from vllm_fp8rl.kernels.linear import block_gemm

POW2 = {"scale_format": "pow2"}
RECIPE = Recipe.from_dict(
    {"training": False, "allow_untested_gpu": True, "weights": POW2, "activations": POW2}
)
N, K = 384, 640


def packed(scale_inv: torch.Tensor, rows: int) -> torch.Tensor:
    """E8M0 of float32 scales ``[rows, K/128]``, or ``[rows/128, K/128]`` that are repeated."""
    bits = scale_inv.view(torch.int32)
    assert not (bits & 0x807FFFFF).any(), "DeepGEMM's assertion: powers of two alone"
    if len(bits) != rows:
        bits = bits[torch.arange(rows) // 128]
    return (bits >> 23).to(torch.uint8)


def fp8_gemm_nt(
    a: tuple[torch.Tensor, torch.Tensor],
    b: tuple[torch.Tensor, torch.Tensor],
    out: torch.Tensor,
    *,
    is_deep_gemm_e8m0_used: bool,
) -> None:
    """``out = a @ b.T`` as on Blackwell, where scales are cast to packed exponents in each call."""
    assert is_deep_gemm_e8m0_used, "DG_HOST_ASSERT(not disable_ue8m0_cast)"
    factors = []
    for (codes, scales), rows in ((a, a[0].shape[0]), (b, -(-b[0].shape[0] // 128))):
        assert scales.dtype == torch.float32 and scales.shape == (rows, codes.shape[1] // 128)
        assert scales.is_contiguous(), "other strides are served slowly, or not at all"
        exponents = packed(scales, codes.shape[0]).double() - 127
        by_element = torch.exp2(exponents).repeat_interleave(128, 1)
        factors.append(codes.double() * by_element)
    out.copy_(factors[0] @ factors[1].T)


def quantize_pow2(x: torch.Tensor, pow2: bool) -> tuple[torch.Tensor, torch.Tensor]:
    assert pow2
    return quantize(x, pow2)


@pytest.fixture(autouse=True)
def blackwell(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    on(monkeypatch, (10, 0))
    monkeypatch.setattr(deep_gemm, "fp8_gemm_nt", fp8_gemm_nt)
    monkeypatch.setattr(torch.ops.fp8rl, "quantize", quantize_pow2, raising=False)
    with set_current_vllm_config(VllmConfig()):
        yield


def on(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(
        type(current_platform), "get_device_capability", classmethod(lambda *_: capability)
    )


def kernel() -> Any:
    config = block_gemm.layer_config(GemmShape(0, N, K), torch.bfloat16)
    return block_gemm.DelegatedKernel("deep_gemm", config, RECIPE)


def weight(seed: int) -> Quantized:
    spread = torch.exp2(torch.arange(N) % 40 - 20.0)[:, None]
    values = torch.randn(N, K, generator=torch.Generator().manual_seed(seed)) * spread
    return quantize_block(values.bfloat16(), scale_format="pow2")


@pytest.mark.parametrize("rows", [1, 3, 4, 130])
def test_deep_gemm_multiplies_as_the_numeric_contract_says(rows: int) -> None:
    x = torch.randn(rows, K, generator=torch.Generator().manual_seed(rows)).bfloat16()
    live, multiply = weight(0), kernel().apply
    wanted = multiply_rows(
        dequantize_group(*quantize_group(x, scale_format="pow2"), dtype=torch.float32),
        dequantize_block(*live, dtype=torch.float32),
    )
    torch.testing.assert_close(multiply(x, live), wanted.bfloat16(), rtol=2**-7, atol=0)
    before = multiply(x, live)
    for mine, new in zip(live, weight(1), strict=True):  # a refit, in place
        mine.copy_(new)
    assert not torch.equal(multiply(x, live), before)
    assert torch.equal(multiply(x, live), multiply(x, weight(1)))


def test_it_starts_with_the_key_alone_and_says_that_it_has_never_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    monkeypatch.setattr(block_gemm.logger, "warning_once", said.append)
    with pytest.raises(UnsupportedError, match="need allow_untested_gpu: true there"):
        block_gemm.require_served_gpu(Recipe())
    assert said == []
    for capability in ((10, 0), (10, 3)):
        on(monkeypatch, capability)
        block_gemm.require_served_gpu(RECIPE)
    assert len(said) == 2 and said[0].startswith("fp8rl has never run on a Blackwell GPU:")
    on(monkeypatch, (12, 0))
    with pytest.raises(UnsupportedError, match=r"not on 12\.0"):
        block_gemm.require_served_gpu(RECIPE)
    on(monkeypatch, (9, 0))
    block_gemm.require_served_gpu(RECIPE)
    assert len(said) == 2 and kernel()._packs is False


@pytest.mark.parametrize("name", ["triton", "deep_gemm"])
def test_vllms_kernels_for_experts_are_offered_there(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """By vLLM's own conditions, in its classes; their results are those of vLLM."""
    from vllm_fp8rl.kernels.moe import fused_moe

    capability = DeviceCapability(10, 0)
    platform = type(current_platform)
    monkeypatch.setattr(platform, "get_device_capability", classmethod(lambda *_, **__: capability))
    for kind in ("is_cuda", "is_cuda_alike", "supports_fp8"):
        monkeypatch.setattr(platform, kind, lambda platform: True)
    monkeypatch.setattr(deep_gemm_moe, "is_deep_gemm_supported", lambda: True)
    monkeypatch.setattr(fused_moe, "find_nvcc", lambda environ: "nvcc")
    moe = FusedMoEConfig(
        num_experts=8,
        experts_per_token=2,
        hidden_dim=512,
        intermediate_size=256,
        num_local_experts=8,
        num_logical_experts=8,
        activation=MoEActivation.SILU,
        device="cpu",
        routing_method=RoutingMethodType.Renormalize,
        moe_parallel_config=FusedMoEParallelConfig.make_no_parallel(),
        in_dtype=torch.bfloat16,
    )
    kernel = one_class(fused_moe.backend_to_kernel_cls(fused_moe._BACKENDS[name]))
    assert fused_moe._unsupported_reason(name, kernel, moe) is None

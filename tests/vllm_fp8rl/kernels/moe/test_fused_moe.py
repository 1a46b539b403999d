"""Which of vLLM's kernels runs FP8 experts; what they compute is in ``tests/gpu``."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import (
    FusedMoEConfig,
    FusedMoEParallelConfig,
    RoutingMethodType,
)
from vllm.model_executor.layers.fused_moe.experts import deep_gemm_moe, triton_deep_gemm_moe
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability

from vllm_fp8rl.compat import one_class
from vllm_fp8rl.kernels.moe import fused_moe
from vllm_fp8rl.kernels.moe.fused_moe import ExpertsByRows

EXPERTS, CHOSEN = 64, 6


@pytest.mark.parametrize(
    ("tokens", "name"),
    [(1, "triton"), (256, "triton"), (1023, "triton"), (1024, "deep_gemm"), (16384, "deep_gemm")],
)
def test_experts_with_many_rows_go_to_deep_gemm(
    monkeypatch: pytest.MonkeyPatch, tokens: int, name: str
) -> None:
    """1,024 tokens of Moonlight give an expert 96 rows, where the two take equally long."""
    monkeypatch.setattr(triton_deep_gemm_moe, "_valid_deep_gemm", lambda *_: True)
    kernel = object.__new__(ExpertsByRows)  # vLLM's kernels inside it need a GPU
    for attribute, value in {
        "moe_config": SimpleNamespace(num_experts=EXPERTS, experts_per_token=CHOSEN),
        "experts": "deep_gemm",
        "fallback_experts": "triton",
    }.items():
        object.__setattr__(kernel, attribute, value)
    # Of two ranks with expert parallel, each with half of the experts and the tokens of both.
    weights = torch.empty(EXPERTS // 2, 1, 1, device="meta")
    hidden = torch.empty(tokens, 1, device="meta")
    assert kernel._select_experts_impl(hidden, weights, weights) == name


@pytest.mark.parametrize(
    ("backend", "width", "pow2", "all2all", "names"),
    [
        ("auto", 1408, False, False, ["deep_gemm by rows", "triton", "deep_gemm"]),
        ("auto", 513, False, False, ["deep_gemm by rows", "triton", "deep_gemm"]),
        ("auto", 512, False, False, ["triton", "deep_gemm"]),  # vLLM gives these to Triton anyway
        ("auto", 1408, True, False, ["triton", "deep_gemm"]),
        ("auto", 1408, False, True, ["triton", "deep_gemm"]),
        ("triton", 1408, False, False, ["triton"]),
        ("deep_gemm", 1408, False, False, ["deep_gemm"]),
    ],
)
def test_the_order_of_kernels(
    monkeypatch: pytest.MonkeyPatch,
    backend: str,
    width: int,
    pow2: bool,
    all2all: bool,
    names: list[str],
) -> None:
    monkeypatch.setattr(fused_moe, "is_deep_gemm_e8m0_used", lambda: pow2)
    moe = SimpleNamespace(
        moe_backend=backend,
        intermediate_size_per_partition=width,
        moe_parallel_config=SimpleNamespace(use_all2all_kernels=all2all),
    )
    found = fused_moe._kernels(moe)
    assert [name + " by rows" * (kernel is ExpertsByRows) for name, kernel in found] == names


@pytest.mark.parametrize("name", ["triton", "deep_gemm"])
def test_vllms_kernels_are_offered_on_blackwell(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """By vLLM's own conditions, in its classes; their results are those of vLLM."""
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
    with set_current_vllm_config(VllmConfig()):
        assert fused_moe._unsupported_reason(name, kernel, moe) is None

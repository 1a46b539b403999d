"""What kernels of vLLM get of a layer, and what compiled code has of DeepGEMM, with stand-ins."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.utils import deep_gemm

from fp8rl import Recipe
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
from vllm_fp8rl.kernels.linear import block_gemm

N, K = 384, 256
Side = tuple[torch.Tensor, torch.Tensor]


def fp8_gemm_nt(a: Side, b: Side, out: torch.Tensor, *, is_deep_gemm_e8m0_used: bool) -> None:
    """``out = a @ b.T`` on Hopper, which reads the scales of a group side by side."""
    assert not is_deep_gemm_e8m0_used
    rows = a[0].shape[0]
    assert a[1].shape == (rows, K // 128)
    assert not rows or a[1].stride() == (1, (rows + 3) // 4 * 4)
    x = dequantize_group(*a, dtype=torch.float32)
    out.copy_(multiply_rows(x, dequantize_block(*b, dtype=torch.float32)))


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(block_gemm, "packs_scales", lambda: False)
    monkeypatch.setattr(deep_gemm, "fp8_gemm_nt", fp8_gemm_nt)
    monkeypatch.setattr(torch.ops.fp8rl, "quantize", quantize, raising=False)
    with set_current_vllm_config(VllmConfig()):
        yield


def kernel(backend: str) -> block_gemm.DelegatedKernel:
    config = block_gemm.layer_config(GemmShape(0, N, K), torch.bfloat16)
    return block_gemm.DelegatedKernel(backend, config, Recipe())


def tensors(*rows: int) -> tuple[torch.Tensor, Quantized]:
    generator = torch.Generator().manual_seed(len(rows))
    x = torch.randn(*rows, K, generator=generator).bfloat16()
    return x, quantize_block(torch.randn(N, K, generator=generator))


@pytest.mark.parametrize("rows", [(0,), (5,), (8,), (2, 3), ()])
def test_any_number_of_dimensions(rows: tuple[int, ...]) -> None:
    x, weight = tensors(*rows)
    group = quantize_group(x.view(-1, K))
    wanted = multiply_rows(
        dequantize_group(*group, dtype=torch.float32),
        dequantize_block(*weight, dtype=torch.float32),
    )
    multiply = kernel("deep_gemm").apply
    assert torch.equal(multiply(x, weight), wanted.bfloat16().view(*rows, N))


def test_compiled_code_has_one_operation_for_the_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile traces each operation of each layer while an engine starts."""
    with torch.library._scoped_library("fp8rl_test", "DEF") as library:
        library.define("quantize(Tensor x, bool pow2) -> (Tensor, Tensor)")
        library.impl("quantize", quantize, "CompositeExplicitAutograd")
        monkeypatch.setattr(torch.ops.fp8rl, "quantize", torch.ops.fp8rl_test.quantize)
        x, weight = tensors(5)
        multiply = kernel("deep_gemm").apply
        graph = make_fx(lambda x, *weight: multiply(x, Quantized(*weight)))(x, *weight).graph
        names = [str(node.target) for node in graph.nodes if node.op == "call_function"]
    assert names == [
        "fp8rl_test.quantize.default",
        *["<built-in function getitem>"] * 2,
        "fp8rl.deep_gemm.default",
    ]


@pytest.mark.parametrize("backend", ["cutlass", "triton"])
def test_other_kernels_get_scales_without_padding(
    monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    """CUTLASS reads the scales of a group side by side, Triton those of a row."""
    kind = block_gemm._KERNELS[backend]
    scales = []

    def stand_in(self: Any, A: Any, B: Any, As: torch.Tensor, Bs: Any) -> torch.Tensor:
        scales.append(As)
        return A.new_empty(len(A), len(B), dtype=torch.bfloat16)

    monkeypatch.setattr(kind, "__init__", lambda self, config: None)
    monkeypatch.setattr(kind, "apply_block_scaled_mm", stand_in)
    x, weight = tensors(5)
    y = kernel(backend).apply(x, weight)
    assert y.shape == (5, N)
    assert torch.equal(scales[0], quantize_group(x)[1])
    assert scales[0].stride() == ((1, 5) if backend == "cutlass" else (K // 128, 1))

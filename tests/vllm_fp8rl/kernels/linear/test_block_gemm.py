"""What kernels of vLLM get of a layer; stand-ins for DeepGEMM 2.6 do with scales what it does."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.platforms import current_platform
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
from vllm_fp8rl.kernels.linear import block_gemm
from vllm_fp8rl.storage.block_grid import BlockGrid, Shard, empty_storage

N, K = 384, 640
Side = tuple[torch.Tensor, torch.Tensor]


def fp8_gemm_nt(a: Side, b: Side, out: torch.Tensor, *, is_deep_gemm_e8m0_used: bool) -> None:
    """``out = a @ b.T``; Hopper's kernel reads the scales of a group side by side."""
    rows, columns = a[0].shape
    assert not is_deep_gemm_e8m0_used and columns % 128 == 0 and columns == b[0].shape[1]
    assert a[1].shape == (rows, columns // 128) and a[1].dtype == b[1].dtype == torch.float32
    assert not rows or a[1].stride() == (1, (rows + 3) // 4 * 4)
    x = dequantize_group(*a, dtype=torch.float32)
    out.copy_(multiply_rows(x, dequantize_block(*b, dtype=torch.float32)))


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    capability = classmethod(lambda *_: (9, 0))
    monkeypatch.setattr(type(current_platform), "get_device_capability", capability)
    monkeypatch.setattr(deep_gemm, "fp8_gemm_nt", fp8_gemm_nt)
    monkeypatch.setattr(torch.ops.fp8rl, "quantize", quantize, raising=False)
    with set_current_vllm_config(VllmConfig()):
        yield


def quantize(x: torch.Tensor, pow2: bool) -> Side:
    """``torch.ops.fp8rl.quantize``, which needs Triton: scales ``[groups, rows padded to 4]``."""
    x = torch.nn.functional.pad(x, (0, -x.shape[1] % 128))
    codes, scale_inv = quantize_group(x, scale_format="pow2" if pow2 else "fp32")
    padding = torch.full((-len(x) % 4, scale_inv.shape[1]), float("nan"))
    by_group = torch.cat((scale_inv, padding)).t()
    return codes, by_group.clone(memory_format=torch.contiguous_format)


def kernel(columns: int) -> block_gemm.DelegatedKernel:
    config = block_gemm.layer_config(GemmShape(0, N, columns), torch.bfloat16)
    return block_gemm.DelegatedKernel("deep_gemm", config, Recipe())


@pytest.mark.parametrize("rows", [(0,), (5,), (130,), (2, 3), ()])
def test_products_are_those_of_the_numeric_contract(rows):
    """Of any number of dimensions, and after a refit in place."""
    generator = torch.Generator().manual_seed(len(rows))
    x = torch.randn(*rows, K, generator=generator).bfloat16()
    spread = torch.exp2(torch.arange(N) % 40 - 20.0)[:, None]
    weight = quantize_block((torch.randn(N, K, generator=generator) * spread).bfloat16())
    multiply = kernel(K).apply
    for factor in (1, 2):
        weight.scale_inv.mul_(factor)
        wanted = multiply_rows(
            dequantize_group(*quantize_group(x.view(-1, K)), dtype=torch.float32),
            dequantize_block(*weight, dtype=torch.float32),
        )
        assert torch.equal(multiply(x, weight), wanted.bfloat16().view(*rows, N))


@pytest.mark.parametrize("columns", [64, 576])
def test_inputs_that_end_within_a_group(columns):
    """The weight lies as a refit stores it; the truth has no zeros behind the columns."""
    multiply = kernel(columns)
    generator = torch.Generator().manual_seed(columns)
    x = torch.randn(5, columns, generator=generator).bfloat16()
    values = torch.randn(N, columns, generator=generator).bfloat16()
    live = empty_storage(N, multiply.stored_columns(columns))
    live[0].view(torch.uint8)[:, :columns] = 0x7F  # what was there before
    parts = [200, N - 200]
    grid = BlockGrid("layer", lambda: live, parts, columns, "fp32")
    for start in (200, 0):
        rows = parts[start > 0]
        part = values[start : start + rows]
        grid.write(Shard(start, rows, (0, 0), (rows, columns)), part)
    wanted = quantize_block(values)
    assert torch.equal(live[0][:, :columns].view(torch.uint8), wanted.codes.view(torch.uint8))
    assert torch.equal(live[1], wanted.scale_inv)
    assert not live[0][:, columns:].view(torch.uint8).any()
    truth = multiply_rows(
        dequantize_group(*quantize_group(x), dtype=torch.float64),
        dequantize_block(*wanted, dtype=torch.float64),
    )
    found = multiply.apply(x, Quantized(*live))
    torch.testing.assert_close(found.double(), truth, rtol=2**-8, atol=1e-3)

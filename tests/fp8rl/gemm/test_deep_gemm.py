"""DeepGEMM's entry points on Hopper as its sources read memory, called by our backend on a CPU.

The checks are those of csrc/apis/gemm.hpp and csrc/utils/layout.hpp; operands are read as the
kernels of impls/sm90_fp8_gemm_{1d1d,1d2d}.cuh and scheduler/gemm.cuh do: by address, from an
expert's offset, whatever the strides of the tensor say. What the kernels compute is for tests/gpu.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch

from fp8rl.gemm import DeepGemmBackend, GemmShape, GroupedShape
from support.gemm import product_error

CPU = torch.device("cpu")
TILE = 128
Side = tuple[torch.Tensor, torch.Tensor]


def _mn_major(sf: torch.Tensor, rows: int, groups: int) -> torch.Tensor:
    """``get_mn_major_tma_aligned_tensor`` where it copies nothing, read as TMA does."""
    aligned = -(-rows // 4) * 4
    assert sf.dtype == torch.float32 and sf.shape == (rows, groups)
    if sf.stride() != (1, aligned):
        assert groups == 1 or sf.stride() == (1, rows), "a slow copy"
        return sf
    return sf.as_strided((rows, groups), (1, aligned))


def _blocks(sf: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    """``check_sf_layout`` of SFB."""
    assert sf.dtype == torch.float32
    assert sf.shape[-2:] == (-(-rows // 128), -(-cols // 128)) and sf.is_contiguous()
    return sf.repeat_interleave(128, -2).repeat_interleave(128, -1)[..., :rows, :cols]


def _groups(sf: torch.Tensor, cols: int) -> torch.Tensor:
    return sf.repeat_interleave(128, 1)[:, :cols]


def _is_aligned(*tensors: torch.Tensor) -> None:
    for tensor in tensors:
        assert tensor.data_ptr() % 16 == 0, "TMA"


def fp8_gemm_nt(
    a: Side,
    b: Side,
    d: torch.Tensor,
    c=None,
    recipe=None,
    *,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool,
) -> None:
    (m, k), (n, k_) = a[0].shape, b[0].shape
    assert k == k_ and d.shape == (m, n) and d.stride(-1) == 1 and disable_ue8m0_cast
    assert a[0].is_contiguous() and b[0].is_contiguous()
    _is_aligned(a[0], b[0], a[1], d)
    left = a[0].float() * _groups(_mn_major(a[1], m, -(-k // 128)), k)
    if recipe is None:
        assert d.dtype == torch.bfloat16 and c is None
        assert compiled_dims == "nk", "tokens, which change, are m"
        d.copy_(left @ (b[0].float() * _blocks(b[1], n, k)).t())
        return
    assert recipe == (1, 1, 128) and d.dtype == torch.float32 and c.data_ptr() == d.data_ptr()
    assert compiled_dims == "mn", "tokens, which change, are k"
    _is_aligned(b[1])
    d.add_(left @ (b[0].float() * _groups(_mn_major(b[1], n, -(-k // 128)), k)).t())


def m_grouped_fp8_gemm_nt_contiguous(
    a: Side, b: Side, d: torch.Tensor, layout: torch.Tensor, *, disable_ue8m0_cast: bool
) -> None:
    (m, k), (experts, n, k_) = a[0].shape, b[0].shape
    assert k == k_ and d.shape == (m, n) and d.dtype == torch.bfloat16 and disable_ue8m0_cast
    assert a[0].is_contiguous() and b[0].is_contiguous() and d.is_contiguous()
    assert layout.shape == (m,) and layout.dtype == torch.int32 and layout.is_contiguous()
    _is_aligned(a[0], b[0], a[1], d)
    left = a[0].float() * _groups(_mn_major(a[1], m, -(-k // 128)), k)
    weights = b[0].float() * _blocks(b[1], n, k)
    d.fill_(torch.nan)
    for start in range(0, m, TILE):  # the expert of a tile's first row
        expert = int(layout[start])
        assert 0 <= expert < experts
        tile = slice(start, start + TILE)
        assert len(layout[tile]) == TILE
        d[tile] = left[tile] @ weights[expert].t()


def k_grouped_fp8_gemm_nt_contiguous(
    a: Side, b: Side, d: torch.Tensor, ks: list[int], ks_tensor: torch.Tensor, c: Any = None
) -> None:
    experts, m, n = d.shape
    assert d.is_contiguous() and d.dtype == torch.float32 and c.data_ptr() == d.data_ptr()
    assert len(ks) == experts and all(type(k) is int and k % 128 == 0 for k in ks)
    assert ks_tensor.tolist() == ks and ks_tensor.dtype == torch.int32
    total = sum(ks)
    assert a[0].shape == (total * m,) and b[0].shape == (total * n,)
    _is_aligned(a[0], b[0], a[1], b[1], d)
    scales = [_mn_major(side[1], rows, total // 128) for side, rows in ((a, m), (b, n))]
    begin = 0
    for expert, k in enumerate(ks):
        parts = []
        for side, sf, rows in ((a, scales[0], m), (b, scales[1], n)):
            codes = side[0][begin * rows : (begin + k) * rows].view(rows, k).float()
            parts.append(codes * _groups(sf[:, begin // 128 : (begin + k) // 128], k))
        d[expert] += parts[0] @ parts[1].t()
        begin += k


def _library() -> ModuleType:
    library = ModuleType("deep_gemm")
    for function in (
        fp8_gemm_nt,
        m_grouped_fp8_gemm_nt_contiguous,
        k_grouped_fp8_gemm_nt_contiguous,
    ):
        setattr(library, function.__name__, function)
    return library


@pytest.mark.parametrize("direction", ["fprop", "dgrad", "wgrad", "wgrad_add"])
@pytest.mark.parametrize(
    "shape",
    [
        GemmShape(256, 384, 128),
        GemmShape(37, 192, 576),
        GroupedShape((256, 0, 128, 128), 256, 384),
        GroupedShape((0, 0, 128), 128, 128),
    ],
    ids=str,
)
def test_operands_lie_as_the_kernels_read_them(shape, direction):
    assert product_error(DeepGemmBackend(_library), direction, shape, CPU) < 1e-2

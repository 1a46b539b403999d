"""Row orders: Megatron's against HF's, written out element by element."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8rl.numerics import quantize_block
from fp8rl.training.layout import RowLayout, qkv_layout
from support.numeric import same_codes

heads = st.tuples(st.integers(1, 4), st.integers(1, 3), st.sampled_from([3, 8, 64, 128]))


def _labels(query_heads: int, groups: int, head_dim: int) -> tuple[list, list]:
    """Rows by name, in Megatron's order and in HF's."""
    per_group = query_heads // groups

    def head(kind: str, number: int) -> list:
        return [(kind, number, row) for row in range(head_dim)]

    megatron = []
    for group in range(groups):
        for query in range(per_group):
            megatron += head("q", group * per_group + query)
        megatron += head("k", group) + head("v", group)
    hf = [row for kind, n in (("q", query_heads), ("k", groups), ("v", groups))
          for number in range(n) for row in head(kind, number)]  # fmt: skip
    return megatron, hf


@given(heads)
@settings(max_examples=30)
def test_qkv_rows_go_to_hf_order_and_back(case):
    groups, per_group, head_dim = case
    layout = qkv_layout(groups * per_group, groups, head_dim)
    megatron, hf = _labels(groups * per_group, groups, head_dim)
    position = {row: i for i, row in enumerate(megatron)}
    x = torch.arange(len(megatron))
    assert layout.to_hf(x).tolist() == [position[row] for row in hf]
    assert torch.equal(layout.from_hf(layout.to_hf(x)), x)
    wide = torch.randn(2, 3, layout.rows)
    assert torch.equal(layout.from_hf(layout.to_hf(wide, -1), -1), wide)
    assert torch.equal(layout.to_hf(wide, -1)[1, 2], layout.to_hf(wide[1, 2]))


@given(st.integers(1, 3).map(lambda n: 64 * n), st.integers(1, 3))
@settings(max_examples=12)
def test_parts_that_lie_apart_have_the_codes_of_each_hf_tensor(width, groups):
    """Whatever their width and order; in one matrix the parts would share a block."""
    layout = RowLayout(("gate_proj", "up_proj"), (width, width), groups, apart=True)
    assert layout.aligned and layout.in_place == (width % 128 == 0)
    parts = {part: torch.randn(groups, width, 72) for part in layout.parts}
    w = torch.cat(list(parts.values()), 1).flatten(0, 1)
    hf = layout.to_hf(w)
    assert torch.equal(layout.from_hf(hf), w)
    assert torch.equal(layout.to_hf(w.t(), -1), hf.t())
    assert torch.equal(layout.from_hf(hf.t(), 1), w.t())
    for name, codes in layout.by_name("mlp.gate_up_proj", quantize_block(hf)).items():
        expected = quantize_block(parts[name.removeprefix("mlp.")].flatten(0, 1))
        assert same_codes(codes, expected)

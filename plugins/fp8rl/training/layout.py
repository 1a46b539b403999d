"""Row order of a weight in Megatron, and in the HF tensors that the rollout engine quantizes.

Quantization blocks lie on the rollout side's matrix. For fused modules that is the rank-local
concatenation of HF tensors, ``[q; k; v]`` or ``[gate; up]``; gate and up of an expert are two
matrices there, which begin with a block each. Megatron keeps gate and up in that order, but
interleaves ``linear_qkv`` by query group, ``[q.., k, v] * groups`` or, with an output gate,
``[q.., gate.., k, v] * groups`` (``SelfAttention.get_query_key_value_tensors``). The ``in_proj`` of
a gated delta net has the rollout's order, ``[q; k; v; z; b; a]``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch.nn.functional import pad

from fp8rl.numerics import BLOCK, Quantized, cdiv

ROW_PARALLEL = ("o_proj", "down_proj", "out_proj")
"""HF modules whose columns tensor parallelism cuts; it cuts the rows of most others."""
REPLICATED = ("q_a_proj", "kv_a_proj_with_mqa")
"""HF modules that every rank of the rollout has as a whole."""


@dataclass(frozen=True)
class RowLayout:
    """Rows of one weight on this rank.

    In Megatron's order the rows are ``groups`` times all parts, ``widths[i]`` rows each; in HF's
    order part after part, each over all groups.
    """

    parts: tuple[str, ...]
    """HF leaf names, e.g. ``("q_proj", "k_proj", "v_proj")``."""
    widths: tuple[int, ...]
    """Rows of each part within one group."""
    groups: int = 1
    apart: bool = False
    """Each part starts a new block: in HF's order the last block of each part is padded with rows
    of zeros."""
    sections: tuple[tuple[str, int], ...] = ()
    """Matrices of which the first part is made, in order, with their rows: tensor parallelism cuts
    each of them. Empty: the part is one matrix."""
    gated_heads: int = 0
    """Heads of each group whose queries have a gate: Megatron has all gates of a group behind all
    its queries, HF each gate behind its query, both in the first part."""

    @property
    def rows(self) -> int:
        """Rows of the whole matrix on this rank."""
        return self.groups * sum(self.widths)

    @property
    def part_rows(self) -> dict[str, int]:
        """Rows of each HF tensor on this rank."""
        return {part: self.groups * n for part, n in zip(self.parts, self.widths, strict=True)}

    @property
    def section_rows(self) -> dict[str, int]:
        """Rows on this rank of each matrix that tensor parallelism cuts."""
        rows = self.part_rows
        if not self.sections:
            return rows
        first, *others = self.parts
        cut = {f"{first} ({name})": count for name, count in self.sections}
        return cut | {part: rows[part] for part in others}

    @property
    def same_order(self) -> bool:
        """Megatron's order is HF's order."""
        return self.groups == 1 and not self.gated_heads

    @cached_property
    def in_place(self) -> bool:
        """The two orders differ only by whole blocks, so both give the same codes."""
        if all(n % BLOCK[0] == 0 for n in self.widths):
            return True
        return self.same_order and not self.apart

    @property
    def aligned(self) -> bool:
        """Every HF tensor starts on a block boundary, so its codes lie on its own grid."""
        if self.apart or len(self.parts) == 1:
            return True
        return all(n % BLOCK[0] == 0 for n in self.part_rows.values())

    @property
    def _hf_rows(self) -> list[int]:
        """Rows of each part in HF's order, rows of zeros included."""
        block = BLOCK[0] if self.apart else 1
        return [cdiv(n, block) * block for n in self.part_rows.values()]

    def to_hf(self, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """Reorder dimension ``dim`` (size :attr:`rows`) from Megatron's order to HF's; parts that
        lie apart are padded with zeros."""
        if self.same_order and not self.apart:
            return x
        dim %= x.ndim
        grouped = x.unflatten(dim, (self.groups, sum(self.widths)))
        split = list(grouped.split(self.widths, dim + 1))
        if self.gated_heads:
            split[0] = _swapped(split[0], dim + 1, (2, self.gated_heads))
        parts = [part.flatten(dim, dim + 1) for part in split]
        after = [0, 0] * (x.ndim - dim - 1)
        padded = [
            pad(part, (*after, 0, rows - part.shape[dim]))
            for part, rows in zip(parts, self._hf_rows, strict=True)
        ]
        return torch.cat(padded, dim)

    def from_hf(self, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """Inverse of :meth:`to_hf`."""
        if self.same_order and not self.apart:
            return x
        dim %= x.ndim
        parts = [
            part.narrow(dim, 0, rows)
            for part, rows in zip(x.split(self._hf_rows, dim), self.part_rows.values(), strict=True)
        ]
        grouped = [p.unflatten(dim, (self.groups, p.shape[dim] // self.groups)) for p in parts]
        if self.gated_heads:
            grouped[0] = _swapped(grouped[0], dim + 1, (self.gated_heads, 2))
        return torch.cat(grouped, dim + 1).flatten(dim, dim + 1)

    def by_name(self, name: str, codes: Quantized) -> dict[str, Quantized]:
        """Cut codes in HF's order into those of each HF module.

        Args:
            name: global HF name of the module, a fused one (``..qkv_proj``) for several parts.
            codes: of the whole matrix.

        Returns:
            Codes by global name, each on its own grid; where parts do not start on block
            boundaries (:attr:`aligned`), the whole matrix under ``name``.
        """
        if not self.aligned:
            return {name: codes}
        prefix = name.rpartition(".")[0]
        if len(self.parts) == 1:
            return {f"{prefix}.{self.parts[0]}": codes}
        blocks = [n // BLOCK[0] for n in self._hf_rows]
        pieces = zip(codes.codes.split(self._hf_rows), codes.scale_inv.split(blocks), strict=True)
        return {
            f"{prefix}.{part}": Quantized(rows[:count], scale_inv)
            for (part, count), (rows, scale_inv) in zip(self.part_rows.items(), pieces, strict=True)
        }


def _swapped(x: torch.Tensor, dim: int, sizes: tuple[int, int]) -> torch.Tensor:
    """Cut a dimension into ``sizes[0]`` times ``sizes[1]`` pieces, and swap these two."""
    return x.unflatten(dim, (*sizes, -1)).transpose(dim, dim + 1).flatten(dim, dim + 2)


def qkv_layout(
    query_heads: int, query_groups: int, head_dim: int, *, gated: bool = False
) -> RowLayout:
    """Return the layout of ``linear_qkv`` on a rank with these heads and query groups.

    ``gated``: each query has a gate of its size (``attention_output_gate``).
    """
    per_group = query_heads // query_groups
    return RowLayout(
        parts=("q_proj", "k_proj", "v_proj"),
        widths=((1 + gated) * per_group * head_dim, head_dim, head_dim),
        groups=query_groups,
        gated_heads=per_group if gated else 0,
    )


def gate_up_layout(rows: int, *, apart: bool = False) -> RowLayout:
    """Return the layout of ``linear_fc1`` of a gated MLP: ``rows`` of gate, then as many of up.

    The two parts of an expert lie ``apart``.
    """
    return RowLayout(parts=("gate_proj", "up_proj"), widths=(rows, rows), apart=apart)


def delta_net_layout(key_rows: int, value_rows: int) -> RowLayout:
    """Return the layout of the rows of ``in_proj`` that run in FP8: ``[q; k; v]``, then ``z``.

    ``key_rows`` are those of q, and of k, on this rank; ``value_rows`` those of v, and of ``z``.
    """
    return RowLayout(
        parts=("in_proj_qkv", "in_proj_z"),
        widths=(2 * key_rows + value_rows, value_rows),
        sections=(("q", key_rows), ("k", key_rows), ("v", value_rows)),
    )


def plain_layout(part: str, rows: int) -> RowLayout:
    """Return the layout of a weight that is one HF tensor."""
    return RowLayout(parts=(part,), widths=(rows,))

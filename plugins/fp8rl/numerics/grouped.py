"""The rows of several experts in one tensor: where they lie, and the tensor once quantized."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from fp8rl.errors import UnsupportedError
from fp8rl.numerics.formats import GROUP, Quantized, cdiv


class ExpertRows:
    """Where each expert's rows lie, padded to a multiple of ``alignment``.

    A rowwise operand holds the rows in the order of the experts. A columnwise operand has the
    expert ``order[position]`` at each position, so that a kernel can add its result to gradients
    that lie in memory in another order than the experts, or can leave experts out.

    Args:
        splits: number of rows of each expert in the tensor to quantize, 0 allowed.
        alignment: 1, or 128 for kernels that need whole tiles of one expert.
        order: experts of a columnwise operand, by position; by default all experts in order.

    Raises:
        UnsupportedError: ``order`` names an expert twice, or an expert that does not exist.
    """

    def __init__(
        self, splits: Sequence[int], alignment: int, order: Sequence[int] | None = None
    ) -> None:
        self.splits = tuple(splits)
        self.alignment = alignment
        self.order = tuple(range(len(self.splits))) if order is None else tuple(order)
        if len(set(self.order)) != len(self.order) or not set(self.order) <= set(
            range(len(self.splits))
        ):
            raise UnsupportedError(
                f"The order of {len(self.splits)} experts cannot be {self.order}; name each "
                "at most once."
            )
        self.sizes = tuple(cdiv(rows, alignment) * alignment for rows in self.splits)
        """Padded rows of each expert."""
        self.starts = tuple(accumulate(self.sizes, initial=0))[:-1]
        """First padded row of each expert in a rowwise operand."""
        self.rows = sum(self.sizes)
        """Padded rows of all experts."""
        self.tokens = sum(self.splits)
        """Rows of the tensor to quantize."""
        self.column_sizes = tuple(self.sizes[expert] for expert in self.order)
        """Padded rows at each position of a columnwise operand."""
        self.column_starts = tuple(accumulate(self.column_sizes, initial=0))
        """First padded row at each position, and the end."""
        groups = (cdiv(size, GROUP) for size in self.column_sizes)
        self.group_starts = tuple(accumulate(groups, initial=0))
        """First group of 128 rows at each position, and the end."""
        self._tables: dict[torch.device, torch.Tensor] = {}
        self._experts: dict[torch.device, torch.Tensor] = {}
        self._column_sizes: dict[torch.device, torch.Tensor] = {}

    @property
    def padded(self) -> bool:
        """Whether a rowwise operand has more rows than the tensor it was made from."""
        return self.rows != self.tokens

    def table(self, device: torch.device) -> torch.Tensor:
        """A table (int32 ``[rows / 128, 6]``) for kernels with one program a tile of 128 rows.

        The columns describe a tile: its first source row; its number of source rows; its expert;
        the expert's first tile and its number of tiles in columnwise memory (0 tiles if the expert
        is left out); the tile's number within the expert. It needs ``alignment`` 128, and is copied
        to a GPU once.
        """
        if device not in self._tables:
            splits = torch.tensor(self.splits, dtype=torch.int64)
            tiles = torch.tensor(self.sizes, dtype=torch.int64) // GROUP
            column_first, column_tiles = torch.zeros_like(tiles), torch.zeros_like(tiles)
            order = torch.tensor(self.order, dtype=torch.int64)
            column_tiles[order] = tiles[order]
            column_first[order] = torch.tensor(self.column_starts[:-1], dtype=torch.int64) // GROUP
            expert = torch.arange(len(tiles)).repeat_interleave(tiles)
            within = torch.arange(len(expert)) - (tiles.cumsum(0) - tiles)[expert]
            source = (splits.cumsum(0) - splits)[expert] + within * GROUP
            left = (splits[expert] - within * GROUP).clamp_(max=GROUP)
            columns = (source, left, expert, column_first[expert], column_tiles[expert], within)
            self._tables[device] = on_device(torch.stack(columns, 1).int(), device)
        return self._tables[device]

    def experts(self, device: torch.device) -> torch.Tensor:
        """The expert of each padded row, int32 ``[rows]``, contiguous; needs ``alignment`` 128."""
        if device not in self._experts:
            expert = self.table(device)[:, 2:3]
            # A single tile would stay a view with a stride of 0.
            self._experts[device] = expert.expand(-1, GROUP).reshape(-1).contiguous()
        return self._experts[device]

    def column_sizes_on(self, device: torch.device) -> torch.Tensor:
        """:attr:`column_sizes` as an int32 tensor on ``device``."""
        if device not in self._column_sizes:
            sizes = torch.tensor(self.column_sizes, dtype=torch.int32)
            self._column_sizes[device] = on_device(sizes, device)
        return self._column_sizes[device]


class LastExpertRows:
    """The rows of the last grouped product: the linears of a layer get the same tokens, and making
    the tables for hundreds of experts takes the host as long as all else in a linear."""

    def __init__(self) -> None:
        self._last: tuple[ExpertRows | None, int] = None, 0

    def of(
        self, splits: Sequence[int], alignment: int, order: Sequence[int], stream: int = 0
    ) -> ExpertRows:
        """Return rows for these arguments of :class:`ExpertRows`, the last ones if they fit.

        Args:
            splits: as for :class:`ExpertRows`.
            alignment: as for :class:`ExpertRows`.
            order: as for :class:`ExpertRows`.
            stream: CUDA stream of the product. On another one the tables may not have been copied
                yet, and their memory may be used again while a kernel reads them.
        """
        key = tuple(splits), alignment, tuple(order)
        last, its_stream = self._last
        if last is None or its_stream != stream or (last.splits, last.alignment, last.order) != key:
            last = ExpertRows(*key)
            self._last = last, stream
        return last


class GroupedRows(NamedTuple):
    """An operand of several experts, quantized in groups along its columns.

    codes: ``[expert_rows.rows, K]``; scale_inv: ``[expert_rows.rows, ceil(K/128)]``, with the
    groups outermost in memory on a GPU. Padded rows have zero codes.
    """

    codes: torch.Tensor
    scale_inv: torch.Tensor
    expert_rows: ExpertRows

    def of(self, expert: int) -> Quantized:
        """The part of one expert; its scales are as dense as if it had been quantized alone."""
        start = self.expert_rows.starts[expert]
        rows = slice(start, start + self.expert_rows.sizes[expert])
        scale_inv = self.scale_inv[rows]
        if scale_inv.stride(0) == 1:
            scale_inv = scale_inv.t().contiguous().t()
        return Quantized(self.codes[rows], scale_inv)


class GroupedColumns(NamedTuple):
    """An operand of several experts, quantized in groups along each expert's own rows.

    codes: one dimension; each position holds ``[K, rows]`` of one expert, contiguous. scale_inv:
    ``[groups of all experts, K]``, contiguous.
    """

    codes: torch.Tensor
    scale_inv: torch.Tensor
    expert_rows: ExpertRows

    def at(self, position: int) -> Quantized:
        """codes ``[K, rows]``, scale_inv ``[K, ceil(rows/128)]`` of the expert at a position."""
        expert_rows, features = self.expert_rows, self.scale_inv.shape[1]
        first, end = expert_rows.column_starts[position : position + 2]
        codes = self.codes[first * features : end * features].view(features, end - first)
        groups = slice(*expert_rows.group_starts[position : position + 2])
        return Quantized(codes, self.scale_inv[groups].t())


def on_device(table: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a small host tensor to ``device``; it is pinned first so that the host need not wait."""
    return (table.pin_memory() if device.type == "cuda" else table).to(device, non_blocking=True)

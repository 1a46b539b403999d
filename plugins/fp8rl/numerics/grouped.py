"""The rows of several experts in one tensor: where they lie, and the tensor once quantized."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch

from fp8rl.errors import UnsupportedError
from fp8rl.numerics.formats import GROUP, Quantized, cdiv

_COLUMNS = 6
"""Of :meth:`ExpertRows.table`."""


class Boundary(NamedTuple):
    """A tile that holds an expert's first rows once more, since they begin inside another tile."""

    expert: int
    start: int
    """First row in the source."""
    rows: int
    """Rows up to the end of the tile inside which they begin, or all of the expert."""
    place: int
    """First row of this tile in a rowwise operand."""


class ExpertRows:
    """Where each expert's rows lie in the two operands of a grouped product.

    **Rowwise** operands hold the rows as the source does, expert after expert without gaps. Kernels
    multiply tiles of ``alignment`` rows by the weight of one expert. A tile belongs to the expert
    of its first row; an expert that begins inside a tile has its rows up to the tile's end once
    more, in a *boundary tile* behind all others. A product of such an operand is whole once the
    rows of boundary tiles are copied to their places (:func:`fp8rl.numerics.place_boundaries`), a
    few for each expert, where padding every expert would mean to copy all of them.

    **Columnwise** operands have groups along each expert's own rows, padded with zeros to a
    multiple of ``alignment``. The expert ``order[position]`` lies at each position, so that a
    kernel can add its result to gradients that lie in memory in another order than the experts, or
    can leave experts out.

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
        self.starts = tuple(accumulate(self.splits, initial=0))[:-1]
        """First row of each expert in the source and in a rowwise operand."""
        self.tokens = sum(self.splits)
        """Rows of the tensor to quantize."""
        self.first_boundary = cdiv(self.tokens, alignment) * alignment
        """First row of the boundary tiles in a rowwise operand."""
        self.rows = self.first_boundary
        """Rows of a rowwise operand."""
        boundaries = []
        for expert, (start, rows) in enumerate(zip(self.starts, self.splits, strict=True)):
            if rows and start % alignment:
                inside = min(rows, -start % alignment)
                boundaries.append(Boundary(expert, start, inside, self.rows))
                self.rows += alignment
        self.boundaries = tuple(boundaries)
        self.sizes = tuple(cdiv(rows, alignment) * alignment for rows in self.splits)
        """Padded rows of each expert in a columnwise operand."""
        self.column_sizes = tuple(self.sizes[expert] for expert in self.order)
        """Padded rows at each position of a columnwise operand."""
        self.column_starts = tuple(accumulate(self.column_sizes, initial=0))
        """First padded row at each position, and the end."""
        groups = (cdiv(size, GROUP) for size in self.column_sizes)
        self.group_starts = tuple(accumulate(groups, initial=0))
        """First group of 128 rows at each position, and the end."""
        self._tables: dict[torch.device, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    def table(self, device: torch.device) -> torch.Tensor:
        """A table (int32 ``[tiles, 6]``) for kernels with one program a tile of 128 rows.

        Each expert's rows are cut into tiles from its first one on; the boundary tiles follow. The
        columns describe a tile: its first source row; its number of rows; its first row in a
        rowwise operand; the expert's first tile and its number of tiles in columnwise memory (0
        tiles if the expert is left out, and for a boundary tile); the tile's number within the
        expert.

        Raises:
            UnsupportedError: ``alignment`` is 1, and an expert has no whole tiles.
        """
        return self._on(device)[0]

    def experts(self, device: torch.device) -> torch.Tensor:
        """The expert by whose weight each row of a rowwise operand is multiplied.

        int32 ``[rows]``, contiguous, one expert for each tile; raises as :meth:`table`.
        """
        return self._on(device)[1]

    def column_sizes_on(self, device: torch.device) -> torch.Tensor:
        """:attr:`column_sizes` as an int32 tensor on ``device``; raises as :meth:`table`."""
        return self._on(device)[2]

    def _on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The three tables, which go to a GPU once, in one copy."""
        if device not in self._tables:
            if self.alignment != GROUP and any(size % GROUP for size in self.sizes):
                raise UnsupportedError(
                    f"A tile has {GROUP} rows of one expert, and experts of {self.splits} rows are "
                    f"aligned to {self.alignment}; make ExpertRows with an alignment of {GROUP}."
                )
            together, parts = self._on_host()
            copies = on_device(torch.from_numpy(together), device).split(parts)
            # A single tile would stay a view with a stride of 0.
            experts = copies[1][:, None].expand(-1, GROUP).reshape(-1).contiguous()
            self._tables[device] = copies[0].view(-1, _COLUMNS), experts, copies[2]
        return self._tables[device]

    def _on_host(self) -> tuple[np.ndarray, list[int]]:
        """The table of tiles, the expert of each tile and :attr:`column_sizes` as one int32 array,
        and the length of each.

        A GPU without work waits for them: a layer's tokens are known when its experts begin. Numpy
        takes half of the time that torch needs for arrays of a few hundred numbers.
        """
        tiles = np.array(self.sizes, np.int32) // GROUP
        splits, starts = (np.array(each, np.int32) for each in (self.splits, self.starts))
        column_first, column_tiles = np.zeros((2, len(tiles)), np.int32)
        order = list(self.order)
        column_tiles[order] = tiles[order]
        column_first[order] = np.array(self.column_starts[:-1], np.int32) // GROUP

        begun = np.append(-(-starts // GROUP), self.first_boundary // GROUP)
        owned = begun[1:] - begun[:-1]
        numbers = np.arange(len(tiles), dtype=np.int32)
        boundaries = np.array(self.boundaries, np.int32).reshape(-1, len(Boundary._fields))
        experts = np.concatenate((np.repeat(numbers, owned), boundaries[:, 0]))

        whole = int(tiles.sum())
        table = np.zeros((whole + len(boundaries), _COLUMNS), np.int32)
        of_tile = np.repeat(numbers, tiles)
        within = np.arange(whole, dtype=np.int32) - (tiles.cumsum() - tiles)[of_tile]
        source = starts[of_tile] + within * GROUP
        table[:whole, 0] = table[:whole, 2] = source
        table[:whole, 1] = np.minimum(starts[of_tile] + splits[of_tile] - source, GROUP)
        table[:whole, 3], table[:whole, 4] = column_first[of_tile], column_tiles[of_tile]
        table[:whole, 5] = within
        table[whole:, :3] = boundaries[:, 1:]
        sizes = np.array(self.column_sizes, np.int32)
        parts = [table.ravel(), experts, sizes]
        return np.concatenate(parts), [len(part) for part in parts]


class LastExpertRows:
    """The rows of the last grouped product: the linears of a layer get the same tokens, and making
    the tables for hundreds of experts takes the host as long as all else in a linear."""

    def __init__(self) -> None:
        self._last: tuple[ExpertRows | None, int] = None, 0

    def of(
        self, splits: Sequence[int], alignment: int, order: Sequence[int], stream: int = 0
    ) -> ExpertRows:
        """Return rows for these arguments of :class:`ExpertRows`, the last ones if they fit.

        On another CUDA ``stream`` than the product's the tables may not have been copied yet, and
        their memory may be used again while a kernel reads them.
        """
        key = tuple(splits), alignment, tuple(order)
        last, its_stream = self._last
        if last is None or its_stream != stream or (last.splits, last.alignment, last.order) != key:
            last = ExpertRows(*key)
            self._last = last, stream
        return last


class Addresses:
    """Where the weights of a module's experts lie, on their GPU: copied when they have moved."""

    def __init__(self) -> None:
        self._last: tuple[tuple[list[int], torch.device, int], torch.Tensor] | None = None

    def on_device(self, addresses: list[int], device: torch.device, stream: int) -> torch.Tensor:
        """Return the addresses as an int64 tensor on ``device``, for a kernel on ``stream``."""
        key = addresses, device, stream
        if self._last is None or self._last[0] != key:
            self._last = key, on_device(torch.tensor(addresses, dtype=torch.int64), device)
        return self._last[1]


class GroupedRows(NamedTuple):
    """An operand of several experts, quantized in groups along its columns.

    codes: ``[expert_rows.rows, K]``; scale_inv: ``[expert_rows.rows, ceil(K/128)]``, with the
    groups outermost in memory on a GPU. What is behind the last expert's rows, and behind those of
    each boundary tile, is not set.
    """

    codes: torch.Tensor
    scale_inv: torch.Tensor
    expert_rows: ExpertRows

    def of(self, expert: int) -> Quantized:
        """The part of one expert; its scales are as dense as if it had been quantized alone."""
        start = self.expert_rows.starts[expert]
        rows = slice(start, start + self.expert_rows.splits[expert])
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


def stream_of(device: torch.device) -> int:
    """Return the CUDA stream on which kernels of a device are enqueued now; 0 on a CPU."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0

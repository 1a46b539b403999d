"""`BlockGrid`: one rank's fused FP8 matrix, written shard by shard in any order.

A kernel reads ``weight_scale_inv`` on the grid of the *rank-local fused* matrix (the q, k and v, or
gate and up, rows of this rank under each other). A shard whose first row is no multiple of 128
shares a block with its neighbour, so neither can be quantized alone: the block's rows are kept at
source precision, and each arrival quantizes the block anew. Whatever the order, the codes are those
of :func:`fp8rl.numerics.quantize_block` on the whole local matrix.

FP8 codes keep their values only where the blocks that they came with are blocks of that grid. Other
codes are refused: to quantize them once more would change the values, unseen.

:class:`Writes` puts quantizations of many layers off until one launch can do them all.

Plain torch: no vLLM in here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from fp8rl.errors import RefitError, ScaleError, UnsupportedError
from fp8rl.numerics import BLOCK, E4M3_MAX, FP8_DTYPE, Quantized, cdiv, on_device, quantize_blocks
from fp8rl.recipe import ScaleFormat

SOURCE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_CHUNK_ELEMENTS = {"cpu": 1 << 16}
"""Elements quantized at once, by device type: the CPU reference makes float32 temporaries of about
20 bytes an element, which must stay small beside a layer of a small model."""
_CHUNK_ELEMENTS_ELSEWHERE = 1 << 27  # a GPU makes none; rows that come from the host are copied
_LAUNCH_BYTES = (1 << 27, 1 << 32)
"""What is put off at most, at first, so that a GPU soon has work, and in the end: a launch costs
the host as much as a layer's checks do."""

_ROWS, _COLS = BLOCK


@dataclass
class _Quantized:
    """What has arrived of a shard that comes as FP8 codes and scales."""

    codes: bool = False
    scales: bool = False


class Writes:
    """Writes to many layers that are put off; :meth:`run` does them with few kernel launches.

    The tensors that come in must keep their values until then. A later write to the same place
    takes that of an earlier one. Enough of them are done at once, so that a GPU works meanwhile.
    """

    def __init__(self) -> None:
        self._bytes, self._limit = 0, _LAUNCH_BYTES[0]
        self._blocks: dict[ScaleFormat, dict[int, tuple[torch.Tensor, Quantized]]] = {}
        self._copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._fills: dict[int, tuple[torch.Tensor, float]] = {}
        self._grids: dict[int, BlockGrid] = {}

    def quantize(
        self, grid: BlockGrid, rows: torch.Tensor, live: Quantized, fmt: ScaleFormat
    ) -> None:
        """Of rows of a grid, on the device of ``live``."""
        if grid.shares_blocks:
            self._grids[id(grid)] = grid
        self._blocks.setdefault(fmt, {})[live.codes.data_ptr()] = (rows, live)
        self._bytes += rows.nbytes
        if self._bytes >= self._limit:
            self.run()
            self._limit = min(2 * self._limit, _LAUNCH_BYTES[1])

    def copy(self, live: torch.Tensor, value: torch.Tensor) -> None:
        """A small tensor of the same shape, dtype and device."""
        self._copies[live.data_ptr()] = (live, value)

    def fill(self, live: torch.Tensor, value: float) -> None:
        """A float32 tensor, each element with one value."""
        self._fills[live.data_ptr()] = (live, value)

    def before(self, live: torch.Tensor) -> None:
        """A tensor is about to be written at once: do what would come too late."""
        if live.data_ptr() in self._copies:
            self.run()

    def forget(self, live: Quantized) -> None:
        """These rows of a grid are written at once."""
        for jobs in self._blocks.values():
            jobs.pop(live.codes.data_ptr(), None)

    @torch.no_grad()
    def run(self) -> None:
        blocks, copies, fills, grids = self._blocks, self._copies, self._fills, self._grids
        self._blocks, self._copies, self._fills, self._grids, self._bytes = {}, {}, {}, {}, 0
        if fills:
            _fill(list(fills.values()))
        if copies:
            live, values = zip(*copies.values(), strict=True)
            torch._foreach_copy_(live, values)
        for fmt, jobs in blocks.items():
            quantize_blocks(list(jobs.values()), BLOCK, fmt)
        for grid in grids.values():
            grid.written()


def _fill(jobs: Sequence[tuple[torch.Tensor, float]]) -> None:
    """Numbers into tensors, with one copy and one launch a device."""
    by_device: dict[torch.device, list[tuple[torch.Tensor, float]]] = {}
    for job in jobs:
        by_device.setdefault(job[0].device, []).append(job)
    for device, together in by_device.items():
        values = torch.tensor([value for _, value in together], dtype=torch.float32)
        numbers = on_device(values, device).unbind()
        live = [tensor for tensor, _ in together]
        torch._foreach_copy_(
            live, [number.expand_as(tensor) for tensor, number in zip(live, numbers, strict=True)]
        )


class BlockGrid:
    """Writes shards into the codes and scales of one linear layer.

    Args:
        name: module name, for messages.
        storage: returns the live ``(codes float8_e4m3fn [N, K'], scale_inv float32
            [ceil(N/128), ceil(K/128)])``; asked at each write, because an engine may move storage.
            K' is K, or K rounded up to whole blocks; columns from K on are and stay 0.
        partitions: rows of each shard on this rank, in order; their sum is N.
        columns: K.
        scale_format: ``fp32`` or ``pow2``.
        device: where the rows of shared blocks are kept.
        on_unpaired: called whenever codes or scales begin to wait for their counterparts, and at
            :meth:`moving`.
        former: the storage before :meth:`moving`.
    """

    def __init__(
        self,
        name: str,
        storage: Callable[[], tuple[torch.Tensor, torch.Tensor]],
        partitions: Sequence[int],
        columns: int,
        scale_format: ScaleFormat,
        device: torch.device | str = "cpu",
        on_unpaired: Callable[[], None] = lambda: None,
        former: Callable[[], tuple[torch.Tensor, torch.Tensor] | None] = lambda: None,
    ) -> None:
        self.name = name
        self._former = former
        self._moving = False
        self._on_unpaired = on_unpaired
        self.columns = columns
        self.device = torch.device(device)
        self._storage = storage
        self._chunk = _CHUNK_ELEMENTS.get(self.device.type, _CHUNK_ELEMENTS_ELSEWHERE)
        self.scale_format = scale_format
        self._rows: dict[int, int] = {}
        total = 0
        for rows in partitions:
            self._rows[total] = rows
            total += rows
        self.total_rows = total
        self._shared = {
            start // _ROWS: torch.zeros(
                min(_ROWS, total - start // _ROWS * _ROWS),
                columns,
                dtype=torch.float32,
                device=device,
            )
            for start in self._rows
            if start % _ROWS
        }
        self._loaded: set[int] = set()
        self._incomplete: dict[int, _Quantized] = {}
        self._last_write = torch.cuda.Event() if self.device.type == "cuda" else None

    @property
    def shares_blocks(self) -> bool:
        """Whether a block holds rows of two shards."""
        return bool(self._shared)

    @property
    def complete(self) -> bool:
        """Every shard has been written at least once."""
        return len(self._loaded) == len(self._rows) and not self._incomplete

    def require_paired(self) -> None:
        """Raise RefitError while FP8 codes wait for their scales, or scales for their codes."""
        if self._incomplete:
            wire = next(iter(self._incomplete.values()))
            got, lacks = ("weight", "weight_scale_inv")
            if not wire.codes:
                got, lacks = lacks, got
            raise RefitError(
                f"'{self.name}' received FP8 '{got}' without its '{lacks}'; send both tensors of "
                "every FP8 weight before generating."
            )

    def missing(self) -> list[int]:
        """First local rows of the shards that were never written."""
        return [start for start in self._rows if start not in self._loaded]

    @property
    def starts(self) -> list[int]:
        """First local rows of the shards, in order."""
        return list(self._rows)

    def shape_of(self, start: int) -> tuple[int, int]:
        """Rows and columns of the shard whose first local row is ``start``."""
        return self._rows[start], self.columns

    def moving(self) -> None:
        """The next write finds new storage without contents (vLLM's layerwise reload).

        It begins with those of the former: shards that do not come again stay as they are.
        """
        if not self._moving:
            self._moving = True
            self._on_unpaired()

    def _move_in(self) -> None:
        if not self._moving:
            return
        self._moving = False
        former = self._former()
        if former is not None:
            for new, old in zip(self._storage(), former, strict=True):
                new.copy_(old)

    def forget_unpaired(self) -> None:
        """Drop what an abandoned transfer left behind, before a new one begins."""
        self._incomplete.clear()

    def discard(self) -> None:
        """The storage has lost its contents: what is kept of shared blocks counts no more either.

        A shared block then has NaN codes until all its shards have come again.
        """
        self.forget_unpaired()
        for kept in self._shared.values():
            kept.fill_(torch.nan)
        self._storage()[0][:, self.columns :].view(torch.uint8).zero_()

    def load_source(self, start: int, rows: torch.Tensor, writes: Writes | None = None) -> None:
        """Quantize a shard into place.

        Args:
            start: first row of the shard on the local grid.
            rows: bfloat16, float16 or float32 ``[n, K]``, already narrowed to this rank.
            writes: takes the quantization of what lies on this grid's device, to be done later;
                its owner has switched autograd off.

        Raises:
            UnsupportedError: another dtype.
            RefitError: not the shard's shape.
        """
        if rows.dtype not in SOURCE_DTYPES:
            raise UnsupportedError(
                f"'{self.name}' got a weight of dtype {rows.dtype}; send bfloat16, float16, "
                "float32, or float8_e4m3fn with its 'weight_scale_inv'."
            )
        self._check_shape(start, rows)
        if writes is None:
            with torch.no_grad():
                self._take_source(start, rows, None)
        else:
            self._take_source(start, rows, writes)

    def _take_source(self, start: int, rows: torch.Tensor, writes: Writes | None) -> None:
        if self._moving:
            self._move_in()
        self._incomplete.pop(start, None)
        if not self._shared and rows.numel() <= self._chunk:
            self._put(start, rows, writes)
        else:
            self._write(start, rows, writes)
        self._loaded.add(start)

    @torch.no_grad()
    def load_codes(self, start: int, codes: torch.Tensor, origin: tuple[int, int]) -> None:
        """Take FP8 codes of a shard; they count once their scales are here too.

        Args:
            start: first row of the shard on the local grid.
            codes: float8_e4m3fn ``[n, K]``, already narrowed to this rank.
            origin: row and column of ``codes[0, 0]`` in the tensor on the wire.

        Raises:
            RefitError: not the shard's shape.
            UnsupportedError: blocks of the wire are no blocks of this grid.
        """
        self._check_shape(start, codes)
        self._require_codes_fit(start, origin)
        self._move_in()
        with self._in_order():
            self._storage()[0][start : start + codes.shape[0], : self.columns].copy_(codes)
            wire = self._arriving(start)
            wire.codes = True
            self._settle(start, wire)

    @torch.no_grad()
    def load_scales(self, start: int, scale_inv: torch.Tensor, origin: tuple[int, int]) -> None:
        """Take the scales of a shard that comes as FP8 codes.

        Args:
            start: first row of the shard on the local grid.
            scale_inv: the whole tensor's ``[ceil(rows/128), ceil(columns/128)]``, not narrowed.
            origin: row and column of the shard's first code in the tensor on the wire.

        Raises:
            UnsupportedError: not a floating dtype of at least 16 bits; or blocks of the wire are no
                blocks of this grid.
            ScaleError: see :func:`check_scales`.
        """
        name = f"{self.name}.weight_scale_inv"
        if scale_inv.dtype not in SOURCE_DTYPES:
            raise UnsupportedError(f"'{name}' has dtype {scale_inv.dtype}; send float32.")
        self._require_codes_fit(start, origin)
        row, column = origin
        last_row, last_column = row + self._rows[start], column + self.columns
        part = scale_inv[
            row // _ROWS : cdiv(last_row, _ROWS), column // _COLS : cdiv(last_column, _COLS)
        ].float()
        check_scales(name, part, self.scale_format)
        self._move_in()
        with self._in_order():
            first = start // _ROWS
            self._storage()[1][first : first + part.shape[0]].copy_(part)
            wire = self._arriving(start)
            wire.scales = True
            self._settle(start, wire)

    def written(self) -> None:
        """Mark the end of writes on the current stream, for :meth:`_wait`."""
        if self._last_write is not None:
            self._last_write.record()

    def _wait(self) -> None:
        """Let the current stream wait for earlier writes, which may have come on another one.

        Shards share blocks: one arrival reads what another left.
        """
        if self._last_write is not None:
            self._last_write.wait()

    @contextmanager
    def _in_order(self) -> Iterator[None]:
        self._wait()
        yield
        self.written()

    def _check_shape(self, start: int, rows: torch.Tensor) -> None:
        expected = (self._rows[start], self.columns)
        if rows.shape != expected:
            raise RefitError(
                f"'{self.name}' needs a shard of shape {expected} at local row {start}, but got "
                f"{tuple(rows.shape)}; send the tensor with the shape of the HF checkpoint."
            )

    def _arriving(self, start: int) -> _Quantized:
        self._on_unpaired()
        return self._incomplete.setdefault(start, _Quantized())

    def codes_fit(self, start: int, origin: tuple[int, int]) -> bool:
        """Whether blocks of the wire are local blocks, none of them shared with another shard.

        Args:
            start: first row of the shard on the local grid.
            origin: row and column of its first element in the tensor on the wire.
        """
        end = start + self._rows[start]
        whole = start % _ROWS == 0 and (end % _ROWS == 0 or end == self.total_rows)
        return whole and origin[0] % _ROWS == 0 and origin[1] % _COLS == 0

    def _require_codes_fit(self, start: int, origin: tuple[int, int]) -> None:
        if not self.codes_fit(start, origin):
            raise UnsupportedError(
                f"'{self.name}' cannot take FP8 codes for its local rows from {start}, whose "
                "128x128 blocks are not those of the checkpoint's tensor: quantizing them once "
                "more would change the weights; load BF16 weights, which are quantized here, or "
                "choose another tensor_parallel_size."
            )

    def _settle(self, start: int, wire: _Quantized) -> None:
        if wire.codes and wire.scales:
            del self._incomplete[start]
            self._loaded.add(start)

    def _own_rows(self, start: int) -> tuple[int, int]:
        """Local rows of a shard that lie in blocks of its own."""
        end = start + self._rows[start]
        lo = cdiv(start, _ROWS) * _ROWS
        hi = end if end == self.total_rows else end // _ROWS * _ROWS
        return (lo, hi) if lo < hi else (lo, lo)

    def _write(self, start: int, rows: torch.Tensor, writes: Writes | None) -> None:
        end = start + self._rows[start]
        lo, hi = self._own_rows(start)
        step = max(1, self._chunk // (_ROWS * self.columns)) * _ROWS
        for first in range(lo, hi, step):
            last = min(first + step, hi)
            whole = (first, last) == (start, end)
            self._put(first, rows if whole else rows[first - start : last - start], writes)
        shared = {start // _ROWS, (end - 1) // _ROWS} & self._shared.keys()
        if shared:
            self._wait()
        for block in shared:
            kept, top = self._shared[block], block * _ROWS
            first, last = max(start, top), min(end, top + _ROWS)
            kept[first - top : last - top].copy_(rows[first - start : last - start])
            self._put(top, kept, writes)
        if shared and writes is None:
            self.written()

    def _put(self, first: int, rows: torch.Tensor, writes: Writes | None) -> None:
        codes, scales = self._storage()
        last, top = first + rows.shape[0], first // _ROWS
        live = Quantized(codes, scales)
        if rows.shape[0] != codes.shape[0]:
            live = Quantized(codes[first:last], scales[top : cdiv(last, _ROWS)])
        here = rows.device == codes.device
        padding = codes.shape[1] - self.columns
        if padding:
            rows = torch.nn.functional.pad(rows, (0, padding))
        if writes is not None and here and not padding:
            writes.quantize(self, rows, live, self.scale_format)
        else:  # at once: no second copy is made before this one is gone
            if writes is not None:
                writes.forget(live)
            quantize_blocks([(rows.to(codes.device), live)], BLOCK, self.scale_format)


def check_scales(name: str, scale_inv: torch.Tensor, scale_format: ScaleFormat) -> None:
    """Check the scales of FP8 codes.

    Args:
        name: for messages.
        scale_inv: bfloat16, float16 or float32, any shape.
        scale_format: of the engine's weights.

    Raises:
        ScaleError: one is 0, negative, NaN or infinite, so large that a code times it is infinite,
            or no power of two where the engine has those.
    """
    values = scale_inv.float()
    good = (values > 0) & torch.isfinite(values * E4M3_MAX)
    if not bool(good.all()):
        raise ScaleError(
            f"'{name}' has a scale that is 0, negative, NaN or infinite, or makes a code of "
            f"{E4M3_MAX:.0f} infinite; quantize the weight again."
        )
    if scale_format == "pow2" and not bool((torch.frexp(values).mantissa == 0.5).all()):
        raise ScaleError(
            f"'{name}' has a scale that is no power of two, but the engine was started with "
            "weights.scale_format 'pow2'; quantize the weight in that format or send it in BF16."
        )


def empty_storage(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of zero and scales of one for a local matrix, on the default device."""
    codes = torch.zeros(rows, columns, dtype=torch.uint8).view(FP8_DTYPE)
    scale_inv = torch.ones(cdiv(rows, _ROWS), cdiv(columns, _COLS), dtype=torch.float32)
    return codes, scale_inv

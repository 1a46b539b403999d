"""`BlockGrid`: one rank's fused FP8 matrix, written shard by shard in any order.

A kernel reads ``weight_scale_inv`` on the grid of the *rank-local fused* matrix (the q, k and v, or
the gate and up rows of this rank, stacked). A shard whose first row is not a multiple of 128 shares
a block with its neighbour, so neither can be quantized alone: the rows of that block are kept at
source precision, and each arrival quantizes the block again. In any order of arrival the codes are
those of :func:`fp8rl.numerics.quantize_block` on the whole local matrix.

FP8 codes keep their values only where the blocks that they came with are blocks of that grid. Other
codes are refused, because quantizing them again would change their values without notice.

:class:`WriteBatch` collects the quantizations of many layers, so that one launch does them all.

This module needs torch only, not vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from fp8rl.errors import RefitError, ScaleError, UnsupportedError
from fp8rl.numerics import (
    BLOCK,
    E4M3_MAX,
    FP8_DTYPE,
    Quantized,
    Stacked,
    cdiv,
    on_device,
    quantize_blocks,
)
from fp8rl.recipe import ScaleFormat

SOURCE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_CHUNK_ELEMENTS = {"cpu": 1 << 16}
"""Elements quantized at once, by device type. The CPU reference makes float32 temporaries of about
20 bytes an element, which must stay small beside a layer of a small model."""
_CHUNK_ELEMENTS_ELSEWHERE = 1 << 27  # a GPU makes none; rows that come from the host are copied
_LAUNCH_BYTES = (1 << 27, 1 << 32)
"""Source bytes of one launch: small for the first one, so that a GPU soon has work, then doubled up
to the second number, because each launch costs the host time."""

_ROWS, _COLS = BLOCK
_PAIR = ("weight", "weight_scale_inv")

LiveStack = Callable[[], Quantized]
"""Returns one matrix of every expert of a layer: live codes ``[E, N, K]`` and their scales."""


class Shard(NamedTuple):
    """The part of an HF weight that becomes rows ``[start, start + rows)`` of the local matrix."""

    start: int
    rows: int
    origin: tuple[int, int]
    """Row and column of its first element in the HF weight."""
    full: tuple[int, int]
    """Shape of the HF weight."""


def chunk_elements(device: torch.device) -> int:
    """Elements that are quantized at once on a device."""
    return _CHUNK_ELEMENTS.get(device.type, _CHUNK_ELEMENTS_ELSEWHERE)


def narrow(tensor: torch.Tensor, shard: Shard, name: str, columns: int) -> torch.Tensor:
    """This rank's part of an HF weight, as a view; RefitError for a tensor of another shape."""
    if tensor.shape != shard.full:
        raise RefitError(
            f"'{name}' takes a tensor of shape {shard.full}, but got {tuple(tensor.shape)}; send "
            "the whole HF tensor of the model that the engine was started with."
        )
    return cut(tensor, shard, columns)


def cut(tensor: torch.Tensor, shard: Shard, columns: int) -> torch.Tensor:
    """Return this rank's part of a tensor of the HF shape, as a view."""
    (row, column) = shard.origin
    if shard.full == (shard.rows, columns):
        return tensor
    return tensor[row : row + shard.rows, column : column + columns]


class WriteBatch:
    """Writes of one batch of tensors, done with few kernel launches.

    No two tensors of a batch may be for the same rows, and each must keep its values until
    :meth:`run`. The owner switches autograd off.
    """

    def __init__(self) -> None:
        self._jobs: dict[ScaleFormat, list[tuple[torch.Tensor, Quantized]]] = {}
        self._stacks: dict[LiveStack, tuple[ScaleFormat, list[torch.Tensor], list[int]]] = {}
        self._bytes, self._limit = 0, _LAUNCH_BYTES[0]
        self._shared: dict[int, tuple[BlockGrid, set[int]]] = {}
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._fills: list[tuple[torch.Tensor, float]] = []

    def quantize(self, rows: torch.Tensor, live: Quantized, scale_format: ScaleFormat) -> None:
        """Quantize rows into live codes and scales on the same device."""
        self._jobs.setdefault(scale_format, []).append((rows, live))
        self._count(rows)

    def quantize_expert(
        self, rows: torch.Tensor, stack: LiveStack, number: int, scale_format: ScaleFormat
    ) -> None:
        """Quantize rows into one matrix of a live stack on the same device."""
        jobs = self._stacks.get(stack)
        if jobs is None:
            jobs = self._stacks[stack] = (scale_format, [], [])
        jobs[1].append(rows)
        jobs[2].append(number)
        self._count(rows)

    def _count(self, rows: torch.Tensor) -> None:
        self._bytes += rows.nbytes
        if self._bytes >= self._limit:
            self._launch()
            self._limit = min(2 * self._limit, _LAUNCH_BYTES[1])

    def share(self, grid: BlockGrid, blocks: set[int]) -> None:
        """Quantize blocks that hold rows of two shards, once, after all shards have come."""
        self._shared.setdefault(id(grid), (grid, set()))[1].update(blocks)

    def copy(self, live: torch.Tensor, value: torch.Tensor) -> None:
        """Copy a small tensor of the same shape, dtype and device."""
        self._copies.append((live, value))

    def fill(self, live: torch.Tensor, value: float) -> None:
        """Write one number to each element of a float32 tensor."""
        self._fills.append((live, value))

    @torch.no_grad()
    def run(self) -> None:
        """Do what was collected."""
        fills, copies, shared = self._fills, self._copies, self._shared
        self._fills, self._copies, self._shared = [], [], {}
        if fills:
            _fill(fills)
        if copies:
            live, values = zip(*copies, strict=True)
            torch._foreach_copy_(live, values)
        for grid, blocks in shared.values():
            grid.quantize_shared(blocks, self)
        self._launch()
        for grid, _ in shared.values():
            grid.written()

    def _launch(self) -> None:
        jobs, self._jobs, self._bytes = self._jobs, {}, 0
        collected, self._stacks = self._stacks, {}
        stacks: dict[ScaleFormat, list[Stacked]] = {}
        for live, (scale_format, weights, at) in collected.items():
            stacks.setdefault(scale_format, []).append(Stacked(weights, live(), at))
        for scale_format in jobs.keys() | stacks.keys():
            together = jobs.get(scale_format, [])
            quantize_blocks(together, BLOCK, scale_format, stacks.get(scale_format, []))


def _fill(jobs: Sequence[tuple[torch.Tensor, float]]) -> None:
    """Write numbers into tensors, with one copy and one launch a device."""
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
            [ceil(N/128), ceil(K/128)])``; called at each write, because an engine may move storage.
            K' is K, or K rounded up to whole blocks; columns from K on stay 0.
        partitions: rows of each shard on this rank, in order; their sum is N.
        columns: K.
        scale_format: ``fp32`` or ``pow2``.
        device: where the rows of shared blocks are kept.
        on_unpaired: called whenever codes or scales begin to wait for their counterparts.
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
    ) -> None:
        self.name = name
        self._on_unpaired = on_unpaired
        self.columns = columns
        self.device = torch.device(device)
        self._storage = storage
        self._chunk = chunk_elements(self.device)
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
        self._incomplete: dict[int, str] = {}
        """Shards of which one of the pair has come -> which."""
        self._last_write = torch.cuda.Event() if self.device.type == "cuda" else None

    @property
    def complete(self) -> bool:
        """Whether every shard has been written at least once."""
        return len(self._loaded) == len(self._rows) and not self._incomplete

    def require_paired(self) -> None:
        """Raise RefitError while FP8 codes wait for their scales, or scales for their codes."""
        if self._incomplete:
            got = next(iter(self._incomplete.values()))
            (lacks,) = set(_PAIR) - {got}
            raise RefitError(
                f"'{self.name}' received FP8 '{got}' without its '{lacks}'; send both tensors of "
                "every FP8 weight before generating."
            )

    def missing(self) -> list[int]:
        """First local rows of the shards that were never written."""
        return [start for start in self._rows if start not in self._loaded]

    @property
    def partitions(self) -> list[tuple[int, int]]:
        """First local row and number of rows of each shard, in order."""
        return list(self._rows.items())

    def whole(self, start: int) -> Shard:
        """Return the shard at a local row of an HF weight of which this rank holds all."""
        rows = self._rows[start]
        return Shard(start, rows, (0, 0), (rows, self.columns))

    def fill_missing(self, make: Callable[[tuple[int, int]], torch.Tensor]) -> None:
        """Write ``make(shape)`` to each shard that was never written."""
        for start in self.missing():
            shard = self.whole(start)
            self.write(shard, make(shard.full))

    def forget_unpaired(self) -> None:
        """Drop what an abandoned transfer left behind, before a new one begins."""
        self._incomplete.clear()

    def discard(self) -> None:
        """Forget the kept rows of shared blocks, after the storage has lost its contents.

        A shared block then has NaN codes until all its shards have come again.
        """
        self.forget_unpaired()
        for kept in self._shared.values():
            kept.fill_(torch.nan)
        self._storage()[0][:, self.columns :].view(torch.uint8).zero_()

    def write(self, shard: Shard, tensor: torch.Tensor, batch: WriteBatch | None = None) -> None:
        """Write this rank's rows of a whole HF weight, in 16 or 32 bits or FP8 codes.

        Codes are copied now, and count once their scales are here too; of others a ``batch``
        collects the quantization.

        Raises:
            RefitError: not the HF weight's shape.
            UnsupportedError: another dtype, or FP8 codes whose blocks are not blocks of this grid.
        """
        part = narrow(tensor, shard, f"{self.name}.weight", self.columns)
        if tensor.dtype == FP8_DTYPE:
            self._require_codes_fit(shard)
            with torch.no_grad(), self._in_order():
                rows = slice(shard.start, shard.start + shard.rows)
                self._storage()[0][rows, : self.columns].copy_(part)
                self._arrived(shard.start, "weight")
            return
        if tensor.dtype not in SOURCE_DTYPES:
            raise UnsupportedError(
                f"'{self.name}' got a weight of dtype {tensor.dtype}; send bfloat16, float16, "
                "float32, or float8_e4m3fn with its 'weight_scale_inv'."
            )
        if batch is not None:
            self._collect(shard.start, part, batch)
            return
        own = WriteBatch()
        with torch.no_grad():
            self._collect(shard.start, part, own)
        own.run()

    @torch.no_grad()
    def write_scales(
        self, shard: Shard, scale_inv: torch.Tensor, batch: WriteBatch | None = None
    ) -> None:
        """Copy this rank's part of the scales of a whole HF weight that comes as FP8 codes.

        Raises:
            RefitError: another shape than ``[ceil(rows/128), ceil(columns/128)]`` of that weight.
            UnsupportedError: not a floating dtype of at least 16 bits; or blocks of the HF tensor
                are not blocks of this grid.
            ScaleError: see :func:`check_scales`.
        """
        name, expected = f"{self.name}.weight_scale_inv", tuple(map(cdiv, shard.full, BLOCK))
        if tuple(scale_inv.shape) != expected:
            raise RefitError(
                f"'{name}' takes scales of shape {expected} (128x128 blocks of a {shard.full} "
                f"weight), but got {tuple(scale_inv.shape)}."
            )
        if scale_inv.dtype not in SOURCE_DTYPES:
            raise UnsupportedError(f"'{name}' has dtype {scale_inv.dtype}; send float32.")
        self._require_codes_fit(shard)
        row, column = shard.origin
        last_row, last_column = row + shard.rows, column + self.columns
        part = scale_inv[
            row // _ROWS : cdiv(last_row, _ROWS), column // _COLS : cdiv(last_column, _COLS)
        ].float()
        check_scales(name, part, self.scale_format)
        with self._in_order():
            first = shard.start // _ROWS
            self._storage()[1][first : first + part.shape[0]].copy_(part)
            self._arrived(shard.start, "weight_scale_inv")

    def written(self) -> None:
        """Mark the end of writes on the current stream, for :meth:`_wait`."""
        if self._last_write is not None:
            self._last_write.record()

    def _wait(self) -> None:
        """Let the current stream wait for writes on others: shards read what others left."""
        if self._last_write is not None:
            self._last_write.wait()

    @contextmanager
    def _in_order(self) -> Iterator[None]:
        self._wait()
        yield
        self.written()

    def codes_fit(self, start: int, origin: tuple[int, int]) -> bool:
        """Whether the shard at local row ``start``, at ``origin`` in the HF tensor, has its
        blocks, none shared with another shard."""
        end = start + self._rows[start]
        whole = start % _ROWS == 0 and (end % _ROWS == 0 or end == self.total_rows)
        return whole and origin[0] % _ROWS == 0 and origin[1] % _COLS == 0

    def _require_codes_fit(self, shard: Shard) -> None:
        if not self.codes_fit(shard.start, shard.origin):
            raise UnsupportedError(
                f"'{self.name}' cannot take FP8 codes for its local rows from {shard.start}, whose "
                "128x128 blocks are not those of the checkpoint's tensor: quantizing them once "
                "more would change the weights; load BF16 weights, which are quantized here, or "
                "choose another tensor_parallel_size."
            )

    def _arrived(self, start: int, what: str) -> None:
        """Note one of the pair of a shard, which is loaded once both have come."""
        self._on_unpaired()
        if self._incomplete.setdefault(start, what) != what:
            del self._incomplete[start]
            self._loaded.add(start)

    def _collect(self, start: int, rows: torch.Tensor, batch: WriteBatch) -> None:
        """Collect the quantization of a shard: blocks of its own now, shared ones at the end."""
        self._incomplete.pop(start, None)
        if not self._shared and rows.numel() <= self._chunk:
            self._put(start, rows, batch)
        else:
            self._collect_parts(start, rows, batch)
        self._loaded.add(start)

    def _collect_parts(self, start: int, rows: torch.Tensor, batch: WriteBatch) -> None:
        end = start + self._rows[start]
        lo = cdiv(start, _ROWS) * _ROWS
        hi = end if end == self.total_rows else end // _ROWS * _ROWS
        step = max(1, self._chunk // (_ROWS * self.columns)) * _ROWS
        for first in range(lo, hi, step):
            last = min(first + step, hi)
            whole = (first, last) == (start, end)
            self._put(first, rows if whole else rows[first - start : last - start], batch)
        shared = {start // _ROWS, (end - 1) // _ROWS} & self._shared.keys()
        if not shared:
            return
        self._wait()
        for block in shared:
            kept, top = self._shared[block], block * _ROWS
            first, last = max(start, top), min(end, top + _ROWS)
            kept[first - top : last - top].copy_(rows[first - start : last - start])
        batch.share(self, shared)

    def quantize_shared(self, blocks: set[int], batch: WriteBatch) -> None:
        """Collect the quantization of shared blocks, from the rows that are kept of them."""
        for block in blocks:
            self._put(block * _ROWS, self._shared[block], batch)

    def _put(self, first: int, rows: torch.Tensor, batch: WriteBatch) -> None:
        """Quantize whole blocks into the live storage from local row ``first`` on."""
        codes, scales = self._storage()
        last, top = first + rows.shape[0], first // _ROWS
        live = Quantized(codes, scales)
        if rows.shape[0] != codes.shape[0]:
            live = Quantized(codes[first:last], scales[top : cdiv(last, _ROWS)])
        here = rows.device == codes.device
        padding = codes.shape[1] - self.columns
        if padding:
            rows = torch.nn.functional.pad(rows, (0, padding))
        if here and not padding:
            batch.quantize(rows, live, self.scale_format)
        else:  # now, so that no second copy is made before this one is freed
            quantize_blocks([(rows.to(codes.device), live)], BLOCK, self.scale_format)


def check_scales(name: str, scale_inv: torch.Tensor, scale_format: ScaleFormat) -> None:
    """Check the scales of FP8 codes.

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


def empty_storage(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of zero and scales of one for ``[..., rows, columns]``, on the default device."""
    codes = torch.zeros(shape, dtype=torch.uint8).view(FP8_DTYPE)
    blocks = (*shape[:-2], *map(cdiv, shape[-2:], BLOCK))
    return codes, torch.ones(blocks, dtype=torch.float32)

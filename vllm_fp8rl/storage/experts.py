"""One rank's expert weights: codes and scales of every local expert, written matrix by matrix.

vLLM fuses the experts of a layer into two stacks: ``w13`` (gate over up) and ``w2`` (down). Each of
an expert's three matrices has block boundaries of its own in them, because the intermediate size is
rounded up to whole blocks; the padding is zero and stays zero. A matrix is therefore a
:class:`~vllm_fp8rl.storage.block_grid.BlockGrid` by itself, in any order of arrival.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch

from fp8rl.errors import RefitError
from fp8rl.models.families import EXPERTS, Experts
from fp8rl.numerics import BLOCK, FP8_DTYPE, Quantized, cdiv
from fp8rl.recipe import ScaleFormat
from vllm_fp8rl.storage.block_grid import (
    SOURCE_DTYPES,
    BlockGrid,
    LiveStack,
    Shard,
    WriteBatch,
    chunk_elements,
    cut,
    empty_storage,
    narrow,
)
from vllm_fp8rl.storage.parameters import check_plain_dtype

Matrix = Literal["w1", "w3", "w2"]
MATRICES: tuple[Matrix, ...] = ("w1", "w3", "w2")
"""vLLM's names of an expert's matrices: gate, up, down."""

Storage = Callable[[str], torch.Tensor]
"""Returns the layer's live tensor of a parameter name; called at each write, because an engine may
move it."""


def stack_of(matrix: Matrix) -> str:
    """The parameter that holds a matrix of every expert."""
    return "w2_weight" if matrix == "w2" else "w13_weight"


@dataclass(frozen=True)
class ExpertLayout:
    """Which experts a rank holds, and how much of each."""

    name: str
    """Name of the module, e.g. ``model.layers.0.mlp.experts``."""
    local: Mapping[int, int]
    """Global number -> number on this rank, for the experts that this rank holds."""
    total: int
    """Experts of the layer on all ranks."""
    hidden: int
    intermediate: int
    """Intermediate size of this rank's part of an expert, without padding."""
    padded: int
    """``intermediate``, rounded up as it is allocated."""
    tp_rank: int
    tp_size: int
    names: Experts = EXPERTS
    """HF names of the matrices of this model's family."""

    @property
    def stacks(self) -> dict[str, tuple[int, int, int]]:
        """Shape of the parameter of each stack, ``[experts, rows, columns]``."""
        experts = len(self.local)
        return {
            "w13_weight": (experts, 2 * self.padded, self.hidden),
            "w2_weight": (experts, self.hidden, self.padded),
        }

    @property
    def fused(self) -> dict[str, tuple[Matrix, ...]]:
        """HF's tensors of all experts at once, ``[experts, rows, columns]``: what they hold."""
        return dict(zip(self.names.fused, (("w1", "w3"), ("w2",)), strict=True))

    def shard(self, matrix: Matrix) -> Shard:
        """Where this rank's part of a matrix lies in the HF tensor."""
        start = self.tp_rank * self.intermediate
        if matrix == "w2":
            full = (self.hidden, self.tp_size * self.intermediate)
            return Shard(0, self.hidden, (0, start), full)
        full = (self.tp_size * self.intermediate, self.hidden)
        return Shard(0, self.intermediate, (start, 0), full)

    def columns(self, matrix: Matrix) -> int:
        return self.intermediate if matrix == "w2" else self.hidden

    def codes_fit(self, matrix: Matrix) -> bool:
        """Whether this rank's part of a matrix begins with a block of the HF tensor."""
        return not any(at % size for at, size in zip(self.shard(matrix).origin, BLOCK, strict=True))

    def hf_name(self, expert: int, matrix: Matrix) -> str:
        """HF name of a matrix of an expert, by its global number."""
        return f"{self.module_name(expert, matrix)}.weight"

    def module_name(self, expert: int, matrix: Matrix) -> str:
        """Return the HF name of an expert's matrix without ``.weight``."""
        return f"{self.name}.{expert}.{self.names.leaves[MATRICES.index(matrix)]}"

    def part_of(self, stack: torch.Tensor, matrix: Matrix, block: int = 1) -> torch.Tensor:
        """Return the rows of a matrix of every local expert in a stack, without padding rows.

        ``block`` is the number of weight rows to a row of the stack: 128 for scales.
        """
        if matrix == "w2":
            return stack
        first = 0 if matrix == "w1" else self.padded // block
        return stack[:, first : first + cdiv(self.intermediate, block)]

    def clear_padding(self, w13: torch.Tensor, w2: torch.Tensor) -> None:
        """Write zeros to what no weight fills."""
        if self.padded == self.intermediate:
            return
        gate, up = w13.split(self.padded, dim=1)
        unused = slice(self.intermediate, None)
        for pad in (gate[:, unused], up[:, unused], w2[:, :, unused]):
            (pad.view(torch.uint8) if pad.dtype == FP8_DTYPE else pad).zero_()


class _Matrices:
    """What the writers of expert matrices have in common."""

    def __init__(self, layout: ExpertLayout, storage: Storage) -> None:
        self.layout = layout
        self._storage = storage
        self._missing = {(expert, matrix) for expert in layout.local for matrix in MATRICES}

    def missing(self) -> list[str]:
        """HF names of the local matrices that were never written."""
        return [self.layout.hf_name(*key) for key in sorted(self._missing)]


class ExpertGrids(_Matrices):
    """Writes expert matrices into the codes and scales of one layer, in any order.

    It stands for the grids of all matrices, and answers as one of them does
    (:class:`~vllm_fp8rl.storage.block_grid.BlockGrid`). A layer may have hundreds of matrices, so
    one has a grid of its own only while it is written by itself, or waits for codes or scales.

    Args:
        layout: which experts this rank holds, and how much of each.
        storage: returns the live ``w13_weight``, ``w2_weight`` (float8_e4m3fn) and their
            ``_scale_inv`` (float32).
        scale_format: ``fp32`` or ``pow2``.
        device: device of the storage.
        on_unpaired: called whenever codes or scales begin to wait for their counterparts.
    """

    def __init__(
        self,
        layout: ExpertLayout,
        storage: Storage,
        scale_format: ScaleFormat,
        device: torch.device,
        on_unpaired: Callable[[], None],
    ) -> None:
        super().__init__(layout, storage)
        self.scale_format = scale_format
        self._device = device
        self._on_unpaired = on_unpaired
        self._shards = {matrix: layout.shard(matrix) for matrix in MATRICES}
        self._stacks: dict[Matrix, LiveStack] = {
            matrix: partial(self._live, matrix)
            for matrix in MATRICES
            if self._shards[matrix].rows * layout.columns(matrix) <= chunk_elements(device)
            and (matrix != "w2" or layout.padded == layout.intermediate)
        }
        """The matrices whose weights are quantized together, each as it comes."""
        self._unpaired: dict[tuple[int, Matrix], BlockGrid] = {}

    def _grid(self, expert: int, matrix: Matrix) -> BlockGrid:
        layout = self.layout
        return BlockGrid(
            layout.module_name(expert, matrix),
            partial(self._live_of, layout.local[expert], matrix),
            [self._shards[matrix].rows],
            layout.columns(matrix),
            self.scale_format,
            self._device,
            on_unpaired=self._on_unpaired,
        )

    @property
    def complete(self) -> bool:
        """Every matrix has been written at least once."""
        return not self._missing and not self._unpaired

    def require_paired(self) -> None:
        """Raise RefitError while FP8 codes wait for their scales, or scales for their codes."""
        for grid in self._unpaired.values():
            grid.require_paired()

    def forget_unpaired(self) -> None:
        """Drop what an abandoned transfer left behind, before a new one begins."""
        self._unpaired.clear()

    def load(
        self, expert: int, matrix: Matrix, tensor: torch.Tensor, batch: WriteBatch | None = None
    ) -> None:
        """Quantize an HF matrix of a local expert, by its global number, or take its FP8 codes."""
        shard, stack = self._shards[matrix], self._stacks.get(matrix)
        alike = tensor.dtype in SOURCE_DTYPES and tensor.device == self._device
        if batch is None or stack is None or not alike or tensor.shape != shard.full:
            self._by_grid(expert, matrix, BlockGrid.write, shard, tensor, batch)
            return
        rows = cut(tensor, shard, self.layout.columns(matrix))
        batch.quantize_expert(rows, stack, self.layout.local[expert], self.scale_format)
        if not self.complete:
            self._unpaired.pop((expert, matrix), None)
            self._missing.discard((expert, matrix))

    def load_scales(
        self, expert: int, matrix: Matrix, scale_inv: torch.Tensor, batch: WriteBatch | None = None
    ) -> None:
        """Take the whole ``weight_scale_inv`` of a local expert's matrix in FP8 codes."""
        shard = self._shards[matrix]
        self._by_grid(expert, matrix, BlockGrid.write_scales, shard, scale_inv, batch)

    def fill_missing(self, make: Callable[[tuple[int, int]], torch.Tensor]) -> None:
        """Write ``make(shape)`` to each matrix that was never written."""
        for expert, matrix in sorted(self._missing):
            self._by_grid(expert, matrix, BlockGrid.fill_missing, make)

    def _by_grid(
        self, expert: int, matrix: Matrix, write: Callable[..., None], *args: object
    ) -> None:
        """Write to one matrix, and keep its grid while codes or scales wait there."""
        key = (expert, matrix)
        grid = self._unpaired.get(key) or self._grid(expert, matrix)
        write(grid, *args)
        if grid.complete:
            self._unpaired.pop(key, None)
            self._missing.discard(key)
        else:
            self._unpaired[key] = grid

    def _live(self, matrix: Matrix) -> Quantized:
        stack, part_of = stack_of(matrix), self.layout.part_of
        codes, scale_inv = self._storage(stack), self._storage(f"{stack}_scale_inv")
        return Quantized(part_of(codes, matrix), part_of(scale_inv, matrix, BLOCK[0]))

    def _live_of(self, local: int, matrix: Matrix) -> Quantized:
        codes, scale_inv = self._live(matrix)
        return Quantized(codes[local], scale_inv[local])


class PlainExperts(_Matrices):
    """Writes expert matrices into an unquantized layer, whose storage has no scales."""

    @torch.no_grad()
    def load(
        self, expert: int, matrix: Matrix, tensor: torch.Tensor, batch: WriteBatch | None = None
    ) -> None:
        """Copy an HF matrix of a local expert into place."""
        layout, name = self.layout, self.layout.hf_name(expert, matrix)
        check_plain_dtype(tensor, name)
        part = narrow(tensor, layout.shard(matrix), name, layout.columns(matrix))
        stack = self._storage(stack_of(matrix))
        layout.part_of(stack, matrix)[layout.local[expert]].copy_(part)
        self._missing.discard((expert, matrix))


def load_fused(
    experts: ExpertGrids | PlainExperts, leaf: str, tensor: torch.Tensor, batch: WriteBatch
) -> None:
    """Write HF's tensor of all experts at once, of which those of other ranks are skipped.

    Args:
        leaf: a key of :attr:`ExpertLayout.fused`.
        tensor: ``[experts, rows, columns]``; another shape is a RefitError.
    """
    matrices = experts.layout.fused[leaf]
    rows, columns = experts.layout.shard(matrices[0]).full
    expected = (experts.layout.total, len(matrices) * rows, columns)
    if tensor.shape != expected:
        raise RefitError(
            f"'{experts.layout.name}.{leaf}' takes a tensor of shape {expected}, but got "
            f"{tuple(tensor.shape)}; send the matrices of all experts."
        )
    parts = tensor.chunk(len(matrices), dim=1)
    for expert in experts.layout.local:
        for matrix, part in zip(matrices, parts, strict=True):
            experts.load(expert, matrix, part[expert], batch)


class ExpertParameter(torch.nn.Parameter):
    """Weights ``[experts, rows, columns]`` of all local experts, or the scales of their blocks.

    ``load`` is the method of the writer for one matrix, ``load(expert, matrix, tensor)``.
    """

    grid: ExpertGrids | PlainExperts
    weight_loader: Callable[..., bool]
    """Has the signature of vLLM's ``RoutedExperts.weight_loader``."""

    def __new__(
        cls, data: torch.Tensor, experts: ExpertGrids | PlainExperts, load: Callable[..., None]
    ) -> ExpertParameter:
        local = experts.layout.local

        def weight_loader(
            param: torch.nn.Parameter,
            loaded_weight: torch.Tensor,
            weight_name: str,
            shard_id: Matrix,
            expert_id: int,
            return_success: bool = False,
        ) -> bool:
            if expert_id not in local:
                return False
            load(expert_id, shard_id, loaded_weight)
            return True

        weight_loader.supports_moe_loading = True  # type: ignore[attr-defined] # read by vLLM
        parameter: Any = torch.Tensor._make_subclass(cls, data, False)
        parameter.grid = experts
        parameter.weight_loader = weight_loader
        return parameter


def empty_stacks(layout: ExpertLayout) -> dict[str, torch.Tensor]:
    """Codes of zero and scales of one, on the default device."""
    stacks: dict[str, torch.Tensor] = {}
    for name, shape in layout.stacks.items():
        codes, scale_inv = empty_storage(*shape)
        stacks |= {name: codes, f"{name}_scale_inv": scale_inv}
    return stacks

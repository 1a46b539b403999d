"""One rank's expert weights: codes and scales of every local expert, written shard by shard.

vLLM fuses the experts of a layer into two stacks: ``w13`` (gate over up) and ``w2`` (down). Each of
an expert's three matrices has block boundaries of its own in them, because the intermediate size is
rounded up to whole blocks; what lies beyond it is zero and stays zero. A matrix is therefore a
:class:`~vllm_fp8rl.storage.block_grid.BlockGrid` by itself, whatever the order of arrival.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch

from fp8rl.errors import RefitError
from fp8rl.numerics import BLOCK, FP8_DTYPE, Quantized, cdiv
from fp8rl.recipe import ScaleFormat
from vllm_fp8rl.storage.block_grid import BlockGrid, Writes
from vllm_fp8rl.storage.parameters import Shard, check_plain_dtype, count_on_meta, narrow

Slot = Literal["w1", "w3", "w2"]
SLOTS: dict[Slot, str] = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
"""vLLM's name of an expert's matrix -> its HF name."""
FUSED: dict[str, tuple[Slot, ...]] = {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}
"""HF's tensors of all experts at once, ``[experts, rows, columns]`` -> what they hold."""

Storage = Callable[[], Mapping[str, torch.Tensor]]
"""The layer's live tensors by parameter name, asked at each write: an engine may move them."""
Former = Callable[[], Mapping[str, torch.Tensor] | None]


def stack_of(slot: Slot) -> str:
    """The parameter that holds a matrix of every expert."""
    return "w2_weight" if slot == "w2" else "w13_weight"


@dataclass(frozen=True)
class ExpertLayout:
    """Which experts a rank holds, and how much of each."""

    name: str
    """Of the module, e.g. ``model.layers.0.mlp.experts``."""
    local: Mapping[int, int]
    """Global number -> number on this rank, of the experts that it holds."""
    total: int
    """Experts of the layer on all ranks."""
    hidden: int
    intermediate: int
    """Of this rank's part of an expert, without padding."""
    padded: int
    """The same, as allocated."""
    tp_rank: int
    tp_size: int

    def shard(self, slot: Slot) -> Shard:
        """Where this rank's part of a matrix lies in the HF tensor."""
        start = self.tp_rank * self.intermediate
        if slot == "w2":
            full = (self.hidden, self.tp_size * self.intermediate)
            return Shard(0, self.hidden, (0, start), full)
        full = (self.tp_size * self.intermediate, self.hidden)
        return Shard(0, self.intermediate, (start, 0), full)

    def columns(self, slot: Slot) -> int:
        return self.intermediate if slot == "w2" else self.hidden

    def codes_fit(self, slot: Slot) -> bool:
        """Whether this rank's part of a matrix begins with a block of the HF tensor."""
        return not any(at % size for at, size in zip(self.shard(slot).origin, BLOCK, strict=True))

    def hf_name(self, expert: int, slot: Slot) -> str:
        """HF name of a matrix of an expert, by its global number."""
        return f"{self.name}.{expert}.{SLOTS[slot]}.weight"

    def part(self, tensor: torch.Tensor, expert: int, slot: Slot) -> torch.Tensor:
        """This rank's part of an HF matrix, as a view.

        Raises:
            RefitError: the tensor has not the HF shape.
        """
        name = self.hf_name(expert, slot)
        return narrow(tensor, self.shard(slot), name, self.columns(slot))

    def rows_of(self, stack: torch.Tensor, local: int, slot: Slot, block: int = 1) -> torch.Tensor:
        """Rows of a local expert's matrix in a stack, without padding rows.

        Args:
            stack: ``w13`` or ``w2``, or their scales.
            block: weight rows to a row of the stack: 128 for scales.
        """
        if slot == "w2":
            return stack[local]
        first = 0 if slot == "w1" else self.padded // block
        return stack[local, first : first + cdiv(self.intermediate, block)]

    def elements(self, block: tuple[int, int] = (1, 1)) -> int:
        """Of any matrix in its stack, padding included; or of its scales."""
        return cdiv(self.padded, block[0]) * cdiv(self.hidden, block[1])

    def clear_padding(self, w13: torch.Tensor, w2: torch.Tensor) -> None:
        """Write zeros to what no weight fills."""
        if self.padded == self.intermediate:
            return
        for first in (self.intermediate, self.padded + self.intermediate):
            pad = w13[:, first : first + self.padded - self.intermediate]
            (pad.view(torch.uint8) if pad.dtype == FP8_DTYPE else pad).zero_()
        pad = w2[:, :, self.intermediate :]
        (pad.view(torch.uint8) if pad.dtype == FP8_DTYPE else pad).zero_()


class ExpertGrids:
    """Writes expert matrices into the codes and scales of one layer, in any order.

    It stands for the grids of all matrices, and answers as one of them does
    (:class:`~vllm_fp8rl.storage.block_grid.BlockGrid`).

    Args:
        layout: of the layer.
        storage: its live ``w13_weight``, ``w2_weight`` (float8_e4m3fn) and their
            ``_scale_inv`` (float32).
        scale_format: ``fp32`` or ``pow2``.
        device: where they lie.
        on_unpaired: called whenever codes or scales begin to wait for their counterparts.
        former: its tensors before :meth:`moving`, or None.
    """

    def __init__(
        self,
        layout: ExpertLayout,
        storage: Storage,
        scale_format: ScaleFormat,
        device: torch.device,
        on_unpaired: Callable[[], None],
        former: Former = lambda: None,
    ) -> None:
        self.layout = layout
        self.scale_format = scale_format
        self._storage = storage
        self._on_unpaired = on_unpaired
        self._move = _Move(storage, former)
        self._grids = {
            (expert, slot): BlockGrid(
                f"{layout.name}.{expert}.{SLOTS[slot]}",
                partial(self._live, local, slot),
                [layout.shard(slot).rows],
                layout.columns(slot),
                scale_format,
                device,
                on_unpaired=on_unpaired,
            )
            for expert, local in layout.local.items()
            for slot in SLOTS
        }

    @property
    def complete(self) -> bool:
        """Every matrix has been written at least once."""
        return all(grid.complete for grid in self._grids.values())

    def require_paired(self) -> None:
        """Raise RefitError while FP8 codes wait for their scales, or scales for their codes."""
        for grid in self._grids.values():
            grid.require_paired()

    def missing(self) -> list[str]:
        """HF names of the local matrices that were never written."""
        return [self.layout.hf_name(*key) for key, grid in self._grids.items() if grid.missing()]

    def forget_unpaired(self) -> None:
        """Drop what an abandoned transfer left behind, before a new one begins."""
        for grid in self._grids.values():
            grid.forget_unpaired()

    def moving(self) -> None:
        """The next write finds new storage without contents (vLLM's layerwise reload).

        It begins with those of the former: matrices that do not come again stay as they are.
        """
        if self._move.begin():
            self._on_unpaired()

    def load(
        self, expert: int, slot: Slot, tensor: torch.Tensor, writes: Writes | None = None
    ) -> None:
        """Quantize an HF matrix of a local expert into place, or take its FP8 codes.

        Args:
            expert, slot: which matrix, by the expert's global number.
            tensor: as in the HF checkpoint.
            writes: takes quantizations, to be done later.

        Raises:
            RefitError: another shape.
            UnsupportedError: another dtype.
        """
        part = self.layout.part(tensor, expert, slot)
        self._move.end()
        if tensor.dtype != FP8_DTYPE:
            self._grids[expert, slot].load_source(0, part, writes)
            return
        if writes is not None:
            writes.run()  # or an earlier one to this matrix would come after this
        self._grids[expert, slot].load_codes(0, part, self.layout.shard(slot).origin)

    def load_scales(
        self, expert: int, slot: Slot, scale_inv: torch.Tensor, writes: Writes | None = None
    ) -> None:
        """Take the whole ``weight_scale_inv`` of a local expert's matrix that comes as FP8 codes.

        Raises:
            RefitError: another shape.
            ScaleError: a scale that is not positive and finite.
            UnsupportedError: another dtype.
        """
        shard = self.layout.shard(slot)
        expected = tuple(map(cdiv, shard.full, BLOCK))
        if tuple(scale_inv.shape) != expected:
            raise RefitError(
                f"'{self.layout.hf_name(expert, slot)}_scale_inv' takes scales of shape {expected} "
                f"(128x128 blocks of a {shard.full} weight), but got {tuple(scale_inv.shape)}."
            )
        self._move.end()
        if writes is not None:
            writes.run()
        self._grids[expert, slot].load_scales(0, scale_inv, shard.origin)

    def fill_missing(self, make: Callable[[tuple[int, int]], torch.Tensor]) -> None:
        """Write the matrices that were never written: ``make(shape)`` of each."""
        for grid in self._grids.values():
            for start in grid.missing():
                grid.load_source(start, make(grid.shape_of(start)))

    def _live(self, local: int, slot: Slot) -> Quantized:
        live, stack = self._storage(), stack_of(slot)
        return Quantized(
            self.layout.rows_of(live[stack], local, slot),
            self.layout.rows_of(live[f"{stack}_scale_inv"], local, slot, BLOCK[0]),
        )


class PlainExperts:
    """Writes expert matrices into an unquantized layer.

    Args:
        layout: of the layer, without padding.
        storage: its live ``w13_weight`` and ``w2_weight``.
        former: see :class:`ExpertGrids`.
    """

    def __init__(
        self, layout: ExpertLayout, storage: Storage, former: Former = lambda: None
    ) -> None:
        self.layout = layout
        self._storage = storage
        self._move = _Move(storage, former)
        self._missing = {(expert, slot) for expert in layout.local for slot in SLOTS}

    def missing(self) -> list[str]:
        """HF names of the local matrices that were never written."""
        return [self.layout.hf_name(*key) for key in sorted(self._missing)]

    def moving(self) -> None:
        """As of :class:`ExpertGrids`."""
        self._move.begin()

    @torch.no_grad()
    def load(
        self, expert: int, slot: Slot, tensor: torch.Tensor, writes: Writes | None = None
    ) -> None:
        """Copy an HF matrix of a local expert into place.

        Raises:
            RefitError: another shape.
            UnsupportedError: not bfloat16, float16 or float32.
        """
        check_plain_dtype(tensor, self.layout.hf_name(expert, slot))
        part = self.layout.part(tensor, expert, slot)
        self._move.end()
        stack = self._storage()[stack_of(slot)]
        self.layout.rows_of(stack, self.layout.local[expert], slot).copy_(part)
        self._missing.discard((expert, slot))


class _Move:
    """From tensors that a layerwise reload has set aside to those that it fills."""

    def __init__(self, storage: Storage, former: Former) -> None:
        self._storage = storage
        self._former = former
        self._open = False

    def begin(self) -> bool:
        """Whether it had not begun."""
        begun, self._open = self._open, True
        return not begun

    def end(self) -> None:
        if not self._open:
            return
        self._open = False
        former = self._former()
        if former is not None:
            for name, live in self._storage().items():
                live.copy_(former[name])


class ExpertParameter(torch.nn.Parameter):
    """A stack of all local experts: ``[experts, rows, columns]``.

    Args:
        data: the tensor.
        experts: what writes it.
    """

    grid: ExpertGrids | PlainExperts
    weight_loader: Callable[..., bool]

    def __new__(cls, data: torch.Tensor, experts: ExpertGrids | PlainExperts) -> ExpertParameter:
        parameter: Any = torch.Tensor._make_subclass(cls, data, False)
        parameter.grid = experts
        parameter.weight_loader = parameter.loader(experts)
        return parameter

    @classmethod
    def loader(cls, experts: ExpertGrids | PlainExperts) -> Callable[..., bool]:
        """A function with the signature of vLLM's ``RoutedExperts.weight_loader``."""
        layout = experts.layout

        # vLLM's layerwise reload binds the first argument by the name 'param'.
        def load(
            param: torch.nn.Parameter,
            loaded_weight: torch.Tensor,
            weight_name: str,
            shard_id: Slot,
            expert_id: int,
            return_success: bool = False,
        ) -> bool:
            if expert_id not in layout.local:
                return False
            if param.is_meta:  # that reload counts elements before it loads any
                experts.moving()
                count_on_meta(_reload_count(experts, loaded_weight.dtype))
            else:
                experts.load(expert_id, shard_id, loaded_weight)
            return True

        load.supports_moe_loading = True  # type: ignore[attr-defined] # vLLM asks for it
        return load


def _reload_count(experts: ExpertGrids | PlainExperts, dtype: torch.dtype) -> int:
    """Elements that a matrix counts for in a layerwise reload, as with ``Fp8Weight``."""
    if dtype == FP8_DTYPE:
        return experts.layout.elements() - 1
    scales = experts.layout.elements(BLOCK) if isinstance(experts, ExpertGrids) else 0
    return experts.layout.elements() + scales


class ExpertScale(ExpertParameter):
    """``float32 [experts, rows / 128, columns / 128]``: what multiplies the codes back."""

    # Scales come with FP8 checkpoints only; a layerwise reload must not wait for them.
    weight_loader_numel = 0

    @classmethod
    def loader(cls, experts: ExpertGrids | PlainExperts) -> Callable[..., bool]:
        assert isinstance(experts, ExpertGrids)
        layout = experts.layout

        def load(
            param: torch.nn.Parameter,
            loaded_weight: torch.Tensor,
            weight_name: str,
            shard_id: Slot,
            expert_id: int,
            return_success: bool = False,
        ) -> bool:
            if expert_id not in layout.local:
                return False
            if param.is_meta:
                experts.moving()
                count_on_meta(layout.elements(BLOCK))
            else:
                experts.load_scales(expert_id, shard_id, loaded_weight)
            return True

        load.supports_moe_loading = True  # type: ignore[attr-defined] # vLLM asks for it
        return load


def load_fused(
    experts: ExpertGrids | PlainExperts, leaf: str, tensor: torch.Tensor, writes: Writes
) -> None:
    """Write HF's tensor of all experts at once.

    Args:
        experts: of one layer.
        leaf: a key of ``FUSED``.
        tensor: ``[experts, rows, columns]``; those of other ranks are left out.
        writes: takes quantizations, to be done later.
    """
    parts = tensor.chunk(len(FUSED[leaf]), dim=1)
    for expert in experts.layout.local:
        for slot, part in zip(FUSED[leaf], parts, strict=True):
            experts.load(expert, slot, part[expert], writes)


def empty_stacks(layout: ExpertLayout) -> dict[str, torch.Tensor]:
    """Codes of zero and scales of one, on the default device."""
    experts = len(layout.local)
    shapes = {
        "w13_weight": (experts, 2 * layout.padded, layout.hidden),
        "w2_weight": (experts, layout.hidden, layout.padded),
    }
    stacks = {}
    for name, (count, rows, columns) in shapes.items():
        codes = torch.zeros(count, rows, columns, dtype=torch.uint8).view(FP8_DTYPE)
        blocks = (count, cdiv(rows, BLOCK[0]), cdiv(columns, BLOCK[1]))
        stacks[name] = codes
        stacks[f"{name}_scale_inv"] = torch.ones(blocks, dtype=torch.float32)
    return stacks

"""vLLM parameters whose loaders write into live storage, quantizing where needed.

vLLM's parallel linear layers call ``load_{column_parallel,merged_column,qkv,row_parallel}_weight``
on their parameters with the whole HF tensor. Each class here turns such a call into one shard
(where it lies on this rank, and where in the HF tensor) and hands it to the layer's
:class:`~vllm_fp8rl.storage.block_grid.BlockGrid`, or copies it after checking its dtype.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from vllm.model_executor.parameter import ModelWeightParameter

from fp8rl.errors import RefitError, UnsupportedError
from fp8rl.numerics import BLOCK, FP8_DTYPE, cdiv
from vllm_fp8rl.storage.block_grid import SOURCE_DTYPES, BlockGrid, Writes


class Shard(NamedTuple):
    """A shard of a weight: rows ``[start, start + rows)`` of the local matrix."""

    start: int
    rows: int
    origin: tuple[int, int]
    """Row and column of its first element in the HF tensor."""
    full: tuple[int, int]
    """Shape of the HF tensor."""


class ShardedParameter(ModelWeightParameter):
    """Base: geometry of the four parallel layouts; subclasses store the shard.

    Args:
        data: the parameter, ``[N, ...]``.
        shape: rows and columns of the local weight matrix, also for a parameter of its scales.
        weight_loader: the layer's own ``weight_loader_v2``.
    """

    def __init__(  # keywords only: BasevLLMParameter.__new__ takes no others
        self, data: torch.Tensor, *, shape: tuple[int, int], weight_loader: Callable[..., None]
    ) -> None:
        self._weight_loader: Callable[..., Any]
        super().__init__(data=data, input_dim=1, output_dim=0, weight_loader=weight_loader)
        self.matrix = shape

    @property
    def weight_loader(self) -> Callable[..., Any]:
        """The layer's own loader, or vLLM's wrapper of it in a layerwise reload."""
        return self._weight_loader

    @weight_loader.setter
    def weight_loader(self, loader: Callable[..., Any]) -> None:
        if inspect.unwrap(loader) != inspect.unwrap(self._weight_loader):
            raise self._foreign(getattr(loader, "__qualname__", str(loader)))
        self._weight_loader = loader

    @weight_loader.deleter
    def weight_loader(self) -> None:
        raise self._foreign("another loader")

    def _foreign(self, loader: str) -> UnsupportedError:
        # Such a loader (Mamba's, say) copies: BF16 would become FP8 by a cast, without scales.
        return UnsupportedError(
            f"The model wants {loader} to load '{self.label}', past the loader that quantizes or "
            "checks what comes; start this model without quantization='fp8rl'."
        )

    @property
    def label(self) -> str:
        """Name for messages."""
        raise NotImplementedError

    def origin(self, full: tuple[int, int], local: tuple[int, int]) -> tuple[int, int]:
        """Row and column of this rank's part in an HF weight, which several ranks may hold.

        Args:
            full: shape of the HF weight.
            local: of the part.
        """
        row, column = (
            self.tp_rank // (self.tp_size // (whole // part)) * part
            for whole, part in zip(full, local, strict=True)
        )
        return row, column

    def store(self, tensor: torch.Tensor, shard: Shard, writes: Writes | None = None) -> None:
        """Write a shard of a whole HF tensor, or leave it to ``writes`` to do so later."""
        raise NotImplementedError

    def load_column_parallel_weight(self, loaded_weight: torch.Tensor) -> None:
        rows, columns = self.matrix
        origin, full = (self.tp_rank * rows, 0), (self.tp_size * rows, columns)
        self.store(loaded_weight, Shard(0, rows, origin, full))

    def load_row_parallel_weight(self, loaded_weight: torch.Tensor) -> None:
        rows, columns = self.matrix
        origin, full = (0, self.tp_rank * columns), (rows, self.tp_size * columns)
        self.store(loaded_weight, Shard(0, rows, origin, full))

    def load_merged_column_weight(self, loaded_weight: torch.Tensor, **kwargs: Any) -> None:
        start, rows = kwargs["shard_offset"], kwargs["shard_size"]
        origin, full = (self.tp_rank * rows, 0), (self.tp_size * rows, self.matrix[1])
        self.store(loaded_weight, Shard(start, rows, origin, full))

    def load_qkv_weight(self, loaded_weight: torch.Tensor, **kwargs: Any) -> None:
        start, rows = kwargs["shard_offset"], kwargs["shard_size"]
        replicas = 1 if kwargs["shard_id"] == "q" else kwargs["num_heads"]
        origin = (self.tp_rank // replicas * rows, 0)
        full = (self.tp_size // replicas * rows, self.matrix[1])
        self.store(loaded_weight, Shard(start, rows, origin, full))

    def load_replicated_weight(self, loaded_weight: torch.Tensor) -> None:
        """The loader of a ReplicatedLinear, whose own one copies without looking at dtypes."""
        self.store(loaded_weight, Shard(0, self.matrix[0], (0, 0), self.matrix))


def narrow(tensor: torch.Tensor, shard: Shard, name: str, columns: int) -> torch.Tensor:
    """This rank's part of an HF weight, as a view.

    Raises:
        RefitError: the tensor has not the HF shape.
    """
    if tensor.shape != shard.full:
        raise RefitError(
            f"'{name}' takes a tensor of shape {shard.full}, but got {tuple(tensor.shape)}; send "
            "the whole HF tensor of the model that the engine was started with."
        )
    (row, column) = shard.origin
    if shard.full == (shard.rows, columns):
        return tensor
    return tensor[row : row + shard.rows, column : column + columns]


def count_on_meta(elements: int) -> None:
    """Tell vLLM's layerwise reload how much came: it looks on while copies are made on meta."""
    target = torch.empty(elements, device="meta")
    target.copy_(torch.empty_like(target))


class Fp8Weight(ShardedParameter):
    """Codes ``float8_e4m3fn [N, K]``. Takes BF16/FP16/FP32, or FP8 codes as they are."""

    def __init__(self, data: torch.Tensor, *, grid: BlockGrid, weight_loader: Callable) -> None:
        super().__init__(data, shape=(data.shape[0], data.shape[1]), weight_loader=weight_loader)
        self.grid = grid

    @property
    def label(self) -> str:
        return f"{self.grid.name}.weight"

    def store(self, tensor: torch.Tensor, shard: Shard, writes: Writes | None = None) -> None:
        if self.is_meta:
            self.grid.moving()
            count_on_meta(self._reload_count(shard, tensor.dtype))
            return
        part = narrow(tensor, shard, self.label, self.matrix[1])
        if tensor.dtype != FP8_DTYPE:
            self.grid.load_source(shard.start, part, writes)
            return
        if writes is not None:
            writes.run()  # or an earlier one to this shard would come after this
        self.grid.load_codes(shard.start, part, shard.origin)

    def _reload_count(self, shard: Shard, dtype: torch.dtype) -> int:
        """Elements that a shard counts for in a layerwise reload.

        The layer is due once as many came as it has. A shard at source precision brings its scales
        with it. FP8 codes count one less, so that the layer waits for their scales until the end:
        vLLM 0.32 counts none for those (``weight_loader_numel``), 0.25.1 all.
        """
        rows, width = shard.rows, self.shape[1]
        if dtype == FP8_DTYPE:
            return rows * width - 1
        blocks = cdiv(shard.start + rows, BLOCK[0]) - cdiv(shard.start, BLOCK[0])
        return rows * width + blocks * cdiv(width, BLOCK[1])


class Fp8Scale(ShardedParameter):
    """``float32 [ceil(N/128), ceil(K/128)]``: the factors that multiply the codes back."""

    # Scales come with FP8 checkpoints only; a layerwise reload must not wait for them.
    weight_loader_numel = 0

    def __init__(
        self,
        data: torch.Tensor,
        *,
        grid: BlockGrid,
        shape: tuple[int, int],
        weight_loader: Callable,
    ) -> None:
        super().__init__(data, shape=shape, weight_loader=weight_loader)
        self.grid = grid

    @property
    def label(self) -> str:
        return f"{self.grid.name}.weight_scale_inv"

    def store(self, tensor: torch.Tensor, shard: Shard, writes: Writes | None = None) -> None:
        if self.is_meta:
            self.grid.moving()
            count_on_meta(tensor.numel())
            return
        expected = tuple(map(cdiv, shard.full, BLOCK))
        if tuple(tensor.shape) != expected:
            raise RefitError(
                f"'{self.label}' takes scales of shape {expected} (128x128 "
                f"blocks of a {shard.full} weight), but got {tuple(tensor.shape)}."
            )
        if writes is not None:
            writes.run()
        self.grid.load_scales(shard.start, tensor, shard.origin)


class PlainWeight(ShardedParameter):
    """An unquantized weight ``[N, K]`` in the model's dtype that is never repacked."""

    def __init__(
        self,
        data: torch.Tensor,
        *,
        module: str,
        partitions: Sequence[int],
        weight_loader: Callable,
        former: Callable[[], torch.Tensor | None] = lambda: None,
    ) -> None:
        super().__init__(data, shape=(data.shape[0], data.shape[1]), weight_loader=weight_loader)
        self.module = module
        self._former = former  # as with BlockGrid
        self._moving = False
        self.missing = {sum(partitions[:i]) for i in range(len(partitions))}
        """First local rows of the shards that were never written."""

    @property
    def label(self) -> str:
        return f"{self.module}.weight"

    def store(self, tensor: torch.Tensor, shard: Shard, writes: Writes | None = None) -> None:
        if self.is_meta:
            self._moving = True  # the materialized parameter takes this over
            count_on_meta(shard.rows * self.shape[1])
            return
        check_plain_dtype(tensor, self.label)
        part = narrow(tensor, shard, self.label, self.matrix[1])
        former = self._former() if self._moving else None
        self._moving = False
        if former is not None:
            self.data.copy_(former)
        self.data[shard.start : shard.start + shard.rows].copy_(part)
        self.missing.discard(shard.start)


def check_plain_dtype(tensor: torch.Tensor, name: str) -> None:
    """Raise UnsupportedError unless a tensor for a BF16 parameter is BF16, FP16 or FP32."""
    if tensor.dtype not in SOURCE_DTYPES:
        raise UnsupportedError(
            f"'{name}' is kept in BF16 but arrives as {tensor.dtype}; send it in bfloat16, or "
            "remove the pin that keeps it in BF16."
        )

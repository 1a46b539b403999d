"""vLLM parameters that write into live storage, quantizing where needed.

vLLM's parallel linear layers call ``load_{column_parallel,merged_column,qkv,row_parallel}_weight``
on their parameters with the whole HF tensor. Each class here turns such a call into a
:class:`Shard` (where it lies on this rank, and where in the HF tensor) and stores it: through the
layer's :class:`~vllm_fp8rl.storage.block_grid.BlockGrid`, or by a copy after checking its dtype. A
refit computes the same shards once (:mod:`vllm_fp8rl.refit.receiver.inventory`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from vllm.model_executor.parameter import ModelWeightParameter

from fp8rl.errors import UnsupportedError
from vllm_fp8rl.storage.block_grid import SOURCE_DTYPES, BlockGrid, Shard, WriteBatch, narrow


class ShardedParameter(ModelWeightParameter):
    """Base class: geometry of the parallel layouts. Subclasses store the shard.

    Args:
        data: the parameter, ``[N, ...]``.
        shape: rows and columns of the local weight matrix, also for a parameter of its scales.
        partitions: first local row and number of rows of each HF weight in the matrix, in order.
        weight_loader: the layer's own ``weight_loader_v2``.
    """

    def __init__(  # keywords only: BasevLLMParameter.__new__ takes no others
        self,
        data: torch.Tensor,
        *,
        shape: tuple[int, int],
        partitions: Sequence[tuple[int, int]],
        weight_loader: Callable[..., None],
    ) -> None:
        self._weight_loader: Callable[..., Any]
        super().__init__(data=data, input_dim=1, output_dim=0, weight_loader=weight_loader)
        self.matrix = shape
        self.partitions = partitions

    @property
    def weight_loader(self) -> Callable[..., Any]:
        """The layer's own loader. Setting another one raises UnsupportedError."""
        return self._weight_loader

    @weight_loader.setter
    def weight_loader(self, loader: Callable[..., Any]) -> None:
        if loader != self._weight_loader:
            raise self._foreign(getattr(loader, "__qualname__", str(loader)))

    @weight_loader.deleter
    def weight_loader(self) -> None:
        raise self._foreign("another loader")

    def _foreign(self, loader: str) -> UnsupportedError:
        # Such a loader (Mamba's, for example) copies: BF16 would be cast to FP8, without scales.
        return UnsupportedError(
            f"The model wants {loader} to load '{self.label}', past the loader that quantizes or "
            "checks what comes; start this model without quantization='fp8rl'."
        )

    @property
    def label(self) -> str:
        """Name for messages."""
        raise NotImplementedError

    def shard(self, start: int, rows: int, full: tuple[int, int]) -> Shard:
        """Return the part of an HF weight of shape ``full`` that is at local row ``start``.

        Ranks may hold the same part, as with KV heads that are fewer than ranks.
        """
        origin = [
            self.tp_rank // (self.tp_size // (whole // part)) * part
            for whole, part in zip(full, (rows, self.matrix[1]), strict=True)
        ]
        return Shard(start, rows, (origin[0], origin[1]), full)

    def store(self, shard: Shard, tensor: torch.Tensor, batch: WriteBatch | None = None) -> None:
        """Write this rank's shard of a whole HF tensor; a batch quantizes it later."""
        raise NotImplementedError

    def load_column_parallel_weight(self, loaded_weight: torch.Tensor) -> None:
        rows, columns = self.matrix
        self.store(self.shard(0, rows, (self.tp_size * rows, columns)), loaded_weight)

    def load_row_parallel_weight(self, loaded_weight: torch.Tensor) -> None:
        rows, columns = self.matrix
        self.store(self.shard(0, rows, (rows, self.tp_size * columns)), loaded_weight)

    def load_merged_column_weight(self, loaded_weight: torch.Tensor, **kwargs: Any) -> None:
        start, rows = kwargs["shard_offset"], kwargs["shard_size"]
        full = (self.tp_size * rows, self.matrix[1])
        self.store(self.shard(start, rows, full), loaded_weight)

    def load_qkv_weight(self, loaded_weight: torch.Tensor, **kwargs: Any) -> None:
        start, rows = kwargs["shard_offset"], kwargs["shard_size"]
        replicas = 1 if kwargs["shard_id"] == "q" else kwargs["num_heads"]
        full = (self.tp_size // replicas * rows, self.matrix[1])
        self.store(self.shard(start, rows, full), loaded_weight)


class Fp8Parameter(ShardedParameter):
    """Base class of the two parameters of an FP8 layer, which its block grid writes."""

    leaf: str
    grid: BlockGrid

    def __init__(self, data: torch.Tensor, *, grid: BlockGrid, weight_loader: Callable) -> None:
        super().__init__(
            data,
            shape=(grid.total_rows, grid.columns),
            partitions=grid.partitions,
            weight_loader=weight_loader,
        )
        self.grid = grid

    @property
    def label(self) -> str:
        return f"{self.grid.name}.{self.leaf}"


class Fp8Weight(Fp8Parameter):
    """FP8 codes ``float8_e4m3fn [N, K']``: K columns, and zeros behind them as the kernel needs.

    Takes BF16, FP16 or FP32, or FP8 codes as they are.
    """

    leaf = "weight"

    def store(self, shard: Shard, tensor: torch.Tensor, batch: WriteBatch | None = None) -> None:
        self.grid.write(shard, tensor, batch)


class Fp8Scale(Fp8Parameter):
    """``float32 [ceil(N/128), ceil(K/128)]``: the factors that multiply the codes back."""

    leaf = "weight_scale_inv"

    def store(self, shard: Shard, tensor: torch.Tensor, batch: WriteBatch | None = None) -> None:
        self.grid.write_scales(shard, tensor, batch)


class PlainWeight(ShardedParameter):
    """An unquantized weight ``[N, K]`` in the model's dtype that is never repacked."""

    def __init__(
        self, data: torch.Tensor, *, module: str, partitions: Sequence[int], weight_loader: Callable
    ) -> None:
        starts = [sum(partitions[:i]) for i in range(len(partitions))]
        super().__init__(
            data,
            shape=(data.shape[0], data.shape[1]),
            partitions=list(zip(starts, partitions, strict=True)),
            weight_loader=weight_loader,
        )
        self.module = module
        self.missing = set(starts)
        """First local rows of the shards that were never written."""

    @property
    def label(self) -> str:
        return f"{self.module}.weight"

    def store(self, shard: Shard, tensor: torch.Tensor, batch: WriteBatch | None = None) -> None:
        check_plain_dtype(tensor, self.label)
        part = narrow(tensor, shard, self.label, self.matrix[1])
        self.data[shard.start : shard.start + shard.rows].copy_(part)
        self.missing.discard(shard.start)


def check_plain_dtype(tensor: torch.Tensor, name: str) -> None:
    """Raise UnsupportedError unless a tensor for a BF16 parameter is BF16, FP16 or FP32."""
    if tensor.dtype not in SOURCE_DTYPES:
        raise UnsupportedError(
            f"'{name}' is kept in BF16 but arrives as {tensor.dtype}; send it in bfloat16, or "
            "remove the pin that keeps it in BF16."
        )

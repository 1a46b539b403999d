"""Linear, embedding and output methods whose weights can be updated in a live engine.

vLLM's own methods prepare weights once after loading: they repack or replace parameters (oneDNN on
CPU drops ``layer.weight``), so a later ``model.load_weights`` fails or is silently ignored. The
methods here allocate everything at construction and have nothing to do after loading.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.linear import (
    LinearMethodBase,
    MergedColumnParallelLinear,
    ReplicatedLinear,
    UnquantizedLinearMethod,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.utils import set_weight_attrs

from fp8rl.errors import CheckpointError, RefitError, UnsupportedError
from fp8rl.gemm import GemmShape
from fp8rl.kernels import head, reference
from fp8rl.numerics import BLOCK, Quantized, cdiv
from vllm_fp8rl.engine.rank_state import RankState
from vllm_fp8rl.kernels.linear.choice import select_kernel
from vllm_fp8rl.storage.block_grid import BlockGrid, empty_storage
from vllm_fp8rl.storage.parameters import (
    Fp8Scale,
    Fp8Weight,
    PlainWeight,
    ShardedParameter,
    check_plain_dtype,
)

_DUMMY_RANGE = 1e-3  # what vLLM's dummy loader draws weights from


def _replicated_loader(param: ShardedParameter, loaded_weight: torch.Tensor) -> None:
    """Load the weight of a ReplicatedLinear; its own loader would copy any dtype."""
    param.store(param.shard(0, param.matrix[0], param.matrix), loaded_weight)


def _loader_of(layer: torch.nn.Module, loader: Callable[..., None], name: str) -> Callable:
    """Return the loader of a parameter: vLLM's for parallel layers, ours for replicated ones."""
    if getattr(loader, "__name__", "") == "weight_loader_v2":
        return loader
    if getattr(type(layer), "weight_loader", None) is ReplicatedLinear.weight_loader:
        return _replicated_loader
    raise UnsupportedError(
        f"'{name}' is a {type(layer).__name__}, which loads its weight in a way that fp8rl does "
        "not know; start this model without quantization='fp8rl'."
    )


def _scale_loader(layer: Any, loader: Callable[..., None]) -> Callable[..., None]:
    """Return the loader of a layer's scales.

    Where one tensor is for several matrices of the layer (Qwen3.5's ``in_proj_qkv``), vLLM cuts it
    by rows of the weight; scales have a row for each block.
    """
    if not isinstance(layer, MergedColumnParallelLinear):
        return loader

    def load(param: Any, loaded_weight: torch.Tensor, loaded_shard_id: Any = None) -> None:
        if not isinstance(loaded_shard_id, tuple):
            loader(param, loaded_weight, loaded_shard_id)
            return
        first = 0
        for index in loaded_shard_id:
            count = cdiv(layer.output_sizes[index], BLOCK[0])
            loader(param, loaded_weight[first : first + count], index)
            first += count

    return load


@register_weight_loader_v2_supported_method
class Fp8RLLinearMethod(LinearMethodBase):
    """Block-FP8 weight, written in place by every load."""

    supports_pre_processed_weights = False

    def __init__(self, state: RankState, name: str) -> None:
        self.state = state
        self.name = name

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        loader = _loader_of(layer, extra_weight_attrs.pop("weight_loader"), self.name)
        rows, columns = sum(output_partition_sizes), input_size_per_partition
        device = torch.empty(0).device
        try:
            self.kernel = select_kernel(
                device, GemmShape(0, rows, columns), self.state.recipe, params_dtype
            )
        except UnsupportedError as error:
            raise UnsupportedError(f"'{self.name}': {error}") from None
        codes, scale_inv = empty_storage(rows, self.kernel.stored_columns(columns))
        self.grid = BlockGrid(
            self.name,
            partial(_live_storage, weakref.ref(layer)),
            output_partition_sizes,
            columns,
            self.state.recipe.weights.scale_format,
            codes.device,
            on_unpaired=self.state.guard.recheck,
        )
        weight = Fp8Weight(codes, grid=self.grid, weight_loader=loader)
        scale = Fp8Scale(scale_inv, grid=self.grid, weight_loader=_scale_loader(layer, loader))
        layer.register_parameter("weight", weight)
        layer.register_parameter("weight_scale_inv", scale)
        if self.kernel.backend == "deep_gemm":
            self.state.warmup.add(*weight.shape)
        self.state.layers[self.name] = layer  # compiled code finds it there
        for parameter in (weight, scale):
            set_weight_attrs(parameter, extra_weight_attrs)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Nothing to do for loaded weights, however often it is called.

        Raises:
            CheckpointError: the checkpoint left out a part of this layer. vLLM does not check that
                for quantized models.
        """
        self.state.built()
        if self.grid.complete:
            return
        if not self.state.dummy:
            self.grid.require_paired()
            raise _incomplete(self.name, self.grid.missing())
        self.grid.fill_missing(dummy_weights(self.grid.device))

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            y = self.product(layer, x)
        elif x.is_cpu:
            y = _opaque_product(x, self.name, self.grid.total_rows)
        else:
            y = self.kernel.apply(x, Quantized(layer.weight, layer.weight_scale_inv))
        return y if bias is None else y + bias

    def discard(self, layer: torch.nn.Module) -> None:
        """Forget what is kept of the weight, after a sleep has discarded it."""
        self.grid.discard()

    def require_ready(self, layer: torch.nn.Module) -> None:
        """Raise RefitError where FP8 codes arrived without their scales."""
        self.grid.require_paired()

    def product(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        """Return ``x @ weight.T`` over the codes of this moment."""
        return self.kernel.apply(x, Quantized(layer.weight.data, layer.weight_scale_inv.data))


@torch.library.custom_op(
    "fp8rl::linear", mutates_args=(), schema="(Tensor x, str name, int out_features) -> Tensor"
)
def _opaque_product(x: torch.Tensor, name: str, out_features: int) -> torch.Tensor:
    """Call :meth:`Fp8RLLinearMethod.product` on a CPU, where torch.compile cannot trace it.

    The layer comes from vLLM's forward context by its name, as in vLLM's own attention op.
    """
    layer = get_forward_context().no_compile_layers[name]
    return layer.quant_method.product(layer, x)


@_opaque_product.register_fake
def _(x: torch.Tensor, name: str, out_features: int) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], out_features))


def _incomplete(name: str, rows: list[int]) -> CheckpointError:
    return CheckpointError(
        f"The checkpoint has no tensor for local rows from {rows[0]} of '{name}'; load a complete "
        "checkpoint, or use load_format='dummy' and refit."
    )


def dummy_weights(device: torch.device) -> Callable[[tuple[int, int]], torch.Tensor]:
    """Return a function of a shape that draws what stands for the weights of no checkpoint.

    vLLM's dummy loader draws codes and scales one by one, negative scales among them.
    """
    generator = torch.Generator(device).manual_seed(1234)

    def draw(shape: tuple[int, int]) -> torch.Tensor:
        rows = torch.empty(shape, dtype=torch.bfloat16, device=device)
        return rows.uniform_(-_DUMMY_RANGE, _DUMMY_RANGE, generator=generator)

    return draw


def live_data(layer: weakref.ref[torch.nn.Module], name: str) -> torch.Tensor:
    """Return the data of a layer's parameter, wherever it is now."""
    module = layer()
    if module is None:
        raise RefitError("A weight was loaded into a layer that no longer exists; restart.")
    parameters: Any = module._parameters  # asked for each shard of a refit: not by __getattr__
    return parameters[name].data


def _live_storage(layer: weakref.ref[torch.nn.Module]) -> tuple[torch.Tensor, torch.Tensor]:
    return live_data(layer, "weight"), live_data(layer, "weight_scale_inv")


@register_weight_loader_v2_supported_method
class RefitLinearMethod(UnquantizedLinearMethod):
    """A linear layer in the model's dtype (a pinned one, or all with ``rollout: false``)."""

    def __init__(self, state: RankState, name: str) -> None:
        super().__init__()
        self.state = state
        self.name = name

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        loader = _loader_of(layer, extra_weight_attrs.pop("weight_loader"), self.name)
        rows, columns = sum(output_partition_sizes), input_size_per_partition
        data = torch.empty(rows, columns, dtype=params_dtype)
        weight = PlainWeight(
            data, module=self.name, partitions=output_partition_sizes, weight_loader=loader
        )
        layer.register_parameter("weight", weight)
        set_weight_attrs(weight, extra_weight_attrs)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Nothing: upstream would hand the weight to oneDNN here and empty the parameter.

        Raises:
            CheckpointError: the checkpoint left out a part of this layer.
        """
        self.state.built()
        weight = layer.weight
        if isinstance(weight, PlainWeight) and weight.missing and not self.state.dummy:
            raise _incomplete(self.name, sorted(weight.missing))

    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        if layer.weight.device.type == "cpu":
            return torch.nn.functional.linear(x, layer.weight, bias)
        return super().apply(layer, x, bias)


class RefitEmbeddingMethod(UnquantizedEmbeddingMethod):
    """Embedding and output projection, tied or not, without a packed copy."""

    def __init__(self, state: RankState, name: str) -> None:
        self.state = state
        self.name = name

    def create_weights(self, layer: torch.nn.Module, *sizes: Any, **extra: Any) -> None:
        # Weak, because vLLM's reload bookkeeping must not keep the layer alive.
        self._loader = weakref.WeakMethod(extra["weight_loader"])
        super().create_weights(layer, *sizes, **(extra | {"weight_loader": self.load}))

    def load(self, param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
        """Load the weight as vLLM's loader does, in a dtype that the layer can hold."""
        check_plain_dtype(loaded_weight, f"{self.name}.weight")
        loader = self._loader()
        if loader is None:
            raise RefitError(
                f"'{self.name}' was loaded after its model was deleted; restart the engine."
            )
        loader(param, loaded_weight)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Nothing: upstream would make a packed copy here that later loads do not reach."""

    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        if layer.weight.device.type == "cpu":
            if self.state.recipe.exact:
                return reference.multiply(x, layer.weight)
            return torch.nn.functional.linear(x, layer.weight, bias)
        vocabulary: Any = layer
        words = vocabulary.shard_indices.num_org_elements
        if self.state.recipe.exact and words <= head.FEW_WORDS:
            return few_words(x, vocabulary.weight, words)
        return super().apply(layer, x, bias)


def few_words(x: torch.Tensor, weight: torch.Tensor, words: int) -> torch.Tensor:
    """Multiply ``x`` ``[rows, K]`` as the trainer does, without the rows that pad a vocabulary.

    Returns:
        ``[rows, padded words]``, with zeros behind the words.
    """
    found = head.multiply(x, weight[:words].t())
    return torch.nn.functional.pad(found, (0, len(weight) - words))

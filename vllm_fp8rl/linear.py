"""Linear, embedding and output methods that live weight updates survive.

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
from vllm.model_executor.layers.linear import (
    LinearMethodBase,
    ReplicatedLinear,
    UnquantizedLinearMethod,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.utils import set_weight_attrs

from fp8rl.errors import RefitError, UnsupportedError
from fp8rl.gemm import GemmShape
from fp8rl.numerics import Quantized
from fp8rl.recipe import Recipe
from vllm_fp8rl.grid import BlockGrid, empty_storage
from vllm_fp8rl.kernels import select_kernel
from vllm_fp8rl.params import (
    Fp8Scale,
    Fp8Weight,
    PlainWeight,
    ShardedParameter,
    check_plain_dtype,
)

_DUMMY_RANGE = 1e-3  # what vLLM's dummy loader draws weights from


def _replicated_loader(param: ShardedParameter, loaded_weight: torch.Tensor) -> None:
    # vLLM's layerwise reload binds the first argument by the name 'param'.
    param.load_replicated_weight(loaded_weight)


def _loader_of(layer: torch.nn.Module, loader: Callable[..., None], name: str) -> Callable:
    """The loader to put on a parameter: vLLM's for parallel layers, ours for replicated ones."""
    if getattr(loader, "__name__", "") == "weight_loader_v2":
        return loader
    if type(layer) is ReplicatedLinear:
        return _replicated_loader
    raise UnsupportedError(
        f"'{name}' is a {type(layer).__name__}, which loads its weight in a way that fp8rl does "
        "not know; pin it to BF16 in another engine or use a dense Llama/Qwen3-style model."
    )


@register_weight_loader_v2_supported_method
class Fp8RLLinearMethod(LinearMethodBase):
    """Block-FP8 weight, written in place by every load.

    Args:
        recipe: scale formats.
        name: module name, for messages.
        dummy: the engine loads no checkpoint (``load_format="dummy"``).
    """

    supports_pre_processed_weights = False

    def __init__(self, recipe: Recipe, name: str, *, dummy: bool) -> None:
        self.recipe = recipe
        self.name = name
        self._dummy = dummy

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
        codes, scale_inv = empty_storage(rows, columns)
        try:
            self.kernel = select_kernel(codes.device, GemmShape(0, rows, columns), self.recipe)
        except UnsupportedError as error:
            raise UnsupportedError(f"'{self.name}': {error}") from None
        self.grid = BlockGrid(
            self.name,
            partial(_live_storage, weakref.ref(layer)),
            output_partition_sizes,
            columns,
            self.recipe.weights.scale_format,
            codes.device,
        )
        weight = Fp8Weight(codes, grid=self.grid, weight_loader=loader)
        scale = Fp8Scale(scale_inv, grid=self.grid, shape=(rows, columns), weight_loader=loader)
        layer.register_parameter("weight", weight)
        layer.register_parameter("weight_scale_inv", scale)
        for parameter in (weight, scale):
            set_weight_attrs(parameter, extra_weight_attrs)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Nothing to do for loaded weights, however often it is called.

        Raises:
            RefitError: the checkpoint left out a part of this layer. vLLM does not check that for
                quantized models.
        """
        if self.grid.complete:
            return
        if not self._dummy:
            self.grid.require_paired()
            raise RefitError(
                f"The checkpoint has no tensor for local rows from {self.grid.missing()[0]} of "
                f"'{self.name}'; load a complete checkpoint, or use load_format='dummy' and refit."
            )
        self._fill_with_dummies()

    def _fill_with_dummies(self) -> None:
        # vLLM's dummy loader has drawn codes and scales one by one, negative scales among them.
        generator = torch.Generator().manual_seed(1234)
        for start in self.grid.missing():
            shape = self.grid.shape_of(start)
            rows = torch.empty(shape, dtype=torch.bfloat16, device="cpu")
            rows.uniform_(-_DUMMY_RANGE, _DUMMY_RANGE, generator=generator)
            self.grid.load_source(start, rows)

    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        self.grid.require_paired()
        y = self.kernel.apply(x, Quantized(*_storage_of(layer)))
        return y if bias is None else y + bias


def _live_storage(layer: weakref.ref[torch.nn.Module]) -> tuple[torch.Tensor, torch.Tensor]:
    module = layer()
    if module is None:
        raise RefitError("A weight was loaded into a layer that no longer exists; restart.")
    return _storage_of(module)


def _storage_of(layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return layer.weight.data, layer.weight_scale_inv.data


@register_weight_loader_v2_supported_method
class RefitLinearMethod(UnquantizedLinearMethod):
    """A linear layer in the model's dtype (a pinned one, or all with ``rollout: false``)."""

    def __init__(self, name: str) -> None:
        super().__init__()
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
        weight = PlainWeight(data, module=self.name, weight_loader=loader)
        layer.register_parameter("weight", weight)
        set_weight_attrs(weight, extra_weight_attrs)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Nothing: upstream would hand the weight to oneDNN here and empty the parameter."""

    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        if layer.weight.device.type == "cpu":
            return torch.nn.functional.linear(x, layer.weight, bias)
        return super().apply(layer, x, bias)


class RefitEmbeddingMethod(UnquantizedEmbeddingMethod):
    """Embedding and output projection, tied or not, without a packed copy."""

    def __init__(self, name: str) -> None:
        self.name = name

    def create_weights(self, layer: torch.nn.Module, *sizes: Any, **extra: Any) -> None:
        extra["weight_loader"] = _checked(extra["weight_loader"], self.name)
        super().create_weights(layer, *sizes, **extra)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Nothing: upstream would make a packed copy here that later loads do not reach."""

    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        if layer.weight.device.type == "cpu":
            return torch.nn.functional.linear(x, layer.weight, bias)
        return super().apply(layer, x, bias)


def _checked(loader: Callable[..., None], name: str) -> Callable[..., None]:
    method = weakref.WeakMethod(loader)  # vLLM's reload bookkeeping must not keep the layer alive

    def load(param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
        check_plain_dtype(loaded_weight, f"{name}.weight")
        live = method()
        if live is None:
            raise RefitError(
                f"'{name}' was loaded after its model was deleted; restart the engine."
            )
        live(param, loaded_weight)

    return load

"""DeepGEMM: DeepSeek's FP8 kernels for Hopper, compiled when first used."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import torch

from fp8rl.gemm.backend import GemmShape, GroupedShape
from fp8rl.gemm.scaled_mm import groups_outermost
from fp8rl.numerics import GROUP, GroupedColumns, GroupedRows, Quantized, place_boundaries
from fp8rl.recipe import ScaleFormat

_HOPPER = (9, 0)
# Bytes. A matrix in a buffer of gradients may start elsewhere, behind a vector of an odd size.
_TMA_ALIGNMENT = 16
_FEATURES = 64  # as vLLM, so that both engines multiply a layer with the same library
_BY_ROWS = "m_grouped_fp8_gemm_nt_contiguous"
_BY_COLUMNS = "k_grouped_fp8_gemm_nt_contiguous"
_TILE_ROWS = "get_mk_alignment_for_contiguous_layout"


def load_deep_gemm() -> ModuleType:
    """Import the ``deep_gemm`` package, or else the copy that a vLLM wheel carries.

    The copy does not need vLLM, so it is loaded from its folder if vLLM is not loaded yet:
    importing vLLM would change settings of torch.

    Raises:
        ImportError: neither is installed, or it does not work here (no CUDA toolkit for its
            compiler).
    """
    if find_spec("deep_gemm") is not None:
        return import_module("deep_gemm")
    if "vllm" in sys.modules:
        return import_module("vllm.third_party.deep_gemm")
    name = "fp8rl.gemm._vendored_deep_gemm"
    if name in sys.modules:
        return sys.modules[name]
    vllm = find_spec("vllm")
    for place in (vllm.submodule_search_locations or ()) if vllm is not None else ():
        init = Path(place, "third_party", "deep_gemm", "__init__.py")
        if init.is_file():
            spec = spec_from_file_location(
                name, init, submodule_search_locations=[str(init.parent)]
            )
            assert spec is not None and spec.loader is not None
            module = sys.modules[name] = module_from_spec(spec)
            try:
                spec.loader.exec_module(module)
            except BaseException:
                del sys.modules[name]
                raise
            return module
    raise ImportError("neither deep_gemm nor a vLLM wheel that carries it is installed")


class DeepGemmBackend:
    """``fp8_gemm_nt``: blocks in fprop and dgrad, 1x128 groups on both sides in wgrad.

    Experts use ``m_grouped_fp8_gemm_nt_contiguous``, whose tiles each have the weight of one expert
    (:class:`fp8rl.numerics.ExpertRows`), and ``k_grouped_fp8_gemm_nt_contiguous``, which adds to a
    stack of float32 matrices and is compiled for each number of experts.

    Args:
        load: function that imports the library, called when support is first asked for.
    """

    name = "deep_gemm"

    def __init__(self, load: Callable[[], ModuleType] = load_deep_gemm) -> None:
        self._load = load

    @cached_property
    def _library(self) -> ModuleType | str:
        try:
            return self._load()
        # Its start looks for a CUDA toolkit and for headers: anything may be raised.
        except Exception as error:
            return f"cannot be imported ({type(error).__name__}: {error})"

    def supports(
        self, device: torch.device, shape: GemmShape, scale_format: ScaleFormat
    ) -> str | None:
        if device.type != "cuda":
            return "needs a GPU"
        if torch.cuda.get_device_capability(device) != _HOPPER:
            return "its use here is tested on Hopper alone"
        if shape.out_features % _FEATURES or shape.in_features % _FEATURES:
            return f"needs multiples of {_FEATURES} out and in features"
        if not shape.tokens:
            return "needs tokens"
        if shape.dtype != torch.bfloat16:
            return f"its kernels round to bfloat16, activations are {shape.dtype}"
        return self._library if isinstance(self._library, str) else None

    def fprop(self, a: Quantized, w: Quantized, dtype: torch.dtype) -> torch.Tensor:
        out = a.codes.new_empty(a.codes.shape[0], w.codes.shape[0], dtype=torch.bfloat16)
        assert dtype == out.dtype  # supports() came first
        self._call(_side(a), (w.codes, w.scale_inv.contiguous()), out)
        return out

    dgrad = fprop

    def wgrad(
        self, grad_t: Quantized, x_t: Quantized, dtype: torch.dtype, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        shape = (len(grad_t.codes), len(x_t.codes))
        # The kernel always adds to a float32 matrix.
        direct = out is not None and out.dtype == torch.float32 and _is_whole(out)
        total = out if direct else grad_t.scale_inv.new_zeros(shape)
        assert total is not None
        # Tokens are the inner dimension here: compiled in, as by default, each new number of them
        # would cost seconds.
        self._call(
            _side(grad_t), _side(x_t), total, c=total, recipe=(1, 1, GROUP), compiled_dims="mn"
        )
        if out is None:
            return total.to(dtype)
        return out if direct else out.add_(total)

    def supports_grouped(
        self, device: torch.device, shape: GroupedShape, scale_format: ScaleFormat
    ) -> str | None:
        if shape.out_features % GROUP or shape.in_features % GROUP:
            return f"needs multiples of {GROUP} out and in features of experts"
        alone = GemmShape(GROUP, shape.out_features, shape.in_features, shape.dtype)
        reason = self.supports(device, alone, scale_format)
        if reason is not None:
            return reason
        library = self._library
        for function in (_BY_ROWS, _BY_COLUMNS, _TILE_ROWS):
            if not hasattr(library, function):
                return f"this copy of the library has no {function}"
        alignment = getattr(library, _TILE_ROWS)()
        if GROUP % alignment:
            return f"its tiles were set to {alignment} rows, which may hold rows of two weights"
        return None

    def grouped_fprop(self, a: GroupedRows, w: Quantized, dtype: torch.dtype) -> torch.Tensor:
        rows, features = a.expert_rows.rows, w.codes.shape[1]
        out = torch.empty(rows, features, dtype=torch.bfloat16, device=a.codes.device)
        assert dtype == out.dtype  # supports_grouped() came first
        experts = a.expert_rows.experts(out.device)
        scaled = (a.codes, groups_outermost(a.scale_inv))
        getattr(self._library, _BY_ROWS)(
            scaled, (w.codes, w.scale_inv), out, experts, disable_ue8m0_cast=True
        )
        return place_boundaries(out, a.expert_rows)

    grouped_dgrad = grouped_fprop

    def grouped_wgrad(
        self,
        grad_t: GroupedColumns,
        x_t: GroupedColumns,
        dtype: torch.dtype,
        out: Sequence[torch.Tensor] | None = None,
    ) -> Sequence[torch.Tensor]:
        positions = len(x_t.expert_rows.order)
        m, n = grad_t.scale_inv.shape[1], x_t.scale_inv.shape[1]
        if out is not None and len(out) != positions:
            raise ValueError(
                f"There are {len(out)} gradients to add to for {positions} experts; give one for "
                "each position of the operands."
            )
        if out is None or out[0].dtype != torch.float32:
            total = x_t.scale_inv.new_zeros(positions, m, n)
            self._by_columns(grad_t, x_t, 0, total)
            if out is None:
                return total.to(dtype).unbind()
            for first, stack in _stacks(out):  # the host is slower with one for each expert
                stack.add_(total[first : first + len(stack)])
            return out
        for first, stack in _stacks(out):
            if len(stack) > 1:
                self._by_columns(grad_t, x_t, first, stack)
            elif x_t.expert_rows.column_sizes[first]:
                self.wgrad(grad_t.at(first), x_t.at(first), dtype, out[first])
        return out

    def _by_columns(
        self, a: GroupedColumns, b: GroupedColumns, first: int, total: torch.Tensor
    ) -> None:
        """Add the products at the positions from ``first`` on to ``total``, one for each matrix."""
        expert_rows, end = b.expert_rows, first + len(total)
        rows = expert_rows.column_starts[first], expert_rows.column_starts[end]
        if rows[0] == rows[1]:
            return
        groups = slice(expert_rows.group_starts[first], expert_rows.group_starts[end])

        def part(side: GroupedColumns) -> tuple[torch.Tensor, torch.Tensor]:
            features = side.scale_inv.shape[1]
            codes = side.codes[rows[0] * features : rows[1] * features]
            return codes, side.scale_inv[groups].t()

        sizes = expert_rows.column_sizes_on(total.device)[first:end]
        getattr(self._library, _BY_COLUMNS)(
            part(a), part(b), total, list(expert_rows.column_sizes[first:end]), sizes, total
        )

    def _call(self, a: tuple, b: tuple, out: torch.Tensor, **options: object) -> None:
        assert isinstance(self._library, ModuleType)  # supports() came first
        self._library.fp8_gemm_nt(a, b, out, disable_ue8m0_cast=True, **options)


def _side(operand: Quantized) -> tuple[torch.Tensor, torch.Tensor]:
    return operand.codes, groups_outermost(operand.scale_inv)


def _is_whole(matrix: torch.Tensor) -> bool:
    """Tell whether TMA can write to the matrix in place."""
    return matrix.is_contiguous() and matrix.data_ptr() % _TMA_ALIGNMENT == 0


def _stacks(matrices: Sequence[torch.Tensor]) -> list[tuple[int, torch.Tensor]]:
    """Find runs of whole matrices that follow each other in memory.

    Returns:
        The index of the first matrix of each run, and a view ``[matrices, rows, columns]`` of the
        run. A matrix that is not whole is a run by itself.
    """
    size, starts = matrices[0].numel() * matrices[0].element_size(), []
    end = limit = -1  # of the run so far, and of the storage that holds it
    for i, matrix in enumerate(matrices):
        start, whole = matrix.data_ptr(), _is_whole(matrix)
        if not whole or start != end or start + size > limit:
            starts.append(i)
            storage = matrix.untyped_storage()
            limit = storage.data_ptr() + storage.nbytes()
        end = start + size if whole else -1
    stacks = []
    for first, end in pairwise([*starts, len(matrices)]):
        matrix = matrices[first]
        shape, strides = (end - first, *matrix.shape), (matrix.numel(), *matrix.stride())
        stacks.append((first, matrix.as_strided(shape, strides)))
    return stacks

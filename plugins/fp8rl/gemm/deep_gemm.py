"""DeepGEMM: DeepSeek's FP8 kernels for Hopper, compiled when first used."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import torch

from fp8rl.gemm.backend import GemmShape
from fp8rl.gemm.scaled_mm import groups_outermost
from fp8rl.numerics import GROUP, Quantized
from fp8rl.recipe import ScaleFormat

_HOPPER = (9, 0)


def load_deep_gemm() -> ModuleType:
    """The ``deep_gemm`` package, or else the copy that a vLLM wheel carries.

    That copy is a library of its own, so it is loaded by its place on disk where vLLM itself is not
    loaded yet: importing vLLM would change settings of torch.

    Raises:
        ImportError: there is neither, or it does not work here (no CUDA toolkit for its compiler).
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

    Args:
        load: what imports the library, at the first question whether it serves a case.
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
        if shape.out_features % GROUP or shape.in_features % GROUP:
            return f"needs multiples of {GROUP} out and in features"
        if not shape.tokens:
            return "needs tokens"
        if shape.dtype != torch.bfloat16:
            return f"its kernels round to bfloat16, activations are {shape.dtype}"
        return self._library if isinstance(self._library, str) else None

    def fprop(self, x: Quantized, w: Quantized, dtype: torch.dtype) -> torch.Tensor:
        return self._by_blocks(x, w, dtype)

    def dgrad(self, grad: Quantized, w_t: Quantized, dtype: torch.dtype) -> torch.Tensor:
        return self._by_blocks(grad, w_t, dtype)

    def wgrad(
        self,
        grad_t: Quantized,
        x_t: Quantized,
        dtype: torch.dtype,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        shape = (len(grad_t.codes), len(x_t.codes))
        # The kernel always adds to a float32 matrix.
        direct = out is not None and out.dtype == torch.float32 and out.is_contiguous()
        total = out if direct else grad_t.scale_inv.new_zeros(shape)
        assert total is not None
        self._call(_side(grad_t), _side(x_t), total, c=total, recipe=(1, 1, GROUP))
        if out is None:
            return total.to(dtype)
        return out if direct else out.add_(total)

    def _by_blocks(self, a: Quantized, w: Quantized, dtype: torch.dtype) -> torch.Tensor:
        out = torch.empty(len(a.codes), len(w.codes), dtype=torch.bfloat16, device=a.codes.device)
        assert dtype == out.dtype  # supports() came first
        self._call(_side(a), (w.codes, w.scale_inv.contiguous()), out)
        return out

    def _call(self, a: tuple, b: tuple, out: torch.Tensor, **options: object) -> None:
        assert isinstance(self._library, ModuleType)  # supports() came first
        self._library.fp8_gemm_nt(a, b, out, disable_ue8m0_cast=True, **options)


def _side(operand: Quantized) -> tuple[torch.Tensor, torch.Tensor]:
    return operand.codes, groups_outermost(operand.scale_inv)

"""The reference backend against float64 products of the dequantized operands."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import pytest
import torch

from fp8rl.gemm import (
    DeepGemmBackend,
    GemmBackend,
    GemmShape,
    ReferenceBackend,
    builtin_backends,
)
from fp8rl.gemm.deep_gemm import load_deep_gemm
from fp8rl.numerics import Quantized, cdiv, quantize_block, quantize_group
from fp8rl.testing.numeric import relative_error

TOKENS, OUT, IN = 37, 200, 300


def exact_groups(q: Quantized) -> torch.Tensor:
    factors = q.scale_inv.double().repeat_interleave(128, 1)[:, : q.codes.shape[1]]
    return q.codes.double() * factors


def exact_blocks(q: Quantized) -> torch.Tensor:
    n, k = q.codes.shape
    factors = q.scale_inv.double().repeat_interleave(128, 0)[:n]
    return q.codes.double() * factors.repeat_interleave(128, 1)[:, :k]


def transposed(q: Quantized) -> Quantized:
    return Quantized(q.codes.t(), q.scale_inv.t())


@pytest.fixture
def tensors():
    g = torch.Generator().manual_seed(0)
    return {
        "x": torch.randn(TOKENS, IN, generator=g),
        "w": torch.randn(OUT, IN, generator=g) * 0.02,
        "grad": torch.randn(TOKENS, OUT, generator=g) * 1e-4,
    }


@pytest.mark.parametrize("scale_format", ["fp32", "pow2"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 4e-3)])
def test_three_products(tensors, dtype, tolerance, scale_format):
    backend = ReferenceBackend()
    x = quantize_group(tensors["x"], scale_format=scale_format)
    w = quantize_block(tensors["w"], scale_format=scale_format)
    grad = quantize_group(tensors["grad"], scale_format=scale_format)
    x_t = quantize_group(tensors["x"].t(), scale_format=scale_format)
    grad_t = quantize_group(tensors["grad"].t(), scale_format=scale_format)
    assert grad_t.scale_inv.shape == (OUT, cdiv(TOKENS, 128))
    for actual, expected in (
        (backend.fprop(x, w, dtype), exact_groups(x) @ exact_blocks(w).t()),
        (backend.dgrad(grad, transposed(w), dtype), exact_groups(grad) @ exact_blocks(w)),
        (backend.wgrad(grad_t, x_t, dtype), exact_groups(grad_t) @ exact_groups(x_t).t()),
    ):
        assert actual.dtype == dtype
        assert relative_error(actual, expected) < tolerance


def test_products_stay_near_the_unquantized_ones(tensors):
    """E4M3 keeps 4 significant bits: a product of two such operands is off by a few percent."""
    backend, (x, w, grad) = ReferenceBackend(), tensors.values()
    pairs = {
        "fprop": (backend.fprop(quantize_group(x), quantize_block(w), torch.float32), x @ w.t()),
        "dgrad": (
            backend.dgrad(quantize_group(grad), transposed(quantize_block(w)), torch.float32),
            grad @ w,
        ),
        "wgrad": (
            backend.wgrad(quantize_group(grad.t()), quantize_group(x.t()), torch.float32),
            grad.t() @ x,
        ),
    }
    for name, (actual, expected) in pairs.items():
        assert 1e-3 < relative_error(actual, expected) < 0.06, name


def test_reference_serves_every_case():
    backend = ReferenceBackend()
    assert isinstance(backend, GemmBackend)
    assert backend.name == "reference"
    assert backend.supports(torch.device("cpu"), GemmShape(1, 7, 3), "pow2") is None


@pytest.mark.parametrize(
    ("name", "capability", "shape", "reason"),
    [
        ("scaled_mm", (9, 0), GemmShape(8, 48, 64), None),
        ("scaled_mm", (9, 0), GemmShape(8, 40, 64), "multiples of 16"),
        ("scaled_mm", (9, 0), GemmShape(7, 48, 64), "multiple of 4 tokens"),
        ("scaled_mm", (10, 0), GemmShape(8, 48, 64), "Hopper alone, this GPU is sm_100"),
        ("deep_gemm", (9, 0), GemmShape(7, 128, 256), None),
        ("deep_gemm", (9, 0), GemmShape(7, 64, 256), "multiples of 128"),
        ("deep_gemm", (8, 9), GemmShape(7, 128, 256), "Hopper alone"),
        ("deep_gemm", (9, 0), GemmShape(7, 128, 256, torch.float32), "round to bfloat16"),
        ("triton", (8, 0), GemmShape(1, 3, 5), "sm_80 has no E4M3"),
    ],
)
def test_what_gpu_backends_serve(name, capability, shape, reason, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    library = ModuleType("deep_gemm")
    backends = {b.name: b for b in (*builtin_backends(), DeepGemmBackend(lambda: library))}
    if name == "triton":
        monkeypatch.setattr("fp8rl.gemm.triton_gemm.find_spec", lambda name: object())
    found = backends[name].supports(torch.device("cuda"), shape, "fp32")
    assert found is None if reason is None else reason in found


def test_a_library_that_does_not_start_is_a_reason(monkeypatch):
    def load() -> ModuleType:
        raise AssertionError("no CUDA toolkit")

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    backend = DeepGemmBackend(load)
    found = backend.supports(torch.device("cuda"), GemmShape(8, 128, 128), "fp32")
    assert found == "cannot be imported (AssertionError: no CUDA toolkit)"


def test_the_vendored_library_is_loaded_without_vllm(tmp_path, monkeypatch):
    folder = tmp_path / "vllm" / "third_party" / "deep_gemm"
    folder.mkdir(parents=True)
    (tmp_path / "vllm" / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (folder / "__init__.py").write_text("from . import inner\nvalue = inner.value\n")
    (folder / "inner.py").write_text("value = 7\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    for name in [n for n in sys.modules if n.partition(".")[0] in ("vllm", "deep_gemm")]:
        monkeypatch.delitem(sys.modules, name)
    importlib.invalidate_caches()
    assert load_deep_gemm().value == 7
    for name in [n for n in sys.modules if n.startswith("fp8rl.gemm._vendored")]:
        del sys.modules[name]  # for good: it is not the real one
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(ImportError, match="neither deep_gemm nor a vLLM wheel"):
        load_deep_gemm()

"""Products of the reference against float64, and which ones the backends of a GPU serve."""

from __future__ import annotations

import importlib
import re
import sys
from types import ModuleType

import pytest
import torch

from fp8rl.gemm import DeepGemmBackend, GemmShape, GroupedShape, ReferenceBackend, builtin_backends
from fp8rl.gemm.deep_gemm import load_deep_gemm
from support.gemm import product_error

GPU = torch.device("cuda")


@pytest.mark.parametrize("direction", ["fprop", "dgrad", "wgrad", "wgrad_add"])
@pytest.mark.parametrize(
    "shape",
    [
        GemmShape(300, 136, 200),
        GemmShape(1, 16, 520, torch.float32),
        GroupedShape((130, 0, 5), 136, 200),
    ],
    ids=str,
)
def test_products_of_dequantized_operands(shape, direction):
    assert product_error(ReferenceBackend(), direction, shape, torch.device("cpu")) < 1e-2


def test_a_wrong_product_is_found():
    class Overwrites(ReferenceBackend):
        def wgrad(self, grad_t, x_t, dtype, out=None):
            product = super().wgrad(grad_t, x_t, dtype)
            return product if out is None else out.copy_(product)

    backend, shape = Overwrites(), GemmShape(300, 136, 200)
    assert not product_error(backend, "wgrad_add", shape, torch.device("cpu")) < 1e-2


@pytest.mark.parametrize(
    ("name", "capability", "shape", "reason"),
    [
        ("scaled_mm", (9, 0), GemmShape(8, 48, 64), None),
        ("scaled_mm", (9, 0), GemmShape(8, 40, 64), "multiples of 16"),
        ("scaled_mm", (9, 0), GemmShape(7, 48, 64), "multiple of 4 tokens"),
        ("scaled_mm", (10, 0), GemmShape(8, 48, 64), "Hopper alone, this GPU is sm_100"),
        ("deep_gemm", (9, 0), GemmShape(7, 960, 576), None),
        ("deep_gemm", (9, 0), GemmShape(7, 128, 96), "multiples of 64"),
        ("deep_gemm", (9, 0), GroupedShape((7,), 128, 576), "multiples of 128 out .* of experts"),
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
    grouped = isinstance(shape, GroupedShape)
    supports = backends[name].supports_grouped if grouped else backends[name].supports
    found = supports(GPU, shape, "fp32")
    assert found is None if reason is None else re.search(reason, found)


def test_a_library_that_does_not_start_is_a_reason(monkeypatch):
    def load() -> ModuleType:
        raise AssertionError("no CUDA toolkit")

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    found = DeepGemmBackend(load).supports(GPU, GemmShape(8, 128, 128), "fp32")
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

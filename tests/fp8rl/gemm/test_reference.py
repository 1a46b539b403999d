"""Products of the reference against float64, and which ones the backends of a GPU serve."""

from __future__ import annotations

import re
from types import ModuleType

import pytest
import torch

from fp8rl.gemm import DeepGemmBackend, GemmShape, GroupedShape, ReferenceBackend, builtin_backends
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

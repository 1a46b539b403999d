"""BF16 products in float32: against float64, and what they leave alone."""

from __future__ import annotations

import pytest
import torch

from fp8rl_demo import products as module
from fp8rl_demo.products import float32_products


@pytest.fixture(autouse=True)
def without_avx512(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """An entry for each product that is ours: torch's own may round alike."""
    made: list[int] = []
    wide = module._wide
    monkeypatch.setattr(module, "_wide", lambda *x: made.append(len(x)) or wide(*x))
    return made


def operands(dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(0)
    shapes = ((3, 5, 64), (3, 64, 7), (3, 5, 7))
    return tuple(torch.randn(shape, generator=g).to(dtype) for shape in shapes)


def products(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> list[torch.Tensor]:
    return [
        a[0] @ b[0],
        a[0].T.contiguous().T @ b[0],
        torch.bmm(a, b),
        torch.addmm(c[0], a[0], b[0], beta=0.5, alpha=2.0),
        torch.addmm(c[0, 0], a[0], b[0]),
        torch.baddbmm(c, a, b, beta=0.5, alpha=2.0),
        torch.nn.functional.linear(a, b[0].T, c[0, 0]),
        a[:0, 0] @ b[0],
    ]


def test_a_product_is_rounded_once(calls: list[int]):
    exact = products(*(x.double() for x in operands()))
    with float32_products():
        found = products(*operands())
    assert calls == [2, 2, 2, 3, 3, 3, 3, 2]  # operands: mm, mm, bmm, addmm, addmm, baddbmm, ..
    for x, y in zip(found, exact, strict=True):
        assert x.dtype == torch.bfloat16 and x.shape == y.shape
        # At most one value next to the middle of two falls to the other one by float32's sums.
        off = x != y.bfloat16()
        assert off.sum() <= 1
        assert torch.allclose(x.double(), y, rtol=2**-8, atol=1e-4)


@pytest.mark.parametrize(("machine", "has"), [("x86_64", "AVX512"), ("aarch64", "DEFAULT")])
def test_other_cpus_keep_their_products(
    monkeypatch: pytest.MonkeyPatch, calls: list[int], machine: str, has: str
):
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: has)
    with float32_products():
        products(*operands())
    assert not calls

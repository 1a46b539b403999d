"""Which backend serves which product: the table, plugins, and the one named for all."""

from __future__ import annotations

import pytest
import torch

from fp8rl.errors import UnsupportedError
from fp8rl.gemm import BackendChoice, GemmShape, GroupedShape, ReferenceBackend, builtin_backends
from fp8rl.gemm.table import DIRECTIONS

CPU, GPU = torch.device("cpu"), torch.device("cuda")
SHAPE = GemmShape(8, 16, 32)
EXPERTS = GroupedShape((128, 0, 256), 256, 128)
HOPPER = (9, 0)


class _Ready(ReferenceBackend):
    """A backend that serves everything, under another name."""

    def __init__(self, name: str) -> None:
        self.name = name


class _Single:
    """A backend without grouped products."""

    def __init__(self, name: str = "single") -> None:
        self.name = name

    def supports(self, *args):
        return None

    fprop = dgrad = wgrad = ReferenceBackend.fprop


def _choice(*backends, **options) -> BackendChoice:
    return BackendChoice({b.name: b for b in backends}, ["fp32"], **options)


def _on(monkeypatch, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)


def _picked(choice: BackendChoice, *, grouped: bool = False) -> list[str]:
    if grouped:
        return [choice.pick_grouped(GPU, EXPERTS, "m", d).name for d in DIRECTIONS]
    return [choice.pick(GPU, SHAPE, "m", d).name for d in DIRECTIONS]


def test_hopper_follows_what_was_measured(monkeypatch):
    _on(monkeypatch, HOPPER)
    names = ("reference", "triton", "scaled_mm", "deep_gemm")
    choice = _choice(*map(_Ready, names))
    assert _picked(choice) == ["deep_gemm", "deep_gemm", "scaled_mm", "deep_gemm"]
    assert _picked(choice, grouped=True) == ["deep_gemm"] * 4
    assert _picked(_choice(*map(_Ready, names[:3]))) == ["scaled_mm"] * 4
    assert _picked(_choice(*map(_Ready, names[:2]))) == ["triton"] * 4


@pytest.mark.parametrize("capability", [(8, 9), (10, 0)])
def test_other_gpus_have_triton(monkeypatch, capability):
    _on(monkeypatch, capability)
    choice = _choice(*map(_Ready, ("reference", "triton", "scaled_mm", "deep_gemm")))
    assert _picked(choice) == ["triton"] * 4
    with pytest.raises(UnsupportedError, match=r"triton: has no grouped.*\. Build the model"):
        _choice(_Single("triton")).pick_grouped(GPU, EXPERTS, "m")


def test_plugins_come_before_the_built_in_ones():
    choice = _choice(*builtin_backends(), _Ready("own"))
    assert choice.names == ["own", "deep_gemm", "scaled_mm", "triton", "reference"]
    assert choice.pick(CPU, SHAPE, "m").name == "own"
    assert _choice(*builtin_backends()).pick(CPU, SHAPE, "m").name == "reference"
    choice = _choice(*builtin_backends(), _Single())  # leaves experts to the table
    assert choice.pick(CPU, SHAPE, "m").name == "single"
    assert choice.pick_grouped(CPU, EXPERTS, "m").name == "reference"


def test_one_name_decides_for_every_product(monkeypatch):
    _on(monkeypatch, HOPPER)
    backends = [_Ready("deep_gemm"), _Ready("own"), _Ready("triton"), _Single()]
    named = _choice(*backends, name="triton")
    assert named.names == ["triton"]
    assert _picked(named) == _picked(named, grouped=True) == ["triton"] * 4
    with pytest.raises(UnsupportedError, match=r"serves 'm'.*single: has no grouped products"):
        _choice(*backends, name="single").pick_grouped(GPU, EXPERTS, "m")
    with pytest.raises(UnsupportedError, match=r"no GEMM backend 'other'.*deep_gemm, own, single"):
        _choice(*backends, name="other")
    with pytest.raises(UnsupportedError, match="deep_gemm: not offered; scaled_mm: not offered"):
        _choice(ReferenceBackend()).pick(GPU, SHAPE, "m")
    assert _picked(_choice(ReferenceBackend(), name="reference")) == ["reference"] * 4

"""Which backend serves which product: the fixed order, and one that was measured."""

from __future__ import annotations

import time

import pytest
import torch

from fp8rl.errors import UnsupportedError
from fp8rl.gemm import GemmShape, GroupedShape, ReferenceBackend, builtin_backends
from megatron_fp8rl.backends import BackendChoice, survey

CPU = torch.device("cpu")
SHAPE = GemmShape(8, 16, 32)


class _Slow(ReferenceBackend):
    """Late by ``seconds[direction]`` in each product."""

    def __init__(self, name: str, **seconds: float) -> None:
        self.name, self._seconds = name, seconds

    def fprop(self, *args):
        time.sleep(self._seconds.get("fprop", 0))
        return super().fprop(*args)

    def dgrad(self, *args):
        time.sleep(self._seconds.get("dgrad", 0))
        return super().dgrad(*args)

    def wgrad(self, *args):
        time.sleep(self._seconds.get("wgrad", 0))
        return super().wgrad(*args)


def _choice(*backends) -> BackendChoice:
    return BackendChoice({b.name: b for b in (*builtin_backends(), *backends)}, ["fp32"])


def test_plugins_come_before_the_built_in_ones():
    assert _choice(_Slow("own")).names == ["own", "deep_gemm", "scaled_mm", "triton", "reference"]
    assert _choice().pick(CPU, SHAPE, "m").name == "reference"


def test_tuning_orders_each_direction_by_its_own_times():
    choice = _choice(_Slow("a", fprop=0.02), _Slow("b", wgrad=0.02, dgrad=0.02))
    assert choice.pick(CPU, SHAPE, "m", "fprop").name == "a"
    choice.tune([SHAPE], CPU)
    picked = {d: choice.pick(CPU, SHAPE, "m", d).name for d in ("fprop", "dgrad", "wgrad")}
    assert picked["fprop"] in ("b", "reference")
    assert picked["dgrad"] in ("a", "reference") and picked["wgrad"] in ("a", "reference")
    times = choice.timings["fprop"][SHAPE]
    assert set(times) == {"a", "b", "reference"} and times["a"] > 15 > times["b"]
    # Another size of the same token bucket shares the order, another bucket does not.
    assert choice.pick(CPU, GemmShape(12, 16, 32), "m").name != "a"
    assert choice.pick(CPU, GemmShape(200, 16, 32), "m").name == "a"


def test_a_settled_shape_asks_nobody_and_each_shape_is_asked_about(monkeypatch):
    asked = []

    class Even(ReferenceBackend):
        name = "even"

        def supports(self, device, shape, scale_format):
            asked.append(shape.tokens)
            return "needs an even number of tokens" if shape.tokens % 2 else None

    choice = _choice(Even())
    odd = SHAPE._replace(tokens=9)  # of the same bucket
    for _ in range(3):
        assert choice.pick(CPU, SHAPE, "m").name == "even"
        assert choice.pick(CPU, odd, "m").name == "reference"
        assert asked == [8, 8, 9, 9]  # again after its product was checked
    monkeypatch.setattr("megatron_fp8rl.backends._REMEMBERED", 2)
    assert choice.pick(CPU, SHAPE._replace(tokens=10), "m").name == "even"
    assert choice.pick(CPU, SHAPE, "m").name == "even"
    assert asked[4:] == [10, 8]


def test_equally_fast_backends_stay_in_the_order_of_preference():
    backends = [_Slow("z", fprop=0.0504), _Slow("a", fprop=0.05), _Slow("c", fprop=0.1)]
    choice = BackendChoice({b.name: b for b in backends}, ["fp32"])
    choice.tune([SHAPE], CPU)
    assert choice.timings["fprop"][SHAPE].keys() == {"z", "a", "c"}
    assert choice.pick(CPU, SHAPE, "m", "fprop").name == "z"


class _Broken(ReferenceBackend):
    name = "broken"

    def fprop(self, *args):
        raise RuntimeError("no kernel image")


def test_a_backend_that_fails_while_it_is_timed_is_not_chosen(caplog):
    choice = _choice(_Broken())
    choice.tune([SHAPE], CPU)
    assert choice.pick(CPU, SHAPE, "m", "fprop").name == "reference"
    assert set(choice.timings["fprop"][SHAPE]) == {"reference"}
    assert "'broken' failed while it was timed: no kernel image" in caplog.text


class _Wrong:
    """Not a subclass of the reference, which is not checked."""

    name = "wrong"

    def __init__(self) -> None:
        self._right, self.calls = ReferenceBackend(), 0

    def supports(self, *args):
        return None

    def fprop(self, *args):
        self.calls += 1
        return self._right.fprop(*args) * 1.05

    def dgrad(self, *args):
        return self._right.dgrad(*args)

    def wgrad(self, *args):
        return self._right.wgrad(*args)


def test_a_backend_whose_product_is_wrong_is_found_at_its_first_pick(caplog):
    wrong = _Wrong()
    choice = _choice(wrong)
    for _ in range(2):
        assert choice.pick(CPU, SHAPE, "m", "fprop").name == "reference"
        assert choice.pick(CPU, SHAPE, "m", "dgrad").name == "wrong"
    assert wrong.calls == 1
    (record,) = caplog.records
    assert record.levelname == "ERROR"
    assert "fprop of 8 x 16 x 32 by GEMM backend 'wrong' is not used" in record.getMessage()
    choice.tune([SHAPE], CPU)
    assert wrong.calls == 1 and "wrong" in choice.timings["dgrad"][SHAPE]
    assert choice.pick(CPU, SHAPE, "m", "fprop").name == "reference"

    named = BackendChoice({"wrong": wrong}, ["fp32"], "wrong")
    with pytest.raises(UnsupportedError, match=r"wrong: its product was off by 0\.05"):
        named.pick(CPU, SHAPE, "m", "fprop")
    assert named.pick(CPU, SHAPE, "m", "wgrad").name == "wrong"


def test_experts_in_a_loop_over_a_wrong_backend_are_found():
    shape = GroupedShape((5, 0, 7), 16, 32)
    choice = _choice(_Wrong())
    assert choice.pick_grouped(CPU, shape, "m", "fprop").name == "reference loop"
    assert choice.pick_grouped(CPU, shape, "m", "dgrad").name == "wrong loop"


def test_without_memory_for_a_check_a_backend_is_used_unchecked(caplog, monkeypatch):
    def no_room(*args):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr("megatron_fp8rl.backends.fault", no_room)
    assert _choice(_Wrong()).pick(CPU, SHAPE, "m", "fprop").name == "wrong"
    assert "is used unchecked" in caplog.text


def test_the_gpu_backends_say_why_they_do_not_serve_a_cpu():
    named = BackendChoice({b.name: b for b in builtin_backends()}, ["fp32"], "scaled_mm")
    with pytest.raises(UnsupportedError, match=r"serves 'm'.*scaled_mm: needs a GPU"):
        named.pick(CPU, SHAPE, "m")


def test_doctor_lists_every_backend_and_why_it_does_not_serve_here():
    facts = survey({b.name: b for b in (*builtin_backends(), _Slow("own"))})
    listed = facts["GEMM backends"].split("; ")
    assert {"reference: ready", "own: ready"} <= set(listed)
    if not torch.cuda.is_available():
        assert "scaled_mm: needs a GPU" in listed
        experts = facts.pop("GEMM backends for experts at once")
        assert experts == "deep_gemm: needs a GPU; one after the other: every backend"
        assert list(facts) == ["GEMM backends"]


def test_measuring_leaves_the_random_state_alone():
    before = torch.get_rng_state()
    _choice(_Slow("a")).tune([SHAPE], CPU)
    assert torch.equal(torch.get_rng_state(), before)

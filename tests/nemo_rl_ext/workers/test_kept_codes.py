"""When the trainer keeps weight codes over a call: by the memory that a device has written down."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

pytest.importorskip("megatron.core")

from megatron_fp8rl.testing.models import build_gpt
from nemo_rl_ext.workers.kept_codes import GROWTH, GROWTH_WITH_EXPERTS, DeviceMemory, KeptCodes
from nemo_rl_ext.workers.training import kept_codes_of
from support.megatron import convert_alone, dense, moe, one_process, pinned

WEIGHTS, SIZE = 300_000, 10_000_000


class Caller(DeviceMemory):
    """A GPU whose numbers are set by hand, and calls on it that need what they are told to."""

    def __init__(self, size: int = SIZE, *, experts: bool = False) -> None:
        self.size, self.taken, self.most, self.keep = size, 0, 0, False
        self.kept_codes = KeptCodes(self.keeping, WEIGHTS, experts=experts, memory=self)

    def total(self) -> int:
        return self.size

    def allocated(self) -> int:
        return self.taken

    def available(self) -> int:
        return self.size - self.taken

    def peak(self) -> int:
        return self.most

    def reset_peak(self) -> None:
        self.most = self.taken

    def take(self, count: int) -> None:
        self.taken += count
        self.most = max(self.most, self.taken)

    @contextmanager
    def keeping(self) -> Iterator[None]:
        self.keep = True
        try:
            yield
        finally:
            self.keep = False

    def call(
        self, growth: int, *, backward: bool = True, lasting: int = 0, fails: bool = False
    ) -> bool:
        """Return whether codes were kept."""
        kept = []

        def run() -> None:
            kept.append(self.keep)
            codes = WEIGHTS * (2 if backward else 1) * self.keep
            self.take(codes + growth)
            self.take(lasting - codes - growth)
            if fails:
                raise MemoryError

        try:
            self.kept_codes.during("train", run, tokens=100, backward=backward)
        except MemoryError:
            assert fails
        assert not self.keep
        return kept.pop()


@pytest.mark.parametrize(
    ("experts", "backward", "room"),
    [(False, True, 4_400_000), (False, False, 4_400_000), (True, False, 5_000_000)],
)
@pytest.mark.parametrize("missing", [0, 1])
def test_codes_are_kept_where_they_fit_beside_what_a_call_has_needed(
    experts: bool, backward: bool, room: int, missing: int
) -> None:
    caller = Caller(experts=experts)
    assert not caller.call(4_000_000, backward=backward), "nobody knows yet what it needs"
    # 1.1 times what it needed, or 1.25, and a twentieth of the device.
    caller.take(SIZE - WEIGHTS * (2 if backward else 1) - room - 500_000 + missing)
    assert caller.call(4_000_000, backward=backward) == (not missing)


def test_weights_in_fp8_are_counted_and_more_is_left_where_a_model_has_experts() -> None:
    """Also where none of the experts is in FP8."""
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1}
    attention = 2 * ((128 + 2 * 128) * 128 + 128 * 128)  # two layers of q, k, v; o
    with one_process() as shim, shim.active():
        conversion = convert_alone(build_gpt(dense(**heads)))
        found = kept_codes_of(conversion)
        mlp = 2 * (2 * 256 * 128 + 128 * 256)
        assert (found._weights, found._growth) == (attention + mlp, GROWTH)
        conversion = convert_alone(build_gpt(moe(2, **heads)), pinned(names=("*.experts.*",)))
        found = kept_codes_of(conversion)
        assert (found._weights, found._growth) == (attention, GROWTH_WITH_EXPERTS)


def test_what_kept_codes_take_is_not_what_a_call_needs() -> None:
    """Counted twice they would not fit the third time."""
    caller = Caller(size=7 * WEIGHTS)
    assert [caller.call(3 * WEIGHTS) for _ in range(5)] == [False, True, True, True, True]


def test_a_call_that_makes_state_which_lasts_is_no_measure() -> None:
    """The first optimizer step makes its moments: they are there before the second call."""
    caller = Caller()
    assert not caller.call(6_000_000, lasting=5_000_000)
    assert not caller.call(1_000_000)
    assert caller.call(1_000_000)


def test_a_call_that_fails_is_no_measure() -> None:
    caller = Caller()
    for expected in (False, True):
        assert caller.call(1_000_000, fails=True) is expected
        assert caller.call(1_000_000) is expected

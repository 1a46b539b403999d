"""When the trainer keeps weight codes over a call: by the memory that a device has written down."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("megatron.core")

from fp8rl.training.weight_codes import WeightEpoch
from megatron_fp8rl.conversion import Conversion
from megatron_fp8rl.testing.models import build_gpt
from nemo_rl_ext.workers.kept_codes import DeviceMemory
from nemo_rl_ext.workers.training import kept_codes_of
from support.megatron import convert_alone, dense, moe, one_process, pinned

CODES = 2 * ((128 + 2 * 128) * 128 + 128 * 128 + 2 * 256 * 128 + 128 * 256)
"""Bytes of one side: two layers of q, k, v; o; gate, up; down, with one head of 128."""
SIZE = 10_000_000


class Device(DeviceMemory):
    """Stands in for a GPU, which tests on a CPU do not have: the numbers are set by hand."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.taken = self.codes = self.most = 0
        self.epoch: WeightEpoch | None = None

    def total(self) -> int:
        return self.size

    def allocated(self) -> int:
        kept = self.epoch is not None and self.epoch.keep
        return self.taken + (self.codes if kept else 0)

    def available(self) -> int:
        return self.size - self.allocated()

    def peak(self) -> int:
        return self.most

    def reset_peak(self) -> None:
        self.most = self.allocated()

    def take(self, count: int) -> None:
        self.taken += count
        self.most = max(self.most, self.allocated())

    def use(self, count: int) -> None:
        """Take memory and give it back."""
        self.take(count)
        self.take(-count)


@pytest.fixture
def conversion() -> Iterator[Conversion]:
    with one_process() as shim, shim.active():
        config = dense(num_attention_heads=1, num_key_value_heads=1)
        yield convert_alone(build_gpt(config))


class Caller:
    """Calls that need what they are told to, over codes whose memory the device counts."""

    def __init__(self, conversion: Conversion, size: int = SIZE) -> None:
        self.device = Device(size)
        self.kept_codes = kept_codes_of(conversion, self.device)
        modules: list[Any] = list(conversion.modules.values())
        (self.epoch,) = {module.fp8_setup.epoch for module in modules}
        self.device.epoch = self.epoch

    def call(
        self,
        growth: int,
        *,
        kind: str = "train",
        tokens: int = 100,
        backward: bool = True,
        lasting: int = 0,
    ) -> bool:
        """Return whether codes were kept."""

        def run() -> bool:
            if self.epoch.keep:
                self.device.codes = CODES * (2 if backward else 1)
            self.device.use(growth)
            self.device.take(lasting)
            return self.epoch.keep

        kept = self.kept_codes.during(kind, run, tokens=tokens, backward=backward)
        assert not self.epoch.keep
        return kept


@pytest.mark.parametrize("room", [4_600_000, 5_100_000])
def test_more_room_is_left_where_the_model_has_experts(room: int) -> None:
    """Also where none of them is in FP8: 1.1 times what a call needed is not enough."""
    with one_process() as shim, shim.active():
        config = moe(2, num_attention_heads=1, num_key_value_heads=1)
        conversion = convert_alone(build_gpt(config), pinned(names=("*.experts.*",)))
        caller = Caller(conversion)
        assert not caller.call(4_000_000, backward=False)
        codes = 2 * ((128 + 2 * 128) * 128 + 128 * 128)  # attention of two layers
        caller.device.take(SIZE - codes - 500_000 - room)
        assert caller.call(4_000_000, backward=False) == (room > 1.25 * 4_000_000)


@pytest.mark.parametrize("backward", [True, False])
@pytest.mark.parametrize("missing", [0, 1])
def test_codes_are_kept_where_they_fit_beside_what_a_call_has_needed(
    conversion: Conversion, backward: bool, missing: int
) -> None:
    caller = Caller(conversion)
    codes = 2 * CODES if backward else CODES
    assert not caller.call(4_000_000, backward=backward), "nobody knows yet what it needs"
    # 1.1 times what it needed, and a twentieth of the device.
    caller.device.take(SIZE - codes - 4_400_000 - 500_000 + missing)
    assert caller.call(4_000_000, backward=backward) == (not missing)


def test_what_kept_codes_take_is_not_what_a_call_needs(conversion: Conversion) -> None:
    """Counted twice they would not fit the third time."""
    caller = Caller(conversion, size=8 * CODES)
    assert [caller.call(3 * CODES) for _ in range(5)] == [False, True, True, True, True]


def test_a_call_that_makes_state_which_lasts_is_no_measure(conversion: Conversion) -> None:
    """The first optimizer step makes its moments: they are there before the second call."""
    caller = Caller(conversion)
    assert not caller.call(6_000_000, lasting=5_000_000)
    assert not caller.call(1_000_000)
    assert caller.call(1_000_000)


def test_a_call_that_fails_is_no_measure(conversion: Conversion) -> None:
    caller = Caller(conversion)
    kept: list[bool] = []

    def fail() -> None:
        kept.append(caller.epoch.keep)
        raise MemoryError

    for expected in (False, True):
        with pytest.raises(MemoryError):
            caller.kept_codes.during("train", fail, tokens=100, backward=True)
        assert kept.pop() is expected and not caller.epoch.keep
        assert caller.call(1_000_000) is expected

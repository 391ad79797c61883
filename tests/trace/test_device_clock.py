"""The time line of a GPU, on a virtual one: distances between events become times of the host."""

from __future__ import annotations

import contextlib
import struct
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.dpp.trace import clock
from megatron.dpp.trace.clock import DeviceClock, HostClock, clock_for


def as_float32(number: float) -> float:
    found: float = struct.unpack("f", struct.pack("f", number))[0]
    return found


class Gpu:
    """A device whose oscillator runs ``rate`` times as fast as the host's; both count ns."""

    def __init__(self, patch: pytest.MonkeyPatch, rate: float = 1.0) -> None:
        self.now, self.rate, self.behind = 1000, rate, 0
        self.delays = [0]
        cuda = SimpleNamespace(
            Event=self._event, device=lambda _: contextlib.nullcontext(),
            synchronize=lambda: None, max_memory_allocated=lambda device: 77,
        )  # fmt: skip
        patch.setattr(torch, "cuda", cuda)
        patch.setattr(clock, "time", SimpleNamespace(monotonic_ns=lambda: self.now))

    def _event(self, enable_timing: bool) -> Any:
        assert enable_timing
        event = SimpleNamespace(at=-1)

        def record() -> None:
            event.at = self.now + self.behind

        def synchronize() -> None:
            self.now += self.delays.pop(0) if len(self.delays) > 1 else self.delays[0]

        event.record, event.synchronize = record, synchronize
        event.query = lambda: self.now >= event.at
        event.elapsed_time = lambda other: as_float32((other.at - event.at) * self.rate / 1e6)
        return event


def test_a_mark_is_known_when_the_device_has_passed_it(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(monkeypatch)
    made = DeviceClock("cuda:0")
    gpu.now, gpu.behind = 5000, 300
    first, second = made.mark(), made.mark()
    assert first is not None and second is not None and first[0] is not second[0]
    assert made.resolve(first) is None
    gpu.now = 5299
    assert made.resolve(first) is None
    gpu.now = 9000
    assert made.resolve(first) == 5300
    assert made.peak_memory() == 77


def test_the_tightest_of_several_tries_ties_the_device_to_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The event lies within the try; the middle of the shortest one is taken."""
    gpu = Gpu(monkeypatch)
    gpu.delays = [900, 500, 40, 700, 100]
    made = DeviceClock("cuda")
    recorded = gpu.now
    mark = made.mark()
    gpu.now += 100
    assert mark is not None and made.resolve(mark) == recorded + 40 // 2


@pytest.mark.parametrize("rate", [1.001, 0.999])
def test_an_event_is_no_earlier_than_its_record_and_no_later_than_it_was_seen(
    rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two oscillators drift apart; what one event corrects holds for those after it."""
    gpu = Gpu(monkeypatch, rate)
    made = DeviceClock("cuda")
    for _ in range(3):
        gpu.now += 1_000_000_000
        before = gpu.now
        mark = made.mark()
        gpu.now += 10
        assert mark is not None
        found = made.resolve(mark)
        assert found == (before if rate < 1 else gpu.now)


def test_distances_are_chained_through_a_base_that_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """A float of 32 bits loses 1000 ns beyond ten seconds. No event is in use twice."""
    gpu = Gpu(monkeypatch)
    made = DeviceClock("cuda")
    for _ in range(40):
        gpu.now, gpu.behind = gpu.now + 500_000_000, 3000
        at = gpu.now + gpu.behind
        mark, later = made.mark(), made.mark()
        assert mark is not None and later is not None and mark[0] is not later[0]
        gpu.now += 10_000
        for each in (mark, later):
            found = made.resolve(each)
            assert found is not None and abs(found - at) <= 500


def test_a_mark_is_none_while_all_events_are_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    Gpu(monkeypatch)
    made = DeviceClock("cuda")
    marks = [made.mark() for _ in range(1 << 14)]
    one, two = marks[-2:]
    assert one is not None and two is not None and made.mark() is None
    made.discard(one)
    again = made.mark()
    assert again is not None and again[0] is one[0] and made.mark() is None
    assert made.resolve(two) is not None
    assert made.mark() is not None


def test_the_host_counts_bytes_and_gives_its_marks_back() -> None:
    own = clock_for("cpu")
    assert isinstance(own, HostClock)
    assert 1 << 20 < own.peak_memory() < 1 << 44
    assert own.resolve(own.mark()) > 0

"""Timers: learning from changing durations, and prolonged tasks, on a made-up clock."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.dpp.runtime.timer import DeviceTimer, HostTimer, timer_for

KEY, OTHER = ("F", 0), ("B", 0)


class Device:
    """A device that works through a queue; ``now`` is the time of host and device."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.free_at = 0.0
        self.rate = 1e9
        """Cycles per second."""
        self.sleeps: list[int] = []
        self.events = 0

    def queue(self, seconds: float) -> None:
        self.free_at = max(self.free_at, self.now) + seconds

    def sleep_cycles(self, cycles: int) -> None:
        self.sleeps.append(cycles)
        self.queue(cycles / self.rate)

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()

    class Event:
        at = 0.0

        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing
            made.events += 1

        def record(self) -> None:
            self.at = max(made.free_at, made.now)

        def query(self) -> bool:
            return made.now >= self.at

        def synchronize(self) -> None:
            made.now = max(made.now, self.at)

        def elapsed_time(self, end: Any) -> float:
            return float(end.at - self.at) * 1e3

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", made.sleep_cycles)
    clock = SimpleNamespace(monotonic=lambda: made.now, sleep=made.sleep)
    monkeypatch.setattr("megatron.dpp.runtime.timer.time", clock)
    return made


def task(
    device: Device, timer: Any, seconds: float, key: tuple[str, int] = KEY,
    prolong: tuple[float, float] | None = None,
) -> None:  # fmt: skip
    """One task on an idle device, until it is over."""
    timer.begin()
    device.queue(seconds)
    if prolong:
        timer.prolong(key, *prolong)
    timer.launched(key)
    device.now = max(device.now, device.free_at) + 1.0
    timer.pause()


def test_a_duration_follows_changes_by_a_quarter(device: Device) -> None:
    timer = DeviceTimer(None)
    for seconds, expected in ((4.0, 4.0), (8.0, 5.0), (1.0, 4.0), (4.0, 4.0)):
        task(device, timer, seconds)
        assert timer.durations == {KEY: pytest.approx(expected)}
    task(device, timer, 16.0, OTHER)
    assert timer.durations == {KEY: pytest.approx(4.0), OTHER: pytest.approx(16.0)}


def test_the_share_of_launching_is_of_the_shortest_times(device: Device) -> None:
    """The first ones include initialisation, and later ones are disturbed."""
    timer = DeviceTimer(None)
    for launch, seconds in ((9.0, 9.0), (1.0, 4.0), (3.0, 6.0)):
        timer.begin()
        device.queue(seconds)
        device.now += launch
        timer.launched(KEY)
        device.now += 20.0
        timer.pause()
    assert timer.launch_share([0]) == pytest.approx(1 / 4)


def test_tasks_of_all_durations_use_few_events(device: Device) -> None:
    timer = DeviceTimer(None)
    for number in range(20):
        task(device, timer, 1.0 + number % 3, prolong=(1.0, 0.5))
    assert device.events <= 5


def test_a_follower_never_waits_and_learns_all_the_same(device: Device) -> None:
    """It launches what its leader decided, and its first look is at the next launch."""
    leader, follower = DeviceTimer(0.0), DeviceTimer(0.0, follow=True)
    for timer, waits in ((leader, True), (follower, False)):
        timer.begin()
        device.queue(3.0)
        timer.launched(KEY)
        device.now += 10.0
        timer.begin()
        device.queue(3.0)
        timer.launched(KEY)
        assert timer.durations == ({} if waits else {KEY: pytest.approx(3.0)})
        assert (timer.pause() > 0.0) == waits
        device.now += 10.0


def test_a_task_is_prolonged_by_a_factor_of_its_shortest_time(device: Device) -> None:
    """Its own time is learned without the delay."""
    timer = DeviceTimer(None)
    task(device, timer, 2.0, prolong=(3.0, 0.0))
    assert not device.sleeps, "its own time is not known yet"
    task(device, timer, 4.0, prolong=(1.5, 0.25))
    calibration, delay = device.sleeps
    assert calibration == 20_000_000 and delay == pytest.approx(1.25 * device.rate)
    assert timer.injected_seconds == pytest.approx(1.25)
    calibrated = 0.25 * calibration / device.rate  # falls into the task, once
    assert timer.durations[KEY] == pytest.approx(2.5 + calibrated)
    task(device, timer, 2.0, prolong=(1.25, 0.0))  # of 2.0, while the mean is longer
    assert len(device.sleeps) == 3, "the clock is measured once"
    assert timer.injected_seconds == pytest.approx(1.75)
    task(device, timer, 2.0, prolong=(1.0, 0.0))
    task(device, timer, 2.0)
    assert len(device.sleeps) == 3
    assert timer.injected_seconds == pytest.approx(1.75)


def test_the_next_task_is_chosen_after_the_delay_too(device: Device) -> None:
    timer = DeviceTimer(0.25)
    task(device, timer, 1.0)
    task(device, timer, 1.0, OTHER, prolong=(1.0, 1e-6))  # measures the clock
    timer.begin()
    device.queue(1.0)
    timer.prolong(KEY, 1.0, 2.0)
    timer.launched(KEY)
    assert timer.pause() == pytest.approx(2.75)
    device.now += 2.5
    assert timer.pause() == pytest.approx(0.25)
    device.now += 1.0
    timer.begin()
    device.queue(1.0)
    timer.launched(KEY)
    assert timer.pause() == pytest.approx(0.75), "a delay is that of one task"


def test_delays_follow_the_clock_of_the_device(device: Device) -> None:
    """By a quarter; one of a millisecond or less is too short to measure."""
    timer = DeviceTimer(None)
    task(device, timer, 1.0, prolong=(1.0, 1.0))
    device.rate = 0.5e9
    task(device, timer, 1.0, prolong=(1.0, 0.001))
    task(device, timer, 1.0, prolong=(1.0, 1.0))
    task(device, timer, 1.0, prolong=(1.0, 1.0))
    assert device.sleeps[1:] == [10**9, 10**6, 10**9, pytest.approx(0.875e9, rel=1e-6)]
    assert timer.injected_seconds == pytest.approx(1.0 + 0.002 + 2.0 + 1.75)


def test_a_host_sleeps_for_the_delay_and_does_not_learn_it(device: Device) -> None:
    timer = HostTimer()
    for seconds, prolong, injected, duration in (
        (2.0, (1.5, 0.25), 1.25, 2.0),
        (4.0, None, 1.25, 2.5),
        (2.5, (1.0, 0.5), 1.75, 2.5),
    ):
        timer.begin()
        device.now += seconds
        if prolong:
            timer.prolong(KEY, *prolong)
        begun = device.now
        timer.launched(KEY)
        assert device.now == begun
        assert timer.injected_seconds == pytest.approx(injected)
        assert timer.durations == {KEY: pytest.approx(duration)}
        device.now += 100.0
    assert timer.pause() == timer.launch_share([0]) == 0.0 and not timer.waiting()


@pytest.mark.parametrize("follow", [False, True])
def test_a_gpu_has_a_timer_of_its_own(monkeypatch: pytest.MonkeyPatch, follow: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    timer = timer_for(follow=follow)
    assert isinstance(timer, DeviceTimer) and timer.follow is follow


def test_growth_is_forgotten_slowly(device: Device) -> None:
    """The expectation follows when durations stop to depend on the size."""

    def expected(size: float, *runs: tuple[float, float]) -> float:
        timer = DeviceTimer(0.0)
        for of_size, seconds in (*runs, (size, 1.0)):
            timer.begin()
            device.queue(seconds)
            timer.launched(KEY, of_size)
            left = timer.pause()
            device.now = device.free_at + 1.0
            timer.pause()
        return left

    growing = ((0.5, 1.0), (1.0, 2.0)) * 30
    assert expected(0.75, *growing) == pytest.approx(1.5, rel=0.02)
    grown = expected(1.0, *growing) - expected(0.5, *growing)
    assert grown == pytest.approx(1.0, rel=0.02)
    stopped = (*growing, *((0.5, 2.0), (1.0, 2.0)) * 60)
    assert expected(1.0, *stopped) == pytest.approx(expected(0.5, *stopped), rel=0.02)


def test_a_task_without_a_size_has_no_growth(device: Device) -> None:
    """A size of 0 divides nothing."""
    timer = DeviceTimer(0.0)
    for _ in range(2):
        timer.begin()
        device.queue(2.0)
        timer.launched(KEY, 0.0)
        left = timer.pause()
        device.now += 10.0
    assert left == pytest.approx(2.0)


def test_before_anything_is_known_the_next_task_is_chosen_at_once(device: Device) -> None:
    timer = DeviceTimer(None)
    timer.begin()
    device.queue(5.0)
    timer.launched(KEY)
    assert timer.pause() == 0.0

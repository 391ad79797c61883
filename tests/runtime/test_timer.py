"""Timers on a made-up clock: durations that are learnt, the time of the next choice, and delays."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.dpp.runtime.timer import DeviceTimer, TaskTimer, timer_for

KEY, OTHER = ("W", 0), ("B", 0)


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

    def launch(
        self, timer: Any, seconds: float = 1.0, *, key: tuple[str, int] = KEY, size: float = 1.0,
        number: int = 1, takes: float = 0.0, prolong: tuple[float, float] | None = None,
    ) -> None:  # fmt: skip
        """Launches tasks, which begin with the launch that takes ``takes`` seconds."""
        timer.begin()
        self.queue(seconds)
        self.now += takes
        if prolong:
            timer.prolong(key, *prolong)
        timer.launched(key, size, number)

    def run(self, timer: Any, seconds: float = 1.0, **more: Any) -> None:
        """Launches tasks, and lets the timer see their end."""
        self.launch(timer, seconds, **more)
        self.now = max(self.now, self.free_at) + 1.0
        timer.pause()

    def learned(self, lookahead: float) -> DeviceTimer:
        """A timer that knows that a task takes a second, with nothing queued."""
        timer = looking_ahead(lookahead)
        self.run(timer)
        assert timer.pause() == 0.0 and timer.durations[KEY] == pytest.approx(1.0)
        return timer


def looking_ahead(seconds: float) -> DeviceTimer:
    """A timer that chooses so long before the end of the queued work."""
    timer = DeviceTimer()
    timer.lookahead = lambda: seconds  # type: ignore[method-assign]
    return timer


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
    clock = SimpleNamespace(monotonic=lambda: made.now, sleep=lambda s: made.sleep(s))
    monkeypatch.setattr("megatron.dpp.runtime.timer.time", clock)
    return made


# The next choice ----------------------------------------------------------------------------------


def test_the_next_task_is_chosen_so_long_before_the_end_of_the_running_one(device: Device) -> None:
    timer = device.learned(0.25)
    device.launch(timer)
    assert timer.pause() == pytest.approx(0.75)
    device.now += 0.7
    assert timer.pause() > 0.0
    device.now += 0.1
    assert timer.pause() == 0.0
    assert DeviceTimer().pause() == 0.0, "nothing is known, and nothing is queued"
    device.now += 5.0
    for _ in range(2):
        device.launch(timer)
    device.now += 1.0
    assert timer.pause() == pytest.approx(0.75), "it runs from the end of the one before"
    device.now += 0.5
    assert timer.pause() == pytest.approx(0.25)


def test_short_tasks_are_queued_until_they_last_as_long(device: Device) -> None:
    """A queue of at most two tasks leaves the device idle if tasks are shorter than launches."""
    timer = device.learned(2.5)
    for _ in range(2):
        device.launch(timer)
    assert timer.pause() == 0.0
    device.launch(timer)
    assert timer.pause() > 0.0
    device.now += 0.6
    assert timer.pause() == 0.0


def test_of_tasks_never_seen_only_one_is_queued_ahead(device: Device) -> None:
    timer = looking_ahead(100.0)
    device.launch(timer)
    assert timer.pause() == 0.0
    device.launch(timer)
    assert timer.pause() > 0.0


def test_a_task_runs_from_the_beginning_of_its_launch(device: Device) -> None:
    """An idle device starts a task while the host launches it. Counted from the launch's end, the
    task would seem to have its whole time left.
    """
    timer = device.learned(0.25)
    device.launch(timer, takes=0.8)
    assert timer.pause() == 0.0
    device.now += 5.0
    device.launch(timer, takes=0.5)
    assert timer.pause() > 0.0


def test_a_task_launched_ahead_of_its_input_begins_when_the_device_has_it(device: Device) -> None:
    """Several may wait."""
    timer = device.learned(0.25)
    assert not timer.waiting()
    for _ in range(2):
        device.free_at = max(device.free_at, device.now) + 5.0  # the device waits for the input
        timer.begin(ahead=True)
        device.queue(1.0)
        timer.launched(OTHER)
    assert timer.waiting() == 2
    device.now += 6.5
    for _ in range(2):
        device.launch(timer)
    assert timer.durations[OTHER] == pytest.approx(1.0), "although nobody asks when to choose"
    assert timer.waiting() == 1, "the first one's events are recorded anew"
    device.now += 5.0
    assert not timer.waiting() and timer.pause() == pytest.approx(2.75), "it has just been seen"
    device.now = device.free_at
    assert timer.pause() == 0.0 and timer.durations[OTHER] == pytest.approx(1.0)


def test_one_launch_that_took_long_does_not_fill_the_queue(device: Device) -> None:
    timer = DeviceTimer()
    device.run(timer, takes=100.0)  # a graph was captured
    timer.durations[KEY] = 1.0
    device.launch(timer)
    assert timer.pause() == 0.0
    device.launch(timer)
    assert timer.pause() > 0.0


def test_tasks_go_on_only_while_the_next_one_could_be_chosen(device: Device) -> None:
    """Else a device that has work would be given more of it before it is time to choose."""
    timer = device.learned(1.5)
    timer.begin()
    assert timer.goes_on(KEY, 1.0, 1) and not timer.goes_on(KEY, 1.0, 2)
    device.now += 0.6
    assert timer.goes_on(KEY, 1.0, 2), "the first one has been running since"
    device.queue(2.0)
    timer.launched(KEY, 1.0, 2)
    timer.begin()
    assert not timer.goes_on(KEY, 1.0, 1), "two are queued before it"


def test_a_gpu_has_a_timer_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert isinstance(timer_for(), DeviceTimer)


# Durations ----------------------------------------------------------------------------------------


def test_a_duration_follows_changes_by_a_quarter(device: Device) -> None:
    timer = DeviceTimer()
    for seconds, expected in ((4.0, 4.0), (8.0, 5.0), (1.0, 4.0), (4.0, 4.0)):
        device.run(timer, seconds)
        assert timer.durations == {KEY: pytest.approx(expected)}
    device.run(timer, 16.0, key=OTHER)
    assert timer.durations == {KEY: pytest.approx(4.0), OTHER: pytest.approx(16.0)}


def test_tasks_in_one_pair_of_events_are_learnt_by_their_share(device: Device) -> None:
    timer = looking_ahead(0.25)
    device.run(timer, 3.0, number=3)
    assert timer.durations[KEY] == pytest.approx(1.0)
    device.launch(timer, 3.0, number=3)
    device.now += 1.0
    assert timer.pause() == pytest.approx(3.0 - 1.0 - 0.25)


def left_after(device: Device, size: float, *runs: tuple[float, float]) -> float:
    """Seconds that are expected of a task of ``size`` behind tasks of (size, seconds)."""
    timer = looking_ahead(0.0)
    for of_size, seconds in runs:
        device.run(timer, seconds, size=of_size)
    device.launch(timer, size=size)
    left = timer.pause()
    device.now = device.free_at + 10.0
    return left


def test_a_long_microbatch_is_expected_to_take_longer(device: Device) -> None:
    """By the last time seen, the next task was chosen far too early or too late. Before two sizes
    were seen, durations are proportional to them.
    """
    seen = [(size, 1.0 + 4.0 * size) for size in (0.25, 1.0, 0.5, 0.25)]
    for size in (1.0, 0.25, 0.75, 0.125):
        assert left_after(device, size, *seen) == pytest.approx(1.0 + 4.0 * size)
    assert left_after(device, 0.5, (1.0, 1.0)) == pytest.approx(0.5)
    assert left_after(device, 0.0, (0.0, 2.0)) == pytest.approx(2.0), "a size of 0 divides nothing"


def test_growth_is_never_negative_and_is_forgotten_slowly(device: Device) -> None:
    """Noise makes durations shrink with the size at times; they may also stop to depend on it."""
    shrinking = ((0.5, 4.0), (1.0, 2.0)) * 2
    assert left_after(device, 0.25, *shrinking) == left_after(device, 1.0, *shrinking) > 0.0
    growing = ((0.5, 1.0), (1.0, 2.0)) * 30
    assert left_after(device, 0.75, *growing) == pytest.approx(1.5, rel=0.02)
    grown = left_after(device, 1.0, *growing) - left_after(device, 0.5, *growing)
    assert grown == pytest.approx(1.0, rel=0.02)
    stopped = (*growing, *((0.5, 2.0), (1.0, 2.0)) * 60)
    alike = left_after(device, 0.5, *stopped)
    assert left_after(device, 1.0, *stopped) == pytest.approx(alike, rel=0.02)


# Launching ----------------------------------------------------------------------------------------


def test_launching_is_judged_by_the_chunk_that_waits_for_it_most(device: Device) -> None:
    """Long kernels of an output layer do not hide that the other layers are launch-bound. First
    times include initialisation, and later ones are disturbed: the shortest count.
    """
    timer = DeviceTimer()
    for chunk, seconds in ((0, 1.0), (1, 9.0)):
        for kind in ("F", "B"):
            for disturbed in (9.0, 0.0, 2.0):
                key = (kind, chunk)
                device.run(timer, seconds + disturbed, key=key, takes=1.0 + disturbed)
    assert timer.launch_share([0, 1]) == pytest.approx(1.0)
    assert timer.launch_share([1]) == pytest.approx(1 / 9)
    assert timer.launch_share([]) == 0.0
    assert timer.launch_share([2]) == 0.0, "it has run nothing yet"


def test_a_short_microbatch_does_not_make_a_chunk_launch_bound(device: Device) -> None:
    """Graphs were captured for long microbatches because launching the shortest took its time."""
    timer = DeviceTimer()
    for size, seconds in ((0.1, 1.0), (1.0, 10.0), (0.7, 7.0), (0.1, 1.0)):
        device.run(timer, seconds, size=size, takes=1.0)
    assert timer.launch_share([KEY[1]]) == pytest.approx(1 / 6)


def test_tasks_of_all_durations_use_few_events(device: Device) -> None:
    timer = DeviceTimer()
    for number in range(20):
        device.run(timer, 1.0 + number % 3, prolong=(1.0, 0.5))
    assert device.events <= 5


# Delays -------------------------------------------------------------------------------------------


def test_a_task_is_prolonged_by_a_factor_of_its_shortest_time(device: Device) -> None:
    """Its own time is learned without the delay."""
    timer = DeviceTimer()
    device.run(timer, 2.0, prolong=(3.0, 0.0))
    assert not device.sleeps, "its own time is not known yet"
    device.run(timer, 4.0, prolong=(1.5, 0.25))
    calibration, delay = device.sleeps
    assert calibration == 20_000_000 and delay == pytest.approx(1.25 * device.rate)
    assert timer.injected_seconds == pytest.approx(1.25)
    calibrated = 0.25 * calibration / device.rate  # falls into the task, once
    assert timer.durations[KEY] == pytest.approx(2.5 + calibrated)
    device.run(timer, 2.0, prolong=(1.25, 0.0))  # of 2.0, while the mean is longer
    assert len(device.sleeps) == 3, "the clock is measured once"
    assert timer.injected_seconds == pytest.approx(1.75)
    device.run(timer, 2.0, prolong=(1.0, 0.0))
    device.run(timer, 2.0)
    assert len(device.sleeps) == 3
    assert timer.injected_seconds == pytest.approx(1.75)


def test_the_next_task_is_chosen_after_the_delay_too(device: Device) -> None:
    timer = device.learned(0.25)
    device.run(timer, key=OTHER, prolong=(1.0, 1e-6))  # measures the clock
    device.launch(timer, prolong=(1.0, 2.0))
    assert timer.pause() == pytest.approx(2.75)
    device.now += 2.5
    assert timer.pause() == pytest.approx(0.25)
    device.now += 1.0
    device.launch(timer)
    assert timer.pause() == pytest.approx(0.75), "a delay is that of one task"


def test_delays_follow_the_clock_of_the_device(device: Device) -> None:
    """By a quarter; one of a millisecond or less is too short to measure."""
    timer = DeviceTimer()
    device.run(timer, prolong=(1.0, 1.0))
    device.rate = 0.5e9
    for seconds in (0.001, 1.0, 1.0):
        device.run(timer, prolong=(1.0, seconds))
    assert device.sleeps[1:] == [10**9, 10**6, 10**9, pytest.approx(0.875e9, rel=1e-6)]
    assert timer.injected_seconds == pytest.approx(1.0 + 0.002 + 2.0 + 1.75)


# A host -------------------------------------------------------------------------------------------


def test_a_hosts_task_lasts_until_its_call_returns_without_its_delay(device: Device) -> None:
    timer = TaskTimer()
    for seconds, prolong, injected, duration in (
        (2.0, (1.5, 0.25), 1.25, 2.0), (4.0, None, 1.25, 2.5), (2.5, (1.0, 0.5), 1.75, 2.5),
    ):  # fmt: skip
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
    shared = TaskTimer()
    shared.begin()
    device.now += 3.0
    assert shared.goes_on(KEY, 1.0, 2)
    shared.launched(KEY, 1.0, 3)
    assert shared.durations == {KEY: 1.0}


def test_a_task_that_its_delay_seems_longer_than_took_no_time(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clocks round. A task of less than no time would put decisions after it."""
    monkeypatch.setattr(device, "sleep", lambda seconds: setattr(device, "now", device.now + 0.375))
    timer = TaskTimer()
    for _ in range(2):
        timer.begin()
        timer.prolong(KEY, 1.0, 0.5)
        timer.launched(KEY)
        assert timer.durations == {KEY: 0.0}

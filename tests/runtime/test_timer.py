"""The time at which the next task may be chosen on a GPU, with events on a made-up clock."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.dpp.runtime.timer import DeviceTimer, HostTimer

KEY = ("W", 0)


class Device:
    """Runs one task after the other; ``now`` is the time of host and device."""

    def __init__(self) -> None:
        self.now = 0.0
        self.seconds = 1.0
        self.free_at = 0.0
        self._recorded = 0
        self.overlaps = False
        """A task runs while it is launched; otherwise once it is."""

    def monotonic(self) -> float:
        return self.now

    def record(self) -> float:
        """Time at which all queued work is done; every second event is a task's end."""
        if self._recorded % 2 and self.overlaps:
            self.free_at = max(self._begun + self.seconds, self.now)
        elif self._recorded % 2:
            self.free_at = max(self.free_at, self.now) + self.seconds
        else:
            self._begun = max(self.free_at, self.now)
        self._recorded += 1
        return max(self.free_at, self.now)


class Event:
    device: Device

    def __init__(self, enable_timing: bool) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.at = self.device.record()

    def query(self) -> bool:
        return self.device.now >= self.at

    def synchronize(self) -> None:
        self.device.now = max(self.device.now, self.at)

    def elapsed_time(self, end: Event) -> float:
        return (end.at - self.at) * 1e3


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    monkeypatch.setattr(Event, "device", made, raising=False)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr("megatron.dpp.runtime.timer.time.monotonic", made.monotonic)
    return made


def launch(timer: Any, number: int = 1) -> None:
    for _ in range(number):
        timer.begin()
        timer.launched(KEY)


def learned(device: Device, lookahead: float) -> DeviceTimer:
    """A timer that knows how long a task takes, with nothing queued."""
    timer = DeviceTimer(lookahead)
    launch(timer)
    device.now += 10.0
    assert timer.pause() == 0.0 and timer.durations[KEY] == pytest.approx(1.0)
    return timer


def test_a_hosts_task_lasts_until_its_call_returns_without_what_was_injected(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sleep(seconds: float) -> None:
        device.now += seconds

    monkeypatch.setattr("megatron.dpp.runtime.timer.time.sleep", sleep)
    timer = HostTimer()
    for factor in (1.0, 3.0, 1.0):
        timer.begin()
        device.now += 2.0
        if factor > 1.0:
            timer.prolong(KEY, factor, 0.5)
        timer.launched(KEY)
        assert timer.durations == {KEY: 2.0}
    assert timer.injected_seconds == 4.5


def test_a_task_that_its_delay_seems_longer_than_took_no_time(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clocks round. A task of less than no time would put decisions after it."""

    def sleep(seconds: float) -> None:
        device.now += seconds - 0.125

    monkeypatch.setattr("megatron.dpp.runtime.timer.time.sleep", sleep)
    timer = HostTimer()
    for _ in range(2):
        timer.begin()
        timer.prolong(KEY, 1.0, 0.5)
        timer.launched(KEY)
        assert timer.durations == {KEY: 0.0}


def test_the_next_task_is_chosen_so_long_before_the_end_of_the_running_one(device: Device) -> None:
    timer = learned(device, 0.25)
    launch(timer)
    assert timer.pause() > 0.0
    device.now += 0.7
    assert timer.pause() > 0.0
    device.now += 0.1
    assert timer.pause() == 0.0


def test_short_tasks_are_queued_until_they_last_as_long(device: Device) -> None:
    """A queue of at most two tasks leaves the device idle if tasks are shorter than launches."""
    timer = learned(device, 2.5)
    launch(timer, 2)
    assert timer.pause() == 0.0
    launch(timer)
    assert timer.pause() > 0.0
    device.now += 0.6
    assert timer.pause() == 0.0


def test_of_tasks_never_seen_only_one_is_queued_ahead(device: Device) -> None:
    timer = DeviceTimer(100.0)
    launch(timer)
    assert timer.pause() == 0.0
    launch(timer)
    assert timer.pause() > 0.0


def test_a_task_runs_from_the_beginning_of_its_launch(device: Device) -> None:
    """An idle device starts a task while the host launches it.

    Counted from the launch's end, the task would seem to have its whole time left.
    """
    device.overlaps = True
    timer = learned(device, 0.25)
    timer.begin()
    device.now += 0.8
    timer.launched(KEY)
    assert timer.pause() == 0.0
    device.now += 5.0
    timer.begin()
    device.now += 0.5
    timer.launched(KEY)
    assert timer.pause() > 0.0


def test_a_task_that_waited_in_the_queue_runs_from_the_end_of_the_one_before(
    device: Device,
) -> None:
    timer = learned(device, 0.25)
    launch(timer, 2)
    device.now += 1.0
    assert timer.pause() == pytest.approx(0.75)
    device.now += 0.5
    assert timer.pause() == pytest.approx(0.25)


def test_a_task_launched_ahead_of_its_input_begins_when_the_device_has_it(device: Device) -> None:
    timer = learned(device, 0.25)
    assert not timer.waiting()
    device.free_at = device.now + 5.0  # the device waits for the input
    timer.begin(ahead=True)
    timer.launched(KEY)
    device.now += 4.0
    assert timer.waiting()
    device.now += 1.1
    assert not timer.waiting() and timer.pause() > 0.0
    device.now += 0.8
    assert timer.pause() == 0.0
    device.now += 1.0
    assert timer.pause() == 0.0 and timer.durations[KEY] == pytest.approx(1.0)


def test_one_launch_that_took_long_does_not_fill_the_queue(device: Device) -> None:
    timer = DeviceTimer(None)
    timer.begin()
    device.now += 100.0  # a graph was captured
    timer.launched(KEY)
    device.now += 10.0
    assert timer.pause() == 0.0
    timer.durations[KEY] = 1.0
    launch(timer)
    assert timer.pause() == 0.0
    launch(timer)
    assert timer.pause() > 0.0


def test_a_long_microbatch_is_expected_to_take_longer(device: Device) -> None:
    """By the last time seen, the next task was chosen far too early or too late."""
    timer = DeviceTimer(0.25)
    for size in (0.25, 1.0, 0.5, 0.25):
        device.seconds = 1.0 + 4.0 * size
        timer.begin()
        timer.launched(KEY, size)
        device.now += 10.0
        timer.pause()
    for size in (1.0, 0.25, 0.75, 0.125):
        device.seconds = 1.0 + 4.0 * size
        timer.begin()
        timer.launched(KEY, size)
        device.now += device.seconds - 0.35
        assert timer.pause() == pytest.approx(0.1)
        device.now += 0.15
        assert timer.pause() == 0.0
        device.now += 10.0
        timer.pause()


def test_before_two_sizes_were_seen_durations_are_proportional(device: Device) -> None:
    timer = learned(device, 0.25)
    timer.begin()
    timer.launched(KEY, 0.5)
    assert timer.pause() == pytest.approx(0.25)


def test_a_longer_microbatch_is_never_expected_to_be_faster(device: Device) -> None:
    """Noise makes durations shrink with the size at times."""
    left = []
    for asked in (0.25, 1.0):
        timer = DeviceTimer(0.0)
        for size, seconds in ((0.5, 4.0), (1.0, 2.0), (0.5, 4.0), (1.0, 2.0)):
            device.seconds = seconds
            timer.begin()
            timer.launched(KEY, size)
            device.now += 10.0
            timer.pause()
        timer.begin()
        timer.launched(KEY, asked)
        left.append(timer.pause())
        device.now += 10.0
    assert left == pytest.approx([timer.durations[KEY]] * 2)


def test_launching_is_judged_by_the_chunk_that_waits_for_it_most(device: Device) -> None:
    """Long kernels of an output layer do not hide that the other layers are launch-bound."""
    device.overlaps = True
    timer = DeviceTimer(None)
    for chunk, launch_seconds, seconds in ((0, 1.0, 1.0), (1, 1.0, 9.0)):
        device.seconds = seconds
        for kind in ("F", "B"):
            timer.begin()
            device.now += launch_seconds
            timer.launched((kind, chunk))
            device.now += 20.0
            timer.pause()
    assert timer.launch_share([0, 1]) == pytest.approx(1.0)
    assert timer.launch_share([1]) == pytest.approx(1 / 9)
    assert timer.launch_share([]) == 0.0
    assert timer.launch_share([2]) == 0.0, "it has run nothing yet"


def test_a_short_microbatch_does_not_make_a_chunk_launch_bound(device: Device) -> None:
    """Graphs were captured for long microbatches because launching the shortest took its time."""
    device.overlaps = True
    timer = DeviceTimer(None)
    for size, seconds in ((0.1, 1.0), (1.0, 10.0), (0.7, 7.0), (0.1, 1.0)):
        device.seconds = seconds
        timer.begin()
        device.now += 1.0
        timer.launched(KEY, size)
        device.now += 20.0
        timer.pause()
    assert timer.launch_share([KEY[1]]) == pytest.approx(1 / 6)


def test_tasks_in_one_pair_of_events_are_learnt_by_their_share(device: Device) -> None:
    timer = DeviceTimer(0.25)
    device.seconds = 3.0
    timer.begin()
    timer.launched(KEY, 1.0, 3)
    device.now += 10.0
    assert timer.pause() == 0.0 and timer.durations[KEY] == pytest.approx(1.0)
    timer.begin()
    timer.launched(KEY, 1.0, 3)
    device.now += 1.0
    assert timer.pause() == pytest.approx(3.0 - 1.0 - 0.25)


def test_tasks_go_on_only_while_the_next_one_could_be_chosen(device: Device) -> None:
    """Else a device that has work would be given more of it before it is time to choose."""
    timer = learned(device, 1.5)
    timer.begin()
    assert timer.goes_on(KEY, 1.0, 1) and not timer.goes_on(KEY, 1.0, 2)
    device.now += 0.6
    assert timer.goes_on(KEY, 1.0, 2), "the first one has been running since"
    timer.launched(KEY, 1.0, 2)
    timer.begin()
    assert not timer.goes_on(KEY, 1.0, 1), "two are queued before it"
    assert DeviceTimer(0.0, follow=True).goes_on(KEY, 1.0, 9), "the leader decides"


def test_a_host_learns_tasks_by_their_share(device: Device) -> None:
    timer = HostTimer()
    timer.begin()
    device.now += 3.0
    assert timer.goes_on(KEY, 1.0, 2)
    timer.launched(KEY, 1.0, 3)
    assert timer.durations == {KEY: 1.0}

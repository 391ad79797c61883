"""How far the host may run ahead of the device.

On a CPU a task is over when its call returns, and there is nothing to pace. On a GPU a call only
queues work. A dynamic schedule that queued several tasks would decide before it knows; one that
waited for the device to be idle would leave it idle while the next task is launched.
``DevicePace`` opens the next decision when what is left of the queued work, judged by how long such
tasks have taken, is as long as launching the next one takes: later, and a task's first small
kernels outrun their launches; earlier, and the decision knows less than it could
(docs/decisions/0007-lookahead.md has the measurements).
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

_SMOOTHING = 0.25
"""Weight of the newest duration in the running estimate."""


class Pace(Protocol):
    """What a schedule tells and asks around its tasks; ``key`` is (kind, chunk)."""

    durations: dict[tuple[str, int], float]
    """Seconds that a task of each (kind, chunk) takes, smoothed, without injected delays."""

    injected_seconds: float
    """By how much tasks were prolonged so far, as measured."""

    def pause(self) -> float:
        """Seconds until the next task may be chosen, as tasks have taken so far; 0: now."""
        ...

    def waiting(self) -> bool:
        """Whether the device still waits for the input of a task that was launched ahead of it."""
        ...

    def launch_share(self, chunks: Sequence[int]) -> float:
        """The part of a chunk's tasks' time for which the host is busy launching them, in the one
        of ``chunks`` where it is largest; 0 on a CPU.
        """
        ...

    def begin(self, ahead: bool = False) -> None:
        """A task is about to be run; ``ahead``: it starts when the device has got its input, for
        which it was told to wait just now.
        """
        ...

    def prolong(self, key: tuple[str, int], factor: float, seconds: float) -> None:
        """Make the task that was just run take ``factor`` times as long and ``seconds`` more."""
        ...

    def launched(self, key: tuple[str, int]) -> None:
        """All work of the task has been queued."""
        ...


def _learn(durations: dict[tuple[str, int], float], key: tuple[str, int], took: float) -> None:
    old = durations.get(key, took)
    durations[key] = max(0.0, old + _SMOOTHING * (took - old))


def _least(times: dict[tuple[str, int], float], key: tuple[str, int], took: float) -> None:
    times[key] = min(took, times.get(key, took))


class HostPace:
    """For a CPU: a task that was run is over."""

    def __init__(self) -> None:
        self.durations: dict[tuple[str, int], float] = {}
        self.injected_seconds = 0.0
        self._began = 0.0
        self._injected = 0.0

    def pause(self) -> float:
        return 0.0

    def waiting(self) -> bool:
        return False

    def launch_share(self, chunks: Sequence[int]) -> float:
        return 0.0

    def begin(self, ahead: bool = False) -> None:
        self._began = time.monotonic()

    def prolong(self, key: tuple[str, int], factor: float, seconds: float) -> None:
        took = time.monotonic() - self._began
        self._injected = (factor - 1.0) * took + seconds
        self.injected_seconds += self._injected
        time.sleep(self._injected)

    def launched(self, key: tuple[str, int]) -> None:
        _learn(self.durations, key, time.monotonic() - self._began - self._injected)
        self._injected = 0.0


@dataclass
class _Running:
    key: tuple[str, int]
    start: Any
    end: Any
    began: float
    delay: _Delay | None


@dataclass
class _Delay:
    """A prolongation: an event before it, and how long it was meant to take."""

    start: Any
    cycles: int
    seconds: float


class DevicePace:
    """For a GPU: the next task is chosen when the running one is nearly over.

    Args:
        lookahead: seconds of device work that may be left when the next task is chosen; None takes
            the longest time that launching a task takes, but no longer than the longest task.
        follow: never hold back (a follower of its stage's leader, or a static schedule).
    """

    def __init__(self, lookahead: float | None, follow: bool = False) -> None:
        self._lookahead, self._follow = lookahead, follow
        self._running: deque[_Running] = deque()
        self.durations: dict[tuple[str, int], float] = {}
        self._free: list[Any] = []
        self._start: Any = None
        self._began = 0.0
        self._launches: dict[tuple[str, int], float] = {}
        self._least_launch: dict[tuple[str, int], float] = {}
        self._least_took: dict[tuple[str, int], float] = {}
        self._last_end = 0.0
        self.injected_seconds = 0.0
        self._delay: _Delay | None = None
        self._cycles_per_second = 0.0
        self._launched_ahead = False
        self._awaited: _Running | None = None

    def pause(self) -> float:
        self._collect()
        if self._follow or not self._running:
            return 0.0
        return max(0.0, self._left() - self._ahead())

    def waiting(self) -> bool:
        task = self._awaited
        if task is not None and task.start.query():
            task.began, self._awaited = time.monotonic(), None
        return self._awaited is not None

    def _ahead(self) -> float:
        """Seconds of queued work at which the next task is chosen. One launch that took long (a
        graph was captured, the host was busy) must not fill the queue: a whole task is enough.
        """
        if self._lookahead is not None:
            return self._lookahead
        launch = max(self._launches.values(), default=0.0)
        return min(launch, max(self.durations.values(), default=0.0))

    def _left(self) -> float:
        """Seconds of work that is queued, judged by how long such tasks have taken: from the end of
        the task before, or from the beginning of their launch on a device that was idle.
        """
        head, *others = self._running
        running = time.monotonic() - max(self._last_end, head.began)
        left = max(0.0, self._expected(head, 0.0) - running)
        return left + sum(self._expected(task, math.inf) for task in others)

    def _expected(self, task: _Running, unknown: float) -> float:
        delay = task.delay.seconds if task.delay is not None else 0.0
        return self.durations.get(task.key, unknown) + delay

    def launch_share(self, chunks: Sequence[int]) -> float:
        """From the shortest times of each kind of task: the first ones include initialisation."""
        return max(map(self._launch_share_of, chunks), default=0.0)

    def _launch_share_of(self, chunk: int) -> float:
        keys = [key for key in self._least_took if key[1] == chunk]
        took = sum(self._least_took[key] for key in keys)
        return min(1.0, sum(self._least_launch[key] for key in keys) / took) if took else 0.0

    def begin(self, ahead: bool = False) -> None:
        self._began, self._launched_ahead = time.monotonic(), ahead
        self._start = self._event()
        self._start.record()

    def prolong(self, key: tuple[str, int], factor: float, seconds: float) -> None:
        # Of the undisturbed duration, so that all schedules are delayed alike.
        extra = (factor - 1.0) * self._least_took.get(key, 0.0) + seconds
        if extra > 0.0:
            cycles = int(extra * self._clock())
            start = self._event()
            start.record()
            torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
            self._delay = _Delay(start, cycles, extra)

    def launched(self, key: tuple[str, int]) -> None:
        end = self._event()
        end.record()
        now = time.monotonic()
        _learn(self._launches, key, now - self._began)
        _least(self._least_launch, key, now - self._began)
        self._running.append(_Running(key, self._start, end, self._began, self._delay))
        self._delay = None
        if self._launched_ahead:
            self._awaited = self._running[-1]
        if self._follow:
            self._collect()

    def _collect(self) -> None:
        """Take finished tasks off the head and learn how long they took."""
        while self._running and self._running[0].end.query():
            task = self._running.popleft()
            took = task.start.elapsed_time(task.end) * 1e-3
            if task.delay is not None:
                took -= self._delayed(task.delay, task.end)
            _learn(self.durations, task.key, took)
            _least(self._least_took, task.key, took)
            self._last_end = time.monotonic()
            self._free += (task.start, task.end)

    def _delayed(self, delay: _Delay, end: Any) -> float:
        """Seconds that a delay took. The device's clock varies with its load, so it is followed:
        otherwise a schedule would meet longer delays than another.
        """
        seconds: float = delay.start.elapsed_time(end) * 1e-3
        self.injected_seconds += seconds
        self._free.append(delay.start)
        if delay.seconds > 1e-3:
            measured = delay.cycles / seconds
            self._cycles_per_second += _SMOOTHING * (measured - self._cycles_per_second)
        return seconds

    def _event(self) -> Any:
        if self._free:
            return self._free.pop()
        return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def _clock(self) -> float:
        """Cycles per second of ``torch.cuda._sleep``, measured once."""
        if not self._cycles_per_second:
            begin, end = self._event(), self._event()
            cycles = 20_000_000
            begin.record()
            torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
            end.record()
            end.synchronize()
            self._cycles_per_second = cycles / (begin.elapsed_time(end) * 1e-3)
        return self._cycles_per_second

"""Times tasks, and says when the next one may be chosen.

On a CPU a task is over when its call returns. On a GPU a call only queues work. A dynamic schedule
that queues several tasks decides too early; one that waits for an idle device leaves it idle while
the next task is launched. ``DeviceTimer`` allows the next decision when the queued work lasts as
long as launching a task takes, by the durations measured so far
(docs/decisions/schedule.md, 0007).
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

_SMOOTHING = 0.25
"""Weight of the newest duration in the running estimate."""
_SLOPE_SMOOTHING = 0.1
"""Weight of the newest task in the growth of a duration with the microbatch's size."""

_SIZES = 256
"""Sizes of which a kind of task keeps a duration."""


def _learn(durations: dict[tuple[str, int], float], key: tuple[str, int], took: float) -> None:
    old = durations.get(key, took)
    learnt = old + _SMOOTHING * (took - old)
    durations[key] = learnt if learnt > 0.0 else 0.0


def _least(times: dict[Any, float], key: Any, took: float) -> None:
    times[key] = min(took, times.get(key, took))


class _Growth:
    """Growth of a task's duration with the size of its microbatch, recent tasks weighing most.

    Before two sizes were seen, durations count as proportional to the size.
    """

    def __init__(self, size: float) -> None:
        self._size = size
        self._variance = self._covariance = 0.0

    def learn(self, size: float, longer: float) -> None:
        """Add a task that took ``longer`` than the running estimate."""
        larger = size - self._size
        self._size += _SMOOTHING * larger
        self._variance += _SLOPE_SMOOTHING * (larger * larger - self._variance)
        self._covariance += _SLOPE_SMOOTHING * (larger * longer - self._covariance)

    def expected(self, size: float, mean: float) -> float:
        """Duration of a task of ``size``; ``mean`` is the running estimate."""
        if self._variance:
            slope = max(0.0, self._covariance / self._variance)
        else:
            slope = mean / self._size if self._size else 0.0
        return max(0.0, mean + slope * (size - self._size))


class TaskTimer:
    """Measures the tasks of a schedule; ``key`` is (kind, chunk). As it stands that of a CPU, where
    a task is over when its call returns.
    """

    def __init__(self) -> None:
        self.durations: dict[tuple[str, int], float] = {}
        """Seconds that a task of each (kind, chunk) takes, smoothed, without injected delays."""
        self.injected_seconds = 0.0
        """Seconds by which tasks were prolonged so far, as measured."""
        self._began = 0.0
        self._injected = 0.0

    def pause(self) -> float:
        """Expected seconds until the next task may be chosen; 0 for now."""
        return 0.0

    def waiting(self) -> int:
        """Tasks launched ahead of their inputs that the device has not begun."""
        return 0

    def launch_share(self, chunks: Sequence[int]) -> float:
        """The largest share of launching in the task time of any of ``chunks``; 0 on a CPU."""
        return 0.0

    def begin(self, *, ahead: bool = False) -> None:
        """Start timing a task; ``ahead``: it starts when the device has its input."""
        self._began = time.monotonic()

    def prolong(self, key: tuple[str, int], factor: float, seconds: float) -> None:
        """Make the task that just ran take ``factor`` times as long and ``seconds`` more."""
        took = time.monotonic() - self._began
        self._injected = (factor - 1.0) * took + seconds
        self.injected_seconds += self._injected
        time.sleep(self._injected)

    def goes_on(self, key: tuple[str, int], size: float, number: int) -> bool:
        """True if the next task could be chosen now, were the ``number`` tasks of one ``key`` since
        :meth:`begin` queued; ``size`` as of :meth:`launched`.
        """
        return True

    def launched(self, key: tuple[str, int], size: float = 1.0, number: int = 1) -> None:
        """Note that all work of the task is queued, or of ``number`` tasks of one ``key``; ``size``
        is that of their microbatch, in the largest: tasks of a key take a time that grows with it.
        """
        took = time.monotonic() - self._began - self._injected
        _learn(self.durations, key, took / number)
        self._injected = 0.0


@dataclass
class _Running:
    key: tuple[str, int]
    size: float
    start: Any
    end: Any
    began: float
    delay: _Delay | None
    number: int = 1


@dataclass
class _Delay:
    """A prolongation: the event before it, and its intended length."""

    start: Any
    cycles: int
    seconds: float


class DeviceTimer(TaskTimer):
    """The timer of a GPU, where the next task is chosen when the running one is nearly over."""

    def __init__(self) -> None:
        super().__init__()
        self._running: deque[_Running] = deque()
        self._growth: dict[tuple[str, int], _Growth] = {}
        self._free: list[Any] = []
        self._start: Any = None
        self._launches: dict[tuple[str, int], float] = {}
        self._least_launch: dict[tuple[str, int], float] = {}
        self._took_by_size: dict[tuple[str, int], dict[float, float]] = {}
        """Shortest seconds of a key's tasks of each size, of the first :data:`_SIZES` sizes."""
        self._last_end = 0.0
        self._delay: _Delay | None = None
        self._cycles_per_second = 0.0
        self._launched_ahead = False
        self._awaited: deque[_Running] = deque()

    def pause(self) -> float:
        self._collect()
        return max(0.0, self._left() - self.lookahead()) if self._running else 0.0

    def waiting(self) -> int:
        while self._awaited and self._awaited[0].start.query():
            self._awaited.popleft().began = time.monotonic()
        return len(self._awaited)

    def lookahead(self) -> float:
        """Seconds of queued work at which the next task is chosen: the longest launch, and at most
        a whole task, as a launch may have taken long (a graph was captured, the host was busy).
        """
        launch = max(self._launches.values(), default=0.0)
        return min(launch, max(self.durations.values(), default=0.0))

    def _left(self) -> float:
        """Expected seconds of queued work, from the end of the task before or, on an idle device,
        from the beginning of the launch.
        """
        head, *others = self._running
        running = time.monotonic() - max(self._last_end, head.began)
        left = max(0.0, self._expected(head, 0.0) - running)
        return left + sum(self._expected(task, math.inf) for task in others)

    def _expected(self, task: _Running, unknown: float) -> float:
        delay = task.delay.seconds if task.delay is not None else 0.0
        mean, growth = self.durations.get(task.key), self._growth.get(task.key)
        if mean is None:
            return unknown + delay
        once = mean if growth is None else growth.expected(task.size, mean)
        return task.number * once + delay

    def launch_share(self, chunks: Sequence[int]) -> float:
        """Uses the shortest time per kind and size of task, as first ones include initialisation.
        Launching takes the same time for all sizes, running the mean.
        """
        most = 0.0
        for chunk in chunks:
            keys = [key for key in self._took_by_size if key[1] == chunk]
            took = sum(statistics.fmean(self._took_by_size[key].values()) for key in keys)
            if took:
                most = max(most, sum(self._least_launch[key] for key in keys) / took)
        return min(1.0, most)

    def begin(self, *, ahead: bool = False) -> None:
        self._began, self._launched_ahead = time.monotonic(), ahead
        self._start = self._event()
        self._start.record()

    def prolong(self, key: tuple[str, int], factor: float, seconds: float) -> None:
        # Of the undisturbed duration, so that all schedules are delayed alike.
        least = min(self._took_by_size.get(key, {}).values(), default=0.0)
        extra = (factor - 1.0) * least + seconds
        if extra > 0.0:
            cycles = int(extra * self._clock())
            start = self._event()
            start.record()
            torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
            self._delay = _Delay(start, cycles, extra)

    def goes_on(self, key: tuple[str, int], size: float, number: int) -> bool:
        queued = _Running(key, size, self._start, None, self._began, None, number)
        self._collect()
        self._running.append(queued)
        left = self._left()
        self._running.pop()
        return left <= self.lookahead()

    def launched(self, key: tuple[str, int], size: float = 1.0, number: int = 1) -> None:
        end = self._event()
        end.record()
        launch = (time.monotonic() - self._began) / number
        _learn(self._launches, key, launch)
        _least(self._least_launch, key, launch)
        self._running.append(
            _Running(key, size, self._start, end, self._began, self._delay, number)
        )
        self._delay = None
        if self._launched_ahead:
            self._awaited.append(self._running[-1])
        self._collect()

    def _collect(self) -> None:
        """Remove finished tasks from the queue's head and learn their durations."""
        while self._running and self._running[0].end.query():
            task = self._running.popleft()
            took = task.start.elapsed_time(task.end) * 1e-3
            if task.delay is not None:
                took -= self._delayed(task.delay, task.end)
            took /= task.number
            growth = self._growth.setdefault(task.key, _Growth(task.size))
            growth.learn(task.size, took - self.durations.get(task.key, took))
            _learn(self.durations, task.key, took)
            sizes = self._took_by_size.setdefault(task.key, {})
            if task.size in sizes or len(sizes) < _SIZES:
                _least(sizes, task.size, took)
            self._last_end = time.monotonic()
            self._free += (task.start, task.end)
        self.waiting()  # before its events are recorded anew

    def _delayed(self, delay: _Delay, end: Any) -> float:
        """Seconds that a delay took. Adapts to the device's clock, which varies with its load:
        otherwise delays would depend on the schedule.
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


def timer_for() -> TaskTimer:
    """The timer of this machine's kind of device."""
    return DeviceTimer() if torch.cuda.is_available() else TaskTimer()

"""The two devices a recorder looks at, the host and a GPU: their clocks and their memory.

A *mark* is whatever a clock hands out when it is read in the hot path; the writing thread turns it
into host nanoseconds later. On the host a mark is that number already. On a GPU it is an event
recorded in the current stream, and its time is known once the device has passed it.
"""

from __future__ import annotations

import resource
import time
from collections import deque
from typing import Any

_POOL_EVENTS = 1 << 14
_REBASE_NS = 2_000_000_000


class HostClock:
    """``CLOCK_MONOTONIC`` of this host."""

    mark = staticmethod(time.monotonic_ns)

    def peak_memory(self) -> int:
        """Most bytes that this process has had in memory."""
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def resolve(self, mark: int) -> int | None:
        """Host time of a mark in nanoseconds."""
        return mark

    def discard(self, mark: int) -> None:
        """Give a mark back that nobody will resolve."""


class DeviceClock:
    """The time line of one CUDA device, expressed in this host's ``CLOCK_MONOTONIC``.

    Events give distances between each other, so one *anchor* ties them to the host: at start an
    event is recorded and waited for, several times, and the tightest try is kept. ``elapsed_time``
    is a 32-bit float of milliseconds, whose step exceeds 100 ns beyond two seconds, so distances
    are chained through a base event that moves along every two seconds. The two oscillators drift
    apart; causality corrects them: an event cannot have happened before the host recorded it, nor
    after the host saw it done.
    """

    def __init__(self, device: str) -> None:
        import torch

        self._cuda: Any = torch.cuda
        self._device = torch.device(device)
        self._free: deque[Any] = deque()
        self._made = 0
        self._base, self._base_ns = self._anchor()

    def _anchor(self) -> tuple[Any, int]:
        best: tuple[int, Any, int] | None = None
        with self._cuda.device(self._device):
            for _ in range(5):
                event = self._cuda.Event(enable_timing=True)
                self._cuda.synchronize()
                before = time.monotonic_ns()
                event.record()
                event.synchronize()
                after = time.monotonic_ns()
                if best is None or after - before < best[0]:
                    best = (after - before, event, (before + after) // 2)
        assert best is not None
        return best[1], best[2]

    def mark(self) -> tuple[Any, int] | None:
        """Record an event in the current stream; None when all pooled events are in use."""
        try:
            event = self._free.popleft()
        except IndexError:
            if self._made >= _POOL_EVENTS:
                return None
            self._made += 1
            event = self._cuda.Event(enable_timing=True)
        recorded_ns = time.monotonic_ns()
        event.record()
        return event, recorded_ns

    def peak_memory(self) -> int:
        """Most bytes that PyTorch has had allocated on the device."""
        return int(self._cuda.max_memory_allocated(self._device))

    def resolve(self, mark: tuple[Any, int]) -> int | None:
        """Host time of a mark in ns, which uses it up; None until the device has passed it."""
        event, recorded_ns = mark
        if not event.query():
            return None
        seen_ns = time.monotonic_ns()
        distance_ns = round(self._base.elapsed_time(event) * 1e6)
        when = self._base_ns + distance_ns
        allowed: int = min(max(when, recorded_ns), seen_ns)
        self._base_ns += allowed - when
        if distance_ns > _REBASE_NS:
            event, self._base = self._base, event
            self._base_ns += distance_ns
        self._free.append(event)
        return allowed

    def discard(self, mark: tuple[Any, int]) -> None:
        """Give a mark back that nobody will resolve."""
        self._free.append(mark[0])


def clock_for(device: str) -> HostClock | DeviceClock:
    """The clock that times work on ``device`` (``cpu``, ``cuda``, ``cuda:1``)."""
    return DeviceClock(device) if device.startswith("cuda") else HostClock()

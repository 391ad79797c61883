"""What tasks and hops cost in a simulated iteration, with all randomness drawn beforehand.

A :class:`Costs` is data: the duration of every task, the speed of every rank over time, the delay
of every message. Times are in seconds, or in any one unit. Two simulations over one ``Costs``
differ by their schedules alone. Made by ``conditions.py`` (the named conditions), by
``measured.py`` (a cost file) or by hand; read by ``clock.py``.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron.dpp.schedule import Kind


@dataclass(frozen=True)
class Shape:
    """``num_ranks`` ranks of ``num_chunks`` chunks each, and ``num_microbatches`` microbatches."""

    num_ranks: int
    num_chunks: int
    num_microbatches: int

    @property
    def num_stages(self) -> int:
        return self.num_ranks * self.num_chunks


class SlowTimes:
    """A rank that works at a fraction of its speed during some intervals.

    Args:
        intervals: ``(start, end)``, in order, without overlap.
        factor: how many times longer work takes inside them.
    """

    def __init__(self, intervals: Sequence[tuple[float, float]], factor: float = 2.0) -> None:
        self._factor = factor
        self._times = [0.0]
        self._work = [0.0]
        for start, end in intervals:
            work = self._work[-1] + start - self._times[-1]
            self._times += (start, end)
            self._work += (work, work + (end - start) / factor)

    def end(self, start: float, work: float) -> float:
        """When ``work`` (in full-speed time) that begins at ``start`` is finished."""
        target = self._done_by(start) + work
        place = bisect.bisect_right(self._work, target) - 1
        rest = target - self._work[place]
        return self._times[place] + rest * (self._factor if place % 2 else 1.0)

    def _done_by(self, time: float) -> float:
        place = bisect.bisect_right(self._times, time) - 1
        rest = time - self._times[place]
        return self._work[place] + rest / (self._factor if place % 2 else 1.0)


@dataclass(frozen=True)
class Hop:
    """The way between virtual stages ``s`` and ``s + 1``, alike in both directions.

    Args:
        latency: from the end of the sending to the arrival.
        occupancy: a message keeps its directed pair of ranks busy for so long.
        scale: per direction and microbatch, a factor on both; empty for none.
    """

    latency: float
    occupancy: float
    scale: tuple[Sequence[float], ...] = ()


@dataclass(frozen=True)
class Costs:
    """Costs of one iteration of ``num_stages`` virtual stages.

    Args:
        durations: ``durations[kind][stage][microbatch]`` at full speed. A fused backward takes its
            ``B`` and ``W``.
        hops: ``hops[s]`` leads from stage ``s`` to ``s + 1``; ``num_stages - 1`` of them.
        slow_times: per rank, where it is slow; a rank that is not named works at full speed.
        overhead: per rank, what passes between the end of a task and the next one's start although
            nobody waits; the task's output is on its way meanwhile. None for a rank not named.
    """

    durations: tuple[list[list[float]], list[list[float]], list[list[float]]]
    hops: list[Hop]
    slow_times: dict[int, SlowTimes] = field(default_factory=dict)
    overhead: dict[int, float] = field(default_factory=dict)

    @property
    def num_stages(self) -> int:
        return len(self.durations[Kind.F])

    @property
    def num_microbatches(self) -> int:
        return len(self.durations[Kind.F][0])


def even_costs(
    num_stages: int,
    num_microbatches: int,
    *,
    times: tuple[float, float, float] = (1.0, 1.0, 1.0),
    hop: float = 0.0,
) -> Costs:
    """Every stage's ``F``, ``B`` and ``W`` take ``times``; half of ``hop`` is latency, half
    occupies the link.
    """
    forward, backward, weight = (
        [[time] * num_microbatches for _ in range(num_stages)] for time in times
    )
    return Costs((forward, backward, weight), [Hop(hop / 2, hop / 2)] * (num_stages - 1))

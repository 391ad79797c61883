"""Costs of a simulated iteration, with all randomness drawn beforehand.

A :class:`Costs` holds the duration of every task, the speed of every rank over time, and the delay
of every message, in seconds or any other unit. Two simulations over the same ``Costs`` differ by
their schedules alone.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from megatron.dpp.schedule import UNIT, Kind, group_sizes


@dataclass(frozen=True)
class Shape:
    """Ranks of a pipeline, chunks of each rank, and microbatches of an iteration.

    Args:
        sizes: of each microbatch, in tokens, for the memory cap; empty where they are equal.
        largest: most tokens that a microbatch may have; 0 for the largest of ``sizes``.
        groups: of linked microbatches, as in :class:`~megatron.dpp.schedule.Geometry`; with sizes.
    """

    num_ranks: int
    num_chunks: int
    num_microbatches: int
    sizes: tuple[int, ...] = ()
    largest: int = 0
    groups: tuple[int, ...] = ()

    @property
    def unit(self) -> int:
        """Size of the largest microbatch, in which the memory cap counts; a group counts as one."""
        return self.largest or max(group_sizes(self.groups, self.sizes), default=UNIT)

    @property
    def num_stages(self) -> int:
        return self.num_ranks * self.num_chunks


class SlowTimes:
    """Intervals in which a rank works at a fraction of its speed.

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
        """The time at which ``work`` (in full-speed time) ends that starts at ``start``."""
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
    """The link between virtual stages ``s`` and ``s + 1``, alike in both directions.

    Args:
        latency: from the end of the send to the arrival.
        occupancy: time for which a message keeps its directed pair of ranks busy.
        scale: a factor on both per direction and microbatch; empty for none.
    """

    latency: float
    occupancy: float
    scale: tuple[Sequence[float], ...] = ()


@dataclass(frozen=True)
class Costs:
    """Costs of one iteration of ``num_stages`` virtual stages.

    Args:
        durations: ``durations[kind][stage][microbatch]`` at full speed. A fused backward takes the
            time of ``B`` and ``W``.
        hops: ``hops[s]`` leads from stage ``s`` to ``s + 1``; ``num_stages - 1`` of them.
        slow_times: of the ranks that are slow at times.
        overhead: per rank, the least time from a task's end to the next one's start. The task's
            output leaves at its end. 0 for a rank that is not named.
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

    def permuted(self, order: Sequence[int]) -> Costs:
        """The same costs with the microbatches in another order."""
        forward, backward, weight = (
            [[row[i] for i in order] for row in rows] for rows in self.durations
        )
        return replace(self, durations=(forward, backward, weight))


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

"""Time of an iteration per rank and cause.

The *pipeline window* runs from the first rank's start of the iteration to the end of the last task
of any rank; the rest of the iteration (gradient reduction, optimizer) is the *tail*. Inside the
window a rank runs tasks, does other work, or idles; idle time is split by the causes that the
executor recorded. What nobody explained is ``host`` (launching, deciding, Python) between tasks,
``warm-up`` before the first task and ``drain`` after the last. The *ideal* is the busiest rank's
own work: no order of tasks can be faster.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from megatron.dpp.report.analysis.model import RankIteration, TracedIteration
from megatron.dpp.trace.schema import EventKind, IdleCause

_MS = 1e6

Stretch = tuple[str, int, int]
"""A name, and the ns from which and up to which it holds."""


@dataclass(frozen=True, slots=True)
class RankTimes:
    """One rank in one iteration, or in the mean of several. ``busy`` + ``other`` + all of ``idle``
    = ``window``; ``bubble`` is the idle share of it; ``peaks`` are the largest values of counters.
    """

    rank: int
    window_ms: float
    bubble: float
    busy_ms: float
    kinds_ms: dict[str, float]
    other_ms: float
    idle_ms: dict[str, float]
    tail_ms: dict[str, float]
    sent_bytes: float
    peaks: dict[str, float]

    @classmethod
    def mean_of(cls, parts: Sequence[RankTimes]) -> RankTimes:
        """The mean of one rank's iterations; what an iteration lacks counts as 0."""

        def mean(name: str) -> Any:
            values = [getattr(part, name) for part in parts]
            if not isinstance(values[0], dict):
                return statistics.fmean(values)
            keys = sorted({key for value in values for key in value})
            return {key: statistics.fmean(value.get(key, 0.0) for value in values) for key in keys}

        peaks = {key: max(p.peaks.get(key, 0.0) for p in parts) for p in parts for key in p.peaks}
        means = {field.name: mean(field.name) for field in fields(cls)}
        return cls(**means | {"rank": parts[0].rank, "peaks": peaks})


@dataclass(frozen=True, slots=True)
class IterationTimes:
    """One iteration."""

    number: int
    total_ms: float
    window_ms: float
    ranks: dict[int, RankTimes]

    @property
    def ideal_ms(self) -> float:
        """The busiest rank's own work."""
        return max(rank.busy_ms for rank in self.ranks.values())

    @property
    def bubble(self) -> float:
        """Mean over the ranks of the idle share of the pipeline window."""
        return statistics.fmean(rank.bubble for rank in self.ranks.values())


def painted(start: int, end: int, layers: Sequence[Stretch]) -> dict[str, int]:
    """Nanoseconds from ``start`` to ``end`` by name. Each layer covers the ones before it; time
    that no layer covers does not count.
    """
    clipped = [(name, max(a, start), min(b, end)) for name, a, b in layers]
    clipped = [(name, a, b) for name, a, b in clipped if a < b]
    edges = np.unique([edge for _, *ends in clipped for edge in ends])
    names = list(dict.fromkeys(name for name, _, _ in clipped))
    owner = np.full(max(len(edges) - 1, 0), -1)
    for name, a, b in clipped:
        first, last = np.searchsorted(edges, (a, b))
        owner[first:last] = names.index(name)
    lengths = np.diff(edges)
    sums = {name: int(lengths[owner == index].sum()) for index, name in enumerate(names)}
    return {name: length for name, length in sums.items() if length}


def _in_ms(times: dict[str, int]) -> dict[str, float]:
    return {name: time / _MS for name, time in times.items()}


def _rank_times(rank: RankIteration, start: int, end: int) -> RankTimes:
    first = min((task.start for task in rank.tasks), default=end)
    last = max((task.end for task in rank.tasks), default=start)
    host: Stretch = (IdleCause.HOST, start, max(end, rank.end))
    waits = sorted(rank.waits, key=lambda wait: wait.cause, reverse=True)
    spans: list[Stretch] = [(span.name, span.start, span.end) for span in reversed(rank.spans)]
    layers = [
        host,
        (IdleCause.WARM_UP, start, first),
        *((wait.cause, wait.start, wait.end) for wait in waits),
        (IdleCause.DRAIN, last, end),
        *((EventKind.SPAN, a, min(b, last)) for _, a, b in spans),
        *((EventKind.TASK, task.start, task.end) for task in rank.tasks),
    ]
    idle = _in_ms(painted(start, end, layers))
    kinds: dict[str, int] = {}
    for task in rank.tasks:
        kinds[task.kind] = kinds.get(task.kind, 0) + task.length
    return RankTimes(
        rank=rank.rank,
        window_ms=(end - start) / _MS,
        busy_ms=idle.pop(EventKind.TASK, 0.0),
        kinds_ms=_in_ms(kinds),
        other_ms=idle.pop(EventKind.SPAN, 0.0),
        bubble=sum(idle.values()) / ((end - start) / _MS or 1.0),
        idle_ms=idle,
        tail_ms=_in_ms(painted(end, rank.end, [host, *spans])),
        sent_bytes=sum(send.num_bytes for send in rank.sends),
        peaks=rank.peaks,
    )


def iteration_times(iteration: TracedIteration) -> IterationTimes:
    """Account for every nanosecond of the pipeline window of every rank."""
    ranks, start = iteration.ranks.values(), iteration.start
    end = max((task.end for rank in ranks for task in rank.tasks[-1:]), default=start)
    times = {rank.rank: _rank_times(rank, start, end) for rank in ranks}
    total, window = (iteration.end - start) / _MS, (end - start) / _MS
    return IterationTimes(iteration.number, total, window, times)

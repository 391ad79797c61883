"""Time of an iteration per rank and cause.

The *pipeline window* runs from the first rank's start of the iteration to the end of the last task
of any rank; the rest of the iteration (gradient reduction, optimizer) is the *tail*. Inside the
window a rank runs tasks, does other work, or idles; idle time is split by the causes that the
executor recorded. What nobody explained is ``host`` (launching, deciding, Python) between tasks,
``warm-up`` before the first task and ``drain`` after the last. The *ideal* is the busiest rank's
own work: no order of tasks can be faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron.dpp.report.analysis.model import RankIteration, TracedIteration
from megatron.dpp.trace.vocabulary import EventKind, IdleCause

Stretch = tuple[str, int, int]
"""A name, and the ns from which and up to which it holds."""


@dataclass(frozen=True, slots=True)
class RankTimes:
    """One rank in one iteration, in ns; ``busy`` + ``other`` + all of ``idle`` = ``window``."""

    rank: int
    window: int
    busy: int
    kinds: dict[str, int]
    other: int
    idle: dict[str, int]
    tail: dict[str, int]
    sent_bytes: int
    peaks: dict[str, float]

    @property
    def bubble(self) -> float:
        """Share of the pipeline window in which this rank idled."""
        return sum(self.idle.values()) / self.window if self.window else 0.0


@dataclass(frozen=True, slots=True)
class IterationTimes:
    """One iteration; times in ns."""

    number: int
    total: int
    window: int
    ideal: int
    ranks: dict[int, RankTimes]

    @property
    def bubble(self) -> float:
        """Mean over the ranks of the idle share of the pipeline window."""
        return sum(rank.bubble for rank in self.ranks.values()) / len(self.ranks)


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


def _rank_times(rank: RankIteration, start: int, end: int) -> RankTimes:
    first = min((task.start for task in rank.tasks), default=end)
    last = max((task.end for task in rank.tasks), default=start)
    host: Stretch = (IdleCause.HOST, start, max(end, rank.end))
    waits = sorted(rank.waits, key=lambda wait: wait.cause, reverse=True)
    spans: list[Stretch] = [(span.name, span.start, span.end) for span in reversed(rank.spans)]
    idle = painted(
        start,
        end,
        [
            host,
            (IdleCause.WARM_UP, start, first),
            *((wait.cause, wait.start, wait.end) for wait in waits),
            (IdleCause.DRAIN, last, end),
            *((EventKind.SPAN, a, min(b, last)) for _, a, b in spans),
            *((EventKind.TASK, task.start, task.end) for task in rank.tasks),
        ],
    )
    kinds: dict[str, int] = {}
    for task in rank.tasks:
        kinds[task.kind] = kinds.get(task.kind, 0) + task.length
    return RankTimes(
        rank=rank.rank,
        window=end - start,
        busy=idle.pop(EventKind.TASK, 0),
        kinds=kinds,
        other=idle.pop(EventKind.SPAN, 0),
        idle=idle,
        tail=painted(end, rank.end, [host, *spans]),
        sent_bytes=sum(send.num_bytes for send in rank.sends),
        peaks=rank.peaks,
    )


def iteration_times(iteration: TracedIteration) -> IterationTimes:
    """Account for every nanosecond of the pipeline window of every rank."""
    ranks = iteration.ranks.values()
    start = iteration.start
    ends = [task.end for rank in ranks for task in rank.tasks[-1:]]
    end = max(ends, default=start)
    times = {rank.rank: _rank_times(rank, start, end) for rank in ranks}
    ideal = max((rank.busy for rank in times.values()), default=0)
    return IterationTimes(iteration.number, iteration.end - start, end - start, ideal, times)

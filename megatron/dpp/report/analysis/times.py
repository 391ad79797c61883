"""Time of an iteration per rank and cause.

The *pipeline window* runs from the first rank's start of the iteration to the end of the last task
of any rank; the rest of the iteration (gradient reduction, optimizer) is the *tail*. Inside the
window a rank runs tasks, does other work, or idles; idle time is split by the causes that the
executor recorded. What nobody explained is ``host`` (launching, deciding, Python) between tasks,
``warm-up`` before the first task and ``drain`` after the last. The *ideal* is the busiest rank's
own work: no order of tasks can be faster.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.dpp.report.analysis.model import Iteration, RankIteration
from megatron.dpp.trace.vocabulary import IdleCause

Interval = tuple[int, int]


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


def union(intervals: list[Interval]) -> list[Interval]:
    """The same stretches of time, sorted and without overlaps."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def clip(intervals: list[Interval], start: int, end: int) -> list[Interval]:
    """The part of ``intervals`` between ``start`` and ``end``."""
    return [(max(a, start), min(b, end)) for a, b in intervals if a < end and b > start]


def subtract(intervals: list[Interval], holes: list[Interval]) -> list[Interval]:
    """``intervals`` without ``holes``; both sorted and without overlaps."""
    left: list[Interval] = []
    first = 0
    for start, end in intervals:
        while first < len(holes) and holes[first][1] <= start:
            first += 1
        at, index = start, first
        while index < len(holes) and holes[index][0] < end:
            if holes[index][0] > at:
                left.append((at, holes[index][0]))
            at = max(at, holes[index][1])
            index += 1
        if at < end:
            left.append((at, end))
    return left


def length(intervals: list[Interval]) -> int:
    """Total of stretches that do not overlap."""
    return sum(end - start for start, end in intervals)


def _idle(rank: RankIteration, gaps: list[Interval], first: int, last: int) -> dict[str, int]:
    """Splits ``gaps`` by recorded cause, then by where they lie."""
    idle: dict[str, int] = {}

    def count(cause: str, intervals: list[Interval]) -> None:
        if intervals:
            idle[cause] = idle.get(cause, 0) + length(intervals)

    drain = clip(gaps, last, gaps[-1][1]) if gaps else []
    count(IdleCause.DRAIN, drain)
    gaps = subtract(gaps, drain)
    for cause in sorted({wait.cause for wait in rank.waits}):
        waited = union([(w.start, w.end) for w in rank.waits if w.cause == cause])
        rest = subtract(gaps, waited)
        if length(rest) < length(gaps):
            idle[cause] = idle.get(cause, 0) + length(gaps) - length(rest)
        gaps = rest
    before = [(start, end) for start, end in gaps if end <= first]
    count(IdleCause.WARM_UP, before)
    count(IdleCause.HOST, subtract(gaps, before))
    return idle


def _tail(rank: RankIteration, start: int) -> dict[str, int]:
    tail: dict[str, int] = {}
    left = [(start, rank.end)] if rank.end > start else []
    for span in rank.spans:
        rest = subtract(left, [(span.start, span.end)])
        taken = length(left) - length(rest)
        if taken:
            tail[span.name] = tail.get(span.name, 0) + taken
        left = rest
    if length(left):
        tail[IdleCause.HOST] = tail.get(IdleCause.HOST, 0) + length(left)
    return tail


def _rank_times(rank: RankIteration, start: int, end: int) -> RankTimes:
    tasks = union([(task.start, task.end) for task in rank.tasks])
    first = tasks[0][0] if tasks else end
    last = tasks[-1][1] if tasks else start
    busy = clip(tasks, start, end)
    spans = clip(union([(span.start, span.end) for span in rank.spans]), start, last)
    other = subtract(spans, busy)
    gaps = subtract(subtract([(start, end)], busy), other)
    kinds: dict[str, int] = {}
    for task in rank.tasks:
        kinds[task.kind] = kinds.get(task.kind, 0) + task.length
    return RankTimes(
        rank=rank.rank,
        window=end - start,
        busy=length(busy),
        kinds=kinds,
        other=length(other),
        idle=_idle(rank, gaps, first, last),
        tail=_tail(rank, end),
        sent_bytes=sum(send.num_bytes for send in rank.sends),
        peaks=rank.peaks,
    )


def iteration_times(iteration: Iteration) -> IterationTimes:
    """Account for every nanosecond of the pipeline window of every rank."""
    ranks = iteration.ranks.values()
    start = iteration.start
    ends = [task.end for rank in ranks for task in rank.tasks[-1:]]
    end = max(ends, default=start)
    times = {rank.rank: _rank_times(rank, start, end) for rank in ranks}
    ideal = max((rank.busy for rank in times.values()), default=0)
    return IterationTimes(iteration.number, iteration.end - start, end - start, ideal, times)

"""Times of an iteration: by rank and cause, of each stage's tasks, and of each link's messages.

The *pipeline window* runs from the first rank's start of the iteration to the end of the last task
of any rank; the rest of the iteration (gradient reduction, optimizer) is the *tail*. Inside the
window a rank runs tasks, does other work, or idles; idle time is split by the causes that the
executor recorded. What nobody explained is ``host`` (launching, deciding, Python) between tasks,
``warm-up`` before the first task and ``drain`` after the last. The *ideal* is the busiest rank's
own work: no order of tasks can be faster.

A *cell* is one (rank, chunk). A task cut into pieces counts as one, with the pieces' times added.

A receiver sees a message when it looks, and it looks between tasks. The delay of a message that
arrived during a task is an upper bound of the link's. Only messages that arrived while their
receiver waited measure the link (*clean* samples).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from megatron.dpp.report.analysis.model import Arrival, RankIteration, TracedIteration
from megatron.dpp.trace.schema import EventKind, IdleCause

Cell = tuple[int, int]
Link = tuple[int, int]
"""Sender and receiver."""

UNDISTURBED = 0.3
"""Quantile of recorded times that stands for an undisturbed task; disturbances only add time."""
_LOOK_NS = 100_000


@dataclass(frozen=True, slots=True)
class TaskTimes:
    """Times of one iteration's tasks in ns: ``tasks[(rank, chunk)][kind][microbatch]``, each rank's
    tasks (kind, chunk, microbatch, piece) in the order in which they ran, and the groups of its
    microbatches, as in ``Geometry``.
    """

    number: int
    tasks: dict[Cell, dict[str, dict[int, int]]]
    orders: dict[int, list[tuple[str, int, int, int]]] = field(default_factory=dict)
    groups: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def typical(self, cell: Cell, kind: str) -> float:
        """Time of an undisturbed task of a kind, 0 where there is none.

        A rank that is slow now and then, or jitter, hardly moves it; one that is always slow does.
        """
        times = sorted(self.tasks[cell].get(kind, {}).values())
        return float(times[int(len(times) * UNDISTURBED)]) if times else 0.0

    def per_microbatch(self, cell: Cell) -> float:
        """Undisturbed time of all of a cell's work for one microbatch."""
        return sum(self.typical(cell, kind) for kind in self.tasks[cell])


def work_of(iteration: TracedIteration) -> TaskTimes:
    """Add up the pieces of every task of an iteration."""
    work = TaskTimes(iteration.number, {})
    for number, rank in iteration.ranks.items():
        for task in rank.tasks:
            times = work.tasks.setdefault((number, task.chunk), {}).setdefault(task.kind, {})
            times[task.microbatch] = times.get(task.microbatch, 0) + task.length
        work.orders[number] = [(t.kind, t.chunk, t.microbatch, t.piece) for t in rank.tasks]
        work.groups[number] = rank.groups
    return work


@dataclass(slots=True)
class LinkSamples:
    """Delays seen on one directed pair of ranks, in ns; ``waited_for`` are the clean ones of one
    iteration by (receiver's chunk, direction, microbatch).
    """

    clean: list[int] = field(default_factory=list)
    any: list[int] = field(default_factory=list)
    waited_for: dict[tuple[int, str, int], int] = field(default_factory=dict)

    @property
    def delay(self) -> int:
        """The typical delay of a message: median of the clean ones, else the least upper bound."""
        return round(statistics.median(self.clean)) if self.clean else min(self.any, default=0)


LinkDelays = dict[Link, LinkSamples]


def _waited_for(rank: RankIteration, arrival: Arrival, start: int, kind: str) -> bool:
    """True if the receiver was looking when the message came, so that its delay is the link's.

    A static schedule looks at the end of its wait only; there the wait must have begun before the
    send. A device that was told to wait sees a message of its own accord, once its tasks are over.
    """
    if arrival.ahead:
        return all(t.end <= start or t.start >= arrival.arrived for t in rank.tasks)
    return any(
        wait.start <= arrival.arrived <= wait.end + _LOOK_NS
        and (wait.start <= start or (kind != "p2p" and arrival.arrived > wait.start + _LOOK_NS))
        for wait in rank.waits
        if wait.cause != IdleCause.LOOKAHEAD
    )


def link_samples(iteration: TracedIteration) -> LinkDelays:
    """Delays of all messages of an iteration, by directed pair of ranks."""
    sends = {send.message: send for rank in iteration.ranks.values() for send in rank.sends}
    links: LinkDelays = {}
    kinds: dict[Link, str] = {}
    for rank in iteration.ranks.values():
        for arrival in rank.arrivals:
            message, send = arrival.message, sends.get(arrival.message)
            start = send.ready if send and send.ready <= arrival.arrived else arrival.sent
            if start is None or message.source == message.destination:
                continue
            link = message.source, message.destination
            samples = links.setdefault(link, LinkSamples())
            delay = max(arrival.arrived - start, 0)
            samples.any.append(delay)
            kinds[link] = send.kind if send else kinds.get(link, "")
            if _waited_for(rank, arrival, start, kinds[link]):
                samples.clean.append(delay)
                samples.waited_for[message.chunk, message.direction, message.microbatch] = delay
    return links


def merge_links(parts: Iterable[LinkDelays]) -> LinkDelays:
    """Samples of several iterations together."""
    total: LinkDelays = {}
    for part in parts:
        for link, samples in part.items():
            into = total.setdefault(link, LinkSamples())
            into.clean += samples.clean
            into.any += samples.any
    return total


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
    spans: list[Stretch] = [(span.name, span.start, span.end) for span in reversed(rank.spans)]
    layers = [
        host,
        (IdleCause.WARM_UP, start, first),
        *((wait.cause, wait.start, wait.end) for wait in rank.waits),
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

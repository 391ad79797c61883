"""Times of each stage's tasks and each link's messages, for the straggler search and for what-if.

A *cell* is one (rank, chunk). A task cut into pieces counts as one, with the pieces' times added.

A receiver sees a message when it looks, and it looks between tasks. The delay of a message that
arrived during a task is an upper bound of the link's. Only messages that arrived while their
receiver waited measure the link (*clean* samples).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field

from megatron.dpp.report.analysis.model import Arrival, RankIteration, TracedIteration
from megatron.dpp.trace.schema import IdleCause

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

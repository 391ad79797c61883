"""Delays of messages per link.

A receiver sees a message when it looks, and it looks between tasks. The delay of a message that
arrived during a task is an upper bound of the link's. Only messages that arrived while their
receiver waited measure the link (*clean* samples).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field

from megatron.dpp.report.analysis.model import Arrival, Iteration, RankIteration
from megatron.dpp.trace.vocabulary import IdleCause

_LOOK_NS = 100_000
ENOUGH = 3
"""Clean samples from which on a link's delay is known."""

Link = tuple[int, int]


@dataclass(slots=True)
class LinkSamples:
    """Delays seen on one directed pair of ranks, in ns."""

    clean: list[int] = field(default_factory=list)
    any: list[int] = field(default_factory=list)
    num_bytes: int = 0
    kind: str = ""
    waited_for: dict[tuple[int, str, int], int] = field(default_factory=dict)
    """The clean ones of one iteration by (receiver's chunk, direction, microbatch)."""

    @property
    def delay(self) -> int:
        """The typical delay of a message: median of the clean ones, else the least upper bound."""
        return round(statistics.median(self.clean)) if self.clean else min(self.any, default=0)

    @property
    def bandwidth(self) -> float:
        """Bytes per second at the typical delay."""
        return self.num_bytes / len(self.any) / self.delay * 1e9 if self.delay else 0.0


def _waited_for(rank: RankIteration, arrival: Arrival, start: int, kind: str) -> bool:
    """True if the receiver was looking when the message came, so that its delay is the link's.

    A static schedule looks at the end of its wait only; there the wait must have begun before the
    send. A device that was told to wait sees a message of its own accord, once its tasks are over.
    """
    if arrival.ahead:
        return all(t.end <= start or t.start >= arrival.arrived for t in rank.tasks)
    for wait in rank.waits:
        if (
            wait.cause == IdleCause.LOOKAHEAD
            or not wait.start <= arrival.arrived <= wait.end + _LOOK_NS
        ):
            continue
        if wait.start <= start or (kind != "p2p" and arrival.arrived > wait.start + _LOOK_NS):
            return True
    return False


def link_samples(iteration: Iteration) -> dict[Link, LinkSamples]:
    """Delays of all messages of an iteration, by directed pair of ranks."""
    ready = {send.message: send for rank in iteration.ranks.values() for send in rank.sends}
    links: dict[Link, LinkSamples] = {}
    for rank in iteration.ranks.values():
        for arrival in rank.arrivals:
            message, send = arrival.message, ready.get(arrival.message)
            start = send.ready if send and send.ready <= arrival.arrived else arrival.sent
            if start is None or message.source == message.destination:
                continue
            link = links.setdefault((message.source, message.destination), LinkSamples())
            delay = max(arrival.arrived - start, 0)
            link.any.append(delay)
            link.num_bytes += send.num_bytes if send else arrival.num_bytes
            link.kind = send.kind if send else link.kind
            if _waited_for(rank, arrival, start, link.kind):
                link.clean.append(delay)
                link.waited_for[message.chunk, message.direction, message.microbatch] = delay
    return links


def merge_links(parts: Iterable[dict[Link, LinkSamples]]) -> dict[Link, LinkSamples]:
    """Samples of several iterations together."""
    total: dict[Link, LinkSamples] = {}
    for part in parts:
        for link, samples in part.items():
            into = total.setdefault(link, LinkSamples(kind=samples.kind))
            into.clean += samples.clean
            into.any += samples.any
            into.num_bytes += samples.num_bytes
    return total

"""Traces of runs that never happened: a small virtual pipeline that drives the real Scheduler.

Times of tasks and hops are functions, so a test injects a cause and knows what the analysis must
find. The files are written with the functions that the recorder uses.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from megatron.dpp.schedule import Geometry, Kind, Scheduler
from megatron.dpp.trace import TraceLayout
from megatron.dpp.trace.lines import EventLines, first_line, header, last_line

MS = 1_000_000
Cost = Callable[[int, int, str, int, int], int]
"""(iteration, rank, kind, chunk, microbatch) -> ns."""
Hop = Callable[[int, int, int], int]
"""(iteration, source, destination) -> ns."""


class Channel(NamedTuple):
    source: int
    destination: int
    chunk: int
    direction: int


@dataclass
class Run:
    """A run to simulate. Times in ns; ``offset`` is the lead of a rank's clock."""

    ranks: int = 4
    chunks: int = 1
    microbatches: int = 8
    iterations: int = 3
    policy: str = "dynamic"
    split: bool = True
    seed: int = 0
    cost: Cost | None = None
    hop: Hop | None = None
    jitter: float = 0.02
    gap_ns: int = 50_000
    offset: dict[int, int] = field(default_factory=dict)
    clocks: dict[int, str] = field(default_factory=dict)
    num_bytes: int = 1 << 20
    schedule: str = "dpp"
    replicas: int = 1
    groups: tuple[int, ...] = ()
    experts: Callable[[int, int, int], tuple[list[int], int]] | None = None
    """(replica, rank, microbatch) -> tokens of its two experts in a forward, and their ns."""

    def task_ns(self, iteration: int, rank: int, kind: str, chunk: int, microbatch: int) -> int:
        if self.cost is not None:
            return self.cost(iteration, rank, kind, chunk, microbatch)
        return base_cost(self, kind)

    def hop_ns(self, iteration: int, source: int, destination: int) -> int:
        return self.hop(iteration, source, destination) if self.hop else 100_000


def base_cost(run: Run, kind: str) -> int:
    """10 ms for a whole rank's F, B and W each; the B of a fused backward takes both."""
    return (10 if kind != "B" or run.split else 20) * MS // run.chunks


class _Pipeline:
    """One iteration on a virtual clock."""

    def __init__(self, run: Run, iteration: int, start: int, noise: random.Random) -> None:
        self.run, self.iteration, self.noise = run, iteration, noise
        self.now = start
        self.start = start
        self.queue: list[tuple[int, int, Callable[[], None]]] = []
        self.events: list[list[tuple[Any, ...]]] = [[] for _ in range(run.ranks)]
        self.free = [start] * run.ranks
        self.busy = [False] * run.ranks
        self.counts: dict[Channel, int] = {}
        self.waiting: dict[Channel, deque[tuple[int, int, int]]] = {}
        self.last: dict[Channel, int] = {}
        shape = run.chunks, run.microbatches
        geometry = [Geometry(run.ranks, r, *shape, groups=run.groups) for r in range(run.ranks)]
        cap = 2.0 * run.chunks * run.microbatches if run.groups else None
        self.schedulers = [
            Scheduler(g, policy=run.policy, split_backward=run.split, cap=cap) for g in geometry
        ]

    def at(self, when: int, what: Callable[[], None]) -> None:
        heapq.heappush(self.queue, (when, len(self.queue) + self.noise.randrange(1 << 30), what))

    def play(self) -> int:
        for rank in range(self.run.ranks):
            self.at(self.start, lambda rank=rank: self.wake(rank))
        while self.queue:
            self.now, _, what = heapq.heappop(self.queue)
            what()
        assert all(scheduler.done for scheduler in self.schedulers)
        return self.now

    def wake(self, rank: int) -> None:
        if self.busy[rank] or self.schedulers[rank].done:
            return
        action = self.schedulers[rank].next()
        if action is None:
            return
        if self.now > self.free[rank]:
            ran = any(event[0] == "task" for event in self.events[rank])
            cause = "message" if ran else "warm-up"
            gap = ("wait", self.free[rank], self.now, self.iteration, cause, "")
            self.events[rank].append(gap)
        self.begin(rank, action.kind, action.chunk, action.microbatch)

    def begin(self, rank: int, kind: Kind, chunk: int, microbatch: int) -> None:
        run = self.run
        source = self.source_of(rank, kind, chunk)
        if source is not None:
            sent, arrived, number = self.waiting[source].popleft()
            assert number == microbatch
            what = (source, microbatch, sent, run.num_bytes, 0, False)
            self.events[rank].append(("arrival", arrived, self.now, self.iteration, *what))
        length = run.task_ns(self.iteration, rank, kind.name, chunk, microbatch)
        length = round(length * self.factor(rank, kind.name, chunk, microbatch))
        self.busy[rank] = True
        start = self.now
        self.at(start + length, lambda: self.end(rank, kind, chunk, microbatch, start))

    def factor(self, *what: int | str) -> float:
        """Random factor on the time of this task or message.

        It depends on its arguments and the seed alone. Two runs with and without a disturbance
        thus differ by the disturbance only.
        """
        key = "/".join(map(str, ("spread", self.run.seed, self.iteration, *what)))
        return random.Random(key).lognormvariate(0, self.run.jitter)

    def source_of(self, rank: int, kind: Kind, chunk: int) -> Channel | None:
        p, v = self.run.ranks, self.run.chunks
        if kind is Kind.F and (rank, chunk) != (0, 0):
            return Channel((rank - 1) % p, rank, chunk, 0)
        if kind is Kind.B and (rank, chunk) != (p - 1, v - 1):
            return Channel((rank + 1) % p, rank, chunk, 1)
        return None

    def target_of(self, rank: int, kind: Kind, chunk: int) -> Channel | None:
        p, v = self.run.ranks, self.run.chunks
        if kind is Kind.F and (rank, chunk) != (p - 1, v - 1):
            return Channel(rank, (rank + 1) % p, chunk + (rank == p - 1), 0)
        if kind is Kind.B and (rank, chunk) != (0, 0):
            return Channel(rank, (rank - 1) % p, chunk - (rank == 0), 1)
        return None

    def end(self, rank: int, kind: Kind, chunk: int, microbatch: int, start: int) -> None:
        task = (kind.name, chunk, microbatch, 0)
        self.events[rank].append(("task", start, self.now, self.iteration, *task))
        self.busy[rank], self.free[rank] = False, self.now
        held = self.schedulers[rank].held
        self.events[rank].append(("counter", self.now, self.now, self.iteration, "held", held))
        target = self.target_of(rank, kind, chunk)
        if target is not None:
            self.send(target, microbatch)
        again = self.now + self.run.gap_ns
        self.free[rank] = again
        self.at(again, lambda: self.wake(rank))

    def send(self, channel: Channel, microbatch: int) -> None:
        run, sent = self.run, self.now
        put = (channel, microbatch, run.num_bytes, "shm")
        self.events[channel.source].append(("send", sent, sent, self.iteration, *put))
        hop = run.hop_ns(self.iteration, channel.source, channel.destination)
        hop = round(hop * self.factor(*channel, microbatch))
        arrival = max(sent + hop, self.last.get(channel, 0) + 1)
        self.last[channel] = arrival

        def arrive() -> None:
            self.counts[channel] = self.counts.get(channel, 0) + 1
            self.waiting.setdefault(channel, deque()).append((sent, self.now, microbatch))
            scheduler = self.schedulers[channel.destination]
            scheduler.arrived(channel.direction, channel.chunk, self.counts[channel])
            self.wake(channel.destination)

        self.at(arrival, arrive)


def play(run: Run) -> list[list[tuple[Any, ...]]]:
    """Events of every rank, on one true clock."""
    noise = random.Random(run.seed)
    events: list[list[tuple[Any, ...]]] = [[] for _ in range(run.ranks)]
    start = MS
    for iteration in range(run.iterations):
        pipeline = _Pipeline(run, iteration, start, noise)
        end = pipeline.play()
        for rank, own in enumerate(pipeline.events):
            events[rank] += own
            events[rank].append(("span", end, end + MS, iteration, "optimizer"))
            events[rank].append(("iteration", start, end + MS, iteration))
        start = end + 2 * MS
    return events


def _of_replica(events: list[tuple[Any, ...]], run: Run, rank: int, replica: int) -> Iterator[Any]:
    """A pipeline's events in one of its replicas, with the experts of each forward."""

    def global_rank(place: int) -> int:
        return place * run.replicas + replica

    for event in events:
        code, start, end, iteration, *rest = event
        if code in ("send", "arrival"):
            source, destination, *channel = rest[0]
            rest[0] = Channel(global_rank(source), global_rank(destination), *channel)
        yield (code, start, end, iteration, *rest)
        if code == "task" and rest[0] == "F" and run.experts is not None:
            _, chunk, microbatch, _ = rest
            tokens, length = run.experts(replica, rank, microbatch)
            layer, group = chunk * run.ranks + rank + 1, rank * run.replicas
            where = (chunk, microbatch, layer, 2 * replica, group, tokens)
            yield ("experts", start, start + length, iteration, *where)


def _shifted(event: tuple[Any, ...], run: Run, rank: int) -> tuple[Any, ...]:
    own = run.offset.get(rank, 0)
    code, start, end, *rest = event
    if code == "arrival":
        channel, sent = rest[1], rest[3]
        rest[3] = sent + run.offset.get(channel.source, 0)
    return (code, start + own, end + own, *rest)


def write(run: Run, directory: Path, *, whole: bool = True) -> Path:
    """Write the files of all ranks; returns their directory."""
    base = 10**12
    places = [(place, replica) for place in range(run.ranks) for replica in range(run.replicas)]
    played = play(run)
    for rank, (place, replica) in enumerate(places):
        layout = TraceLayout(
            data=replica,
            pipeline=place,
            tensor=0,
            data_size=run.replicas,
            pipeline_size=run.ranks,
            tensor_size=1,
            num_chunks=run.chunks,
            schedule=run.schedule,
        )
        own = base + run.offset.get(rank, 0)
        head = header(rank, layout, "cpu", "synthetic", own)
        head["args"]["clock"] = run.clocks.get(rank, "one")
        head["args"]["start_unix_ns"] = 1_700_000_000 * 10**9
        path = layout.path(directory)
        path.parent.mkdir(parents=True, exist_ok=True)
        lines, text_of = [first_line(head)], EventLines(rank, own)
        for event in _of_replica(played[place], run, place, replica):
            moved = _shifted(event, run, rank)
            at = (moved[0], moved[1] + base, moved[2] + base, *moved[3:])
            if moved[0] == "arrival":
                at = (*at[:6], at[6] + base, *at[7:])
            lines.append(text_of.line(at))
        path.write_text("".join(lines) + (last_line(rank, 0) if whole else ""))
    return path.parent

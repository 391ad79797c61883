"""Iterations of a run as objects, all ranks on one clock, and the places of the ranks.

Reads the ranks' files side by side, so that one iteration of all ranks is in memory at a time
however long the run was. The other modules of this package take :class:`TracedIteration` objects
and never see a file.
"""

from __future__ import annotations

import math
import resource
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from megatron.dpp.report.align import Alignment
from megatron.dpp.report.reader import Event, MessageId, TraceFile, message_of, read_events
from megatron.dpp.schedule import groups_of
from megatron.dpp.trace.schema import EventKind


@dataclass(frozen=True)
class JobShape:
    """The job's shape: each rank's stage, and its replica, tensor rank and context rank."""

    num_ranks: int
    num_chunks: int
    pipeline: dict[int, int]
    replica: dict[int, tuple[int, ...]]
    schedule: str

    @classmethod
    def of(cls, files: list[TraceFile]) -> JobShape:
        """Read from the headers of the files."""
        layout = files[0].layout
        places = {file.rank: file.layout for file in files}
        return cls(
            num_ranks=layout.pipeline_size,
            num_chunks=layout.num_chunks,
            pipeline={rank: place.pipeline for rank, place in places.items()},
            replica={rank: (p.data, p.tensor, p.context) for rank, p in places.items()},
            schedule=layout.schedule,
        )

    def name_of(self, rank: int) -> str:
        """A rank by its place and number, without what the job has only one of: ``stage 1, replica
        0 (rank 2)``.
        """
        numbers = zip(*self.replica.values(), strict=True)
        words = ("replica", "tensor rank", "context rank")
        parts = [
            f", {word} {own}"
            for word, own, found in zip(words, self.replica[rank], numbers, strict=False)
            if len(set(found)) > 1
        ]
        return f"stage {self.pipeline[rank]}{''.join(parts)} (rank {rank})"

    def stage_of(self, rank: int) -> list[int]:
        """The ranks of a rank's stage, of all replicas."""
        return [peer for peer, stage in self.pipeline.items() if stage == self.pipeline[rank]]

    def pipelines(self) -> list[list[int]]:
        """Ranks of every pipeline, in order of their stages."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in sorted(self.pipeline, key=lambda r: self.pipeline[r]):
            groups.setdefault(self.replica[rank], []).append(rank)
        return [groups[key] for key in sorted(groups)]


class TaskRun(NamedTuple):
    """A task that ran; ``start`` and ``end`` are ns on the run's reference clock."""

    start: int
    end: int
    kind: str
    chunk: int
    microbatch: int
    piece: int

    @property
    def length(self) -> int:
        """Nanoseconds."""
        return self.end - self.start


class ExpertsRun(NamedTuple):
    """A rank's experts of one layer in one forward: ``tokens`` of each, the first one's number, and
    the first rank of their expert-parallel group.
    """

    start: int
    end: int
    chunk: int
    microbatch: int
    layer: int
    first: int
    group: int
    tokens: list[int]


class Wait(NamedTuple):
    """A stretch in which a rank ran no task, and why."""

    start: int
    end: int
    cause: str
    detail: str


class OtherWork(NamedTuple):
    """Other work: optimizer, gradient reduction, data."""

    start: int
    end: int
    name: str


class Send(NamedTuple):
    """A message on its way: ``ready`` is when its tensor could be copied."""

    ready: int
    message: MessageId
    num_bytes: int
    kind: str


class Arrival(NamedTuple):
    """A message received: when it was sent (None: unknown) and seen complete. ``ahead``: it was
    taken before that, and ``arrived`` is when the receiver's device had come to it and had it.
    """

    sent: int | None
    arrived: int
    message: MessageId
    ahead: bool = False


@dataclass(slots=True)
class RankIteration:
    """One rank in one iteration, each list in order of time."""

    rank: int
    number: int = -1
    start: int = 0
    end: int = 0
    tasks: list[TaskRun] = field(default_factory=list)
    experts: list[ExpertsRun] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)
    spans: list[OtherWork] = field(default_factory=list)
    sends: list[Send] = field(default_factory=list)
    arrivals: list[Arrival] = field(default_factory=list)
    peaks: dict[str, float] = field(default_factory=dict)
    """Largest value of each counter."""

    @property
    def groups(self) -> tuple[int, ...]:
        """``Geometry.groups`` of its microbatches, by the order of their backwards."""
        return groups_of([t.microbatch for t in self.tasks if t.kind == "B" and t.chunk == 0])


@dataclass(frozen=True, slots=True)
class TracedIteration:
    """All ranks' share of one iteration."""

    number: int
    ranks: dict[int, RankIteration]

    @property
    def start(self) -> int:
        """Start of the first rank."""
        return min(rank.start for rank in self.ranks.values())

    @property
    def end(self) -> int:
        """End of the last rank, optimizer included."""
        return max(rank.end for rank in self.ranks.values())


def _iterations(file: TraceFile, alignment: Alignment) -> Iterator[RankIteration]:
    """Whole iterations of one rank, without one that a crash cut short."""
    current = RankIteration(file.rank)
    for event in read_events(file):
        start = alignment.to_global(file.rank, file.time_ns(event))
        end = start + file.duration_ns(event)
        if event["cat"] == EventKind.ITERATION:
            current.number, current.start, current.end = event["args"]["iteration"], start, end
            for events in (current.tasks, current.waits, current.spans):
                events.sort()
            yield current
            current = RankIteration(file.rank)
        else:
            _add(current, event, start, end, alignment)


def _add(to: RankIteration, event: Event, start: int, end: int, alignment: Alignment) -> None:
    cat, args = event["cat"], event["args"]
    if cat == EventKind.COUNTER:
        to.peaks[event["name"]] = max(float(args["value"]), to.peaks.get(event["name"], -math.inf))
    elif cat == EventKind.TASK:
        to.tasks.append(TaskRun(start, end, *(args[name] for name in TaskRun._fields[2:])))
    elif cat == EventKind.EXPERTS:
        to.experts.append(ExpertsRun(start, end, *(args[name] for name in ExpertsRun._fields[2:])))
    elif cat == EventKind.WAIT:
        to.waits.append(Wait(start, end, args["cause"], args.get("detail", "")))
    elif cat == EventKind.SPAN:
        to.spans.append(OtherWork(start, end, event["name"]))
    elif cat in (EventKind.SEND, EventKind.ARRIVAL) and (message := message_of(event)):
        if cat == EventKind.SEND:
            to.sends.append(Send(start, message, args["bytes"], args["kind"]))
            return
        sent, ahead = args.get("sent_ns"), args.get("ahead", False)
        if sent is not None and message.source in alignment.clocks:
            sent = alignment.to_global(message.source, sent)
        to.arrivals.append(Arrival(sent, start, message, ahead))


def _allow_open_files(count: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + 64
    if soft < wanted:
        least = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (least, hard))


def read_iterations(
    files: list[TraceFile], alignment: Alignment, only: Collection[int] | None = None
) -> Iterator[TracedIteration]:
    """The iterations that every rank has finished, in order.

    Args:
        files: the run's files.
        alignment: their clocks.
        only: numbers of the iterations wanted (default: all).
    """
    _allow_open_files(len(files))
    streams = [_iterations(file, alignment) for file in files]
    heads = [next(stream, None) for stream in streams]
    while all(head is not None for head in heads):
        ranks = [head for head in heads if head is not None]
        number = max(rank.number for rank in ranks)
        if all(rank.number == number for rank in ranks):
            if only is None or number in only:
                yield TracedIteration(number, {rank.rank: rank for rank in ranks})
            number += 1
        for index, rank in enumerate(ranks):
            if rank.number < number:
                heads[index] = next(streams[index], None)

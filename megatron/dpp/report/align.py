"""One time line for many clocks.

Every host has its own ``CLOCK_MONOTONIC``. A message cannot arrive before it was sent, so for
clocks ``a`` and ``b`` with unknown offsets (true time = clock + offset) each message from ``a`` to
``b`` says

    offset[a] - offset[b] <= arrived (on b) - sent (on a)

and messages the other way bound the difference from the other side. An iteration says the same of
replicas, which reduce their gradients in it: none leaves before all have entered. These are
difference constraints:
shortest paths from a reference clock give the largest offset each clock can have, paths to it the
smallest. Both extremes are consistent as a whole and so is their middle, which is used; half their
distance is the uncertainty that remains. Nothing is assumed about the delays.

Clocks drift, so a long trace is cut into windows that are solved one by one; between the middles of
two windows the offset runs along a straight line. What happened in one window is told by the hosts'
wall clocks, and by how far they were apart at the first iteration that both began. A trace none of
whose windows bounds all clocks is one window. Ranks of one host read one clock and need no
estimate. A clock that is not bounded from both sides is refused by name.
"""

from __future__ import annotations

import bisect
import contextlib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from megatron.dpp.errors import DataError
from megatron.dpp.report.reader import Event, TraceFile, message_of, read_events
from megatron.dpp.trace.vocabulary import EventKind

WINDOW_NS = 10 * 10**9
"""Within a window clocks are taken to run at one rate; 1 ppm of drift makes 10 us of error."""
_PIECE_NS = WINDOW_NS // 8
"""Evidence is collected in so short pieces, as the windows are known when all files are read."""
_LARGEST_SLACK_NS = 1_000_000
_SAMPLED_MICROBATCHES = 8
_WITHIN, _ACROSS = (
    (EventKind.ARRIVAL,),
    (EventKind.ARRIVAL, EventKind.SEND, EventKind.ITERATION),
)

Bounds = dict[tuple[str, str], int]
"""(a, b) -> the least ``arrived on b - sent on a`` seen: an upper bound of offset[a] - offset[b].
"""


@dataclass(frozen=True)
class ClockOffset:
    """The offset of a clock: (middle of a window on this clock, offset, uncertainty) in ns."""

    points: tuple[tuple[int, int, int], ...]

    def at(self, time_ns: int) -> int:
        """Offset at a time of this clock, interpolated between windows, constant beyond them."""
        index = bisect.bisect_left(self.points, (time_ns,))
        if index == 0:
            return self.points[0][1]
        if index == len(self.points):
            return self.points[-1][1]
        (t0, o0, _), (t1, o1, _) = self.points[index - 1], self.points[index]
        return o0 + (o1 - o0) * (time_ns - t0) // (t1 - t0)

    @property
    def uncertainty_ns(self) -> int:
        """The true offset is within this distance of the estimate (largest over the windows)."""
        return max(point[2] for point in self.points)


@dataclass(frozen=True)
class Alignment:
    """Offsets of all clocks to ``reference``; ``clocks[r]`` is the clock of rank r."""

    reference: str
    clocks: dict[int, str]
    offsets: dict[str, ClockOffset]

    def to_global(self, rank: int, time_ns: int) -> int:
        """A time of ``rank`` on the reference clock."""
        return time_ns + self.offsets[self.clocks[rank]].at(time_ns)

    @property
    def uncertainty_ns(self) -> int:
        """Largest uncertainty of any clock."""
        return max(offset.uncertainty_ns for offset in self.offsets.values())

    def summary(self) -> list[dict[str, Any]]:
        """Per clock its ranks, offset of the first window and uncertainty."""
        return [
            {
                "clock": clock,
                "ranks": sorted(rank for rank, name in self.clocks.items() if name == clock),
                "offset_ns": offset.points[0][1],
                "uncertainty_ns": offset.uncertainty_ns,
                "windows": len(offset.points),
            }
            for clock, offset in self.offsets.items()
        ]


@dataclass
class _Iteration:
    """An iteration of replicas on each clock: the latest entry and the earliest exit."""

    entered: dict[str, int] = field(default_factory=dict)
    left: dict[str, int] = field(default_factory=dict)


@dataclass
class _Evidence:
    """Findings of all files: bounds per receiving clock and piece of its host's time."""

    bounds: dict[tuple[str, int], Bounds] = field(default_factory=dict)
    sends: dict[tuple[Any, ...], tuple[int, str]] = field(default_factory=dict)
    arrivals: dict[tuple[Any, ...], tuple[int, str]] = field(default_factory=dict)
    iterations: dict[tuple[int, ...], _Iteration] = field(default_factory=dict)
    began: dict[str, dict[int, int]] = field(default_factory=dict)
    """Per clock, when each iteration began in its host's unix time."""


def message_key(event: Event) -> tuple[Any, ...] | None:
    """The key that a send and its arrival share; None for a channel known by name only."""
    message = message_of(event)
    return None if message is None else (event["args"]["iteration"], *message)


class _Scan:
    """Collects the evidence of one file after the other."""

    def __init__(self, files: list[TraceFile]) -> None:
        self.clocks = {file.rank: file.clock for file in files}
        self.evidence = _Evidence()
        self.reference = files[0].clock
        self._unix_less_own = {file.clock: file.start_unix_ns - file.start_ns for file in files}
        self._cross = len(set(self.clocks.values())) > 1

    def _bound(self, sender: str, receiver: str, sent_ns: int, arrived_ns: int) -> None:
        """``arrived_ns`` on the receiver's clock is no earlier than ``sent_ns`` on the sender's."""
        if sender == receiver:
            return
        piece = (arrived_ns + self._unix_less_own[receiver]) // _PIECE_NS
        known = self.evidence.bounds.setdefault((receiver, piece), {})
        delay = arrived_ns - sent_ns
        known[sender, receiver] = min(delay, known.get((sender, receiver), delay))

    def read(self, file: TraceFile) -> None:
        """Add what one file knows."""
        seen: dict[int, int] = {}
        for event in read_events(file, _ACROSS if self._cross else _WITHIN):
            cat = event["cat"]
            if cat == EventKind.ARRIVAL:
                self._arrival(file, event)
            elif cat == EventKind.SEND:
                self._send(file, event)
            else:
                self._iteration(file, event, seen)

    def _arrival(self, file: TraceFile, event: Event) -> None:
        args = event["args"]
        source = self.clocks.get(args.get("source", -1))
        if source is None:
            return
        arrived = file.time_ns(event)
        if source == file.clock and arrived < args.get("sent_ns", arrived):
            raise DataError(
                f"{file.path}: {event['name']} from rank {args['source']} arrived "
                f"{args['sent_ns'] - arrived} ns before it was sent, although both ranks say they "
                "read one clock; the files are not of one run or the host's clock is broken"
            )
        if "sent_ns" in args:
            self._bound(source, file.clock, args["sent_ns"], arrived)
        elif source != file.clock and args["microbatch"] < _SAMPLED_MICROBATCHES:
            key = message_key(event)
            if key is not None:
                self.evidence.arrivals[key] = (arrived, file.clock)

    def _send(self, file: TraceFile, event: Event) -> None:
        args, key = event["args"], message_key(event)
        receiver = self.clocks.get(args.get("destination", -1))
        if key is None or receiver in (None, file.clock):
            return
        if args["microbatch"] < _SAMPLED_MICROBATCHES:
            self.evidence.sends[key] = (file.time_ns(event), file.clock)

    def _iteration(self, file: TraceFile, event: Event, seen: dict[int, int]) -> None:
        number, layout = event["args"]["iteration"], file.layout
        occurrence = seen[number] = seen.get(number, 0) + 1
        key = (layout.pipeline, layout.tensor, number, occurrence)
        one = self.evidence.iterations.setdefault(key, _Iteration())
        start, clock = file.time_ns(event), file.clock
        end = start + file.duration_ns(event)
        began = start + file.start_unix_ns - file.start_ns
        self.evidence.began.setdefault(clock, {}).setdefault(number, began)
        one.entered[clock] = max(start, one.entered.get(clock, start))
        one.left[clock] = min(end, one.left.get(clock, end))

    def finish(self) -> dict[int, Bounds]:
        """All bounds, per window of the unix time of the reference's host."""
        for key, (arrived, receiver) in self.evidence.arrivals.items():
            if key in self.evidence.sends:
                sent, sender = self.evidence.sends[key]
                self._bound(sender, receiver, sent, arrived)
        for one in self.evidence.iterations.values():
            for a, entered in one.entered.items():
                for b, left in one.left.items():
                    self._bound(a, b, entered, left)
        windows: dict[int, Bounds] = {}
        for (receiver, piece), bounds in self.evidence.bounds.items():
            window = (piece * _PIECE_NS - self._ahead(receiver)) // WINDOW_NS
            _tighten(windows.setdefault(window, {}), bounds)
        return windows

    def _ahead(self, clock: str) -> int:
        """Lead of this host's wall clock over the reference's, in ns: exact to the skew of an
        iteration's start, enough to tell windows."""
        began = self.evidence.began.get(clock, {})
        other = self.evidence.began.get(self.reference, {})
        common = next((number for number in began if number in other), None)
        return 0 if common is None else began[common] - other[common]


def _tighten(known: Bounds, bounds: Bounds) -> None:
    for pair, delay in bounds.items():
        known[pair] = min(delay, known.get(pair, delay))


def _shortest(start: str, edges: dict[str, list[tuple[str, int]]]) -> dict[str, int] | None:
    """Bellman-Ford from ``start``; None when there is a negative cycle."""
    distance: dict[str, int] = {start: 0}
    active, rounds = {start}, 0
    while active:
        if rounds > len(edges) + 1:
            return None
        rounds += 1
        reached: set[str] = set()
        for node in active:
            for other, weight in edges.get(node, ()):
                length = distance[node] + weight
                if length < distance.get(other, math.inf):
                    distance[other] = length
                    reached.add(other)
        active = reached
    return distance


def _extremes(
    reference: str, bounds: Bounds, slack_ns: int
) -> tuple[dict[str, int], dict[str, int]] | None:
    """Largest offsets and negated smallest ones; None when the bounds contradict each other."""
    up: dict[str, list[tuple[str, int]]] = {}
    down: dict[str, list[tuple[str, int]]] = {}
    for (a, b), delay in bounds.items():
        up.setdefault(b, []).append((a, delay + slack_ns))
        down.setdefault(a, []).append((b, delay + slack_ns))
    highest, lowest = _shortest(reference, up), _shortest(reference, down)
    return None if highest is None or lowest is None else (highest, lowest)


def solve(reference: str, clocks: Iterable[str], bounds: Bounds) -> dict[str, tuple[int, int]]:
    """Offset and uncertainty of every clock, in nanoseconds.

    Clocks that drift within the window contradict each other slightly; every bound is then widened
    by the least power of two that makes them agree, and the uncertainty grows by as much.

    Raises:
        DataError: the bounds contradict each other by more than a millisecond.
        LookupError: clocks that are not bounded from both sides (its argument lists them).
    """
    slack, found = 0, _extremes(reference, bounds, 0)
    while found is None:
        slack = max(1000, 2 * slack)
        if slack > _LARGEST_SLACK_NS:
            raise DataError(
                "the clocks contradict each other: messages arrived before they were sent"
            )
        found = _extremes(reference, bounds, slack)
    highest, lowest = found
    unbounded = sorted(set(clocks) - (highest.keys() & lowest.keys()))
    if unbounded:
        raise LookupError(unbounded)
    return {
        clock: (
            (highest[clock] - lowest[clock]) // 2,
            (highest[clock] + lowest[clock] + 1) // 2 + slack,
        )
        for clock in clocks
    }


def _refuse(alignment_clocks: dict[int, str], names: Iterable[str]) -> DataError:
    lost = set(names)
    ranks = sorted(rank for rank, clock in alignment_clocks.items() if clock in lost)
    return DataError(
        f"the clocks of ranks {', '.join(map(str, ranks))} cannot be aligned with rank "
        f"{min(alignment_clocks)}'s: no messages in both directions bound them"
    )


def align(
    files: list[TraceFile], progress: Callable[[TraceFile], None] = lambda file: None
) -> Alignment:
    """Read the messages of all files and put their clocks on that of the first rank.

    Args:
        files: the run's files in rank order.
        progress: called after each file.

    Raises:
        DataError: ranks that cannot be aligned, by name, or contradicting clocks.
    """
    scan = _Scan(files)
    for file in files:
        scan.read(file)
        progress(file)
    windows = scan.finish()
    reference, clocks = scan.reference, list(dict.fromkeys(scan.clocks.values()))
    solved = {}
    for window, bounds in sorted(windows.items()):
        with contextlib.suppress(LookupError):
            solved[window] = solve(reference, clocks, bounds)
    if not solved:  # a short trace: the two directions may be in windows that follow each other
        whole: Bounds = {}
        for bounds in windows.values():
            _tighten(whole, bounds)
        try:
            solved[min(windows, default=0)] = solve(reference, clocks, whole)
        except LookupError as error:
            raise _refuse(scan.clocks, error.args[0]) from None
    unix_less_own = files[0].start_unix_ns - files[0].start_ns
    points: dict[str, list[tuple[int, int, int]]] = {clock: [] for clock in clocks}
    for window, found in solved.items():
        middle = window * WINDOW_NS + WINDOW_NS // 2 - unix_less_own
        for clock, (offset, uncertainty) in found.items():
            points[clock].append((middle - offset, offset, uncertainty))
    offsets = {clock: ClockOffset(tuple(points[clock])) for clock in clocks}
    return Alignment(reference, scan.clocks, offsets)

"""One time line for many clocks.

Every host has its own ``CLOCK_MONOTONIC``. A message cannot arrive before it was sent, so for
clocks ``a`` and ``b`` with unknown offsets (true time = clock + offset) each message from ``a`` to
``b`` says

    offset[a] - offset[b] <= arrived (on b) - sent (on a)

and messages the other way bound the difference from the other side. An iteration says the same of
replicas, which reduce their gradients in it: none leaves before all have entered. Shortest paths
over these bounds give the largest and the smallest offset that each clock can have. Their middle is
used; half their distance is the uncertainty that remains. Nothing is assumed about the delays.

Clocks drift, so iterations are joined to windows of some seconds, which are solved one by one;
between the middles of two windows the offset runs along a straight line. Where no window bounds all
clocks, the trace is one window. Ranks of one host read one clock and need no estimate. A clock that
is not bounded from both sides is refused by name.
"""

from __future__ import annotations

import bisect
import contextlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron.dpp.errors import DataError
from megatron.dpp.report.reader import Event, TraceFile, message_of, read_events
from megatron.dpp.trace.schema import EventKind

WINDOW_NS = 10 * 10**9
"""Within a window clocks are taken to run at one rate; 1 ppm of drift makes 10 us of error."""
_LARGEST_SLACK_NS = 1_000_000
_UNBOUNDED = 1 << 60
_SAMPLED_MICROBATCHES = 8

ClockBounds = dict[tuple[str, str], int]
"""(a, b) -> the least ``arrived on b - sent on a`` seen: an upper bound of offset[a] - offset[b].
"""


@dataclass(frozen=True)
class ClockOffset:
    """The offset of a clock: (middle of a window on this clock, offset, uncertainty) in ns."""

    points: tuple[tuple[int, int, int], ...]

    def at(self, time_ns: int) -> int:
        """Offset at a time of this clock, interpolated between windows, constant beyond them."""
        index = bisect.bisect_left(self.points, (time_ns,))
        if index in (0, len(self.points)):
            return self.points[max(index - 1, 0)][1]
        (t0, o0, _), (t1, o1, _) = self.points[index - 1], self.points[index]
        return o0 + (o1 - o0) * (time_ns - t0) // (t1 - t0)

    @property
    def uncertainty_ns(self) -> int:
        """The true offset is within this distance of the estimate (largest over the windows)."""
        return max(point[2] for point in self.points)


@dataclass(frozen=True)
class Alignment:
    """Offsets of all clocks to that of the first rank; ``clocks[r]`` is the clock of rank r."""

    clocks: dict[int, str]
    offsets: dict[str, ClockOffset]

    def to_global(self, rank: int, time_ns: int) -> int:
        """A time of ``rank`` on the reference clock."""
        return time_ns + self.offsets[self.clocks[rank]].at(time_ns)

    @property
    def uncertainty_ns(self) -> int:
        """Largest uncertainty of any clock."""
        return max(offset.uncertainty_ns for offset in self.offsets.values())


def message_key(event: Event) -> tuple[Any, ...] | None:
    """The key that a send and its arrival share; None for a channel known by name only."""
    message = message_of(event)
    return None if message is None else (event["args"]["iteration"], *message)


class _Scan:
    """Collects bounds by iteration, one file after the other."""

    def __init__(self, files: list[TraceFile]) -> None:
        self.clocks = {file.rank: file.clock for file in files}
        self.bounds: dict[int, ClockBounds] = defaultdict(dict)
        self.seen: dict[int, tuple[int, int]] = {}
        """First and last time of each iteration on the first rank's clock."""
        self._sends: dict[tuple[Any, ...], tuple[int, str]] = {}
        self._arrivals: dict[tuple[Any, ...], tuple[int, str]] = {}
        self._entered: dict[tuple[int, ...], dict[str, int]] = defaultdict(dict)
        self._left: dict[tuple[int, ...], dict[str, int]] = defaultdict(dict)

    def _bound(
        self, iteration: int, sender: str, receiver: str, sent_ns: int, arrived_ns: int
    ) -> None:
        """``arrived_ns`` on the receiver's clock is no earlier than ``sent_ns`` on the sender's."""
        if sender != receiver:
            _tighten(self.bounds[iteration], {(sender, receiver): arrived_ns - sent_ns})

    def read(self, file: TraceFile) -> None:
        """Add what one file knows."""
        several = len(set(self.clocks.values())) > 1
        kinds = (EventKind.ARRIVAL, EventKind.SEND, EventKind.ITERATION)
        repeats: dict[int, int] = defaultdict(int)
        for event in read_events(file, kinds if several else kinds[:1]):
            number, time = event["args"]["iteration"], file.time_ns(event)
            end = time + file.duration_ns(event)
            if file.clock == self.clocks[min(self.clocks)]:
                first, last = self.seen.get(number, (time, end))
                self.seen[number] = min(first, time), max(last, end)
            if event["cat"] == EventKind.ITERATION:
                repeats[number] += 1
                key = number, file.layout.pipeline, file.layout.tensor, repeats[number]
                entered, left = self._entered[key], self._left[key]
                entered[file.clock] = max(time, entered.get(file.clock, time))
                left[file.clock] = min(end, left.get(file.clock, end))
            else:
                self._message(file, event, time)

    def _message(self, file: TraceFile, event: Event, time: int) -> None:
        args, arrived = event["args"], event["cat"] == EventKind.ARRIVAL
        peer = self.clocks.get(args.get("source" if arrived else "destination", -1))
        sent = args.get("sent_ns") if arrived else None
        if peer is not None and sent is not None:
            if peer == file.clock and time < sent:
                raise DataError(
                    f"{file.path}: {event['name']} from rank {args['source']} arrived "
                    f"{sent - time} ns before it was sent, although both ranks say they read one "
                    "clock; the files are not of one run or the host's clock is broken"
                )
            self._bound(args["iteration"], peer, file.clock, sent, time)
            return
        key = message_key(event)
        if peer in (None, file.clock) or not key or args["microbatch"] >= _SAMPLED_MICROBATCHES:
            return
        if arrived:  # of a message's parts the first send and the last arrival count
            self._arrivals[key] = time, file.clock
        else:
            self._sends.setdefault(key, (time, file.clock))
        if key in self._sends and key in self._arrivals:
            (sent, sender), (time, receiver) = self._sends[key], self._arrivals[key]
            self._bound(args["iteration"], sender, receiver, sent, time)

    def windows(self) -> list[tuple[int, ClockBounds]]:
        """All bounds, by the middles of windows on the first rank's clock."""
        for key, entered in self._entered.items():
            for a, entry in entered.items():
                for b, leaving in self._left[key].items():
                    self._bound(key[0], a, b, entry, leaving)
        windows: list[tuple[int, int, ClockBounds]] = []
        for number in sorted(self.seen, key=lambda number: self.seen[number]):
            first, last = self.seen[number]
            if not windows or last - windows[-1][0] > WINDOW_NS:
                windows.append((first, last, {}))
            begin, end, bounds = windows.pop()
            _tighten(bounds, self.bounds.get(number, {}))
            windows.append((begin, max(end, last), bounds))
        return [((begin + end) // 2, bounds) for begin, end, bounds in windows]


def _tighten(known: ClockBounds, bounds: ClockBounds) -> None:
    for pair, delay in bounds.items():
        known[pair] = min(delay, known.get(pair, delay))


def solve(clocks: Sequence[str], bounds: ClockBounds) -> dict[str, tuple[int, int]]:
    """Offset to the first clock and uncertainty of every clock, in nanoseconds.

    Clocks that drift within the window contradict each other slightly; every bound is then widened
    by the least power of two that makes them agree, and the uncertainty grows by as much.

    Raises:
        DataError: the bounds contradict each other by more than a millisecond.
        LookupError: clocks that are not bounded from both sides (its argument lists them).
    """
    place = {clock: index for index, clock in enumerate(clocks)}
    slack = 0
    while True:
        most = np.full((len(clocks), len(clocks)), _UNBOUNDED)
        np.fill_diagonal(most, 0)
        for (a, b), delay in bounds.items():
            most[place[a], place[b]] = delay + slack
        for via in range(len(clocks)):
            longer = most[:, via, None] + most[None, via, :]
            np.minimum(most, longer, out=most, where=longer < _UNBOUNDED // 2)
        if most.diagonal().min() >= 0:
            break
        slack = max(1000, 2 * slack)
        if slack > _LARGEST_SLACK_NS:
            raise DataError(
                "the clocks contradict each other: messages arrived before they were sent"
            )
    highest, lowest = most[:, 0], most[0, :]
    lost = [c for c, i in place.items() if max(highest[i], lowest[i]) >= _UNBOUNDED // 2]
    if lost:
        raise LookupError(lost)
    middles, widths = (highest - lowest) // 2, (highest + lowest + 1) // 2 + slack
    return {clock: (int(middles[i]), int(widths[i])) for clock, i in place.items()}


def _whole(clocks: dict[int, str], bounds: Iterable[ClockBounds]) -> dict[str, tuple[int, int]]:
    """The offsets by all bounds together: in a short trace the two directions may be in windows
    that follow each other.
    """
    together: ClockBounds = {}
    for some in bounds:
        _tighten(together, some)
    try:
        return solve(list(dict.fromkeys(clocks.values())), together)
    except LookupError as error:
        ranks = [rank for rank, clock in sorted(clocks.items()) if clock in error.args[0]]
        raise DataError(
            f"the clocks of ranks {', '.join(map(str, ranks))} cannot be aligned with rank "
            f"{min(clocks)}'s: no messages in both directions bound them"
        ) from None


def align(files: list[TraceFile]) -> Alignment:
    """Read the messages of all files, in rank order, and put their clocks on that of the first one.

    Raises:
        DataError: ranks that cannot be aligned, by name, or contradicting clocks.
    """
    scan = _Scan(files)
    for file in files:
        scan.read(file)
    clocks = list(dict.fromkeys(scan.clocks.values()))
    windows = scan.windows() if len(clocks) > 1 else []
    points: dict[str, list[tuple[int, int, int]]] = {clock: [] for clock in clocks}

    def add(middle: int, solved: dict[str, tuple[int, int]]) -> None:
        for clock, (offset, uncertainty) in solved.items():
            points[clock].append((middle - offset, offset, uncertainty))

    for middle, bounds in windows:
        with contextlib.suppress(LookupError):
            add(middle, solve(clocks, bounds))
    if not points[clocks[0]]:
        add(0, _whole(scan.clocks, scan.bounds.values()))
    return Alignment(scan.clocks, {clock: ClockOffset(tuple(points[clock])) for clock in clocks})

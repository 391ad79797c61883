"""An in-process network with seeded delays, reordering between channels and faults on demand.

For tests of a transport's caller: all ranks of a pipeline live in this process, in threads of their
own or stepped by one thread. A payload is copied as late as the contract of ``base.py`` allows, so
a caller that overwrites a tensor after ``put`` sees wrong numbers.

    network = FakeNetwork(channels, seed=7, delay=0.01)
    transports = [network.transport(rank) for rank in range(4)]

Time is the real clock, or a ``VirtualClock`` that jumps to the next event when every open transport
waits (``stepping=True``: when any one of them waits, for tests that run all ranks in one thread).
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from megatron.dpp.errors import (
    PeerDead,
    TransferTimeout,
    TransportError,
    TransportUnavailable,
)
from megatron.dpp.transport.base import (
    Board,
    ChannelSpec,
    LinkInfo,
    Message,
    Transport,
    check_payload,
)
from megatron.dpp.transport.kinds import TransportKind, register

Delay = float | Callable[[random.Random, ChannelSpec, int], float]
"""Seconds that a message travels: uniform in 0..delay, or the result of a function of (generator,
channel, index of the message).
"""

_BOARD_RING = 4096


class VirtualClock:
    """A clock that only moves when :class:`FakeNetwork` (or a caller) moves it. Seconds."""

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        """Seconds since the clock was made."""
        return self._now

    def advance_to(self, moment: float) -> None:
        """Jump forward; a moment in the past changes nothing."""
        self._now = max(self._now, moment)


@dataclass
class _Parcel:
    """A message in flight."""

    source: torch.Tensor
    labels: tuple[int, int, int, int]
    sent: float
    arrives: float = 0.0


@dataclass
class _Channel:
    """Both ends of one channel. Every field is guarded by the network's lock."""

    spec: ChannelSpec
    waiting: deque[_Parcel] = field(default_factory=deque)
    flying: deque[_Parcel] = field(default_factory=deque)
    arrived: deque[tuple[_Parcel, torch.Tensor]] = field(default_factory=deque)
    num_arrived: int = 0
    num_launched: int = 0
    last_arrival: float = 0.0
    stalled: bool = False


@dataclass
class _BoardState:
    """The memory of one board. Guarded by the network's lock."""

    ranks: tuple[int, ...]
    counters: list[list[int]]
    words: list[int]
    read: list[int]


class FakeNetwork:
    """All ranks' channels in one process.

    Args:
        channels: every channel of the network.
        seed: seeds the delays.
        delay: how long messages travel, see :data:`Delay`. Messages of one channel never overtake
            each other.
        clock: a :class:`VirtualClock`, or None for real time.
        stepping: with a virtual clock, one thread drives all ranks, so any ``wait`` may move time.
        ahead: messages may be taken in flight; ``take`` waits for them, as a GPU would.
    """

    def __init__(
        self,
        channels: Sequence[ChannelSpec],
        *,
        seed: int = 0,
        delay: Delay = 0.0,
        clock: VirtualClock | None = None,
        stepping: bool = False,
        ahead: bool = False,
    ) -> None:
        self._ahead = ahead
        self._channels = [_Channel(spec) for spec in channels]
        self._random = random.Random(seed)
        self._delay = delay
        self._clock = clock
        self._stepping = stepping
        self._changed = threading.Condition()
        self._failures: dict[int, TransportError] = {}
        self._boards: dict[tuple[int, ...], _BoardState] = {}
        self._open: set[int] = set()
        self._sleepers: dict[int, tuple[float, int]] = {}
        self._version: dict[int, int] = {}
        self._closed: set[int] = set()

    def now(self) -> float:
        """Seconds, on the virtual or the monotonic clock."""
        return time.monotonic() if self._clock is None else self._clock.now()

    def transport(
        self, rank: int, *, board_ranks: Sequence[int] | None = None, board_counters: int = 0
    ) -> FakeTransport:
        """The transport of one rank, with a board when ``board_ranks`` are given."""
        with self._changed:
            self._open.add(rank)
            self._version.setdefault(rank, 0)
            board = self._board(tuple(board_ranks), board_counters) if board_ranks else None
        return FakeTransport(self, rank, self._channels, board)

    def _board(self, ranks: tuple[int, ...], num_counters: int) -> _BoardState:
        fresh = _BoardState(ranks, [[0] * num_counters for _ in ranks], [], [0] * len(ranks))
        return self._boards.setdefault(ranks, fresh)

    # Faults on demand.

    def kill(self, rank: int) -> None:
        """Let ``rank`` die: the next call of every rank raises ``PeerDead``."""
        self.fail(PeerDead(f"rank {rank} died (a fault asked for by the test)"))

    def fail(self, error: TransportError) -> None:
        """Let every open transport raise ``error`` from now on."""
        with self._changed:
            for rank in self._open:
                self._failures.setdefault(rank, error)
            self._touch(*self._open)

    def stall(self, spec: ChannelSpec, *, stalled: bool = True) -> None:
        """Hold back (or let go) what has not arrived yet on one channel."""
        with self._changed:
            self._find(spec).stalled = stalled
            self._touch(spec.destination, spec.source)

    def _find(self, spec: ChannelSpec) -> _Channel:
        return next(channel for channel in self._channels if channel.spec == spec)

    # Called by the transports, with the lock held.

    def _touch(self, *ranks: int) -> None:
        for rank in ranks:
            self._version[rank] = self._version.get(rank, 0) + 1
        self._changed.notify_all()

    def _launch(self, channel: _Channel) -> None:
        """Start the copies that have credit."""
        while channel.waiting and (len(channel.flying) + len(channel.arrived) < channel.spec.depth):
            parcel = channel.waiting.popleft()
            delay = (
                self._delay(self._random, channel.spec, channel.num_launched)
                if callable(self._delay)
                else self._random.uniform(0.0, self._delay)
            )
            parcel.arrives = max(self.now() + delay, channel.last_arrival)
            channel.last_arrival = parcel.arrives
            channel.num_launched += 1
            channel.flying.append(parcel)

    def _deliver(self) -> None:
        """Move what is due from flying to arrived."""
        now = self.now()
        for channel in self._channels:
            while channel.flying and not channel.stalled and channel.flying[0].arrives <= now:
                parcel = channel.flying.popleft()
                channel.arrived.append((parcel, parcel.source.clone()))
                channel.num_arrived += 1
                self._touch(channel.spec.destination, channel.spec.source)

    def _next_event(self) -> float:
        flying = [c.flying[0].arrives for c in self._channels if c.flying and not c.stalled]
        return min(flying, default=float("inf"))

    def _wait(self, rank: int, seen: int, seconds: float) -> bool:
        """Sleep until the rank's version passes ``seen``, or ``seconds`` pass; True if something
        may have changed.
        """
        deadline = self.now() + seconds
        self._sleepers[rank] = (deadline, seen)
        try:
            while True:
                self._deliver()
                if self._version[rank] != seen or rank in self._failures:
                    return True
                if self.now() >= deadline:
                    return False
                self._pass_time(deadline)
        finally:
            del self._sleepers[rank]

    def _all_idle(self) -> bool:
        return all(self._version[rank] == seen for rank, (_, seen) in self._sleepers.items())

    def _pass_time(self, deadline: float) -> None:
        event = self._next_event()
        if self._clock is None:
            self._changed.wait(max(0.0, min(event, deadline) - self.now()))
        elif self._stepping:
            self._clock.advance_to(min(event, deadline))
        elif len(self._sleepers) == len(self._open) and self._all_idle():
            moment = min(event, *(until for until, _ in self._sleepers.values()))
            if moment <= self.now():  # another sleeper is due, and needs the lock
                self._changed.wait(1.0)
            self._clock.advance_to(moment)
            self._changed.notify_all()
        else:
            self._changed.wait(1.0)


class FakeTransport(Transport):
    """One rank of a :class:`FakeNetwork`."""

    def __init__(
        self, network: FakeNetwork, rank: int, channels: list[_Channel], board: _BoardState | None
    ) -> None:
        self.rank = rank
        self._network = network
        self._outgoing = [c for c in channels if c.spec.source == rank]
        self._incoming = [c for c in channels if c.spec.destination == rank]
        self.outgoing = [c.spec for c in self._outgoing]
        self.incoming = [c.spec for c in self._incoming]
        self.board = None if board is None else _FakeBoard(self, board)
        self._seen = -1

    def _check(self) -> None:
        if self.rank in self._network._closed:
            raise TransportUnavailable(f"rank {self.rank}: the transport is closed")
        if self.rank in self._network._failures:
            raise self._network._failures[self.rank]

    def put(
        self, channel: int, tensor: torch.Tensor, *, iteration: int, microbatch: int,
        part: int = 0, num_parts: int = 1,
    ) -> None:  # fmt: skip
        target = self._outgoing[channel]
        check_payload(tensor, target.spec)
        with self._network._changed:
            self._check()
            labels = (iteration, microbatch, part, num_parts)
            target.waiting.append(_Parcel(tensor.detach(), labels, self._network.now()))
            self._network._launch(target)
            self._network._deliver()
            self._network._touch(target.spec.destination)

    def poll(self) -> Sequence[int]:
        with self._network._changed:
            self._check()
            self._network._deliver()
            self._seen = self._network._version[self.rank]
            return [channel.num_arrived for channel in self._incoming]

    def coming(self) -> Sequence[int]:
        with self._network._changed:
            self._check()
            if not self._network._ahead:
                return ()
            return [channel.num_arrived + len(channel.flying) for channel in self._incoming]

    def take(self, channel: int) -> Message:
        source = self._incoming[channel]
        with self._network._changed:
            self._check()
            there = bool(source.arrived)
            while not source.arrived and source.flying and self._network._ahead:
                self._network._wait(self.rank, self._network._version[self.rank], 1.0)
                self._check()
            if not source.arrived:
                raise IndexError(f"rank {self.rank}: nothing has arrived on {source.spec}")
            parcel, tensor = source.arrived.popleft()
            self._network._launch(source)
            self._network._deliver()
            self._network._touch(source.spec.source)
        sent_ns, arrived_ns = int(parcel.sent * 1e9), int(parcel.arrives * 1e9) if there else 0
        return Message(tensor, *parcel.labels, sent_ns, arrived_ns)

    def wait(self, seconds: float) -> bool:
        with self._network._changed:
            self._check()
            changed = self._network._wait(self.rank, self._seen, seconds)
            self._check()
            return changed

    def pending(self) -> int:
        with self._network._changed:
            self._check()
            self._network._deliver()
            return sum(len(c.waiting) + len(c.flying) for c in self._outgoing)

    def pending_bytes(self) -> int:
        with self._network._changed:
            parcels = [p for c in self._outgoing for p in (*c.waiting, *c.flying)]
            return sum(parcel.source.nbytes for parcel in parcels)

    def now(self) -> float:
        return self._network.now()

    def links(self) -> Sequence[LinkInfo]:
        peers = {s.destination for s in self.outgoing} | {s.source for s in self.incoming}
        return [
            LinkInfo(peer, "fake", "asked for: all ranks are in one process")
            for peer in sorted(peers)
        ]

    def departed(self, peer: int) -> bool:
        return peer in self._network._closed

    def close(self) -> None:
        with self._network._changed:
            self._network._open.discard(self.rank)
            self._network._closed.add(self.rank)
            self._network._changed.notify_all()


class _FakeBoard(Board):
    """A member's view of the block."""

    def __init__(self, transport: FakeTransport, state: _BoardState) -> None:
        self._transport = transport
        self._network = transport._network
        self._state = state
        self.index = state.ranks.index(transport.rank)
        self.size = len(state.ranks)

    def post(self, counters: Sequence[int]) -> None:
        with self._network._changed:
            self._transport._check()
            self._state.counters[self.index] = list(counters)
            self._network._touch(*self._state.ranks)

    def common(self) -> Sequence[int]:
        with self._network._changed:
            self._transport._check()
            return [min(column) for column in zip(*self._state.counters, strict=True)]

    def append(self, word: int) -> None:
        if not 0 <= word < 1 << 63:
            raise ValueError(f"board word {word} is outside 0..2**63-1")
        with self._network._changed:
            self._transport._check()
            lag = len(self._state.words) - min(self._state.read[1:], default=len(self._state.words))
            if lag >= _BOARD_RING:
                raise TransferTimeout(
                    f"rank {self._transport.rank}: a board reader lags {lag} words"
                )
            self._state.words.append(word)
            self._network._touch(*self._state.ranks)

    def next(self) -> int | None:
        with self._network._changed:
            self._transport._check()
            position = self._state.read[self.index]
            if position == len(self._state.words):
                return None
            self._state.read[self.index] = position + 1
            return self._state.words[position]


register(TransportKind(name="fake"))

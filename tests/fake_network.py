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

import functools
import random
import sys
import threading
import time
import types
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from megatron.dpp.errors import PeerDead, TransferTimeout, TransportError, TransportUnavailable
from megatron.dpp.transport import kinds
from megatron.dpp.transport.base import (
    Board,
    ChannelSpec,
    LinkInfo,
    Message,
    Transport,
    check_payload,
)

Delay = float | Callable[[random.Random, ChannelSpec, int], float]
"""Seconds that a message travels: uniform in 0..delay, or the result of a function of (generator,
channel, index of the message).
"""

_BOARD_RING = 4096
_Call = TypeVar("_Call", bound=Callable[..., Any])


class VirtualClock:
    """A clock that only moves when :class:`FakeNetwork` (or a caller) moves it. Seconds."""

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
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
        self, channels: Sequence[ChannelSpec], *, seed: int = 0, delay: Delay = 0.0,
        clock: VirtualClock | None = None, stepping: bool = False, ahead: bool = False,
    ) -> None:  # fmt: skip
        self.ahead = ahead
        self.channels = [_Channel(spec) for spec in channels]
        self.changed = threading.Condition()
        self.failures: dict[int, TransportError] = {}
        self.version: dict[int, int] = {}
        self.open: set[int] = set()
        self.closed: set[int] = set()
        self._random, self._delay = random.Random(seed), delay
        self._clock, self._stepping = clock, stepping
        self._boards: dict[tuple[int, ...], _Words] = {}
        self._sleepers: dict[int, tuple[float, int]] = {}

    def now(self) -> float:
        """Seconds, on the virtual or the monotonic clock."""
        return time.monotonic() if self._clock is None else self._clock.now()

    def transport(
        self, rank: int, *, board_ranks: Sequence[int] | None = None, board_counters: int = 0
    ) -> FakeTransport:
        """The transport of one rank, with a board when ``board_ranks`` are given."""
        with self.changed:
            self.open.add(rank)
            self.version.setdefault(rank, 0)
            words, ranks = None, tuple(board_ranks or ())
            if ranks:
                words = self._boards.setdefault(ranks, _Words(ranks, board_counters))
        return FakeTransport(self, rank, words)

    # Faults on demand.

    def kill(self, rank: int) -> None:
        """Let ``rank`` die: the next call of every rank raises ``PeerDead``."""
        self.fail(PeerDead(f"rank {rank} died (a fault asked for by the test)"))

    def fail(self, error: TransportError) -> None:
        """Let every open transport raise ``error`` from now on."""
        with self.changed:
            for rank in self.open:
                self.failures.setdefault(rank, error)
            self.touch(*self.open)

    def stall(self, spec: ChannelSpec, *, stalled: bool = True) -> None:
        """Hold back (or let go) what has not arrived yet on one channel."""
        with self.changed:
            next(channel for channel in self.channels if channel.spec == spec).stalled = stalled
            self.touch(spec.destination, spec.source)

    # Called by the transports, with the lock held.

    def touch(self, *ranks: int) -> None:
        """Let the ranks look again."""
        for rank in ranks:
            self.version[rank] = self.version.get(rank, 0) + 1
        self.changed.notify_all()

    def launch(self, channel: _Channel) -> None:
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

    def deliver(self) -> None:
        """Move what is due from flying to arrived."""
        now = self.now()
        for channel in self.channels:
            while channel.flying and not channel.stalled and channel.flying[0].arrives <= now:
                parcel = channel.flying.popleft()
                channel.arrived.append((parcel, parcel.source.clone()))
                channel.num_arrived += 1
                self.touch(channel.spec.destination, channel.spec.source)

    def wait(self, rank: int, seen: int, seconds: float) -> bool:
        """Sleep until the rank's version passes ``seen``, or ``seconds`` pass; True if something
        may have changed.
        """
        deadline = self.now() + seconds
        self._sleepers[rank] = (deadline, seen)
        try:
            while True:
                self.deliver()
                if self.version[rank] != seen or rank in self.failures:
                    return True
                if self.now() >= deadline:
                    return False
                self._pass_time(deadline)
        finally:
            del self._sleepers[rank]

    def _pass_time(self, deadline: float) -> None:
        flying = [c.flying[0].arrives for c in self.channels if c.flying and not c.stalled]
        event = min(flying, default=float("inf"))
        idle = all(self.version[rank] == seen for rank, (_, seen) in self._sleepers.items())
        if self._clock is None:
            self.changed.wait(max(0.0, min(event, deadline) - self.now()))
        elif self._stepping:
            self._clock.advance_to(min(event, deadline))
        elif len(self._sleepers) == len(self.open) and idle:
            moment = min(event, *(until for until, _ in self._sleepers.values()))
            if moment <= self.now():  # another sleeper is due, and needs the lock
                self.changed.wait(1.0)
            self._clock.advance_to(moment)
            self.changed.notify_all()
        else:
            self.changed.wait(1.0)


def _locked(call: _Call) -> _Call:
    """A call of a transport or of its board: one at a time, and none after a failure."""

    @functools.wraps(call)
    def run(self: Any, *given: Any, **named: Any) -> Any:
        transport = getattr(self, "transport", self)
        with transport.network.changed:
            transport.check()
            return call(self, *given, **named)

    return run  # type: ignore[return-value]


class FakeTransport(Transport):
    """One rank of a :class:`FakeNetwork`."""

    def __init__(self, network: FakeNetwork, rank: int, words: _Words | None) -> None:
        self.rank, self.network, self._seen = rank, network, -1
        self._outgoing = [c for c in network.channels if c.spec.source == rank]
        self._incoming = [c for c in network.channels if c.spec.destination == rank]
        self.outgoing = [c.spec for c in self._outgoing]
        self.incoming = [c.spec for c in self._incoming]
        self.board = None if words is None else _FakeBoard(self, words)

    def check(self) -> None:
        if self.rank in self.network.closed:
            raise TransportUnavailable(f"rank {self.rank}: the transport is closed")
        if self.rank in self.network.failures:
            raise self.network.failures[self.rank]

    @_locked
    def put(
        self, channel: int, tensor: torch.Tensor, *, iteration: int, microbatch: int,
        part: int = 0, num_parts: int = 1,
    ) -> None:  # fmt: skip
        target, labels = self._outgoing[channel], (iteration, microbatch, part, num_parts)
        check_payload(tensor, target.spec)
        target.waiting.append(_Parcel(tensor.detach(), labels, self.network.now()))
        self.network.launch(target)
        self.network.deliver()
        self.network.touch(target.spec.destination)

    @_locked
    def poll(self) -> Sequence[int]:
        self.network.deliver()
        self._seen = self.network.version[self.rank]
        return [channel.num_arrived for channel in self._incoming]

    @_locked
    def coming(self) -> Sequence[int]:
        if not self.network.ahead:
            return ()
        return [channel.num_arrived + len(channel.flying) for channel in self._incoming]

    @_locked
    def take(self, channel: int) -> Message:
        source = self._incoming[channel]
        there = bool(source.arrived)
        while not source.arrived and source.flying and self.network.ahead:
            self.network.wait(self.rank, self.network.version[self.rank], 1.0)
            self.check()
        if not source.arrived:
            raise IndexError(f"rank {self.rank}: nothing has arrived on {source.spec}")
        parcel, tensor = source.arrived.popleft()
        self.network.launch(source)
        self.network.deliver()
        self.network.touch(source.spec.source)
        sent_ns, arrived_ns = int(parcel.sent * 1e9), int(parcel.arrives * 1e9) if there else 0
        return Message(tensor, *parcel.labels, sent_ns, arrived_ns)

    @_locked
    def wait(self, seconds: float) -> bool:
        changed = self.network.wait(self.rank, self._seen, seconds)
        self.check()
        return changed

    @_locked
    def pending(self) -> int:
        self.network.deliver()
        return sum(len(c.waiting) + len(c.flying) for c in self._outgoing)

    def pending_bytes(self) -> int:
        with self.network.changed:
            parcels = [p for c in self._outgoing for p in (*c.waiting, *c.flying)]
            return sum(parcel.source.nbytes for parcel in parcels)

    def now(self) -> float:
        return self.network.now()

    def links(self) -> Sequence[LinkInfo]:
        peers = {s.destination for s in self.outgoing} | {s.source for s in self.incoming}
        reason = "asked for: all ranks are in one process"
        return [LinkInfo(peer, "fake", reason) for peer in sorted(peers)]

    def departed(self, peer: int) -> bool:
        return peer in self.network.closed

    def close(self) -> None:
        with self.network.changed:
            self.network.open.discard(self.rank)
            self.network.closed.add(self.rank)
            self.network.changed.notify_all()


class _Words:
    """The memory of one board. Guarded by the network's lock."""

    def __init__(self, ranks: tuple[int, ...], num_counters: int) -> None:
        self.ranks, self.words, self.read = ranks, list[int](), [0] * len(ranks)
        self.counters = [[0] * num_counters for _ in ranks]


class _FakeBoard(Board):
    """A member's view of the block."""

    def __init__(self, transport: FakeTransport, state: _Words) -> None:
        self.transport, self._state = transport, state
        self.index, self.size = state.ranks.index(transport.rank), len(state.ranks)

    @_locked
    def post(self, counters: Sequence[int]) -> None:
        self._state.counters[self.index] = list(counters)
        self.transport.network.touch(*self._state.ranks)

    @_locked
    def common(self) -> Sequence[int]:
        return [min(column) for column in zip(*self._state.counters, strict=True)]

    @_locked
    def append(self, word: int) -> None:
        if not 0 <= word < 1 << 63:
            raise ValueError(f"board word {word} is outside 0..2**63-1")
        lag = len(self._state.words) - min(self._state.read[1:], default=len(self._state.words))
        if lag >= _BOARD_RING:
            raise TransferTimeout(f"rank {self.transport.rank}: a board reader lags {lag} words")
        self._state.words.append(word)
        self.transport.network.touch(*self._state.ranks)

    @_locked
    def next(self) -> int | None:
        position = self._state.read[self.index]
        if position == len(self._state.words):
            return None
        self._state.read[self.index] = position + 1
        return self._state.words[position]


fake: Any = types.ModuleType(f"{kinds.__name__}.fake")
fake.KIND = kinds.TransportKind(name="fake")
sys.modules[fake.__name__] = fake

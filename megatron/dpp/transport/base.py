"""The contract that every transport kind keeps.

A *channel* is a one-way first-in-first-out queue between two ranks. It belongs to one (chunk,
direction) of the receiving rank. Order inside a channel is fixed. Order between channels is free,
so a pipeline schedule can be dynamic.

A process opens one transport, keeps it for the whole run, and calls it from one thread.
"""

from __future__ import annotations

import abc
import math
import os
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from megatron.dpp.config import MOST_SLOTS
from megatron.dpp.direction import Direction as Direction
from megatron.dpp.errors import (
    ConfigError,
    PeerDead,
    TransferTimeout,
    TransportError,
    number_fault,
    setting,
    shown,
)
from megatron.dpp.processes import are_stopped, stopped, stopped_of_job

_MOST_RANKS = (1 << 31) - 1
_MOST_BYTES = 1 << 40

EXPLAIN_SECONDS = 1.0
"""Time in which another rank's reason may arrive after a failure."""
_NAP_SECONDS = 0.05
_SILENT_SECONDS = 1.0


@dataclass(frozen=True)
class ChannelSpec:
    """One channel: its ends, its payload and its size.

    Args:
        source: global rank of the sender.
        destination: global rank of the receiver.
        chunk: model chunk *on the receiving rank*; -1 - chunk for a kind's messages about one.
        direction: ``FORWARD`` carries stage inputs, ``BACKWARD`` their gradients.
        slot_bytes: largest payload of one message, in bytes.
        depth: number of messages the receiver can hold before the sender's next one stays pending.
    """

    source: int
    destination: int
    chunk: int
    direction: Direction
    slot_bytes: int
    depth: int = 2

    def __post_init__(self) -> None:
        for name, least, most in (
            ("source", 0, _MOST_RANKS),
            ("destination", 0, _MOST_RANKS),
            ("chunk", -_MOST_RANKS - 1, _MOST_RANKS),
            ("slot_bytes", 0, _MOST_BYTES),
            ("depth", 1, MOST_SLOTS),
        ):
            if fault := number_fault(getattr(self, name), least, most):
                slots = setting("slots")
                raise ConfigError(f"{self}: {name} {fault} ({slots})", slots)

    def __str__(self) -> str:
        name = self.direction.name.lower()
        ends = f"rank {shown(self.source)} -> {shown(self.destination)}"
        return f"{name} of chunk {shown(self.chunk)}, {ends}"


class Message(NamedTuple):
    """The result of ``take``. ``tensor`` is fresh: it never shares storage with a slot.

    Args:
        part, num_parts: a stage boundary of several tensors sends one message per tensor.
        sent_ns: the sender's ``CLOCK_MONOTONIC`` at ``put``.
        arrived_ns: the receiver's ``CLOCK_MONOTONIC`` when the message was first seen to be
            complete; 0 if it was taken earlier. Clocks of two hosts differ.
    """

    tensor: torch.Tensor
    iteration: int
    microbatch: int
    part: int
    num_parts: int
    sent_ns: int
    arrived_ns: int


@dataclass(frozen=True)
class LinkInfo:
    """The kind of the link to one peer, and the reason for it (printed once at start).

    ``pid`` is the peer's process where it is on this host, else 0.
    """

    peer: int
    kind: str
    reason: str
    pid: int = 0


class Board(abc.ABC):
    """The means by which the ranks of one pipeline stage agree on one order of tasks.

    Member 0 is the leader. Each member posts its own counters, which only grow. The leader reads
    their element-wise minimum and appends words; the other members read these in the same order.
    No collective, no lock. A change by any member ends the ``wait`` of the transport. Members on
    one host share memory; other hosts get the words, and the leader their counters, over the
    control connections.
    """

    index: int
    size: int
    spans_hosts: bool = False

    @abc.abstractmethod
    def post(self, counters: Sequence[int]) -> None:
        """Publish this member's counters."""

    @abc.abstractmethod
    def common(self) -> Sequence[int]:
        """Element-wise minimum of the counters of all members. On another host than the leader's,
        of the members there.
        """

    @abc.abstractmethod
    def append(self, word: int) -> None:
        """Publish the next word, 0 <= word < 2**63 (leader).

        Waits, with the transport's deadline, for a reader that lags a full ring.
        """

    @abc.abstractmethod
    def next(self) -> int | None:
        """The first word that this member has not read yet, or None (followers)."""


class Transport(abc.ABC):
    """Channels of one rank, of one or several kinds.

    ``outgoing`` and ``incoming`` list this rank's channels; methods name a channel by its index in
    those lists. After the first failure every method but ``close`` raises that failure (a
    :class:`~megatron.dpp.errors.TransportError`).
    """

    rank: int
    outgoing: Sequence[ChannelSpec]
    incoming: Sequence[ChannelSpec]
    board: Board | None = None

    @abc.abstractmethod
    def put(
        self, channel: int, tensor: torch.Tensor, *, iteration: int, microbatch: int,
        part: int = 0, num_parts: int = 1,
    ) -> None:  # fmt: skip
        """Send ``tensor`` (contiguous, any dtype and shape up to ``slot_bytes``). Never blocks.

        Without a free slot the message stays pending and is progressed later. The transport keeps
        the tensor's storage alive until its copy is done; the caller may drop it (or set its
        ``.data``) but must not overwrite it. On a GPU the copy is ordered after the work queued so
        far on the current stream.
        """

    @abc.abstractmethod
    def poll(self) -> Sequence[int]:
        """Messages that have arrived in full on each incoming channel since the transport was
        opened, or were taken while they were coming. Cheap; drops tensors whose copy is done.
        """

    def coming(self) -> Sequence[int]:
        """Messages on each incoming channel that may be taken; empty where a kind cannot tell.

        These have arrived, or the sender's GPU has all the work queued that makes and sends them.

        ``take`` of one that has not arrived returns at once; the current stream waits for it.
        """
        return ()

    @abc.abstractmethod
    def take(self, channel: int) -> Message:
        """Copy the head message of an incoming channel into a fresh tensor on this rank's device
        and free its slot.

        Work queued on the current stream afterwards sees the data. Raises ``ProtocolError`` when
        the header does not fit the channel, and ``IndexError`` when nothing has arrived or is
        coming. After a failure the data of what was still coming means nothing.
        """

    @abc.abstractmethod
    def wait(self, seconds: float) -> bool:
        """Sleep until something arrives, a board changes, or ``seconds`` pass. True if something
        may have changed. Releases the GIL.
        """

    @abc.abstractmethod
    def pending(self) -> int:
        """Puts whose copy is not done yet."""

    @abc.abstractmethod
    def pending_bytes(self) -> int:
        """Bytes of the tensors of those puts."""

    def flush(self, seconds: float) -> None:
        """Wait until ``pending() == 0``.

        Raises:
            TransferTimeout: no pending put left for ``seconds``.
            PeerDead: the same, and a receiver has closed its transport.
        """
        least, deadline = math.inf, 0.0
        while True:
            self.poll()  # first, so that a later change ends the wait
            left = self.pending()
            if left == 0:
                return
            if left < least:
                least, deadline = left, self.now() + seconds
            if self.now() >= deadline:
                raise self._unsent(left, seconds)
            self.wait(deadline - self.now())

    def now(self) -> float:
        """Seconds on the clock of this transport's deadlines."""
        return time.monotonic()

    def _unsent(self, left: int, seconds: float) -> TransportError:
        """The error of a flush that makes no progress."""
        for channel, spec in enumerate(self.outgoing):
            if self._has_unsent(channel) and self.departed(spec.destination):
                return PeerDead(
                    f"rank {self.rank}: {left} puts are pending, and none left for {seconds:g} s: "
                    f"rank {spec.destination} has closed its transport"
                )
        timeout = setting("timeout")
        return TransferTimeout(
            f"rank {self.rank}: {left} puts are pending, and none left for {seconds:g} s; their "
            f"receivers are alive but take nothing ({timeout})",
            timeout,
        )

    def _has_unsent(self, channel: int) -> bool:
        """True if puts on an outgoing channel are pending; False where a kind cannot tell."""
        return False

    @abc.abstractmethod
    def links(self) -> Sequence[LinkInfo]:
        """One entry per peer, in rank order."""

    @abc.abstractmethod
    def close(self) -> None:
        """Free everything within 5 s. May be called twice, and after a failure.

        ``flush`` first: what is pending goes on leaving for about 2 s, and the rest is lost. After
        a failure nothing pending is waited for.
        """

    def overdue(
        self, channel: int, seconds: float, *, iteration: int, microbatch: int
    ) -> TransportError:
        """The error to raise when an incoming message is missing after ``seconds``."""
        spec = self.incoming[channel]
        what = (
            f"rank {self.rank}: microbatch {microbatch} of iteration {iteration} ({spec}) has not "
            f"arrived after {seconds:g} s{self.brought(channel)}"
        )
        if self.departed(spec.source):
            return PeerDead(f"{what}, and rank {spec.source} has closed its transport")
        if found := self.trouble():
            return TransferTimeout(f"{what}; {found}")
        timeout = setting("timeout")
        return TransferTimeout(
            f"{what}; rank {spec.source} is alive: it is slow, stopped or waiting itself "
            f"({timeout} sets how long to wait)",
            timeout,
        )

    def brought(self, channel: int) -> str:
        """Text about the kind of an incoming channel's link and what came last; empty where nothing
        has, and where a kind cannot tell.
        """
        return ""

    def silence(self, peer: int) -> float:
        """Seconds for which the host of ``peer`` has owed an answer; 0 where it answers, and where
        a kind cannot tell.
        """
        return 0.0

    def trouble(self) -> str:
        """Text about peers whose host does not answer, and about those of this host that are
        stopped, or of which a child is, and torchrun; else empty.
        """
        found = []
        for link in self.links():
            if link.pid and (names := stopped(link.pid)):
                found.append(are_stopped(names, f" of rank {link.peer}"))
            elif (seconds := self.silence(link.peer)) >= _SILENT_SECONDS:
                found.append(
                    f"nothing has come from the host of rank {link.peer} for {seconds:.0f} s "
                    f"({link.kind}): it is down, or the network between is cut (DPP_PEER_TIMEOUT "
                    "sets when it counts as gone)"
                )
        return "; ".join(filter(None, (*found, stopped_of_job(alone=True))))

    def raise_failure(self) -> None:
        """Raise a link's failure that explains an error met elsewhere, if one shows in a second.

        When a rank dies, a collective of another library often fails first, and its error does not
        name the rank.
        """
        deadline = time.monotonic() + EXPLAIN_SECONDS
        while time.monotonic() < deadline:
            self.poll()
            self.wait(_NAP_SECONDS)

    def abort(self, reason: str) -> None:  # noqa: B027
        """Tell the peers at once that this rank gives up; they raise ``PeerDead`` with ``reason``.

        Does nothing where a kind cannot tell them.
        """

    def departed(self, peer: int) -> bool:
        """True if ``peer`` has closed its transport in good order; a dead peer is a failure."""
        return False

    def let_go_in_child(self) -> None:  # noqa: B027
        """Let go of what a forked child shares with its parent; called there of each transport that
        is in ``OPENED``.
        """

    def __enter__(self) -> Transport:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if error is not None:
                self.abort(f"{type(error).__name__}: {error}")
        finally:
            self.close()


OPENED: weakref.WeakSet[Transport] = weakref.WeakSet()
"""Transports of this process that have something to let go of."""


def _let_all_go() -> None:
    for transport in list(OPENED):
        transport.let_go_in_child()


os.register_at_fork(after_in_child=_let_all_go)  # once: a hook of its own would outlive each


def check_payload(tensor: torch.Tensor, spec: ChannelSpec) -> None:
    """Raise ``ValueError`` for a tensor that cannot travel on a channel; a :class:`ConfigError` for
    one that is too large.
    """
    if not tensor.is_contiguous():
        raise ValueError(
            f"{spec}: a tensor of shape {tuple(tensor.shape)} is not contiguous; call .contiguous()"
        )
    if tensor.nbytes > spec.slot_bytes:
        max_tokens = setting("max_tokens")
        raise ConfigError(
            f"{spec}: a tensor of shape {tuple(tensor.shape)} and {tensor.dtype} has "
            f"{tensor.nbytes} bytes, the channel's slots have {spec.slot_bytes}: give the longest "
            f"length (seq_length), or the most tokens of a microbatch ({max_tokens})",
            max_tokens,
        )

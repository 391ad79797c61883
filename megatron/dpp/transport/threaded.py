"""The part that is common to transports whose messages are carried by threads in Python."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from megatron.dpp.errors import TransportError, TransportUnavailable
from megatron.dpp.transport.base import Transport
from megatron.dpp.transport.joining import Request


class ThreadedTransport(Transport):
    """Counts, waking and failures of one rank.

    The threads of a subclass hold ``changed`` while they change what the caller's thread reads, and
    ``ring`` afterwards. ``_incoming`` has an object with ``num_arrived`` per incoming channel,
    ``_outgoing`` one with ``num_pending`` and ``pending_bytes`` per outgoing channel.
    """

    _incoming: Sequence[Any]
    _outgoing: Sequence[Any]

    def __init__(self, request: Request) -> None:
        self.rank = request.rank
        self.outgoing, self.incoming = request.outgoing, request.incoming
        self.changed = threading.Condition()
        self._device = request.device
        self._seen = self._version = 0
        self._failure: TransportError | None = None
        self._closed = False

    def ring(self) -> None:
        """Something changed: end ``wait``."""
        with self.changed:
            self._version += 1
            self.changed.notify_all()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._closed:
            raise TransportUnavailable(f"rank {self.rank}: the transport is closed")

    def poll(self) -> Sequence[int]:
        self._check()
        with self.changed:
            self._seen = self._version
            return [channel.num_arrived for channel in self._incoming]

    def wait(self, seconds: float) -> bool:
        self._check()
        with self.changed:
            changed = self.changed.wait_for(lambda: self._seen != self._version, seconds)
        self._check()
        return changed

    def pending(self) -> int:
        self._check()
        with self.changed:
            return sum(channel.num_pending for channel in self._outgoing)

    def pending_bytes(self) -> int:
        with self.changed:
            return sum(channel.pending_bytes for channel in self._outgoing)

    def _has_unsent(self, channel: int) -> bool:
        pending: int = self._outgoing[channel].num_pending
        return pending > 0

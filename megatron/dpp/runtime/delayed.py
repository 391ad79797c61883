"""A transport whose messages arrive late on purpose, for ``DppConfig.inject`` and tests.

It wraps another transport and hides each message until its delay is over. Order inside a channel
stays as it is.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any, cast

from megatron.dpp.inject import Injector
from megatron.dpp.transport import kinds
from megatron.dpp.transport.base import Message, Transport


def delayed(inner: Transport, injector: Injector | None, ranks: Sequence[int]) -> Transport:
    """``inner``, with every message delayed by ``injector`` if that delays any.

    A delay begins when the message was sent or, if the sender may be on another host, when it was
    first seen. Messages are taken out of ``inner`` at once, so a slow link causes no back-pressure.

    Args:
        inner: the transport that moves the tensors; closed with this one.
        injector: gives the delay of each message, by the ranks' places in the pipeline.
        ranks: global ranks of the pipeline, to find those places.
    """
    if injector is None or not injector.delays_messages:
        return inner
    return cast(Transport, _Delayed(inner, injector, ranks))


class _Delayed:
    """All but what comes in is the inner transport's."""

    def __init__(self, inner: Transport, injector: Injector, ranks: Sequence[int]) -> None:
        self._inner, self._injector = inner, injector
        self.incoming = inner.incoming
        place = {rank: index for index, rank in enumerate(ranks)}
        self._pairs = [(place[c.source], place[c.destination]) for c in inner.incoming]
        far = {link.peer for link in inner.links() if kinds.find(link.kind).between_hosts}
        self._one_clock = [c.source not in far for c in inner.incoming]
        self._num_taken = [0] * len(inner.incoming)
        self._visible = [0] * len(inner.incoming)
        self._hidden: list[deque[Message]] = [deque() for _ in inner.incoming]
        self._shown: list[deque[Message]] = [deque() for _ in inner.incoming]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def poll(self) -> Sequence[int]:
        """As the transport's, of messages whose delay is over."""
        for index, total in enumerate(self._inner.poll()):
            for number in range(self._num_taken[index], total):
                self._hide(index, number)
            self._num_taken[index] = max(self._num_taken[index], total)
        now = time.monotonic_ns()
        for index, hidden in enumerate(self._hidden):
            while hidden and hidden[0].arrived_ns <= now:
                self._shown[index].append(hidden.popleft())
                self._visible[index] += 1
        return tuple(self._visible)

    def _hide(self, index: int, number: int) -> None:
        """Take a message, due when its delay is over and those before it have arrived."""
        message = self._inner.take(index)
        begin = message.sent_ns if self._one_clock[index] else message.arrived_ns
        late = self._injector.message_seconds(*self._pairs[index], number)
        due = max(begin + int(late * 1e9), message.arrived_ns)
        if self._hidden[index]:
            due = max(due, self._hidden[index][-1].arrived_ns)
        self._hidden[index].append(message._replace(arrived_ns=due))

    def wait(self, seconds: float) -> bool:
        """As the transport's; what ends a delay ends it, too."""
        heads = [hidden[0].arrived_ns for hidden in self._hidden if hidden]
        left = (min(heads) - time.monotonic_ns()) * 1e-9 if heads else seconds
        if left >= seconds:
            return self._inner.wait(seconds)
        if left > 0:
            self._inner.wait(left)
        return True

    def take(self, channel: int) -> Message:
        """The message, with its delay in ``arrived_ns``, for traces."""
        if not self._shown[channel]:
            raise IndexError(f"nothing has arrived on {self.incoming[channel]}")
        return self._shown[channel].popleft()

    def departed(self, peer: int) -> bool:
        """True if ``peer`` has left and no message of it is delayed here."""
        if not self._inner.departed(peer):
            return False
        self.poll()  # its last messages may not have been looked at yet
        pairs = zip(self._hidden, self.incoming, strict=True)
        return not any(hidden and spec.source == peer for hidden, spec in pairs)

"""A transport whose messages arrive late on purpose.

Wraps any other transport and hides a message until its time has come; order inside a channel stays
as it is. Used by ``--dpp-inject`` and by the tests that hold the numbers to be independent of
timing.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

import torch

from megatron.dpp.runtime.inject import Injector
from megatron.dpp.transport.base import LinkInfo, Message, Transport


class DelayedTransport(Transport):
    """``inner``, with every message hidden for as long as ``injector`` says.

    Args:
        inner: the transport that moves the tensors; closed with this one.
        injector: says how late each message is, by the ranks' places in the pipeline.
        ranks: global ranks of the pipeline, to find those places.
    """

    def __init__(self, inner: Transport, injector: Injector, ranks: Sequence[int]) -> None:
        self._inner, self._injector = inner, injector
        self.rank, self.board = inner.rank, inner.board
        self.outgoing, self.incoming = inner.outgoing, inner.incoming
        place = {rank: index for index, rank in enumerate(ranks)}
        self._pairs = [(place[c.source], place[c.destination]) for c in inner.incoming]
        self._visible = [0] * len(inner.incoming)
        self._due: list[deque[float]] = [deque() for _ in inner.incoming]
        self._shown: list[deque[float]] = [deque() for _ in inner.incoming]

    def poll(self) -> Sequence[int]:
        now = time.monotonic()
        for index, total in enumerate(self._inner.poll()):
            due = self._due[index]
            for number in range(self._visible[index] + len(due), total):
                moment = now + self._injector.message_seconds(*self._pairs[index], number)
                due.append(max(moment, due[-1]) if due else moment)
            while due and due[0] <= now:
                self._shown[index].append(due.popleft())
                self._visible[index] += 1
        return tuple(self._visible)

    def wait(self, seconds: float) -> bool:
        heads = [due[0] for due in self._due if due]
        if not heads:
            return self._inner.wait(seconds)
        left = max(0.0, min(heads) - time.monotonic())
        if left >= seconds:
            return self._inner.wait(seconds)
        # The inner transport would wake at once for what it has already shown us.
        time.sleep(min(left, 1e-3))
        return True

    def put(
        self, channel: int, tensor: torch.Tensor, *,
        iteration: int, microbatch: int, part: int = 0, num_parts: int = 1,
    ) -> None:  # fmt: skip
        self._inner.put(
            channel, tensor, iteration=iteration, microbatch=microbatch,
            part=part, num_parts=num_parts,
        )  # fmt: skip

    def take(self, channel: int) -> Message:
        """The message, arrived when it was shown: a trace is to see the delay."""
        message = self._inner.take(channel)
        shown_ns = int(self._shown[channel].popleft() * 1e9)
        return message._replace(arrived_ns=max(message.arrived_ns, shown_ns))

    def pending(self) -> int:
        return self._inner.pending()

    def flush(self, seconds: float) -> None:
        self._inner.flush(seconds)

    def links(self) -> Sequence[LinkInfo]:
        return self._inner.links()

    def departed(self, peer: int) -> bool:
        """Whether ``peer`` has left and nothing of it is still held back here."""
        if not self._inner.departed(peer):
            return False
        self.poll()  # its last messages may not have been looked at yet
        pairs = zip(self._due, self.incoming, strict=True)
        return not any(due and spec.source == peer for due, spec in pairs)

    def abort(self, reason: str) -> None:
        self._inner.abort(reason)

    def close(self) -> None:
        self._inner.close()

"""Messages that are late on purpose: when each is due, on one channel and on several."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.dpp.runtime.delayed import delayed
from megatron.dpp.transport.base import LinkInfo, Message
from tests.runtime.pipelines import Topology


class Inner:
    """The transport of the second of these ranks with two chunks; a test says what has arrived."""

    rank, board, outgoing = 1, None, ()

    def __init__(self, ranks: tuple[int, ...]) -> None:
        specs = Topology(ranks, 1, 2).channels([4], [4], 4)
        self.incoming = [spec for spec in specs if spec.destination == 1]
        self.arrived: list[list[Message]] = [[] for _ in self.incoming]
        self.taken = [0 for _ in self.incoming]
        self.waits: list[float] = []

    def departed(self, peer: int) -> bool:
        return True

    def links(self) -> list[LinkInfo]:
        return [LinkInfo(0, "shm", "")]

    def poll(self) -> list[int]:
        return [len(messages) for messages in self.arrived]

    def take(self, channel: int) -> Message:
        self.taken[channel] += 1
        return self.arrived[channel][self.taken[channel] - 1]

    def wait(self, seconds: float) -> bool:
        self.waits.append(seconds)
        return False


class Late:
    """A transport whose messages are late by ``delays``, in seconds by number; and its clock."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        delays: dict[int, float],
        ranks: tuple[int, ...] = (0, 1),
    ) -> None:
        self.now = 10**9
        clock = SimpleNamespace(monotonic_ns=lambda: self.now)
        monkeypatch.setattr("megatron.dpp.runtime.delayed.time", clock)
        injector: Any = SimpleNamespace(
            delays_messages=True, message_seconds=lambda source, here, number: delays[number]
        )
        self.inner = Inner(ranks)
        inner: Any = self.inner
        self.transport = delayed(inner, injector, ranks)

    def arrive(self, channel: int, *, sent: int = 10**9, arrived: int = 10**9) -> None:
        number = len(self.inner.arrived[channel])
        message = Message(torch.zeros(1), 0, number, 0, 1, sent, arrived)
        self.inner.arrived[channel].append(message)


def test_a_message_waits_for_the_one_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    late = Late(monkeypatch, {0: 0.01, 1: 0.05, 2: 0.02})
    for _ in range(3):
        late.arrive(0)
    seen = []
    for now in (0, 10, 20, 49, 50):
        late.now = 10**9 + now * 10**6
        seen.append(late.transport.poll()[0])
    assert seen == [0, 1, 1, 1, 3]
    due = [late.transport.take(0).arrived_ns - 10**9 for _ in range(3)]
    assert due == [10**7, 5 * 10**7, 5 * 10**7]


def test_a_wait_ends_when_a_delayed_message_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    late = Late(monkeypatch, {0: 0.05})
    transport, waits = late.transport, late.inner.waits
    assert transport.wait(3.0) is False and waits == [3.0], "nothing is under way"
    late.arrive(0, arrived=late.now + 10**7)
    late.now += 2 * 10**7
    assert transport.poll()[0] == 0
    assert transport.wait(3.0) is True
    assert waits[1:] == [pytest.approx(0.03)], "50 ms after it was sent"
    assert transport.wait(0.01) is False and waits[2:] == [0.01]
    late.now += 3 * 10**7
    assert transport.wait(3.0) is True and len(waits) == 3, "it is due"
    assert transport.poll()[0] == 1
    assert transport.take(0).arrived_ns == 10**9 + 5 * 10**7


def test_a_wait_ends_with_the_first_message_of_any_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    late = Late(monkeypatch, {0: 0.05, 1: 0.01})
    late.arrive(0)
    late.transport.poll()
    late.now += 4 * 10**7
    late.arrive(1, sent=late.now, arrived=late.now)
    late.transport.poll()
    assert late.transport.wait(3.0)
    assert late.inner.waits == [pytest.approx(0.01)]


def test_a_sender_has_left_whatever_another_one_has_under_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    late = Late(monkeypatch, {0: 0.05}, ranks=(0, 1, 2))
    sources = [spec.source for spec in late.inner.incoming]
    late.arrive(sources.index(2))
    assert late.transport.departed(0) and not late.transport.departed(2)
    late.now += 5 * 10**7
    assert late.transport.departed(2)


def test_a_delay_begins_when_a_message_was_sent_or_from_another_host_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another host has another clock; the link itself may take longer than the delay."""
    for kind, seconds, due in (("shm", 2, 4), ("shm", 5, 6), ("tcp", 2, 6)):
        monkeypatch.setattr(Inner, "links", lambda self, kind=kind: [LinkInfo(0, kind, "")])
        late = Late(monkeypatch, {0: float(seconds)})
        late.arrive(0, sent=10**9, arrived=4 * 10**9)
        late.now = 10**12
        late.transport.poll()
        assert late.transport.take(0).arrived_ns == due * 10**9


def test_all_but_what_comes_in_is_the_inner_transports(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []
    monkeypatch.setattr(Inner, "board", "a board of its stage")
    late = Late(monkeypatch, {})
    inner: Any = late.inner
    inner.put = lambda *given, **labels: done.append((given, labels))
    inner.pending, inner.pending_bytes = lambda: 2, lambda: 640
    inner.flush, inner.abort, inner.close = done.append, done.append, lambda: done.append("closed")
    labels = {"iteration": 5, "microbatch": 3, "part": 1, "num_parts": 2}
    late.transport.put(4, torch.ones(1), **labels)
    late.transport.flush(7.0)
    late.transport.abort("no memory")
    late.transport.close()
    assert done == [((4, torch.ones(1)), labels), 7.0, "no memory", "closed"]
    assert (late.transport.pending(), late.transport.pending_bytes()) == (2, 640)
    assert late.transport.board == "a board of its stage"

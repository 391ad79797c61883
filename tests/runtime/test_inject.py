"""Injected variability: a pure function of seed and task, equal in amount for every schedule, and
messages that are late on purpose.
"""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.dpp.core.rng import derive
from megatron.dpp.errors import ConfigError
from megatron.dpp.inject import Injector, Task
from megatron.dpp.runtime.delayed import delayed
from megatron.dpp.runtime.topology import Topology
from megatron.dpp.transport.base import ChannelSpec, Direction, LinkInfo, Message
from tests.fake_network import FakeNetwork


def share_of_slow_work(pieces: int, ranks: int = 8) -> float:
    """Mean extra work of 40 iterations whose 96 units are cut into this many pieces each."""
    total = 0.0
    for rank in range(ranks):
        injector = Injector("transient:2x:20%", rank, ranks, seed=3)
        for iteration in range(5):
            for unit in range(96 * pieces):
                task = Task(iteration, "F", 0, 0, unit / pieces, 1 / pieces)
                total += (injector.factor(task) - 1.0) / pieces
    return total / (ranks * 5 * 96)


def test_transients_cover_the_same_work_however_it_is_cut() -> None:
    whole, halves = share_of_slow_work(1), share_of_slow_work(2)
    assert whole == pytest.approx(halves, rel=1e-9)
    assert whole == pytest.approx(0.2, abs=0.03)


def test_answers_depend_on_the_task_and_on_nothing_else() -> None:
    task = Task(3, "B", 1, 7, 12.0, 0.5)
    first = Injector("jitter:0.3,lengths:0.5", 1, 4, seed=5)
    again = Injector("jitter:0.3,lengths:0.5", 1, 4, seed=5)
    first.factor(Task(0, "F", 0, 0))
    assert first.factor(task) == again.factor(task)
    assert first.factor(task) != Injector("jitter:0.3", 2, 4, seed=5).factor(task)


def test_slow_rank_and_slow_link_hit_only_theirs() -> None:
    text = "slow-rank:1:1.5,slow-link:0-1:5ms"
    assert Injector(text, 1, 4).factor(Task(0, "F", 0, 0)) == 1.5
    assert Injector(text, 2, 4).factor(Task(0, "F", 0, 0)) == 1.0
    assert Injector(text, 0, 4).message_seconds(1, 0, 9) == pytest.approx(5e-3)
    assert Injector(text, 0, 4).message_seconds(1, 2, 9) == 0.0


@pytest.mark.parametrize(
    "text",
    [
        "jiter:0.3", "jitter:x", "transient:2x", "slow-link:0-1:5", "transient:2x:0%", "",
        "jitter:nan", "jitter:-1", "slow-rank:1:0.5", "head:0.5x", "slow-link:0-2:5ms",
        "slow-link:1-1:5ms", "jitter:0.3,",
    ],
)  # fmt: skip
def test_a_form_that_is_not_known_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"DppConfig\(inject="):
        Injector(text, 0, 4)


def test_the_first_and_the_last_rank_share_a_link_with_several_chunks_only() -> None:
    assert Injector("slow-link:0-3:5ms", 0, 4, num_chunks=2).message_seconds(3, 0, 0) > 0.0
    with pytest.raises(ConfigError, match=r"slow-link:0-3:5ms'\): pipeline ranks 0 and 3 share no"):
        Injector("slow-link:0-3:5ms", 0, 4)
    with pytest.raises(ConfigError, match="outside the pipeline of 4 ranks"):
        Injector("slow-rank:4:2", 0, 4)


def test_a_seed_may_be_any_64_bits() -> None:
    """PyTorch's initial seed may exceed a signed 64-bit number."""
    task = Task(3, "B", 1, 7, 12.0, 0.5)
    assert Injector("jitter:0.3", 1, 4, seed=(1 << 64) - 7).factor(task) >= 1.0
    one = Task(3, "B", 1, 1, 12.0, 0.5)
    assert Injector("jitter:0.3", 1, 4, seed=5).factor(one) == pytest.approx(2.16510899143066)
    assert derive(5, 1) == 3085186920139808632 != derive((1 << 64) - 7, 1)


def test_a_late_message_has_arrived_when_its_delay_is_over_since_it_was_sent() -> None:
    """However long its receiver is busy; a trace shows an injected slow link."""
    spec = ChannelSpec(0, 1, 0, Direction.FORWARD, 64)
    network = FakeNetwork([spec])
    sender, inner = network.transport(0), network.transport(1)
    receiver = delayed(inner, Injector("slow-link:0-1:20ms", 1, 2), (0, 1))
    for other in (None, Injector("jitter:0.3", 1, 2)):
        assert delayed(inner, other, (0, 1)) is inner, "nothing is late"
    begin = time.monotonic_ns()
    for microbatch in range(2):
        sender.put(0, torch.arange(4.0), iteration=0, microbatch=microbatch)
        with pytest.raises(IndexError, match="nothing has arrived"):
            receiver.take(0)
        if microbatch:
            time.sleep(0.03)  # the receiver is busy with a task
        while receiver.poll()[0] <= microbatch:
            assert not microbatch
            receiver.wait(0.01)
        message = receiver.take(0)
        assert torch.equal(message.tensor, torch.arange(4.0))
        assert message.arrived_ns >= begin + 20_000_000


def test_a_heavy_head_is_on_the_last_chunk_of_the_last_rank() -> None:
    """The other chunks of that rank keep their speed."""
    last = Injector("head:3x", 3, 4, num_chunks=2)
    assert [last.factor(Task(0, "F", chunk, 0)) for chunk in range(2)] == [1.0, 3.0]
    assert Injector("head:3x", 2, 4, num_chunks=2).factor(Task(0, "F", 1, 0)) == 1.0


# Late messages ------------------------------------------------------------------------------------


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

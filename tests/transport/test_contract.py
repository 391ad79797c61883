"""The common part of transports: limits of channels, deadlines of a flush, and the fake network."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from megatron.dpp.errors import PeerDead, TransferTimeout
from megatron.dpp.transport import ChannelSpec, Direction, base
from megatron.dpp.transport.base import Transport
from tests.fake_network import FakeNetwork, FakeTransport, VirtualClock
from tests.transport.kinds import PATIENCE

FORWARD = ChannelSpec(0, 1, 0, Direction.FORWARD, 64, 2)
BACKWARD = ChannelSpec(1, 0, 0, Direction.BACKWARD, 64, 1)


class Scripted(Transport):
    """``left``: pending puts, by time; ``waits``: how long it was asked to sleep."""

    def __init__(self, left: Callable[[float], int], naps: float = 100.0) -> None:
        self.rank, self.incoming, self.outgoing = 0, [BACKWARD], [FORWARD]
        self.left, self.naps = left, naps
        self.time = 50.0
        self.waits: list[float] = []
        self.calls: list[str] = []
        self.gone: set[int] = set()

    def now(self) -> float:
        return self.time

    def put(self, channel: int, tensor: torch.Tensor, **labels: Any) -> None:
        raise AssertionError

    def poll(self) -> Sequence[int]:
        self.calls.append("poll")
        return [0]

    def take(self, channel: int) -> Any:
        raise AssertionError

    def wait(self, seconds: float) -> bool:
        assert self.calls[-1] != "wait", "a change before the poll would be slept over"
        self.calls.append("wait")
        self.waits.append(seconds)
        assert len(self.waits) < 100, "it waits for ever"
        self.time += min(seconds, self.naps)
        return True

    def pending(self) -> int:
        assert self.calls[-1] == "poll", "a change between the two would be slept over"
        return self.left(self.time - 50.0)

    def pending_bytes(self) -> int:
        return 0

    def links(self) -> Sequence[Any]:
        return []

    def departed(self, peer: int) -> bool:
        return peer in self.gone

    def abort(self, reason: str) -> None:
        self.calls.append(f"abort {reason}")

    def close(self) -> None:
        self.calls.append("close")


def test_a_flush_ends_where_no_put_has_left_for_its_time() -> None:
    stuck = Scripted(lambda now: 2)
    with pytest.raises(TransferTimeout, match="rank 0: 2 puts are pending, and none left for 3 s"):
        stuck.flush(3.0)
    assert stuck.waits == [3.0]


def test_every_put_that_leaves_gives_a_flush_its_time_again() -> None:
    leaving = Scripted(lambda now: 3 - int(now / 2.0), naps=2.0)
    leaving.flush(2.5)
    assert leaving.waits == [2.5] * 3
    stops = Scripted(lambda now: 3 if now < 2.0 else 2, naps=1.0)
    with pytest.raises(TransferTimeout, match="2 puts"):
        stops.flush(2.5)
    assert stops.waits == [2.5, 1.5, 2.5, 1.5, 0.5]
    comes_back = Scripted(lambda now: 1 if now < 2.0 else 2, naps=1.0)
    with pytest.raises(TransferTimeout, match="2 puts"):
        comes_back.flush(2.5)  # another put is no progress
    assert comes_back.waits == [2.5, 1.5, 0.5]
    Scripted(lambda now: 0).flush(0.0)


def test_a_late_message_is_its_senders() -> None:
    one = Scripted(lambda now: 0)
    text = "rank 0: microbatch 4 of iteration 9 (backward of chunk 0, rank 1 -> 0) has not arrived"
    late = one.overdue(0, 1.5, iteration=9, microbatch=4)
    assert type(late) is TransferTimeout and str(late).startswith(f"{text} after 1.5 s; rank 1 is")
    one.gone = {0}
    assert type(one.overdue(0, 1.5, iteration=9, microbatch=4)) is TransferTimeout
    one.gone = {1}
    late = one.overdue(0, 1.5, iteration=9, microbatch=4)
    assert type(late) is PeerDead and "rank 1 has closed its transport" in str(late)


def test_a_failure_that_shows_in_a_second_explains_another(monkeypatch: pytest.MonkeyPatch) -> None:
    quiet = Scripted(lambda now: 0, naps=0.05)
    monkeypatch.setattr(base.time, "monotonic", lambda: quiet.time)
    quiet.raise_failure()
    assert len(quiet.waits) in (20, 21) and set(quiet.waits) == {0.05}
    fails = Scripted(lambda now: 0, naps=0.05)
    monkeypatch.setattr(base.time, "monotonic", lambda: fails.time)

    def poll() -> Sequence[int]:
        if len(fails.waits) == 3:
            raise PeerDead("rank 1 died")
        fails.calls.append("poll")
        return [0]

    monkeypatch.setattr(fails, "poll", poll)
    with pytest.raises(PeerDead, match="rank 1 died"):
        fails.raise_failure()


def test_a_block_that_fails_gives_up_before_it_closes() -> None:
    one = Scripted(lambda now: 0)
    with one as entered:
        assert entered is one
    assert one.calls == ["close"]
    one.calls.clear()
    with pytest.raises(KeyError), one:
        raise KeyError("x")
    assert one.calls == ["abort KeyError: 'x'", "close"]


# The fake network ---------------------------------------------------------------------------------


def network(**settings: Any) -> tuple[FakeNetwork, FakeTransport, FakeTransport]:
    made = FakeNetwork([FORWARD, BACKWARD], clock=VirtualClock(), stepping=True, **settings)
    return made, made.transport(0), made.transport(1)


def put(transport: FakeTransport, number: int) -> None:
    transport.put(0, torch.full((4,), float(number)), iteration=0, microbatch=number)


def test_a_message_travels_for_its_delay_and_never_overtakes() -> None:
    delays = {0: 3.0, 1: 1.0, 2: 2.0}
    made, a, b = network(delay=lambda chance, spec, index: delays[index])
    for number in range(3):
        put(a, number)
    assert a.pending() == 3 and a.pending_bytes() == 48
    assert list(b.poll()) == [0] and not b.wait(2.5)
    assert b.wait(9.0) and made.now() == 3.0
    assert list(b.poll()) == [2], "the third put waits for a slot"
    assert a.pending() == 1
    first = b.take(0)
    assert (first.sent_ns, first.arrived_ns, first.microbatch) == (0, 3_000_000_000, 0)
    assert b.take(0).arrived_ns == 3_000_000_000, "it waited behind the first"
    while list(b.poll()) != [3]:
        assert b.wait(9.0)
    assert made.now() == 5.0  # two seconds after it got its slot
    assert a.pending() == 0
    with pytest.raises(IndexError, match="rank 0: nothing has arrived on backward"):
        a.take(0)


def test_a_message_taken_in_flight_has_no_time_of_arrival() -> None:
    made, a, b = network(delay=lambda chance, spec, index: 2.0, ahead=True)
    put(a, 7)
    assert list(b.coming()) == [1] and list(b.poll()) == [0]
    message = b.take(0)
    assert made.now() == 2.0
    assert (message.microbatch, message.arrived_ns) == (7, 0)
    assert list(b.coming()) == [1] and list(b.poll()) == [1]
    _, c, d = network(delay=lambda chance, spec, index: 2.0)
    put(c, 1)
    assert d.coming() == ()
    with pytest.raises(IndexError):
        d.take(0)


def test_a_stalled_channel_holds_back_and_lets_go() -> None:
    made, a, b = network()
    made.stall(FORWARD)
    put(a, 0)
    assert list(b.poll()) == [0] and not b.wait(1.0)
    made.stall(FORWARD, stalled=False)
    assert list(b.poll()) == [1]
    assert not a.departed(1)
    b.close()
    assert a.departed(1) and not b.departed(0)


def test_virtual_time_passes_while_all_ranks_sleep_and_not_before() -> None:
    made = FakeNetwork([FORWARD, BACKWARD], clock=VirtualClock())
    one, other = made.transport(0), made.transport(1)
    woken: list[tuple[bool, float]] = []

    def sleep_and_leave() -> None:
        woken.append((other.wait(7.0), made.now()))  # until the message
        other.poll()
        woken.append((other.wait(5.0), made.now()))
        other.close()

    other.poll()
    sleeper = threading.Thread(target=sleep_and_leave)
    sleeper.start()
    put(one, 0)
    one.poll()
    assert not one.wait(9.0) and made.now() == 9.0
    sleeper.join(PATIENCE)
    assert woken == [(True, 0.0), (False, 5.0)]

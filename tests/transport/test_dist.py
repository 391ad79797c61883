"""The order in which a peer's channels end, over gloo."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.dpp.errors import PeerDead, ProtocolError, SetupError, TransportUnavailable
from megatron.dpp.transport import ChannelSpec, Direction, TransportOptions
from megatron.dpp.transport.kinds import dist
from megatron.dpp.transport.kinds.dist import DistTransport
from tests.transport.kinds import PATIENCE, close_and_wait, opened, pair, take_next


@pytest.fixture(autouse=True)
def close_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that closes alone waits this long for its peers to do so."""
    monkeypatch.setattr(dist, "_CLOSE_SECONDS", 0.5)


class HeldBack:
    """A group whose sends wait until they are let go."""

    def __init__(self, group: Any) -> None:
        self.group, self.let_go = group, threading.Event()

    def send(self, *given: Any) -> Any:
        assert self.let_go.wait(PATIENCE)
        return self.group.send(*given)


def hold_back(sender: DistTransport, channel: int) -> HeldBack:
    held = HeldBack(sender._outgoing[channel]._group)
    sender._outgoing[channel]._group = held
    return held


def pair_of(transports: Sequence[Any]) -> tuple[DistTransport, DistTransport]:
    a, b = transports
    return a, b


def test_the_end_of_one_channel_is_not_the_end_of_another() -> None:
    with opened("dist", pair()) as transports:
        a, b = pair_of(transports)
        held = hold_back(a, 0)
        a.put(0, torch.full((3,), 7.0), iteration=0, microbatch=0)
        closer = threading.Thread(target=a.close)
        closer.start()
        b._incoming[1].thread.join(PATIENCE)  # it ends with its channel
        assert not b._incoming[1].thread.is_alive()
        assert not b.departed(0), "a message is still under way"
        held.let_go.set()
        assert bool((take_next(b, 0, 0).tensor == 7).all())
        closer.join(PATIENCE)
        close_and_wait(a, b)


def test_what_came_before_the_end_may_be_taken_after_it() -> None:
    with opened("dist", pair()) as transports:
        a, b = pair_of(transports)
        for channel in range(2):
            a.put(channel, torch.full((3,), float(channel)), iteration=0, microbatch=0)
        a.flush(PATIENCE)
        close_and_wait(a, b)
        assert list(b.poll()) == [1, 1]
        for channel in range(2):
            assert bool((b.take(channel).tensor == channel).all())


def test_a_link_that_breaks_behind_an_end_is_no_failure() -> None:
    with opened("dist", pair()) as transports:
        a, b = pair_of(transports)
        held = hold_back(a, 0)
        b.note_end(b.incoming[1])
        b.fail_link(b.incoming[0], RuntimeError("connection closed by peer"))
        assert b.departed(0)
        b.poll()
        held.let_go.set()


# One rank's side, without a network ---------------------------------------------------------------


def alone(*incoming: ChannelSpec, outgoing: Sequence[ChannelSpec] = ()) -> Any:
    """The transport of rank 1, whose channels have no threads."""
    made: Any = object.__new__(DistTransport)
    made.rank, made.incoming, made.outgoing = 1, list(incoming), list(outgoing)
    made.changed = threading.Condition()
    made._seen = made._version = 0
    made._failure, made._ended, made._closed, made._bell = None, set(), False, None
    made._device = torch.device("cpu")
    made._incoming = made._outgoing = ()
    return made


IN, IN_1, OUT = pair()[0], pair()[1], pair()[2]
OTHER = ChannelSpec(2, 1, 0, Direction.BACKWARD, 64)


def test_a_peer_has_left_with_the_end_of_its_last_channel() -> None:
    rank = alone(IN, IN_1, OTHER, outgoing=[OUT])
    assert not rank.departed(0) and not rank.departed(5)
    rank.note_end(IN)
    assert not rank.departed(0)
    rank.note_end(OTHER)
    assert rank.departed(2) and not rank.departed(0)
    rank.note_end(IN_1)
    assert rank.departed(0) and rank._version == 3


def test_a_broken_link_is_its_peers_and_the_first_one_counts() -> None:
    rank = alone(IN, OTHER, outgoing=[OUT])
    rank.note_end(OTHER)
    rank.fail_link(OUT, RuntimeError("reset\nmore"))
    rank.fail_link(IN, RuntimeError("later"))
    with pytest.raises(PeerDead) as caught:
        rank._check()
    assert str(caught.value) == f"rank 1: rank 0 is gone ({OUT}): reset"
    silent = alone(IN)
    silent.fail_link(IN, RuntimeError())
    with pytest.raises(PeerDead, match="rank 0 is gone"):
        silent._check()
    closing = alone(IN)
    closing._closed = True
    closing.fail_link(IN, RuntimeError("reset"))
    with pytest.raises(TransportUnavailable, match="rank 1: the transport is closed"):
        closing._check()


def test_every_channel_of_a_pair_has_a_tag_of_its_own() -> None:
    rank = alone()
    rank._groups = {0: "lower", 2: "higher"}
    specs = [
        ChannelSpec(0, 1, chunk, direction, 64) for chunk in range(2) for direction in Direction
    ]
    found = [rank._address(spec, 0) for spec in specs]
    assert found == [("lower", 0, tag) for tag in range(4)]
    assert rank._address(specs[0], 2) == ("higher", 1, 0)


@pytest.mark.parametrize(
    "header",
    [
        b"no JSON",
        b'{"dtype": "float32", "shape": [1]}',
        b'{"labels": [0, 0, 0, 1, 0], "shape": [1]}',
        b'{"labels": [0, 0, 0, 1, 0], "dtype": "pigeon", "shape": [1]}',
        b'{"labels": [0, 0, 0, 1, 0], "dtype": "float32", "shape": "x"}',
        b'{"labels": [0, 0, 0, 1, 0], "dtype": "float32", "shape": [1000]}',
        b'{"labels": [0], "dtype": "float32", "shape": [1]}',
        b'{"labels": 7, "dtype": "float32", "shape": [1]}',
        b'{"labels": {"a": 0}, "dtype": "float32", "shape": [1]}',
        b'{"labels": [0, 0, 0, 1, 0.5], "dtype": "float32", "shape": [1]}',
        b'{"labels": [0, 0, 0, 1, null], "dtype": "float32", "shape": [1]}',
        b'{"labels": [0, 0, 1, 1, 0], "dtype": "float32", "shape": [1]}',
        b'{"labels": [0, 9223372036854775808, 0, 1, 0], "dtype": "float32", "shape": [1]}',
        b'{"labels": [0, 0, 0, 1, 0], "dtype": "float32", "shape": 1}',
        b'{"labels": [0, 0, 0, 1, 0], "dtype": "float32", "shape": [true]}',
        b'{"labels": [0, 0, 0, 1, 0], "dtype": "float32", "shape": [-1]}',
        b'{"labels": [0, 0, 0, 1, 0], "dtype": "float32", "shape": [68719476736]}',
        b'{"labels": [0, 0, 0, 1, 0], "dtype": "nn", "shape": [1]}',
        b'{"labels": [0, 0, 0, 1, 0], "dtype": "qint8", "shape": [1]}',
        b'{"labels": [0, 0, 0, 1, 0], "dtype": {"a": 1}, "shape": [1]}',
        b'{"labels": [0, 0, 0, 1, 0], "dtype": "\\ud800", "shape": [1]}',
        b"[" * 512,
        b"[1]",
        b"\xff",
    ],
)
def test_a_broken_header_is_a_failure_that_stays(header: bytes) -> None:
    rank = alone(IN)
    buffer = torch.zeros(512 + 64, dtype=torch.uint8)
    padded = bytearray(header.ljust(512))
    buffer[:512] = torch.frombuffer(padded, dtype=torch.uint8)
    source = SimpleNamespace(
        spec=IN, messages=deque([(buffer, 7)]), credit=threading.Semaphore(0), num_arrived=1
    )
    rank._incoming = [source]
    for call in (lambda: rank.take(0), rank.poll):
        with pytest.raises(ProtocolError, match="rank 1: broken header on forward of chunk 0"):
            call()
    assert source.credit.acquire(blocking=False), "its place is free"


@pytest.mark.parametrize("error", [RuntimeError("gone"), ValueError("stoll")])
def test_a_store_that_does_not_count_is_named(error: Exception) -> None:
    def add(*_: Any) -> int:
        raise error

    with pytest.raises(SetupError, match=f"rank 1: the store does not count.*{error}"):
        alone()._connect(SimpleNamespace(add=add), TransportOptions())


def test_a_wait_ends_at_once_with_a_change_since_the_last_poll() -> None:
    rank = alone()
    rank.poll()
    assert not rank.wait(0.0)
    rank.ring()
    assert rank.wait(30.0) and rank.wait(30.0), "until the next poll"
    rank.poll()
    assert not rank.wait(0.0)
    asked: list[float] = []
    rank._bell = SimpleNamespace(
        wait=lambda seconds: bool(asked.append(seconds)), poll=lambda: None, ring=lambda: None
    )
    assert not rank.wait(0.5)
    rank.ring()
    assert rank.wait(0.5) and asked == [0.5]


def test_a_failure_during_a_wait_ends_it() -> None:
    class Failing(threading.Condition):
        def wait_for(self, predicate: Any, timeout: float | None = None) -> bool:
            rank._failure = PeerDead("rank 1: rank 0 is gone")
            return False

    rank = alone()
    rank.changed = Failing()
    with pytest.raises(PeerDead, match="rank 0 is gone"):
        rank.wait(30.0)


def test_what_is_pending_is_what_has_not_been_sent() -> None:
    """In messages and in bytes, on each channel in order; the header travels with the payload."""
    let_go, sent = threading.Semaphore(0), []

    def send(buffers: Sequence[torch.Tensor], peer: int, tag: int) -> Any:
        assert let_go.acquire(timeout=PATIENCE)
        sent.append((bytes(buffers[0][:1].tolist()), len(buffers[0]), peer, tag))
        return SimpleNamespace(wait=lambda seconds: None)

    rank = alone(outgoing=[OUT])
    out: Any = dist._Outgoing(rank, OUT, SimpleNamespace(send=send), 7, 5)
    rank._outgoing = [out]
    for size in (3, 10, 6):
        rank.put(0, torch.zeros(size, dtype=torch.uint8), iteration=0, microbatch=0)
    found = []
    for left in (2, 1, 0):
        assert rank._has_unsent(0)
        found.append((rank.pending(), rank.pending_bytes()))
        let_go.release()
        with rank.changed:
            assert rank.changed.wait_for(lambda left=left: out.num_pending == left, PATIENCE)
    assert found == [(3, 19), (2, 16), (1, 6)] and rank.pending_bytes() == 0
    assert not rank._has_unsent(0)
    out.puts.put(None)
    let_go.release()
    out.thread.join(PATIENCE)
    assert [first for first, *_ in sent] == [b"{"] * 3 + [b"\0"], "the end is a message, too"
    assert {rest for _, *rest_ in sent for rest in [tuple(rest_)]} == {(512 + OUT.slot_bytes, 7, 5)}

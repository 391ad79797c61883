"""The order in which a peer's channels end, over gloo."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from megatron.dpp.errors import (
    PeerDead,
    ProtocolError,
    SetupError,
    TransferTimeout,
    TransportUnavailable,
)
from megatron.dpp.transport import ChannelSpec, Direction, open_transport
from megatron.dpp.transport.kinds import dist
from megatron.dpp.transport.kinds.dist import DistTransport
from tests.transport.kinds import PATIENCE, close_and_wait, opened, pair, take_next


@pytest.fixture(autouse=True)
def close_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that closes alone waits this long for its peers to do so."""
    monkeypatch.setattr(dist, "CLOSE_SECONDS", 0.5)


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
        for thread in threading.enumerate():
            if thread.name == "dpp-dist-in-0-2":
                thread.join(PATIENCE)  # it ends with its channel
                assert not thread.is_alive()
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


class Group:
    """A gloo group of rank 1 and a peer that is the test: it sends what is put into ``coming``."""

    def __init__(self, store: Any, rank: int, *_: Any) -> None:
        GROUPS.append(self)
        self.rank, self.coming = rank, [queue.Queue[Any]() for _ in range(4)]  # by tag
        self.may_send, self.sent = threading.Semaphore(1 << 20), list[Any]()

    def recv(self, buffers: list[torch.Tensor], peer: int, tag: int) -> Any:
        def wait(_: Any) -> None:
            if isinstance(item := self.coming[tag].get(), Exception):
                raise item
            buffers[0][: len(item)] = torch.frombuffer(bytearray(item), dtype=torch.uint8)

        return SimpleNamespace(wait=wait)

    def send(self, buffers: list[torch.Tensor], peer: int, tag: int) -> Any:
        assert self.may_send.acquire(timeout=PATIENCE)
        self.sent.append((bytes(buffers[0][:1].tolist()), len(buffers[0]), peer, tag))
        return SimpleNamespace(wait=lambda _: None)


GROUPS: list[Group] = []
END = b"\0"


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., DistTransport]]:
    """Opens the transport of rank 1; ``GROUPS`` has its groups, in the order of the peers."""
    monkeypatch.setattr(dist, "ProcessGroupGloo", Group)
    GROUPS.clear()
    made: list[DistTransport] = []

    def open_one(*channels: ChannelSpec, store: Any = None) -> DistTransport:
        found = open_transport(channels, rank=1, store=store or HashStore(), kind="dist")
        assert isinstance(found, DistTransport)
        made.append(found)
        return found

    yield open_one
    for group in GROUPS:
        for coming in group.coming:
            coming.put(END)
    for transport in made:
        transport.close()


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.001)


IN, IN_1, OUT = pair()[0], pair()[1], pair()[2]
OTHER = ChannelSpec(2, 1, 0, Direction.BACKWARD, 64)


def test_a_peer_has_left_with_the_end_of_its_last_channel(alone: Any) -> None:
    rank = alone(IN, IN_1, OTHER, OUT)
    assert not rank.departed(0) and not rank.departed(5)
    for group, tag in ((GROUPS[0], 0), (GROUPS[1], 1)):
        rank.poll()
        group.coming[tag].put(END)
        assert rank.wait(PATIENCE)
    assert rank.departed(2) and not rank.departed(0)
    rank.poll()
    GROUPS[0].coming[2].put(END)
    assert rank.wait(PATIENCE) and rank.departed(0)


def test_a_broken_link_is_its_peers_and_the_first_one_counts(alone: Any) -> None:
    rank = alone(IN, OTHER, OUT)
    rank.note_end(OTHER)
    rank.fail_link(OUT, RuntimeError("reset\nmore"))
    rank.fail_link(IN, RuntimeError("later"))
    for _ in range(2):
        with pytest.raises(PeerDead) as caught:
            rank.poll()
        assert str(caught.value) == f"rank 1: rank 0 is gone ({OUT}): reset"
    silent = alone(IN)
    GROUPS[-1].coming[0].put(RuntimeError())
    with pytest.raises(PeerDead, match="rank 0 is gone"):
        while True:
            silent.poll()
            assert silent.wait(PATIENCE)
    closing = alone(IN)
    GROUPS[-1].coming[0].put(END)
    closing.close()
    closing.fail_link(IN, RuntimeError("reset"))
    with pytest.raises(TransportUnavailable, match="rank 1: the transport is closed"):
        closing.poll()


def test_every_channel_of_a_pair_has_a_tag_of_its_own(alone: Any) -> None:
    specs = [
        ChannelSpec(1, peer, chunk, direction, 64)
        for peer in (0, 2) for chunk in range(2) for direction in Direction
    ]  # fmt: skip
    alone(*specs).close()
    lower, higher = GROUPS
    assert (lower.rank, higher.rank) == (1, 0)
    assert sorted(lower.sent) == [(END, 512 + 64, 0, tag) for tag in range(4)]
    assert sorted(higher.sent) == [(END, 512 + 64, 1, tag) for tag in range(4)]


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
def test_a_broken_header_is_a_failure_that_stays(header: bytes, alone: Any) -> None:
    rank = alone(ChannelSpec(0, 1, 0, Direction.FORWARD, 64, 1))
    GROUPS[0].coming[0].put(header.ljust(512))
    until(lambda: rank.poll() == [1])
    for call in (lambda: rank.take(0), rank.poll):
        with pytest.raises(ProtocolError, match="rank 1: broken header on forward of chunk 0"):
            call()
    GROUPS[0].coming[0].put(END)
    until(lambda: rank.departed(0))  # its place is free


@pytest.mark.parametrize("error", [RuntimeError("gone"), ValueError("stoll")])
def test_a_store_that_does_not_count_is_named(error: Exception, alone: Any) -> None:
    class Store(HashStore):
        def add(self, *_: Any) -> int:
            raise error

    with pytest.raises(SetupError, match=f"rank 1: the store does not count.*{error}"):
        alone(IN, store=Store())


def test_a_wait_ends_at_once_with_a_change_since_the_last_poll(alone: Any) -> None:
    rank = alone(IN)
    rank.poll()
    assert not rank.wait(0.0)
    rank.ring()
    assert rank.wait(30.0) and rank.wait(30.0), "until the next poll"
    rank.poll()
    assert not rank.wait(0.0)


def test_a_failure_during_a_wait_ends_it(alone: Any) -> None:
    rank = alone(IN)
    rank.poll()
    failing = threading.Timer(0.05, rank.fail_link, (IN, RuntimeError("reset")))
    failing.start()
    with pytest.raises(PeerDead, match="rank 0 is gone"):
        rank.wait(30.0)


def test_what_is_pending_is_what_has_not_been_sent(alone: Any) -> None:
    """In messages and in bytes, on each channel in order; the header travels with the payload."""
    rank = alone(OUT)
    (group,) = GROUPS
    group.may_send = threading.Semaphore(0)
    for size in (3, 10, 6):
        rank.put(0, torch.zeros(size, dtype=torch.uint8), iteration=0, microbatch=0)
    found = []
    for left in (2, 1, 0):
        with pytest.raises(TransferTimeout):
            rank.flush(0.0)
        found.append((rank.pending(), rank.pending_bytes()))
        group.may_send.release()
        until(lambda left=left: rank.pending() == left)
    assert found == [(3, 19), (2, 16), (1, 6)] and rank.pending_bytes() == 0
    group.may_send.release()
    rank.close()
    assert [first for first, *_ in group.sent] == [b"{"] * 3 + [END], "the end is a message, too"
    assert {tuple(rest) for _, *rest in group.sent} == {(512 + OUT.slot_bytes, 0, 1)}

"""Descriptors of set-up messages: too many of them, and processes that have no room for them."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from torch.distributed import HashStore

from megatron.dpp.errors import ProtocolError, SetupError
from megatron.dpp.transport import handshake, open_transport, opening
from megatron.dpp.transport.joining import PeerLink
from tests.transport.kinds import of_rank, pair
from tests.transport.test_setup import errors_of

Ends = tuple[PeerLink, socket.socket]


def num_open() -> int:
    return len(os.listdir("/proc/self/fd"))


@contextlib.contextmanager
def room_for(count: int) -> Iterator[None]:
    """This process can open ``count`` descriptors more."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    filled: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 8, limits[1]))
    try:
        with contextlib.suppress(OSError):
            while True:
                filled.append(os.dup(0))
        for _ in range(count):
            os.close(filled.pop())
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for fd in filled:
            os.close(fd)


@pytest.fixture
def ends() -> Iterator[Ends]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        yield PeerLink(rank=0, peer=1, sock=ours, incoming=[], outgoing=[]), theirs


@pytest.mark.parametrize(("count", "room"), [(1, 0), (2, 0), (2, 1)])
def test_a_process_without_room_for_descriptors_says_so(count: int, room: int, ends: Ends) -> None:
    link, peer = ends
    handshake.send_message(peer, {}, [0] * count)
    before = num_open()
    with room_for(room), pytest.raises(SetupError) as caught:
        link.receive_fds(count)
    assert "rank 0: the set-up of the links with rank 1 ended" in str(caught.value)
    assert f"had room for {room} more (ulimit -n)" in str(caught.value)
    assert num_open() == before


@pytest.mark.parametrize(("sent", "most"), [(1, 0), (2, 1), (3, 1), (3, 2), (5, 2)])
def test_more_descriptors_than_expected_are_refused_and_closed(
    sent: int, most: int, ends: Ends
) -> None:
    link, peer = ends
    before = num_open()
    handshake.send_message(peer, {}, [0] * sent)
    with pytest.raises(ProtocolError, match=f"rank 1 sent .* more than {most} descriptors"):
        link.receive_fds(most)
    assert num_open() == before


def test_no_program_that_this_process_starts_inherits_what_a_peer_sent(ends: Ends) -> None:
    """Such a program would keep the memory and the bells of ranks that have ended."""
    link, peer = ends
    os.set_inheritable(peer.fileno(), True)
    handshake.send_message(peer, {}, [peer.fileno()] * 2)
    fds = link.receive_fds(2)
    try:
        assert [os.get_inheritable(fd) for fd in fds] == [False, False]
    finally:
        for fd in fds:
            os.close(fd)


def test_a_link_that_gets_no_descriptor_names_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    dup = os.dup

    def fail(fd: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(opening.os, "dup", fail)
    errors: dict[int, Any] = errors_of("shm")
    monkeypatch.setattr(opening.os, "dup", dup)
    before = num_open()
    for rank in range(2):
        assert type(errors[rank]) is SetupError
    assert any("Too many open files (ulimit -n)" in str(error) for error in errors.values()), errors
    del errors
    assert num_open() <= before


def test_a_store_that_is_gone_is_a_typed_error() -> None:
    class Gone(HashStore):
        def set(self, key: str, value: str) -> None:
            raise RuntimeError("Broken pipe: the store is gone")

    with pytest.raises(SetupError, match=r"rank 0: the set-up of the links ended: .*store is gone"):
        open_transport(of_rank(pair(), 0), rank=0, store=Gone(), kind="shm")

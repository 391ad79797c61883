"""A stage's board over several hosts: order, back-pressure, and what members may not send.

In one process, whose threads take themselves to be on several hosts.
"""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore

from megatron.dpp.errors import PeerDead, ProtocolError, TransportError, VersionMismatch
from megatron.dpp.transport import Transport, TransportOptions, open_transport
from megatron.dpp.transport.base import Board
from megatron.dpp.transport.joining import BoardHosts
from tests.transport import raw
from tests.transport.kinds import PATIENCE, several_hosts, until_failure
from tests.transport.test_tcp import remembered

THREE_HOSTS = "aabbbc"
"""Host of each rank; rank 0 leads."""
ARRIVALS, WORD, LOOK = 4, 5, 6  # kinds of notes, csrc/transport/peer.h
RING = 4096


@contextlib.contextmanager
def members(hosts: Sequence[str], counters: int = 2) -> Iterator[list[Transport]]:
    """One transport per host named, all of one board and without channels."""
    store, ranks = HashStore(), range(len(hosts))
    options = TransportOptions(setup_timeout=PATIENCE, node_ips="127.0.0.1")

    def open_one(rank: int) -> Transport:
        name_host(hosts[rank])
        return open_transport(
            [], rank=rank, store=store, options=options, board_ranks=ranks, board_counters=counters
        )

    with several_hosts() as name_host, ThreadPoolExecutor(len(hosts)) as pool:
        transports = list(pool.map(open_one, ranks))
        try:
            yield transports
        finally:
            list(pool.map(lambda transport: transport.close(), transports))


def board_of(transport: Transport) -> Board:
    assert transport.board is not None
    return transport.board


def wait_for_common(leader: Transport, expected: list[int]) -> None:
    deadline = time.monotonic() + PATIENCE
    while list(board_of(leader).common()) != expected:
        assert time.monotonic() < deadline, f"{board_of(leader).common()} is not {expected}"
        leader.poll()
        leader.wait(0.1)


def read(transport: Transport, count: int) -> list[int]:
    words: list[int] = []
    while len(words) < count:
        transport.poll()
        word = board_of(transport).next()
        if word is None:
            assert transport.wait(PATIENCE), f"rank {transport.rank} has {len(words)} words"
        else:
            words.append(word)
    return words


def test_the_first_member_of_each_host_talks_with_the_leader() -> None:
    host_of = dict(zip((4, 5, 6, 7, 8, 9), THREE_HOSTS, strict=True))
    views = {rank: BoardHosts.of(rank, list(host_of), host_of) for rank in host_of}
    partners = {4: [5, 6, 9], 5: [4], 6: [4, 7, 8], 7: [6], 8: [6], 9: [4]}
    assert {rank: view.partners for rank, view in views.items()} == partners
    assert {rank: view.upstream for rank, view in views.items()} == {
        4: None, 5: 4, 6: 4, 7: 6, 8: 6, 9: 4,
    }  # fmt: skip
    assert [view.num_lines for view in views.values()] == [4, 4, 3, 3, 3, 1]
    assert [rank for rank, view in views.items() if view.is_relayed] == [6, 7, 8, 9]


def test_arrivals_count_when_all_hosts_have_them_and_all_read_one_order() -> None:
    with members(THREE_HOSTS) as transports:
        assert [t.board.spans_hosts for t in transports if t.board] == [True] * 6
        kinds = {link.peer: link.kind for link in transports[0].links()}
        assert kinds == {1: "shm", 2: "tcp", 5: "tcp"}
        for rank, transport in enumerate(transports[:-1]):
            board_of(transport).post([3 + rank, 9 - rank])
        time.sleep(0.05)
        assert list(board_of(transports[0]).common()) == [0, 0]
        board_of(transports[-1]).post([7, 7])
        wait_for_common(transports[0], [3, 5])
        board_of(transports[3]).post([11, 11])  # no head: its head's progress thread tells
        board_of(transports[4]).post([12, 12])
        wait_for_common(transports[0], [3, 7])
        words = [random.Random(1).randrange(1 << 63) for _ in range(50)]
        for word in words:
            board_of(transports[0]).append(word)
        for transport in transports[1:]:
            assert read(transport, len(words)) == words
            assert board_of(transport).next() is None


def test_no_word_is_lost_when_readers_lag_more_than_a_ring() -> None:
    """The leader waits for the slowest reader of any host."""
    total = 3 * RING
    with members("aabb") as transports:
        written = []

        def lead() -> None:
            for word in range(total):
                board_of(transports[0]).append(word)
                written.append(word)

        thread = threading.Thread(target=lead)
        thread.start()
        assert read(transports[1], RING) == list(range(RING))
        assert read(transports[2], RING) == list(range(RING))
        deadline = time.monotonic() + PATIENCE
        while len(written) < RING:
            assert time.monotonic() < deadline, written
            time.sleep(0.01)
        time.sleep(0.1)
        assert len(written) == RING, "rank 3 has read nothing"
        rest = [ThreadPoolExecutor(1).submit(read, t, total - RING) for t in transports[1:3]]
        assert read(transports[3], total) == list(range(total))
        assert [future.result(PATIENCE) for future in rest] == [list(range(RING, total))] * 2
        thread.join(PATIENCE)
        assert len(written) == total


def note(kind: int, *values: int) -> bytes:
    return raw.note(kind, struct.pack(f"<{len(values)}Q", *values))


@pytest.mark.parametrize(
    ("sender", "receiver", "sent"),
    [
        (2, 0, note(ARRIVALS, 1, 0, 0)),  # it has read a word that was never sent
        (2, 0, note(ARRIVALS, 0, 5, 5) + note(ARRIVALS, 0, 4, 5)),  # they shrink
        (2, 0, note(ARRIVALS, 0, 5)),
        (2, 0, note(WORD, 7)),  # a word is the leader's
        (0, 2, note(ARRIVALS, 0, 5, 5)),  # the leader has no line
        (0, 2, note(WORD, 7)[:-1].replace(b"\x08\x00", b"\x07\x00", 1)),
        (0, 2, note(LOOK)),
        (0, 2, note(WORD, 7) * (RING + 1)),  # more than a ring without a reader
        (1, 0, note(ARRIVALS, 0, 5, 5)),  # a member of the own host
    ],
)
def test_a_hostile_member_is_named_and_all_hosts_learn_of_it(
    sender: int, receiver: int, sent: bytes
) -> None:
    with remembered() as connections, members(THREE_HOSTS) as transports:
        send(connections[sender, receiver, "control"], sent)
        errors = [until_failure(transport) for transport in transports]
    assert isinstance(errors[receiver], ProtocolError)
    for error in errors:
        assert f"rank {sender} (pid" in str(error), errors


def send(sock: socket.socket, sent: bytes) -> None:
    """In the pieces in which a peer would send, whatever the kind of the socket."""
    sock.settimeout(PATIENCE)
    for first in range(0, len(sent), 4092):
        sock.sendall(sent[first : first + 4092])


def test_a_lost_connection_between_hosts_ends_all_members() -> None:
    with remembered() as connections, members(THREE_HOSTS) as transports:
        connections[0, 5, "control"].shutdown(socket.SHUT_RDWR)
        errors: list[TransportError] = [until_failure(transport) for transport in transports]
    assert all(type(error) is PeerDead for error in errors), errors
    for error in errors[:-1]:
        assert "rank 5 (pid" in str(error), errors


def test_unequal_boards_are_refused() -> None:
    store = HashStore()

    def open_one(rank: int) -> TransportError | None:
        name_host("ab"[rank])
        options = TransportOptions(setup_timeout=PATIENCE, node_ips="127.0.0.1")
        try:
            open_transport(
                [], rank=rank, store=store, options=options, board_ranks=(0, 1),
                board_counters=2 + rank,
            ).close()  # fmt: skip
        except TransportError as error:
            return error
        return None

    with several_hosts() as name_host, ThreadPoolExecutor(2) as pool:
        found = list(pool.map(open_one, range(2)))
    assert any(isinstance(error, VersionMismatch) for error in found), found
    assert "expects a board of [2, 2] (members, counters)" in str(found[0])

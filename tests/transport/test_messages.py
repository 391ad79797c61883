"""Set-up messages: their lengths, ends and descriptors, and the patterns that try links."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import struct
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.dpp.errors import ProtocolError, SetupError, TransportError
from megatron.dpp.transport import TransportOptions, messages
from megatron.dpp.transport.joining import PeerLink, link_faults
from megatron.dpp.transport.kinds import cuda_ipc
from megatron.dpp.transport.messages import PeerEnded, message_waits, receive_message, send_message
from tests.transport.meeting import Ends, both, connected, ends, link_of, num_open

__all__ = ["ends"]

CLOSED = "its connection was closed; its own message says why"
LEFT = "it has closed its transport; its own message"


@pytest.mark.parametrize("ends", [socket.SOCK_SEQPACKET, socket.SOCK_STREAM], indirect=True)
@pytest.mark.parametrize(
    ("sent", "error", "text"),
    [
        (b"", SetupError, f"ended: {CLOSED}"),
        (b"\0\0\2", SetupError, f"ended: {LEFT}"),
        (b"\x01\x00\x03\x01", SetupError, f"ended: {LEFT}"),
        (b"\x03\x00\x01\x01hi", SetupError, f"ended: {LEFT}"),
        (b"\4\0\3\1why", SetupError, "ended: why"),
        (b'\x0e\0{"a":"\\udfff"}', ProtocolError, "sent a broken set-up message: 'utf-8' codec"),
        (b"\2\0[]", ProtocolError, "rank 0: rank 1 sent a broken set-up message: not an object"),
    ],
)
def test_what_comes_instead_of_a_message_is_said(
    ends: Ends, sent: bytes, error: type[TransportError], text: str
) -> None:
    if sent:
        ends[1].send(sent)
    ends[1].close()
    with pytest.raises(error, match="rank 1") as caught, messages.joining(0, 1, ends[0]):
        receive_message(ends[0])
    assert type(caught.value) is error and text in str(caught.value)


@pytest.mark.parametrize("ends", [socket.SOCK_SEQPACKET, socket.SOCK_STREAM], indirect=True)
def test_the_longest_message_passes_and_a_longer_one_is_refused_before_it_is_read(
    ends: Ends,
) -> None:
    longest = {"key": "x" * (messages.MAX_MESSAGE - len('{"key": ""}'))}
    send_message(ends[1], longest)
    assert receive_message(ends[0]) == (longest, [])
    with pytest.raises(ProtocolError, match="a set-up message of 4097 bytes; the limit is 4096"):
        send_message(ends[1], {"key": longest["key"] + "x"})
    body = b"{" if ends[0].type == socket.SOCK_STREAM else b"{" * 4097
    ends[1].sendall(struct.pack("<H", 4097) + body)
    with pytest.raises(ProtocolError, match=r"it announces 4097 bytes|it is too long"):
        receive_message(ends[0])


def test_a_packet_has_the_length_that_it_announces(ends: Ends) -> None:
    for body in (b"{} ", b"{"):
        ends[1].send(struct.pack("<H", 2) + body)
        with pytest.raises(ProtocolError, match=f"{len(body)} bytes where 2 were announced"):
            receive_message(ends[0])


def test_what_a_peer_said_last_is_found_behind_its_messages(ends: Ends) -> None:
    with open("/dev/null") as file:
        for _ in range(7):
            send_message(ends[1], {}, [file.fileno()])
        ends[1].send(b"\x04\x00\x03\x01why")
        before = num_open()
        text = "rank 0: the set-up of the links with rank 1 ended: why$"
        with pytest.raises(SetupError, match=text), messages.joining(0, 1, ends[0]):
            raise ConnectionError
        assert num_open() == before, "descriptors of unread messages stay open"


@pytest.mark.parametrize("ends", [socket.SOCK_STREAM], indirect=True)
def test_a_peer_that_gives_up_is_quoted_while_its_connection_stays_open(ends: Ends) -> None:
    """Over tcp, where a note has no end but its length."""
    ends[1].send(b"\x04\x00\x03\x01why" + b"\x02\x00{}")
    with pytest.raises(PeerEnded, match=r"^why$"):
        receive_message(ends[0])
    assert receive_message(ends[0]) == ({}, [])


def test_a_message_waits_where_it_is_here_in_full(ends: Ends) -> None:
    with connected(socket.SOCK_STREAM) as stream:
        for ours, theirs in (ends, stream):
            ours.setblocking(False)
            for part in (b"\2", b"\0{", b"}") if ours is stream[0] else (b"\2\0{}",):
                assert not message_waits(ours)
                theirs.send(part)
            assert message_waits(ours) and receive_message(ours) == ({}, [])
            assert not message_waits(ours)
            theirs.shutdown(socket.SHUT_RDWR)
            assert message_waits(ours)


# Descriptors --------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(("count", "room"), [(1, 0), (2, 0), (2, 1)])
def test_a_process_without_room_for_descriptors_says_so(count: int, room: int, ends: Ends) -> None:
    link, before = link_of(0, ends[0]), num_open()
    send_message(ends[1], {}, [0] * count)
    with room_for(room), pytest.raises(SetupError) as caught:
        link.receive(count)
    assert "rank 0: the set-up of the links with rank 1 ended" in str(caught.value)
    assert f"had room for {room} more (ulimit -n)" in str(caught.value)
    assert num_open() == before


@pytest.mark.parametrize(
    ("sent", "most", "text"),
    [
        *((sent, most, f"rank 1 sent .* more than {most} descriptors")
          for sent, most in ((1, 0), (2, 1), (3, 1), (3, 2), (5, 2))),
        *((sent, most, f"rank 0: rank 1 sent {sent} descriptors, expected {most}")
          for sent, most in ((0, 1), (1, 2))),
    ],
)  # fmt: skip
def test_descriptors_of_another_number_are_refused_and_closed(
    sent: int, most: int, text: str, ends: Ends
) -> None:
    before = num_open()
    send_message(ends[1], {}, [0] * sent)
    with pytest.raises(ProtocolError, match=text):
        link_of(0, ends[0]).receive(most)
    assert num_open() == before


def test_no_program_that_this_process_starts_inherits_what_a_peer_sent(ends: Ends) -> None:
    """Such a program would keep the memory and the bells of ranks that have ended."""
    os.set_inheritable(ends[1].fileno(), True)
    send_message(ends[1], {}, [ends[1].fileno()] * 2)
    _, fds = link_of(0, ends[0]).receive(2)
    assert [os.get_inheritable(fd) for fd in fds] == [False, False]
    for fd in fds:
        os.close(fd)


def test_a_link_between_gpus_may_have_no_channels(ends: Ends) -> None:
    link = PeerLink(rank=0, peer=1, sock=ends[0], incoming=[], outgoing=[])
    cuda = SimpleNamespace(
        ahead_fault=lambda peer: "", write_pattern=lambda *_: None, pattern_fault=lambda *_: ""
    )
    extension = SimpleNamespace(CudaLinks=lambda *_: cuda)
    setup: Any = SimpleNamespace(
        extension=extension, native=None, gpu=0, options=TransportOptions()
    )
    before = num_open()
    for message in ({}, {}, {"seed": 1, "unwritten": ""}, {"fault": ""}):
        send_message(ends[1], message)
    assert cuda_ipc.join(setup, [link]) == {}
    assert num_open() == before


# Patterns -----------------------------------------------------------------------------------------


def faults_of(
    wrong: dict[int, str], unwritten: dict[int, str] | None = None
) -> tuple[dict[int, Any], list[int]]:
    """The faults that both ranks find, and the ranks that waited for what they had begun to write.

    Args:
        wrong: by rank, the difference that it finds.
        unwritten: by rank, the error that its write meets.
    """
    written: dict[int, int] = {}
    waited: list[int] = []

    def write(link: PeerLink, seed: int) -> None:
        written[link.rank] = seed
        if error := (unwritten or {}).get(link.rank):
            raise SetupError(error)

    def fault_of(link: PeerLink, seed: int) -> str:
        return wrong.get(link.rank, "") if seed == written[link.peer] else "another seed"

    with connected(socket.SOCK_STREAM) as ends:
        found = both(
            lambda rank: link_faults(
                [link_of(rank, ends[rank])], write, fault_of, lambda link: waited.append(link.rank)
            )
        )
    return found, sorted(waited)


@pytest.mark.parametrize(
    ("wrong", "unwritten", "fault", "waits"),
    [
        ({}, {}, "", [0, 1]),
        ({0: "zeros"}, {}, "rank 0: zeros", [0, 1]),
        ({1: "zeros"}, {}, "rank 1: zeros", [0, 1]),
        ({0: "zeros", 1: "ones"}, {}, "rank 0: zeros", [0, 1]),
        ({}, {1: "the card\nsays no"}, "rank 1: the card says no", [0]),
        ({0: "\u00e9" * 5000}, {}, "rank 0: " + "\u00e9" * 292, [0, 1]),
    ],
)
def test_both_ends_say_the_same_of_a_link_that_does_not_deliver(
    wrong: dict[int, str], unwritten: dict[int, str], fault: str, waits: list[int]
) -> None:
    """If both fail, it is what the lower rank says; what was not begun is not waited for."""
    expected = {rank: {1 - rank: fault} if fault else {} for rank in range(2)}
    assert faults_of(wrong, unwritten) == (expected, waits)

"""Bytes on tcp connections that no transport of ours would send, and kernels short of something."""

from __future__ import annotations

import ctypes
import dataclasses
import fcntl
import os
import platform
import re
import signal
import socket
import struct
import sys
import termios
import threading
import time
from collections.abc import Callable

import pytest

from megatron.dpp.errors import PeerDead, ProtocolError
from megatron.dpp.transport.native import load_native
from tests.transport import raw
from tests.transport.raw import Rank, Segment
from tests.transport.test_hostile_wire import sealed

MICROBATCH = 24
"""The place of a message's microbatch in its header."""
STRIPED = 8 << 20
"""Bytes from which a message has a part on each connection."""


@pytest.fixture(scope="module")
def parts() -> list[Segment]:
    """The two parts of a striped message, as a sender puts them on its connections."""
    payload = (ctypes.c_ubyte * STRIPED)(*range(200))
    with raw.alone(load_native(), 0, [raw.channel(0, STRIPED)]) as sender:
        sender.put(0, payload)
        return [raw.read_segment(sock) for sock in sender.data]


def moved(part: Segment, offset: int, length: int) -> Segment:
    return dataclasses.replace(part, offset=part.offset + offset, length=part.length + length)


FORGED: dict[str, tuple[int, Callable[[list[Segment]], Segment]]] = {
    "the same part twice": (0, lambda parts: parts[0]),
    "the part of another connection": (1, lambda parts: parts[0]),
    "an overlapping part": (1, lambda parts: moved(parts[1], -4096, 4096)),
    "a part beyond the end": (1, lambda parts: moved(parts[1], 4096, 0)),
    "a part of no bytes": (1, lambda parts: moved(parts[1], 0, -parts[1].length)),
}


@pytest.mark.parametrize("forged", FORGED)
def test_segments_that_overlap_complete_no_message(forged: str, parts: list[Segment]) -> None:
    connection, make = FORGED[forged]
    with raw.alone(load_native(), 1, [raw.channel(0, STRIPED)]) as receiver:
        receiver.data[0].sendall(parts[0].frame() + parts[0].payload)
        receiver.data[connection].sendall(make(parts).frame())
        error = raw.until_error(receiver, receives=True)
    assert type(error) is ProtocolError
    assert "which carries" in str(error) and "rank 0 (pid 1 on test, tcp) sent" in str(error)


def test_the_parts_of_a_message_have_one_header(parts: list[Segment]) -> None:
    front = bytearray(parts[1].front)
    front[MICROBATCH] ^= 1
    other = dataclasses.replace(parts[1], front=sealed(bytes(front)))
    with raw.alone(load_native(), 1, [raw.channel(0, STRIPED)]) as receiver:
        receiver.data[0].sendall(parts[0].frame() + parts[0].payload)
        receiver.data[1].sendall(other.frame())
        error = raw.until_error(receiver, receives=True)
    assert type(error) is ProtocolError and "sent two headers for one message" in str(error)


def test_the_parts_as_they_were_sent_are_a_message(parts: list[Segment]) -> None:
    with raw.alone(load_native(), 1, [raw.channel(0, STRIPED)]) as receiver:
        for sock, part in zip(receiver.data, parts, strict=True):
            sock.sendall(part.frame() + part.payload)
        receiver.until_arrived()
        assert receiver.take(0) == b"".join(part.payload for part in parts)


def until_it_waits_for(sock: socket.socket, count: int) -> None:
    """Returns once a receiver's socket waits for ``count`` bytes more than lie in it."""
    deadline = time.monotonic() + raw.PATIENCE
    while True:
        unread = int.from_bytes(fcntl.ioctl(sock, termios.FIONREAD, bytes(4)), sys.byteorder)
        if sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) == unread + count:
            return
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.skipif(
    tuple(map(int, re.findall(r"\d+", platform.release())[:2])) < (5, 7),
    reason="before Linux 5.7 each packet wakes the receiver",
)
@pytest.mark.parametrize("kibibytes", [(128, 128), (768, 192), (4096, 256)])
def test_a_receiver_waits_for_many_bytes_and_for_no_more_than_come(
    monkeypatch: pytest.MonkeyPatch, kibibytes: tuple[int, int]
) -> None:
    size, wakes_at = (number << 10 for number in kibibytes)
    payloads = [(ctypes.c_ubyte * size)(*range(60)) for size in (size, 64)]
    channels = [raw.channel(chunk, len(payload)) for chunk, payload in enumerate(payloads)]
    with raw.alone(load_native(), 0, channels, connections=1) as sender:
        for index, payload in enumerate(payloads):
            sender.put(index, payload)
        large, small = (raw.read_segment(sender.data[0]) for _ in payloads)
    ends = raw.tcp_pair()
    monkeypatch.setattr(raw, "tcp_pair", lambda: ends)
    with ends[0].dup() as ours, raw.alone(load_native(), 1, channels, connections=1) as receiver:
        data = receiver.data[0]
        data.sendall(large.frame())
        until_it_waits_for(ours, wakes_at)
        data.sendall(large.payload[:-10])
        until_it_waits_for(ours, 10)
        data.sendall(large.payload[-10:])
        until_it_waits_for(ours, 1)
        data.sendall(small.frame() + small.payload)
        receiver.until_arrived(2)
        assert receiver.take(0) == large.payload
        assert receiver.take(1) == small.payload


def say_goodbye(receiver: Rank) -> None:
    receiver.control.sendall(raw.note(raw.BYE, struct.pack("<Q", 1)))


def end_connections(receiver: Rank) -> None:
    for sock in receiver.data:
        sock.close()


@pytest.mark.parametrize("order", [(say_goodbye, end_connections), (end_connections, say_goodbye)])
def test_a_message_that_is_lost_behind_a_goodbye_is_a_failure(
    order: tuple[Callable[[Rank], None], ...], parts: list[Segment]
) -> None:
    with raw.alone(load_native(), 1, [raw.channel(0, STRIPED)]) as receiver:
        receiver.data[0].sendall(parts[0].frame() + parts[0].payload)  # the other part never comes
        for step in order:
            step(receiver)
        error = raw.until_error(receiver, receives=True)
    assert type(error) is PeerDead
    assert "closed its transport, and 1 messages that it had sent were lost" in str(error)


def test_a_peer_has_not_left_before_what_it_sent_is_here(parts: list[Segment]) -> None:
    with raw.alone(load_native(), 1, [raw.channel(0, STRIPED)]) as receiver:
        say_goodbye(receiver)  # overtakes the message
        time.sleep(0.3)
        assert not receiver.native.departed(0)
        for sock, part in zip(receiver.data, parts, strict=True):
            sock.sendall(part.frame() + part.payload)
        receiver.until_arrived()
        assert receiver.native.departed(0)


def test_an_interrupted_wait_does_not_hide_the_end_of_a_connection() -> None:
    def threads() -> set[int]:
        return {int(thread) for thread in os.listdir("/proc/self/task")}

    before, heard = threads(), list[int]()
    old = signal.signal(signal.SIGUSR1, lambda number, _: heard.append(number))
    try:
        with raw.alone(load_native(), 1, [raw.channel(0, 64)]) as receiver:
            for thread in threads() - before:
                assert ctypes.CDLL(None).tgkill(os.getpid(), thread, signal.SIGUSR1) == 0
            deadline = time.monotonic() + raw.PATIENCE
            while not heard:  # this thread hears of it between two naps
                assert time.monotonic() < deadline
                time.sleep(0.01)
            end_connections(receiver)
            error = raw.until_error(receiver, receives=True)
    finally:
        signal.signal(signal.SIGUSR1, old)
    assert type(error) is PeerDead
    assert "a data connection was closed, and there was no goodbye" in str(error)


def test_a_close_does_not_wait_for_a_peer_that_reads_nothing() -> None:
    large = (ctypes.c_ubyte * (32 << 20))()
    with raw.alone(load_native(), 0, [raw.channel(0, 32 << 20)]) as sender:
        assert sender.put(0, large)
        closing = threading.Thread(target=sender.native.close)
        closing.start()
        closing.join(raw.PATIENCE)
        assert not closing.is_alive()

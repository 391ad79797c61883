"""A peer of the job that sends what no transport of ours would send: mutated frames and notes.

``csrc/tests/hostile.cc`` does the same in volume, and in shared memory, under sanitizers.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import os
import random
import select
import socket
import struct
import subprocess
import termios
import time
from collections.abc import Iterator

import pytest

from megatron.dpp.errors import ProtocolError, TransportError
from megatron.dpp.transport.native import load_native
from tests.transport import raw
from tests.transport.hostile import mutated_bytes
from tests.transport.meeting import census
from tests.transport.raw import Rank, Segment

SUMMED, SUM_AT = 140, struct.Struct("<I")
"""Bytes of a header that its checksum covers, which follows them."""
FIELDS = ((4, "<H"), (6, "<B"), (7, "<B"), (8, "<i"), (12, "<i"), (24, "<q"), (32, "<I"),
          (36, "<I"), (40, "<Q"), (48, "<Q"), (64, "<Q"), (72, "<Q"), (120, "<Q"),
          (128, "<I"))  # fmt: skip
PLACES = ((192, "<I"), (200, "<Q"), (208, "<Q"))
SLOT = 4096


def _table() -> Iterator[int]:
    for value in range(256):
        for _ in range(8):
            value = (value >> 1) ^ (0x82F63B78 if value & 1 else 0)
        yield value


TABLE = tuple(_table())


def sealed(frame: bytes) -> bytes:
    """A frame with the right checksum of its header."""
    crc = 0xFFFFFFFF
    for byte in frame[:SUMMED]:
        crc = (crc >> 8) ^ TABLE[(crc ^ byte) & 0xFF]
    return frame[:SUMMED] + SUM_AT.pack(crc ^ 0xFFFFFFFF) + frame[SUMMED + 4 :]


@pytest.fixture(scope="module")
def segments() -> list[Segment]:
    """The first messages of a channel, as a sender puts them on its connection."""
    with raw.alone(load_native(), 0, [raw.channel(0, SLOT, 4)], connections=1) as sender:
        for size in (0, 1, 64, SLOT):
            sender.put(0, (ctypes.c_ubyte * size)(*range(min(size, 200))))
        return [raw.read_segment(sender.data[0]) for _ in range(4)]


def test_a_checksum_is_that_of_the_sender(segments: list[Segment]) -> None:
    for segment in segments:
        assert sealed(segment.frame()) == segment.frame()


def odd(rng: random.Random, form: str) -> bytes:
    bits = 8 * struct.calcsize(form)
    value = rng.choice((rng.randrange(9), (1 << rng.randrange(bits)) - rng.randrange(2),
                        (1 << bits) - 1 - rng.randrange(9), rng.getrandbits(bits)))  # fmt: skip
    return (value % (1 << bits)).to_bytes(bits // 8, "little")


def mutated(rng: random.Random, segment: Segment) -> bytes:
    """A segment with wrong fields behind a right checksum, or with other bytes."""
    frame, payload = bytearray(segment.frame()), segment.payload
    way = rng.randrange(4)
    if way == 0:
        return mutated_bytes(rng, bytes(frame) + payload)
    for at, form in rng.sample(FIELDS if way == 1 else PLACES, rng.randrange(1, 4)):
        frame[at : at + struct.calcsize(form)] = odd(rng, form)
    if way == 3:
        payload = mutated_bytes(rng, payload)
    return sealed(bytes(frame)) + payload


def any_note(rng: random.Random) -> bytes:
    """A note of a known or unknown kind with a likely or unlikely body."""
    if rng.random() < 0.3:
        return raw.credit(rng.randrange(3), rng.randrange(4))
    if rng.random() < 0.2:
        return rng.randbytes(rng.randrange(1, 40))
    body = rng.randbytes(rng.choice((0, 1, 8, 16, 32, 1024, 1025)))
    return mutated_bytes(rng, raw.note(rng.randrange(9), body))


def settle(rank: Rank) -> None:
    """Returns once a transport has read what was sent to it, or has failed."""
    deadline = time.monotonic() + raw.PATIENCE
    for sock in (rank.control, *rank.data):
        if sock.family != socket.AF_UNIX:
            continue
        unread = functools.partial(fcntl.ioctl, sock, termios.TIOCOUTQ, bytes(4))
        while not rank.native.failure() and unread() != bytes(4):
            assert time.monotonic() < deadline, "it reads no more"
            time.sleep(0.0001)


def take_all(rank: Rank) -> None:
    rank.native.poll(1)
    while True:
        try:
            assert len(rank.take(0)) <= SLOT
        except IndexError:
            return


def attack(rng: random.Random, segments: list[Segment]) -> int:
    """Several inputs to one transport; returns how many it took."""
    receives = rng.random() < 0.7
    with raw.alone(load_native(), int(receives), [raw.channel(0, SLOT, 4)]) as rank:
        for count, segment in enumerate(segments):
            try:
                if not receives:
                    rank.put(0, (ctypes.c_ubyte * 64)())
                with_note = not receives or rng.random() < 0.2
                whole = segment.frame() + segment.payload
                said = any_note(rng) if with_note else mutated(rng, segment)
                to = rank.control if with_note else rng.choice(rank.data)
                if not with_note and rng.random() < 0.5:
                    to, said = rank.data[0], whole
                to.setblocking(False)
                try:
                    to.sendall(said)
                except OSError:
                    rank.native.check()
                settle(rank)
                if receives:
                    take_all(rank)
                rank.native.check()
            except TransportError as error:
                assert "rank" in str(error)
                return count
    return len(segments)


@pytest.mark.parametrize(
    ("count", "seed"), [(300, 1), pytest.param(8000, 2, marks=pytest.mark.slow)]
)
@pytest.mark.timeout(1800)
def test_frames_and_notes_of_a_hostile_peer_are_typed_failures(
    count: int, seed: int, segments: list[Segment], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(raw, "tcp_pair", lambda: socket.socketpair())
    before, refused = census(), 0
    for number in range(count):
        try:
            refused += attack(random.Random(f"{seed} {number}"), segments) < len(segments)
        except BaseException as error:
            raise AssertionError(f"seed {seed}, transport {number}") from error
    assert census() == before
    assert refused > count // 2


# What it found ------------------------------------------------------------------------------------


def test_credit_for_what_is_still_sent_frees_no_payload() -> None:
    """A payload is done when the kernel has it, whatever the receiver says."""
    large = (ctypes.c_ubyte * (32 << 20))()
    channel = raw.channel(0, ctypes.sizeof(large), 1)
    with raw.alone(load_native(), 0, [channel], connections=1) as sender:
        assert sender.put(0, large, 0)
        sender.control.sendall(raw.credit(0, 1))
        settle(sender)
        time.sleep(0.02)  # the note is read, and then the credit is given
        assert sender.put(0, large, 1)
        raw.read_segment(sender.data[0])
        deadline = time.monotonic() + raw.PATIENCE
        while sender.native.done(0) == 0:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        time.sleep(0.05)  # while the second one is on its way
        assert sender.native.done(0) == 1


SEQUENCE = 40
"""The place of a message's number in its header."""


def refusal_of(segment: Segment, *changes: tuple[int, str, int]) -> Exception:
    """The error of a receiver of four slots whose first message has changes of its header."""
    frame = bytearray(segment.frame())
    for at, form, value in changes:
        struct.pack_into(form, frame, at, value)
    with raw.alone(load_native(), 1, [raw.channel(0, SLOT, 4)]) as receiver:
        receiver.data[0].sendall(sealed(bytes(frame)) + segment.payload)
        error = raw.until_error(receiver)
    assert type(error) is ProtocolError
    return error


@pytest.mark.parametrize(
    ("at", "form", "value", "text"),
    [
        (6, "<B", len(load_native().dtype_names), "number of the dtype is"),
        (7, "<B", load_native().max_dims + 1, "number of dimensions is"),
        (8, "<i", 1, "it names chunk 1, direction 0"),
        (12, "<i", 1, "it names chunk 0, direction 1"),
        (32, "<I", 1, "part 1 of 1"),
        (36, "<I", 0, "part 0 of 0"),
        (48, "<Q", 65, "byte count is 65, expected 64"),
    ],
)
def test_a_header_that_is_just_beyond_what_it_may_say_is_refused(
    at: int, form: str, value: int, text: str, segments: list[Segment]
) -> None:
    error = refusal_of(segments[2], (SEQUENCE, "<Q", 1), (at, form, value))
    assert "a broken header on forward of chunk 0, rank 0 -> 1: " + text in str(error), error


@pytest.mark.parametrize("sequence", [0, 5])
def test_a_message_that_has_no_slot_is_refused(sequence: int, segments: list[Segment]) -> None:
    error = refusal_of(segments[2], (SEQUENCE, "<Q", sequence))
    assert f"message {sequence} without credit on forward of chunk 0" in str(error), error


def test_credit_does_not_shrink() -> None:
    with raw.alone(load_native(), 0, [raw.channel(0, SLOT, 2)]) as sender:
        for _ in range(2):
            sender.put(0, (ctypes.c_ubyte * 64)())
        sender.control.sendall(raw.credit(0, 2) + raw.credit(0, 1))
        error = raw.until_error(sender)
    assert type(error) is ProtocolError and "credit that it had given before" in str(error)


def test_a_peer_says_goodbye_once() -> None:
    with raw.alone(load_native(), 1, [raw.channel(0, SLOT)]) as receiver:
        receiver.control.sendall(raw.note(raw.BYE, bytes(8)) + raw.note(raw.BYE, b"\1" + bytes(7)))
        error = raw.until_error(receiver)
    assert type(error) is ProtocolError and "a second goodbye" in str(error)


def test_a_goodbye_behind_many_notes_is_no_death() -> None:
    """A rank that was stopped reads what its peer said before it ended to the last note."""
    native = load_native().Transport(
        rank=1, incoming=[], outgoing=[], timeout=raw.PATIENCE, checksum=False, max_pending=2,
        spin=False,
    )  # fmt: skip
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs, subprocess.Popen(["true"]) as peer:
        pidfd = os.pidfd_open(peer.pid)  # not reaped before it has ended
        for _ in range(200):
            theirs.sendall(raw.credit(0, 0))
        theirs.sendall(raw.note(raw.BYE, bytes(8)))
        native.add_peer(0, "rank 0 (pid 1 on test, shm)", ours.detach(), pidfd, -1)
        assert select.select([pidfd], [], [], raw.PATIENCE)[0]
        native.start()
        deadline = time.monotonic() + 0.3
        while time.monotonic() < deadline:
            native.poll(0)
            native.wait(0.05)
        native.close()

"""C++ transports whose connections a test makes, so that it can write and read what they carry.

Nothing here needs PyTorch: a process of its own is there in a moment.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import resource
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.dpp.errors import TransportError

FRAME_BYTES = 256
"""In front of each segment: the message's header, the channel, offset and length, padding."""
_PLACE_AT = 200
_PLACE = struct.Struct("<QQ")
_NOTE = struct.Struct("<HB")
CREDIT, BYE = 1, 2
PATIENCE = 30.0


def load(path: str) -> Any:
    """The extension module from a file, without the package around it."""
    specification = importlib.util.spec_from_file_location("_native", path)
    assert specification is not None and specification.loader is not None
    native = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(native)
    return native


def channel(chunk: int, slot_bytes: int, depth: int = 2) -> tuple[int, ...]:
    """A forward channel from rank 0 to rank 1."""
    return (0, 1, chunk, 0, slot_bytes, depth)


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    """Two connected TCP sockets."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    return one, other


def note(kind: int, body: bytes) -> bytes:
    """A note as it travels on a control connection."""
    return _NOTE.pack(len(body), kind) + body


def credit(number: int, released: int) -> bytes:
    """The receiver's note that messages of a channel were taken."""
    return note(CREDIT, struct.pack("<IIQ", number, 0, released))


def resident() -> int:
    """Bytes of this process that are in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


@dataclass
class Rank:
    """One transport, and the other ends of its connections."""

    native: Any
    control: socket.socket
    data: list[socket.socket]

    def put(self, index: int, payload: Any, microbatch: int = 0) -> bool:
        """Send a ctypes array as bytes; True while it is pending."""
        size, address = ctypes.sizeof(payload), ctypes.addressof(payload)
        pending: bool = self.native.put(
            index, address, size, UINT8, (size,), 0, microbatch, 0, 1, 0
        )
        return pending

    def until_arrived(self, count: int = 1) -> None:
        """Wait for a message on each channel."""
        while sum(self.native.poll(count)) != count:
            assert self.native.wait(PATIENCE)

    def take(self, index: int) -> bytes:
        """The payload of the message at the head."""
        size = self.native.head(index)[3]
        payload = (ctypes.c_ubyte * size)()
        self.native.take(index, ctypes.addressof(payload), size, 0)
        return bytes(payload)


UINT8 = 0  # set by start(): the code depends on the build


def start(
    library: Any, rank: int, channels: Sequence[tuple[int, ...]], ends: list[socket.socket],
    **changes: Any,
) -> Any:  # fmt: skip
    """A started transport of rank 0 or 1 over a control connection and data connections, which it
    owns from here on.
    """
    global UINT8
    UINT8 = library.dtype_names.index("uint8")
    sides: list[Sequence[Any]] = [[], channels] if rank == 0 else [channels, []]
    settings = {"timeout": PATIENCE, "checksum": False, "max_pending": 16, "spin": False, **changes}
    native = library.Transport(rank=rank, incoming=sides[0], outgoing=sides[1], **settings)
    control, *data = ends
    peer = 1 - rank
    native.add_peer(peer, f"rank {peer} (pid 1 on test, tcp)", control.detach(), -1, -1)
    places = [list(range(len(side))) for side in sides]
    native.add_tcp_link(peer, *places, [sock.detach() for sock in data])
    native.start()
    return native


@contextlib.contextmanager
def alone(
    library: Any, rank: int, channels: Sequence[tuple[int, ...]], connections: int = 2
) -> Iterator[Rank]:
    """A transport whose peer is the test."""
    control = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    data = [tcp_pair() for _ in range(connections)]
    native = start(library, rank, channels, [control[0], *(ours for ours, _ in data)])
    made = Rank(native, control[1], [theirs for _, theirs in data])
    for sock in (made.control, *made.data):
        sock.settimeout(PATIENCE)
    try:
        yield made
    finally:
        native.close()
        for sock in (made.control, *made.data):
            sock.close()


def until_error(rank: Rank, *, receives: bool = False) -> Exception:
    """The failure of a transport; nothing arrives at one that receives."""
    deadline = time.monotonic() + PATIENCE
    try:
        while time.monotonic() < deadline:
            assert not receives or rank.native.poll(1) == [0]
            rank.native.check()
            rank.native.wait(0.1)
    except TransportError as error:
        return error
    raise AssertionError("no failure was noticed")


def receive(sock: socket.socket, count: int) -> bytes:
    """Exactly so many bytes."""
    parts = bytearray()
    while len(parts) < count:
        piece = sock.recv(count - len(parts))
        assert piece, f"the connection ended after {len(parts)} of {count} bytes"
        parts += piece
    return bytes(parts)


@dataclass
class Segment:
    """A part of a message: its frame without the place, its place, and its bytes."""

    front: bytes
    offset: int
    length: int
    payload: bytes

    def frame(self) -> bytes:
        """The frame as it travels."""
        return (self.front + _PLACE.pack(self.offset, self.length)).ljust(FRAME_BYTES, b"\0")


def read_segment(sock: socket.socket) -> Segment:
    """The next segment of a connection."""
    frame = receive(sock, FRAME_BYTES)
    offset, length = _PLACE.unpack_from(frame, _PLACE_AT)
    return Segment(frame[:_PLACE_AT], offset, length, receive(sock, length))

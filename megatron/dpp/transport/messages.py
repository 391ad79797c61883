"""The messages of a set-up: JSON objects of at most ``MAX_MESSAGE`` bytes, with descriptors over
unix sockets. Anybody may have sent what is received."""

from __future__ import annotations

import array
import contextlib
import json
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, TypeVar

from megatron.dpp.errors import ProtocolError, SetupError

_Read = TypeVar("_Read")

MAX_MESSAGE = 4096
LENGTH = struct.Struct("<H")
_MOST_UNREAD = 8
"""Limit on the messages that a peer has sent before it gave up; no set-up sends more."""

_FAILED = 3
_NOTES = (1, 2, _FAILED)
"""Notes that C++ sends on the same connections (``Peer::Note``), as a message's first byte."""
_SAYS_WHY = "its own message says why"


class PeerEnded(ProtocolError):
    """The connection ended, or the peer gave up or stayed silent, in the place of a message."""


@contextlib.contextmanager
def joining(rank: int, peer: int, sock: socket.socket) -> Iterator[None]:
    """Name both ranks in the errors of a link's set-up.

    Raises:
        SetupError: the peer failed; with its own error, if it has sent it. Or this process has no
            room for descriptors.
        ProtocolError: it sent an invalid message.
    """
    try:
        yield
    except (PeerEnded, OSError, SetupError) as error:
        # Where sending failed, what the peer said before it ended is still to be read.
        why = _last_words(sock) if isinstance(error, ConnectionError) else str(error)
        raise SetupError(
            f"rank {rank}: the set-up of the links with rank {peer} ended: {why}"
        ) from error
    except ProtocolError as error:
        raise ProtocolError(f"rank {rank}: rank {peer} sent {error}") from error


def send_message(sock: socket.socket, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
    """Send one set-up message, over a unix socket with descriptors."""
    body = json.dumps(message).encode()
    if len(body) > MAX_MESSAGE:
        raise ProtocolError(f"a set-up message of {len(body)} bytes; the limit is {MAX_MESSAGE}")
    frame = LENGTH.pack(len(body)) + body
    if fds:
        socket.send_fds(sock, [frame], list(fds))
    else:
        sock.sendall(frame)


def receive_message(
    sock: socket.socket, max_fds: int = 0, until: float | None = None
) -> tuple[dict[str, Any], list[int]]:
    """Receive one set-up message and its descriptors.

    Args:
        until: the time (``time.monotonic``) by which the whole message must be here; None applies
            the socket's timeout to each read.

    Raises:
        PeerEnded: the other side ended the connection or gave up.
        ProtocolError: the message is invalid.
        SetupError: this process has no room for its descriptors.
    """
    fds: list[int] = []
    try:
        if sock.type == socket.SOCK_SEQPACKET:
            body = _receive_packet(sock, fds, max_fds, until)
        else:
            body = _receive_stream(sock, until)
        return read_object(body), fds
    except BaseException as error:
        for fd in fds:
            os.close(fd)
        if isinstance(error, TimeoutError):
            raise PeerEnded(
                "no answer in time" if until else f"no answer after {sock.gettimeout():g} s"
            ) from error
        if isinstance(error, OSError):
            raise PeerEnded(f"{error}; {_SAYS_WHY}") from error
        if isinstance(error, (ValueError, struct.error, RecursionError)):
            raise ProtocolError(f"a broken set-up message: {error}") from error
        raise


def read_object(text: bytes | str) -> dict[str, Any]:
    """A JSON object of texts that can be encoded.

    Raises:
        ValueError, RecursionError: it is something else.
    """
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError("not an object")
    json.dumps(value, ensure_ascii=False).encode()  # JSON can name half a surrogate pair
    return value


def _receive_packet(
    sock: socket.socket, fds: list[int], max_fds: int, until: float | None
) -> bytes:
    """The body of a message of a unix socket; its descriptors are added to ``fds``."""
    size = array.array("i").itemsize
    room = (LENGTH.size + MAX_MESSAGE, socket.CMSG_SPACE(max_fds * size))
    packet, control, flags, _ = _read(
        sock, until, lambda: sock.recvmsg(*room, socket.MSG_CMSG_CLOEXEC)
    )
    for level, kind, data in control:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.extend(array.array("i", data[: len(data) - len(data) % size]))
    if flags & socket.MSG_TRUNC:
        raise ValueError("it is too long")
    # The space for them is rounded up: one more than asked for may have come.
    if len(fds) > max_fds or (flags & socket.MSG_CTRUNC and len(fds) == max_fds):
        raise ValueError(f"it has more than {max_fds} descriptors")
    if flags & socket.MSG_CTRUNC:
        raise SetupError(
            f"{max_fds} descriptors may come with a set-up message, and this process had room "
            f"for {len(fds)} more (ulimit -n)"
        )
    if not packet:
        raise PeerEnded(f"its connection was closed; {_SAYS_WHY}")
    (length,) = LENGTH.unpack_from(packet)
    body = packet[LENGTH.size :]
    if body and body[0] in _NOTES:
        _take_leave(body[0], body[1:])
    if len(body) != length:
        raise ValueError(f"{len(body)} bytes where {length} were announced")
    return body


def _receive_stream(sock: socket.socket, until: float | None) -> bytes:
    """The body of a message of a TCP connection."""
    (length,) = LENGTH.unpack(_receive_exactly(sock, LENGTH.size, until))
    if length > MAX_MESSAGE:
        raise ValueError(f"it announces {length} bytes")
    first = _receive_exactly(sock, 1, until)
    if first[0] in _NOTES:
        _take_leave(first[0], _receive_exactly(sock, length, until))
    return first + _receive_exactly(sock, length - 1, until)


def _last_words(sock: socket.socket) -> str:
    for _ in range(_MOST_UNREAD):
        try:
            _, fds = receive_message(sock, 2)
        except PeerEnded as error:
            return str(error)
        except ProtocolError:
            continue
        for fd in fds:
            os.close(fd)
    return "its connection was closed"


def _take_leave(note: int, body: bytes) -> NoReturn:
    """Raise ``PeerEnded`` for a note of a peer that gives up, or closes, during the set-up."""
    if note == _FAILED and len(body) > 1:
        raise PeerEnded(body[1:].decode(errors="replace"))  # the first byte classes the fault
    raise PeerEnded(f"it has closed its transport; {_SAYS_WHY}")


def _read(sock: socket.socket, until: float | None, read: Callable[[], _Read]) -> _Read:
    """Read by ``until``, and again after a reset: Linux may report it before it delivers the peer's
    last message."""
    if until is not None:
        if (left := until - time.monotonic()) <= 0:
            raise TimeoutError
        sock.settimeout(left)
    try:
        return read()
    except ConnectionResetError:
        return read()


def _receive_exactly(sock: socket.socket, count: int, until: float | None) -> bytes:
    parts = b""
    while len(parts) < count:
        piece = _read(sock, until, lambda: sock.recv(count - len(parts)))  # noqa: B023 - called here
        if not piece:
            raise PeerEnded(f"its connection was closed; {_SAYS_WHY}")
        parts += piece
    return parts

"""The messages of a set-up: JSON objects of at most ``MAX_MESSAGE`` bytes, with descriptors over
unix sockets. Anybody may have sent what is received."""

from __future__ import annotations

import array
import contextlib
import json
import os
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, TypeVar, get_origin, get_type_hints

from megatron.dpp.errors import ProtocolError, SetupError

_Read = TypeVar("_Read")
_Kind = TypeVar("_Kind")

MAX_MESSAGE = 4096
LENGTH = struct.Struct("<H")
_MOST_UNREAD = 8
"""Limit on the messages that a peer has sent before it gave up; no set-up sends more."""

_LONGEST_FAULT = 300
"""Characters, each of which may take 12 bytes."""

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


def fitting(fault: object) -> str:
    """The beginning of a fault, as one line that a set-up message has room for."""
    text = str(fault).encode(errors="replace").decode()  # no half surrogate pairs
    return " ".join(text.split())[:_LONGEST_FAULT]


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


def receive_message(sock: socket.socket, max_fds: int = 0) -> tuple[dict[str, Any], list[int]]:
    """Receive one set-up message and its descriptors; each read may take the socket's timeout.

    Raises:
        PeerEnded: the other side ended the connection or gave up.
        ProtocolError: the message is invalid.
        SetupError: this process has no room for its descriptors.
    """
    fds: list[int] = []
    try:
        if sock.type == socket.SOCK_SEQPACKET:
            body = _receive_packet(sock, fds, max_fds)
        else:
            body = _receive_stream(sock)
        return read_object(body), fds
    except BaseException as error:
        for fd in fds:
            os.close(fd)
        if isinstance(error, TimeoutError):
            raise PeerEnded(f"no answer after {sock.gettimeout():g} s") from error
        if isinstance(error, OSError):
            raise PeerEnded(f"{error}; {_SAYS_WHY}") from error
        if isinstance(error, (ValueError, struct.error, RecursionError)):
            raise ProtocolError(f"a broken set-up message: {error}") from error
        raise


def message_waits(sock: socket.socket) -> bool:
    """True where a whole message, or the end, waits at a connection that does not block."""
    try:
        head = sock.recv(LENGTH.size + MAX_MESSAGE, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    if sock.type == socket.SOCK_SEQPACKET or not head:
        return True
    return len(head) >= LENGTH.size and len(head) >= LENGTH.size + LENGTH.unpack_from(head)[0]


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


def read_fields(kind: type[_Kind], fields: Any) -> _Kind:
    """A dataclass of a JSON object's fields, each of the type that it is declared with.

    Raises:
        TypeError: a field is missing, unknown, or of another type.
    """
    made = kind(**fields)
    for name, declared in get_type_hints(kind).items():
        value = getattr(made, name)
        if type(value) is not (get_origin(declared) or declared):
            raise TypeError(f"{name} is {str(value)[:80]!r}")
    return made


def _receive_packet(sock: socket.socket, fds: list[int], max_fds: int) -> bytes:
    """The body of a message of a unix socket; its descriptors are added to ``fds``."""
    size = array.array("i").itemsize
    room = (LENGTH.size + MAX_MESSAGE, socket.CMSG_SPACE(max_fds * size))
    packet, control, flags, _ = _read(lambda: sock.recvmsg(*room, socket.MSG_CMSG_CLOEXEC))
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


def _receive_stream(sock: socket.socket) -> bytes:
    """The body of a message of a TCP connection."""
    (length,) = LENGTH.unpack(_receive_exactly(sock, LENGTH.size))
    if length > MAX_MESSAGE:
        raise ValueError(f"it announces {length} bytes")
    first = _receive_exactly(sock, 1)
    if first[0] in _NOTES:
        _take_leave(first[0], _receive_exactly(sock, length))
    return first + _receive_exactly(sock, length - 1)


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


def _read(read: Callable[[], _Read]) -> _Read:
    """Read, and again after a reset: Linux may report it before it delivers the peer's last
    message."""
    try:
        return read()
    except ConnectionResetError:
        return read()


def _receive_exactly(sock: socket.socket, count: int) -> bytes:
    parts = b""
    while len(parts) < count:
        piece = _read(lambda: sock.recv(count - len(parts)))  # noqa: B023 - called here
        if not piece:
            raise PeerEnded(f"its connection was closed; {_SAYS_WHY}")
        parts += piece
    return parts

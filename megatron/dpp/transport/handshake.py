"""Mutual authentication over a fresh connection, and the messages of a set-up.

Both sides know a random token of the job. Each sends a nonce and proves its knowledge with an
HMAC-SHA256 over both nonces, both ranks and the purpose of the connection. The token never travels.
Until the proof is complete, a message has at most ``MAX_HELLO`` bytes, and the acceptor gives a
connection ``HELLO_SECONDS`` in all.

    connector                      acceptor
      hello {rank, nonce}    ->
                             <-    hello {rank, nonce, proof "acceptor"}
      {proof "connector"}    ->
                             <-    {welcome}
"""

from __future__ import annotations

import array
import contextlib
import functools
import hashlib
import hmac
import json
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, TypeVar

from megatron.dpp.errors import AuthError, ProtocolError, SetupError, setting

_Read = TypeVar("_Read")

MAX_HELLO = 4096
"""Bytes of the longest set-up message."""

HELLO_SECONDS = 5.0
"""Seconds in which a connection must prove itself."""

_AWAY = {"again": True}

_LENGTH = struct.Struct("<H")

_MOST_UNREAD = 8
"""Limit on the messages that a peer has sent before it gave up; no set-up sends more."""

_FAILED = 3
_NOTES = (1, 2, _FAILED)
"""Notes that C++ sends on the same connections (``Peer::Note``), as a message's first byte."""


class SentAway(AuthError):
    """The acceptor has ended the connection before it judged us; connect again."""


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
    except (PeerEnded, OSError) as error:
        # Where sending failed, what the peer said before it ended is still to be read.
        why = _last_words(sock) if isinstance(error, ConnectionError) else str(error)
        raise SetupError(
            f"rank {rank}: the set-up of the links with rank {peer} ended: {why}"
        ) from error
    except ProtocolError as error:
        raise ProtocolError(f"rank {rank}: rank {peer} sent {error}") from error
    except SetupError as error:
        raise SetupError(
            f"rank {rank}: the set-up of the links with rank {peer} ended: {error}"
        ) from error


def send_message(
    sock: socket.socket, message: dict[str, Any], fds: list[int] | None = None
) -> None:
    """Send one set-up message, over a unix socket with descriptors."""
    body = json.dumps(message).encode()
    if len(body) > MAX_HELLO:
        raise ProtocolError(f"a set-up message of {len(body)} bytes; the limit is {MAX_HELLO}")
    frame = _LENGTH.pack(len(body)) + body
    if fds:
        socket.send_fds(sock, [frame], fds)
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
        body = _receive_body(sock, fds, max_fds, until)
        message = read_object(body)
    except BaseException as error:
        for fd in fds:
            os.close(fd)
        if isinstance(error, TimeoutError):
            raise PeerEnded(
                "no answer in time" if until else f"no answer after {sock.gettimeout():g} s"
            ) from error
        if isinstance(error, OSError):
            raise PeerEnded(f"{error}; its own message says why") from error
        if isinstance(error, (ValueError, struct.error, RecursionError)):
            raise ProtocolError(f"a broken set-up message: {error}") from error
        raise
    return message, fds


def read_object(text: bytes | str) -> dict[str, Any]:
    """A JSON object of texts that can be encoded, from anybody.

    Raises:
        ValueError, RecursionError: it is something else.
    """
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError("not an object")
    json.dumps(value, ensure_ascii=False).encode()  # JSON can name half a surrogate pair
    return value


def _receive_body(sock: socket.socket, fds: list[int], max_fds: int, until: float | None) -> bytes:
    read = functools.partial(_receive_exactly, sock, until=until)
    if sock.type == socket.SOCK_SEQPACKET:
        size = array.array("i").itemsize
        room = (_LENGTH.size + MAX_HELLO, socket.CMSG_SPACE(max_fds * size))
        _limit(sock, until)
        packet, control, flags, _ = _despite_reset(
            lambda: sock.recvmsg(*room, socket.MSG_CMSG_CLOEXEC)
        )
        for level, kind, data in control:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                whole = len(data) - len(data) % size
                fds.extend(array.array("i", data[:whole]))
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
            raise PeerEnded("its connection was closed; its own message says why")
        (length,) = _LENGTH.unpack_from(packet)
        body = packet[_LENGTH.size :]
        if body and body[0] in _NOTES:
            _take_leave(body[0], body[1:])
    else:
        (length,) = _LENGTH.unpack(read(_LENGTH.size))
        if length > MAX_HELLO:
            raise ValueError(f"it announces {length} bytes")
        body = read(1)
        if body[0] in _NOTES:
            _take_leave(body[0], read(length))
        body += read(length - 1)
    if len(body) != length:
        raise ValueError(f"{len(body)} bytes where {length} were announced")
    return body


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
    raise PeerEnded("it has closed its transport; its own message says why")


def _despite_reset(read: Callable[[], _Read]) -> _Read:
    """Read again after a reset: Linux may report it before it delivers the peer's last message."""
    try:
        return read()
    except ConnectionResetError:
        return read()


def _limit(sock: socket.socket, until: float | None) -> None:
    """Let the next call on a socket end at ``until``."""
    if until is not None:
        if (left := until - time.monotonic()) <= 0:
            raise TimeoutError
        sock.settimeout(left)


def _receive_exactly(sock: socket.socket, count: int, *, until: float | None) -> bytes:
    parts = b""
    while len(parts) < count:
        _limit(sock, until)
        piece = _despite_reset(functools.partial(sock.recv, count - len(parts)))
        if not piece:
            raise PeerEnded("its connection was closed; its own message says why")
        parts += piece
    return parts


def connect_side(
    sock: socket.socket, token: bytes, rank: int, peer: int, purpose: str, seconds: float
) -> None:
    """Authenticate with the rank that accepts, within ``seconds``.

    Raises:
        AuthError: the other side does not know the token, is not ``peer``, or refuses us.
        SentAway: it has no place for us now, or has hung up.
    """
    try:
        _connect_side(sock, token, rank, peer, purpose, seconds)
    except ConnectionError as error:  # it hung up before we could send
        raise SentAway(f"rank {peer} ended the handshake: {error}", error) from error


def _connect_side(
    sock: socket.socket, token: bytes, rank: int, peer: int, purpose: str, seconds: float
) -> None:
    sock.settimeout(seconds)
    until = time.monotonic() + seconds
    nonce = secrets.token_hex(16)
    send_message(sock, {"rank": rank, "purpose": purpose, "nonce": nonce})
    answer = _receive_proof(sock, f"rank {peer}", until)
    transcript = _transcript(rank, peer, nonce, _text(answer, "nonce"), purpose)
    if answer.get("rank") != peer or not _proves(token, "acceptor", transcript, answer):
        token_file = setting("token_file")
        raise AuthError(
            f"rank {rank}: what listens as rank {peer} does not know this job's token (another "
            f"job, or a different {token_file})",
            token_file,
        )
    send_message(sock, {"proof": _proof(token, "connector", transcript)})
    if _receive_proof(sock, f"rank {peer}", until).get("welcome") is not True:
        raise AuthError(f"rank {rank}: rank {peer} did not let us in")


def accept_side(
    sock: socket.socket, token: bytes, rank: int, may_enter: Callable[[], bool] = lambda: True
) -> tuple[int, str]:
    """Authenticate a connection; returns its rank and its purpose.

    Args:
        may_enter: called once the connection has proven itself, before it is told so. False ends
            the handshake: somebody else has sent it away.

    Raises:
        AuthError: it does not know the token, or was sent away.
        ProtocolError: it sent an invalid message, or ended.
    """
    try:
        return _accept_side(sock, token, rank, may_enter)
    except OSError as error:
        raise PeerEnded(f"its connection ended: {error}") from error


def _accept_side(
    sock: socket.socket, token: bytes, rank: int, may_enter: Callable[[], bool]
) -> tuple[int, str]:
    until = time.monotonic() + HELLO_SECONDS
    hello, _ = receive_message(sock, until=until)
    peer = hello.get("rank")
    if type(peer) is not int:
        raise ProtocolError(f"a hello without a rank: {str(hello)[:200]}")
    nonce = secrets.token_hex(16)
    purpose = _text(hello, "purpose")
    transcript = _transcript(peer, rank, _text(hello, "nonce"), nonce, purpose)
    proof = _proof(token, "acceptor", transcript)
    send_message(sock, {"rank": rank, "nonce": nonce, "proof": proof})
    answer, _ = receive_message(sock, until=until)
    if not _proves(token, "connector", transcript, answer):
        raise AuthError(
            f"rank {rank}: a connection that claims to be rank {peer} has a wrong proof"
        )
    if not may_enter():
        raise SentAway(f"rank {rank}: the connection of rank {peer} was sent away")
    send_message(sock, {"welcome": True})
    return peer, purpose


def send_away(sock: socket.socket) -> None:
    """Ask the connector to come again, and end the connection. For another thread than the one
    that is in ``accept_side``, which fails.
    """
    body = json.dumps(_AWAY).encode()
    with contextlib.suppress(OSError):
        sock.send(_LENGTH.pack(len(body)) + body, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def _receive_proof(sock: socket.socket, who: str, until: float) -> dict[str, Any]:
    try:
        message, _ = receive_message(sock, until=until)
    except PeerEnded as error:
        raise SentAway(f"{who} ended the handshake: {error}", error) from error
    except ProtocolError as error:
        raise AuthError(f"{who} ended the handshake: {error}", error) from error
    if message == _AWAY:
        raise SentAway(f"{who} is busy with other connections")
    return message


def _text(message: dict[str, Any], key: str) -> str:
    value = message.get(key)
    if not isinstance(value, str) or len(value) > 256:
        raise ProtocolError(f"a set-up message without {key}")
    return value


def _transcript(connector: int, acceptor: int, first: str, second: str, purpose: str) -> bytes:
    return json.dumps([connector, acceptor, first, second, purpose]).encode()


def _proof(token: bytes, side: str, transcript: bytes) -> str:
    return hmac.new(token, side.encode() + b"\0" + transcript, hashlib.sha256).hexdigest()


def _proves(token: bytes, side: str, transcript: bytes, message: dict[str, Any]) -> bool:
    proof = message.get("proof")
    return (
        isinstance(proof, str)
        and proof.isascii()
        and hmac.compare_digest(proof.encode(), _proof(token, side, transcript).encode())
    )

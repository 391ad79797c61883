"""Mutual authentication over fresh connections, and who is let in.

Both sides know a random token of the job. Each sends a nonce and proves its knowledge with an
HMAC-SHA256 over both nonces, both ranks and the purpose of the connection. The token never travels.

    connector                      acceptor
      hello {rank, nonce}    ->
                             <-    hello {rank, nonce, proof "acceptor"}
      {proof "connector"}    ->
                             <-    {welcome}

Anybody who reaches a listener may connect. A stranger gets one of ``MOST_PROOFS`` places, for
``HELLO_SECONDS`` in all, and is never a reason to give up.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import json
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from megatron.dpp.errors import AuthError, ProtocolError, setting
from megatron.dpp.transport.messages import PeerEnded, receive_message, send_message

HELLO_SECONDS = 5.0
"""Seconds in which a connection must prove itself."""

MOST_PROOFS = 64
"""Limit on the connections of one listener that are proving themselves."""

_GRACE_SECONDS = 0.25
"""Age from which a connection loses its place to a new one while all places are taken."""

_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class SentAway(AuthError):
    """The acceptor has ended the connection before it judged us; connect again."""


def connect_side(
    sock: socket.socket, token: bytes, rank: int, peer: int, purpose: str, seconds: float
) -> None:
    """Authenticate with the rank that accepts, within ``seconds``.

    Raises:
        AuthError: the other side does not know the token, is not ``peer``, or refuses us.
        SentAway: it has no place for us now, or has hung up.
    """
    sock.settimeout(seconds)
    until = time.monotonic() + seconds
    nonce = secrets.token_hex(16)
    with _as_refusals(f"rank {peer}"):
        send_message(sock, {"rank": rank, "purpose": purpose, "nonce": nonce})
        answer, _ = receive_message(sock, until=until)
        transcript = _transcript(rank, peer, nonce, _text(answer, "nonce"), purpose)
        if answer.get("rank") != peer or not _proves(token, "acceptor", transcript, answer):
            token_file = setting("token_file")
            raise AuthError(
                f"rank {rank}: what listens as rank {peer} does not know this job's token "
                f"(another job, or a different {token_file})",
                token_file,
            )
        send_message(sock, {"proof": _proof(token, "connector", transcript)})
        if receive_message(sock, until=until)[0].get("welcome") is not True:
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
    """End the connection, so that the connector comes again. For another thread than the one that
    is in ``accept_side``, which fails.
    """
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def _as_refusals(who: str) -> Iterator[None]:
    """Tell a handshake that was broken off, after which one comes again, from a broken one."""
    try:
        yield
    except (PeerEnded, ConnectionError) as error:  # it may hang up before we can send
        raise SentAway(f"{who} ended the handshake: {error}", error) from error
    except ProtocolError as error:
        raise AuthError(f"{who} ended the handshake: {error}", error) from error


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


@dataclass
class Connection:
    """A connection to a peer; ``pidfd`` is of the process at its other end, or -1."""

    peer: int
    purpose: str
    sock: socket.socket
    pidfd: int = -1

    def close(self) -> None:
        """Close both descriptors; may be called twice."""
        self.sock.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


class Admission:
    """The connections of one listener until they are proven; ``close`` ends the unproven ones.

    Attributes:
        refused: connections so far that could not prove themselves.
        shortage: the last reason why the system did not accept a connection, or "".
    """

    def __init__(self, listener: socket.socket, token: bytes, rank: int) -> None:
        self.refused = 0
        self.shortage = ""
        self._listener, self._token, self._rank = listener, token, rank
        self._proofs: list[_Proof] = []  # oldest first
        listener.setblocking(False)

    def accept(self) -> None:
        """Accept what is waiting while there are places.

        Without a place, the oldest connections that have not proven themselves are sent away.
        """
        self.shortage = ""
        while len(self._proofs) < MOST_PROOFS:
            try:
                sock, _ = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _SHORTAGES:
                    raise
                self.shortage = f"{error} (ulimit -n)"
                break
            connection = Connection(-1, "", sock)
            try:
                identify(connection, self._rank)
                proof = _Proof(connection, self._token, self._rank)
                proof.start()
            except (AuthError, OSError):  # another user; it has gone
                connection.close()
                self.refused += 1
            except RuntimeError as error:  # no thread
                send_away(sock)
                connection.close()
                self.shortage = f"{error} (ulimit -u)"
                break
            else:
                self._proofs.append(proof)
        self._make_room()

    @property
    def crowded(self) -> bool:
        """True while a waiting connection cannot be accepted."""
        return len(self._proofs) >= MOST_PROOFS or bool(self.shortage)

    def proven(self) -> list[Connection]:
        """The connections that have proven themselves since the last call."""
        ended = [proof for proof in self._proofs if not proof.is_alive()]
        self._proofs = [proof for proof in self._proofs if proof not in ended]
        for proof in ended:
            if not proof.proven:
                proof.connection.close()
                self.refused += 1
        return [proof.connection for proof in ended if proof.proven]

    def close(self) -> None:
        """End all connections that are proving themselves."""
        for proof in self._proofs:
            proof.end()
        for proof in self._proofs:
            proof.join()
            proof.connection.close()
        self._proofs.clear()

    def _make_room(self) -> None:
        oldest = time.monotonic() - _GRACE_SECONDS
        for proof in self._proofs:
            if proof.since < oldest:
                proof.end()


class _Proof(threading.Thread):
    """Proves one connection; only the thread that made this object closes its descriptors."""

    def __init__(self, connection: Connection, token: bytes, rank: int) -> None:
        super().__init__(name="dpp-proof", daemon=True)
        self.connection = connection
        self.proven = False
        self.since = time.monotonic()
        self._token, self._rank = token, rank
        self._verdict = threading.Lock()  # taken once, for ever: by the welcome or by end()

    def run(self) -> None:
        with contextlib.suppress(AuthError, ProtocolError):
            connection = self.connection
            connection.peer, connection.purpose = accept_side(
                connection.sock,
                self._token,
                self._rank,
                lambda: self._verdict.acquire(blocking=False),
            )
            self.proven = True

    def end(self) -> None:
        """Ask a true peer to connect again, and end the thread; nothing once it is let in."""
        if self._verdict.acquire(blocking=False):
            send_away(self.connection.sock)


def identify(connection: Connection, rank: int) -> None:
    """Open a pidfd of the process at the other end of a unix socket.

    Raises:
        AuthError: that process belongs to another user.
    """
    sock = connection.sock
    if sock.family != socket.AF_UNIX:
        return
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", credentials)
    if uid != os.getuid():
        raise AuthError(
            f"rank {rank}: a process of user {uid} is at the other end; we are {os.getuid()}"
        )
    # Another PID namespace or an old kernel has none: the end of the socket has to do.
    with contextlib.suppress(OSError):
        connection.pidfd = os.pidfd_open(pid)

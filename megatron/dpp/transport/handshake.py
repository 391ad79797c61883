"""Mutual authentication over fresh connections, and who is let in.

Both sides know a random token of the job. Each sends a nonce and proves its knowledge with an
HMAC-SHA256 over both nonces, both ranks and the purpose of the connection. The token never travels.

    connector                      acceptor
      hello {rank, nonce}    ->
                             <-    hello {rank, nonce, proof "acceptor"}
      {proof "connector"}    ->
                             <-    {welcome}

Anybody who reaches a listener may connect. A stranger gets one of ``MOST_GUESTS`` places, and is
never a reason to give up.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import json
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron.dpp.errors import AuthError, ProtocolError, setting
from megatron.dpp.transport.messages import (
    PeerEnded,
    message_waits,
    receive_message,
    send_message,
)

MOST_GUESTS = 64
"""Limit on the connections to a rank that have not proven themselves yet."""

GRACE_SECONDS = 0.25
"""Age from which a connection loses its place while all places are taken."""

_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class SentAway(AuthError):
    """The acceptor has ended the connection before it judged us; connect again."""


def connect_side(
    sock: socket.socket, token: bytes, rank: int, peer: int, purpose: str, seconds: float
) -> None:
    """Authenticate with the rank that accepts; each of its messages may take ``seconds``.

    Raises:
        AuthError: the other side does not know the token, is not ``peer``, or refuses us.
        SentAway: it has no place for us now, or has hung up.
    """
    sock.settimeout(seconds)
    nonce = secrets.token_hex(16)
    try:
        send_message(sock, {"rank": rank, "purpose": purpose, "nonce": nonce})
        answer, _ = receive_message(sock)
        transcript = _transcript(rank, peer, nonce, _text(answer, "nonce"), purpose)
        if answer.get("rank") != peer or not _proves(token, "acceptor", transcript, answer):
            token_file = setting("token_file")
            raise AuthError(
                f"rank {rank}: what listens as rank {peer} does not know this job's token "
                f"(another job, or a different {token_file})",
                token_file,
            )
        send_message(sock, {"proof": _proof(token, "connector", transcript)})
        if receive_message(sock)[0].get("welcome") is not True:
            raise AuthError(f"rank {rank}: rank {peer} did not let us in")
    except (PeerEnded, ConnectionError) as error:  # it may hang up before we can send
        raise SentAway(f"rank {peer} ended the handshake: {error}", error) from error
    except ProtocolError as error:
        raise AuthError(f"rank {peer} ended the handshake: {error}", error) from error


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


@dataclass(eq=False)
class Guest:
    """A connection that has to prove itself, at the side that accepts."""

    connection: Connection
    since: float = 0.0
    is_proven: bool = False
    _transcript: bytes = b""

    def answer(self, message: dict[str, Any], token: bytes, rank: int) -> dict[str, Any]:
        """The answer to the connector's next message: our proof, then its welcome. Sets peer and
        purpose of the connection.

        Raises:
            AuthError: it does not know the token.
            ProtocolError: the message is no hello.
        """
        connection = self.connection
        if self._transcript:
            if not _proves(token, "connector", self._transcript, message):
                raise AuthError(
                    f"rank {rank}: a connection that claims to be rank {connection.peer} has a "
                    "wrong proof"
                )
            return {"welcome": True}
        peer, nonce = message.get("rank"), secrets.token_hex(16)
        if type(peer) is not int:
            raise ProtocolError(f"a hello without a rank: {str(message)[:200]}")
        connection.peer, connection.purpose = peer, _text(message, "purpose")
        self._transcript = _transcript(
            peer, rank, _text(message, "nonce"), nonce, connection.purpose
        )
        return {"rank": rank, "nonce": nonce, "proof": _proof(token, "acceptor", self._transcript)}


class Admission:
    """The connections to a rank's listeners until they are proven; ``close`` ends the unproven.

    Attributes:
        refused: connections so far that could not prove themselves.
        shortage: the last reason why the system did not accept a connection, or "".
    """

    def __init__(self, listeners: Sequence[socket.socket], token: bytes, rank: int) -> None:
        self.refused = 0
        self.shortage = ""
        self._listeners, self._token, self._rank = listeners, token, rank
        self._guests: list[Guest] = []  # oldest first

    def look(self, seconds: float) -> list[Connection]:
        """Wait for ``seconds`` at the most until somebody connects or speaks; returns the
        connections that have proven themselves since the last call.
        """
        poll = select.poll()
        for sock in (*self._listeners, *(guest.connection.sock for guest in self._guests)):
            poll.register(sock, select.POLLIN)
        ready = poll.poll(1000 * seconds)
        self.shortage = ""
        came = [self._accept(listener) for listener in self._listeners]
        spoke = [guest for guest in list(self._guests) if self._hear(guest)]
        if ready and not any(came) and not spoke:  # parts of messages, or no place for the next
            time.sleep(seconds)
        return [guest.connection for guest in spoke if guest.is_proven]

    def close(self) -> None:
        """End all connections that have not proven themselves."""
        for guest in self._guests:
            guest.connection.close()
        self._guests.clear()

    def _accept(self, listener: socket.socket) -> bool:
        """Accept who waits while there are places; true if somebody was accepted.

        Without a place for the next one, old guests have to go.
        """
        came = False
        for _ in range(MOST_GUESTS - len(self._guests)):
            try:
                sock, _ = listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                break
            except OSError as error:
                if error.errno not in _SHORTAGES:
                    raise
                self.shortage = f"{error} (ulimit -n)"
                break
            came = True
            sock.setblocking(False)
            guest = Guest(Connection(-1, "", sock), time.monotonic())
            self._guests.append(guest)
            try:
                identify(guest.connection, self._rank)
            except (AuthError, OSError):  # another user; it has gone
                self._refuse(guest)
        if len(self._guests) >= MOST_GUESTS:
            oldest = time.monotonic() - GRACE_SECONDS
            for guest in [guest for guest in self._guests if guest.since < oldest]:
                self._refuse(guest)
        return came

    def _hear(self, guest: Guest) -> bool:
        """Answer a guest that has said something; false for one that has not."""
        sock = guest.connection.sock
        try:
            if not message_waits(sock):
                return False
            answer = guest.answer(receive_message(sock)[0], self._token, self._rank)
            send_message(sock, answer)
        except (AuthError, ProtocolError, OSError):
            self._refuse(guest)
            return True
        if "welcome" in answer:
            guest.is_proven = True
            self._guests.remove(guest)
        return True

    def _refuse(self, guest: Guest) -> None:
        """End a guest's connection; a true peer comes again."""
        guest.connection.close()
        self._guests.remove(guest)
        self.refused += 1


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

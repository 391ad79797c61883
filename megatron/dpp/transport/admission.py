"""Accepts connections on one listener and lets each prove that it belongs to the job.

Anybody who reaches the listener may connect. A stranger gets one of ``MOST_PROOFS`` places, for
``handshake.HELLO_SECONDS`` at most, and is never a reason to give up.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
import threading
import time
from dataclasses import dataclass

from megatron.dpp.errors import AuthError, ProtocolError
from megatron.dpp.transport import handshake

MOST_PROOFS = 64
"""Limit on the connections of one listener that are proving themselves."""

_GRACE_SECONDS = 0.25
"""Age from which a connection loses its place to a new one while all places are taken."""

_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


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
                handshake.send_away(sock)
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
            connection.peer, connection.purpose = handshake.accept_side(
                connection.sock,
                self._token,
                self._rank,
                lambda: self._verdict.acquire(blocking=False),
            )
            self.proven = True

    def end(self) -> None:
        """Ask a true peer to connect again, and end the thread; nothing once it is let in."""
        if self._verdict.acquire(blocking=False):
            handshake.send_away(self.connection.sock)


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

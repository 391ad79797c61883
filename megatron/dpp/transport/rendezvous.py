"""How ranks find each other: facts in the job's store, then one authenticated connection per pair.

The lower rank of a pair connects, over an abstract unix socket on one host. ``native.py`` is the
caller; it gets connected sockets and hands them to C++.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import socket
import stat
import struct
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

from torch._C._distributed_c10d import Store

from megatron.dpp.errors import AuthError, ConfigError, ProtocolError, SetupError, VersionMismatch
from megatron.dpp.transport import handshake
from megatron.dpp.transport.options import TransportOptions

_MAX_STRANGERS = 64


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What one rank tells the others about itself, and what the choice of a kind depends on.

    ``host`` differs between machines, and between network namespaces of one machine: they cannot
    reach each other's abstract sockets. ``settings`` are the options that both sides of a link must
    share.
    """

    rank: int
    abi: int
    host: str
    hostname: str
    uid: int
    pid: int
    device: str
    unix_address: str
    settings: dict[str, int | float | bool]


@dataclass
class Connection:
    """An authenticated connection and what we know of the process at its other end."""

    peer: int
    sock: socket.socket
    pidfd: int


def host_identity() -> str:
    """Equal for two processes exactly when shared memory can be passed between them over an
    abstract socket.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"


class Rendezvous:
    """One rank's meeting with its peers, over one store, for one transport. Use with ``with``."""

    def __init__(self, store: Store, rank: int, options: TransportOptions) -> None:
        self._store = store
        self._rank = rank
        self._options = options
        opened = store.add(f"dpp/{options.name}/opened/{rank}", 1)
        self._prefix = f"dpp/{options.name}/{opened}"
        self._deadline = time.monotonic() + options.setup_timeout
        self._token = self._agree_on_token()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        job = hashlib.sha256(b"address" + self._token).hexdigest()[:16]
        self.unix_address = f"dpp-{job}-{rank}-{secrets.token_hex(4)}"
        self._listener.bind("\0" + self.unix_address)
        self._listener.listen(128)

    def __enter__(self) -> Rendezvous:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()

    def exchange(self, own: Facts, peers: Sequence[int]) -> dict[int, Facts]:
        """Publish our facts and return the peers'; ``VersionMismatch`` when a peer runs something
        else.
        """
        self._store.set(f"{self._prefix}/facts/{self._rank}", json.dumps(asdict(own)))
        found = {}
        for peer in peers:
            found[peer] = Facts(**json.loads(self._get(f"facts/{peer}", f"rank {peer}")))
            _compare(own, found[peer])
        return found

    def connect(self, facts: dict[int, Facts], purpose: str = "control") -> dict[int, Connection]:
        """One authenticated connection with every rank in ``facts``."""
        connections: dict[int, Connection] = {}
        try:
            for peer in sorted(facts):
                if peer > self._rank:
                    connections[peer] = self._reach(facts[peer], purpose)
            missing = {peer for peer in facts if peer < self._rank}
            strangers = 0
            while missing:
                connection = self._admit(missing)
                if connection is None:
                    strangers += 1
                    if strangers > _MAX_STRANGERS:
                        raise AuthError(
                            f"rank {self._rank}: {strangers} strangers tried to connect"
                        )
                    continue
                connections[connection.peer] = connection
                missing.discard(connection.peer)
        except BaseException:
            for connection in connections.values():
                connection.sock.close()
                _close(connection.pidfd)
            raise
        return connections

    def _agree_on_token(self) -> bytes:
        if self._options.token_file:
            return read_token(Path(self._options.token_file))
        if self._store.add(f"{self._prefix}/token/claimed", 1) == 1:
            self._store.set(f"{self._prefix}/token", secrets.token_hex(32))
        return self._get("token", "the first rank").encode()

    def _get(self, key: str, whose: str) -> str:
        key = f"{self._prefix}/{key}"
        try:
            self._store.wait([key], timedelta(seconds=max(0.001, self._remaining())))
            return self._store.get(key).decode()
        except RuntimeError as error:
            raise SetupError(
                f"rank {self._rank}: {whose} has not opened its transport after "
                f"{self._options.setup_timeout:g} s ({str(error).splitlines()[0][:200]})"
            ) from error

    def _remaining(self) -> float:
        return self._deadline - time.monotonic()

    def _reach(self, peer: Facts, purpose: str) -> Connection:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pidfd = -1
        try:
            sock.settimeout(handshake.HELLO_SECONDS)
            sock.connect("\0" + peer.unix_address)
            pidfd = _check_process(sock, self._rank)
            # The acceptor answers only after it has reached the ranks above it.
            handshake.connect_side(
                sock, self._token, self._rank, peer.rank, purpose, max(0.001, self._remaining())
            )
        except OSError as error:
            sock.close()
            _close(pidfd)
            raise SetupError(
                f"rank {self._rank}: cannot reach rank {peer.rank} on this host: {error}"
            ) from error
        except BaseException:
            sock.close()
            _close(pidfd)
            raise
        return Connection(peer.rank, sock, pidfd)

    def _admit(self, expected: set[int]) -> Connection | None:
        """The next connection that proves to be one of ``expected``; None for one that does not."""
        remaining = self._remaining()
        if remaining <= 0:
            raise SetupError(
                f"rank {self._rank}: ranks {sorted(expected)} have not connected after "
                f"{self._options.setup_timeout:g} s"
            )
        self._listener.settimeout(remaining)
        try:
            sock, _ = self._listener.accept()
        except TimeoutError:
            return self._admit(expected)
        pidfd = -1
        try:
            pidfd = _check_process(sock, self._rank)
            peer, _ = handshake.accept_side(sock, self._token, self._rank)
            if peer not in expected:
                raise ProtocolError(f"rank {peer} connected, expected one of {sorted(expected)}")
        except (OSError, AuthError, ProtocolError):
            sock.close()
            _close(pidfd)
            return None
        return Connection(peer, sock, pidfd)


def read_token(path: Path) -> bytes:
    """The job's secret from a file that only its owner may read."""
    try:
        facts = path.stat()
        secret = path.read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"token file {path}: {error.strerror}") from error
    if stat.S_IMODE(facts.st_mode) & 0o077:
        raise ConfigError(
            f"token file {path} has mode {stat.S_IMODE(facts.st_mode):o}; chmod 600 it"
        )
    if len(secret) < 16:
        raise ConfigError(f"token file {path} holds {len(secret)} bytes; 16 are the least")
    return secret


def _check_process(sock: socket.socket, rank: int) -> int:
    """Refuse another user's process; return a pidfd of the peer, or -1 where it cannot be had."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", credentials)
    if uid != os.getuid():
        raise AuthError(
            f"rank {rank}: a process of user {uid} is at the other end; we are {os.getuid()}"
        )
    try:
        return os.pidfd_open(pid)
    except OSError:
        return -1  # another PID namespace, or an old kernel: the end of the socket has to do


def _compare(own: Facts, peer: Facts) -> None:
    if own.abi != peer.abi:
        raise VersionMismatch(
            f"rank {own.rank} speaks transport version {own.abi}, rank {peer.rank} on {peer.hostname} "
            f"{peer.abi}; install one version everywhere"
        )
    for name, value in own.settings.items():
        if peer.settings.get(name) != value:
            raise VersionMismatch(
                f"transport option {name} is {value} on rank {own.rank} and {peer.settings.get(name)} on "
                f"rank {peer.rank}; start all ranks with equal settings"
            )


def _close(fd: int) -> None:
    if fd >= 0:
        os.close(fd)

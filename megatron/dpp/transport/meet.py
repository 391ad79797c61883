"""Ranks meet: a secret of the job, facts in its store, then authenticated connections.

The lower rank of a pair connects, over an abstract unix socket on one host and over TCP between
hosts. Others may be able to write into the store.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import platform
import secrets
import socket
import stat
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import Store

from megatron.dpp.errors import (
    AuthError,
    ConfigError,
    ProtocolError,
    SetupError,
    VersionMismatch,
    one_line,
    setting,
)
from megatron.dpp.hosts import family_of, with_port
from megatron.dpp.processes import are_stopped, stopped
from megatron.dpp.transport import handshake
from megatron.dpp.transport.handshake import Admission, Connection, identify
from megatron.dpp.transport.joining import Facts
from megatron.dpp.transport.messages import read_fields, read_object
from megatron.dpp.transport.options import TransportOptions
from megatron.dpp.transport.rdma_ports import read_places

CONTROL = "control"
"""Purpose of a link's first connection, whose end means that the peer is gone."""

_PREFIX = "dpp/main"
_SHORTEST_TOKEN, _MOST_TOKEN_BYTES = 16, 1 << 16
_BACKLOG = 128
_RETRY_SECONDS = 0.02


def host_identity() -> str:
    """Equal for two processes if they can pass shared memory over an abstract socket."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"


class Meeting:
    """One rank's meeting with its peers over a store, for one transport; a context manager.

    A rank that fails before it has published its facts publishes its error instead.
    """

    def __init__(
        self, store: Store, rank: int, options: TransportOptions, tcp_host: str | None = None
    ) -> None:
        self._store = store
        self._rank = rank
        self._options = options
        self._prefix = _PREFIX
        self._prefix += f"/{self._count(f'opened/{rank}')}"  # by this rank, over this store
        self._deadline = time.monotonic() + options.setup_timeout
        self._listeners: list[socket.socket] = []
        self._has_published = False
        self.unix_address = ""
        self.tcp_address: list[Any] = []
        try:
            self._token, self._token_source = self._agree_on_token()
            self.token_name = hashlib.sha256(b"name" + self._token).hexdigest()[:16]
            self._listen(tcp_host)
        except BaseException as error:
            self.__exit__(type(error), error)
            raise

    def _listen(self, tcp_host: str | None) -> None:
        unix = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listeners.append(unix)
        self.unix_address = f"dpp-{self.token_name}-{self._rank}-{secrets.token_hex(4)}"
        unix.bind("\0" + self.unix_address)
        if tcp_host is not None:
            tcp = self._listen_on(tcp_host)
            self._listeners.append(tcp)
            self.tcp_address = [tcp_host, tcp.getsockname()[1]]
        for listener in self._listeners:
            listener.listen(_BACKLOG)
            listener.setblocking(False)

    def _listen_on(self, host: str) -> socket.socket:
        """A listener on the first free port of ``listen_ports``."""
        first, last = self._options.listen_ports or (0, 0)
        for port in range(first, last + 1):
            try:
                return socket.create_server((host, port), family=family_of(host), backlog=_BACKLOG)
            except OSError as error:
                if error.errno != errno.EADDRINUSE or first == 0:
                    node_ips = setting("node_ips")
                    raise SetupError(
                        f"rank {self._rank}: cannot listen on {with_port(host, port)} "
                        f"({node_ips}, DPP_LISTEN_PORTS): {error}",
                        node_ips,
                    ) from error
        raise SetupError(
            f"rank {self._rank}: all ports from {first} to {last} of {host} are in use; a host "
            "needs one per rank (DPP_LISTEN_PORTS)"
        )

    def __enter__(self) -> Meeting:
        return self

    def __exit__(self, _: object, error: BaseException | None, *__: object) -> None:
        for listener in self._listeners:
            listener.close()
        if error is not None and not self._has_published:
            with contextlib.suppress(RuntimeError):  # the store is gone
                self._publish({"hostname": platform.node(), "failed": one_line(error, 1000)})

    def _publish(self, facts: dict[str, Any]) -> None:
        self._has_published = True
        self._store.set(f"{self._prefix}/facts/{self._rank}", json.dumps(facts))

    def exchange(self, own: Facts, peers: Sequence[int]) -> dict[int, Facts]:
        """Publish our facts and return the peers'.

        Raises:
            AuthError: a peer has another token.
            VersionMismatch: a peer runs another version or other settings.
            SetupError: a peer does not publish its facts in time, or has failed before.
            ProtocolError: what the store holds in their place is no rank's facts.
        """
        self._publish(asdict(own))
        return {
            peer: _read_facts(
                self._get(f"facts/{peer}", f"rank {peer}"), peer, own, self._token_source
            )
            for peer in peers
        }

    def connect(
        self, wanted: Sequence[tuple[Facts, str, bool]]
    ) -> dict[tuple[int, str], Connection]:
        """Authenticated connections, each given as (peer, purpose, over TCP or not).

        Returns them by (rank of the peer, purpose).
        """
        made: dict[tuple[int, str], Connection] = {}
        try:
            for peer, purpose, over_tcp in sorted(wanted, key=lambda entry: entry[0].rank):
                if peer.rank > self._rank:
                    made[peer.rank, purpose] = self._reach(peer, purpose, over_tcp=over_tcp)
            missing = {(peer.rank, purpose) for peer, purpose, _ in wanted} - set(made)
            self._admit(missing, made)
        except BaseException:
            for connection in made.values():
                connection.close()
            raise
        return made

    def _agree_on_token(self) -> tuple[bytes, str]:
        """The job's secret, and where it is from."""
        if named := self._options.token_file or os.environ.get("DPP_TOKEN_FILE"):
            return read_token(Path(named)), named
        if self._count("token/claimed") == 1:
            self._store.set(f"{self._prefix}/token", secrets.token_hex(32))
        return self._get("token", "the first rank").encode(), "torchrun's store"

    def _count(self, key: str) -> int:
        """Add 1 to a counter of the store; returns its value."""
        try:
            return self._store.add(f"{self._prefix}/{key}", 1)
        except (RuntimeError, ValueError) as error:  # ValueError: others wrote something else there
            raise SetupError(
                f"rank {self._rank}: the store does not count {key}: {one_line(error, 200)}"
            ) from error

    def _get(self, key: str, whose: str) -> str:
        key = f"{self._prefix}/{key}"
        try:
            self._store.wait([key], timedelta(seconds=max(0.001, self._remaining())))
            return self._store.get(key).decode(errors="replace")  # from anybody
        except RuntimeError as error:
            halted = stopped(os.getppid())  # torchrun, which has the store, or a rank
            raise SetupError(
                f"rank {self._rank}: {whose} has not opened its transport after "
                f"{self._options.setup_timeout:g} s ({str(error).splitlines()[0][:200]})"
                + (f"; {are_stopped(halted)}" if halted else "")
            ) from error

    def _remaining(self) -> float:
        return self._deadline - time.monotonic()

    def _reach(self, peer: Facts, purpose: str, *, over_tcp: bool) -> Connection:
        """Connect until the peer's listener lets us in, or time runs out.

        Raises:
            AuthError: what listens there does not know the job's token, or refuses us.
            SetupError: there is no way to it, or it has let nobody in until the deadline.
        """
        where: Any = tuple(peer.tcp_address) if over_tcp else "\0" + peer.unix_address
        while True:
            try:
                return self._try_to_reach(peer.rank, where, purpose)
            except (OSError, OverflowError, TypeError, ValueError, handshake.SentAway) as error:
                turned_down = BlockingIOError | ConnectionError | handshake.SentAway
                if not isinstance(error, turned_down) or self._remaining() <= _RETRY_SECONDS:
                    address = with_port(str(where[0]), where[-1]) if over_tcp else "this host"
                    raise SetupError(
                        f"rank {self._rank}: cannot reach rank {peer.rank} on {address}: {error}"
                    ) from error
            time.sleep(_RETRY_SECONDS)

    def _try_to_reach(self, peer: int, where: Any, purpose: str) -> Connection:
        sock = (
            socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            if isinstance(where, str)
            else socket.socket(family_of(where[0]), socket.SOCK_STREAM)
        )
        connection = Connection(peer, purpose, sock)
        try:
            # The acceptor answers only after it has reached the ranks above it.
            patience = max(0.001, self._remaining())
            connection.sock.settimeout(patience)
            connection.sock.connect(where)
            identify(connection, self._rank)
            _watch_tcp(connection, self._options.peer_timeout)
            handshake.connect_side(
                connection.sock, self._token, self._rank, peer, purpose, patience
            )
        except BaseException:
            connection.close()
            raise
        return connection

    def _admit(
        self, missing: set[tuple[int, str]], made: dict[tuple[int, str], Connection]
    ) -> None:
        """Accept until no connection is missing."""
        with contextlib.closing(Admission(self._listeners, self._token, self._rank)) as admission:
            while missing:
                if self._remaining() <= 0:
                    refused, shortage = admission.refused, admission.shortage
                    raise SetupError(
                        f"rank {self._rank}: ranks {sorted({rank for rank, _ in missing})} have "
                        f"not connected after {self._options.setup_timeout:g} s"
                        + (f"; {refused} connections could not prove themselves" if refused else "")
                        + (f"; accepting failed: {shortage}" if shortage else "")
                    )
                for connection in admission.look(_RETRY_SECONDS):
                    name = (connection.peer, connection.purpose)
                    if name not in missing:
                        connection.close()
                        continue
                    missing.discard(name)
                    _watch_tcp(connection, self._options.peer_timeout)
                    made[name] = connection


def _watch_tcp(connection: Connection, seconds: float) -> None:
    """Disable Nagle's delay, and notice a lost host after ``seconds`` of silence.

    An idle connection sends probes. The one after ``seconds`` may still be answered, so that it
    ends up to two intervals later. The control connection ends as late while data is in flight,
    too: the kernel counts that time from the last answer.

    Not so those that carry payloads: a stopped process leaves them unread, and that timer takes its
    kernel's full receive window for silence.
    """
    sock = connection.sock
    if sock.family == socket.AF_UNIX:
        return
    interval = max(1, round(seconds / 10))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, interval)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, math.ceil(seconds / interval) + 1)
    if connection.purpose == CONTROL:
        most = round(1000 * (seconds + 2 * interval))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, most)


def _read_facts(text: str, peer: int, own: Facts, token_source: str) -> Facts:
    """A peer's facts from the store, which others may be able to write."""
    try:
        fields = read_object(text)
        if failed := fields.get("failed"):
            raise SetupError(
                f"rank {own.rank}: rank {peer} on {fields.get('hostname')} could not open its "
                f"transport: {failed}"
            )
        _compare(own, fields, token_source)
        facts = read_fields(Facts, fields)
        for result in facts.found.values():
            if "missing" not in {**result}:
                read_places(result["places"])
        if facts.rank != peer:
            raise ValueError(f"they are of rank {facts.rank}")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ProtocolError(
            f"rank {own.rank}: the store holds broken facts of rank {peer}: {error}"
        ) from error
    return facts


def _compare(own: Facts, peer: dict[str, Any], token_source: str) -> None:
    """Raise an error for facts of another version, of other settings, or of another token."""
    who = f"rank {peer.get('rank')} on {peer.get('hostname')}"
    if own.abi != peer.get("abi"):
        raise VersionMismatch(
            f"rank {own.rank} speaks transport version {own.abi}, {who} speaks {peer.get('abi')}; "
            "install one version everywhere"
        )
    for name, value in own.settings.items():
        other = peer["settings"].get(name)
        if other != value:
            raise VersionMismatch(
                f"transport option {name} is {value} on rank {own.rank} and {other} on {who}; "
                "start all ranks with equal settings"
            )
    if own.token != peer["token"]:
        token_file = setting("token_file")
        raise AuthError(
            f"rank {own.rank} on {own.hostname} has another secret of the job (from "
            f"{token_source}) than {who}: give every node the same file ({token_file})",
            token_file,
        )


def read_token(path: Path) -> bytes:
    """The job's secret from a file that only its owner may read, and that is ours.

    Raises:
        ConfigError: there is no such file, or it is of another kind, owner, mode or length.
    """
    try:
        # A named pipe would let open() wait for a writer.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
        with os.fdopen(fd, "rb") as file:
            facts = os.fstat(fd)
            mode = stat.S_IMODE(facts.st_mode)
            content = file.read(_MOST_TOKEN_BYTES + 1) if stat.S_ISREG(facts.st_mode) else b""
    except (OSError, ValueError) as error:  # a path with a zero byte
        raise ConfigError(f"token file {path}: {getattr(error, 'strerror', error)}") from error
    secret = content.strip()
    for is_wrong, why in (
        (not stat.S_ISREG(facts.st_mode), "is not a regular file"),
        (
            facts.st_uid != os.getuid(),
            f"belongs to user {facts.st_uid}; it must be ours ({os.getuid()})",
        ),
        (mode & 0o077, f"has mode {mode:o}; chmod 600 it"),
        (len(content) > _MOST_TOKEN_BYTES, f"has more than {_MOST_TOKEN_BYTES} bytes"),
        (len(secret) < _SHORTEST_TOKEN, f"holds {len(secret)} bytes; 16 are the least"),
    ):
        if is_wrong:
            raise ConfigError(f"token file {path} {why}")
    return secret

"""Rendezvous of ranks: facts in the job's store, then authenticated connections.

The lower rank of a pair connects, over an abstract unix socket on one host and over TCP between
hosts.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import secrets
import selectors
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import Store

from megatron.dpp.errors import ProtocolError, SetupError, VersionMismatch, one_line, setting
from megatron.dpp.hosts import family_of, with_port
from megatron.dpp.transport import handshake
from megatron.dpp.transport.admission import Admission, Connection, identify
from megatron.dpp.transport.job_token import SecretFile, read_shared_token, read_token
from megatron.dpp.transport.joining import Facts
from megatron.dpp.transport.options import TransportOptions
from megatron.dpp.transport.rdma_places import read_places

CONTROL = "control"
"""Purpose of a link's first connection, whose end means that the peer is gone."""

_BACKLOG = 128
_ACCEPT_SLICE = 0.02  # seconds; also how late a finished proof may be noticed
_RETRY_SECONDS = 0.02


def host_identity() -> str:
    """Equal for two processes if they can pass shared memory over an abstract socket."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"


class Rendezvous:
    """One rank's rendezvous with its peers over a store, for one transport; a context manager."""

    def __init__(
        self, store: Store, rank: int, options: TransportOptions, tcp_host: str | None = None
    ) -> None:
        self._store = store
        self._rank = rank
        self._options = options
        self._prefix = f"dpp/{options.name}"
        self._prefix += f"/{self._count(f'opened/{rank}')}"
        self._deadline = time.monotonic() + options.setup_timeout
        self._token = self._agree_on_token()
        self._listeners: list[socket.socket] = []
        job = hashlib.sha256(b"address" + self._token).hexdigest()[:16]
        self.unix_address = f"dpp-{job}-{rank}-{secrets.token_hex(4)}"
        self.tcp_address: tuple[str, int] | None = None
        try:
            self._listen(tcp_host)
        except BaseException:
            self.close()
            raise

    def _listen(self, tcp_host: str | None) -> None:
        unix = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listeners.append(unix)
        unix.bind("\0" + self.unix_address)
        if tcp_host is not None:
            tcp = self._listen_on(tcp_host)
            self._listeners.append(tcp)
            self.tcp_address = (tcp_host, tcp.getsockname()[1])
        for listener in self._listeners:
            listener.listen(_BACKLOG)

    def _listen_on(self, host: str) -> socket.socket:
        """A listener on the first free port of ``listen_ports``; ranks begin at different ones."""
        first, last = self._options.listen_ports or (0, 0)
        ports = range(first, last + 1)
        start = self._rank % len(ports)
        for port in (*ports[start:], *ports[:start]):
            try:
                return socket.create_server((host, port), family=family_of(host), backlog=_BACKLOG)
            except OSError as error:
                if error.errno != errno.EADDRINUSE or first == 0:
                    node_ips, listen_ports = setting("node_ips"), setting("listen_ports")
                    raise SetupError(
                        f"rank {self._rank}: cannot listen on {with_port(host, port)} "
                        f"({node_ips}, {listen_ports}): {error}",
                        node_ips,
                        listen_ports,
                    ) from error
        listen_ports = setting("listen_ports")
        raise SetupError(
            f"rank {self._rank}: all ports from {first} to {last} of {host} are in use; a host "
            f"needs one per rank ({listen_ports})",
            listen_ports,
        )

    def __enter__(self) -> Rendezvous:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop listening."""
        for listener in self._listeners:
            listener.close()

    def exchange(self, own: Facts, peers: Sequence[int]) -> dict[int, Facts]:
        """Publish our facts and return the peers'.

        Raises:
            VersionMismatch: a peer runs another version or other settings.
            SetupError: a peer does not publish its facts in time.
            ProtocolError: what the store holds in their place is no rank's facts.
        """
        self._store.set(f"{self._prefix}/facts/{self._rank}", json.dumps(asdict(own)))
        found = {}
        for peer in peers:
            found[peer] = _read_facts(self._get(f"facts/{peer}", f"rank {peer}"), peer, own)
        return found

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
            for (_, purpose), connection in made.items():
                if purpose == CONTROL and connection.sock.family != socket.AF_UNIX:
                    _end_when_unanswered(connection.sock, self._options.peer_timeout)
        except BaseException:
            for connection in made.values():
                connection.close()
            raise
        return made

    def _agree_on_token(self) -> bytes:
        if named := self._options.token_file or os.environ.get("DPP_TOKEN_FILE"):
            return read_token(Path(named))
        ranks = os.environ.get("WORLD_SIZE", "")
        private = ranks.isdecimal() and os.environ.get("LOCAL_WORLD_SIZE") == ranks
        if self._count("token/claimed") == 1:
            self._store.set(
                f"{self._prefix}/token",
                self._share_file(int(ranks)) if private else secrets.token_hex(32),
            )
        found = self._get("token", "the first rank")
        if not private:
            return found.encode()
        token = read_shared_token(self._rank, found)
        self._count("token/read")
        return token

    def _share_file(self, num_ranks: int) -> str:
        """Make the file with the token, which goes when all ranks have read it; its name."""
        file = SecretFile(self._rank)
        read = f"{self._prefix}/token/read"
        file.delete_when(lambda: self._store.add(read, 0) >= num_ranks, self._options.setup_timeout)
        return file.name

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
            raise SetupError(
                f"rank {self._rank}: {whose} has not opened its transport after "
                f"{self._options.setup_timeout:g} s ({str(error).splitlines()[0][:200]})"
            ) from error

    def _remaining(self) -> float:
        return self._deadline - time.monotonic()

    def _reach(self, peer: Facts, purpose: str, *, over_tcp: bool) -> Connection:
        """Connect until the peer's listener lets us in, or time runs out.

        Raises:
            AuthError: what listens there does not know the job's token, or refuses us.
            SetupError: there is no way to it, or it has let nobody in until the deadline.
        """
        where = peer.tcp_address if over_tcp else "\0" + peer.unix_address
        while True:
            try:
                return self._try_to_reach(peer.rank, where, purpose, over_tcp=over_tcp)
            except (BlockingIOError, ConnectionError, handshake.SentAway) as error:
                refusal: Exception = error
            except OSError as error:
                raise self._unreachable(peer, error, over_tcp=over_tcp) from error
            if self._remaining() <= _RETRY_SECONDS:
                raise self._unreachable(peer, refusal, over_tcp=over_tcp) from refusal
            time.sleep(_RETRY_SECONDS)

    def _unreachable(self, peer: Facts, error: Exception, *, over_tcp: bool) -> SetupError:
        address = with_port(*peer.tcp_address) if over_tcp and peer.tcp_address else "this host"
        return SetupError(f"rank {self._rank}: cannot reach rank {peer.rank} on {address}: {error}")

    def _try_to_reach(self, peer: int, where: Any, purpose: str, *, over_tcp: bool) -> Connection:
        connection = Connection(peer, purpose, _new_socket(where, over_tcp=over_tcp))
        try:
            # The acceptor answers only after it has reached the ranks above it.
            patience = max(0.001, self._remaining())
            connection.sock.settimeout(patience)
            connection.sock.connect(where)
            identify(connection, self._rank)
            _watch_tcp(connection.sock, self._options.peer_timeout)
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
        with contextlib.ExitStack() as stack:
            selector = stack.enter_context(selectors.DefaultSelector())
            admissions = []
            for listener in self._listeners:
                admission = Admission(listener, self._token, self._rank)
                stack.callback(admission.close)
                admissions.append(admission)
                selector.register(listener, selectors.EVENT_READ, admission)
            while missing:
                self._check_patience(missing, admissions)
                for key, _ in selector.select(_ACCEPT_SLICE):
                    key.data.accept()
                for admission in admissions:
                    for connection in admission.proven():
                        name = (connection.peer, connection.purpose)
                        if name not in missing:
                            connection.close()
                            continue
                        missing.discard(name)
                        _watch_tcp(connection.sock, self._options.peer_timeout)
                        made[name] = connection
                if any(admission.crowded for admission in admissions):
                    time.sleep(_ACCEPT_SLICE)  # its listener stays readable

    def _check_patience(
        self, missing: set[tuple[int, str]], admissions: Sequence[Admission]
    ) -> None:
        if self._remaining() > 0:
            return
        refused = sum(admission.refused for admission in admissions)
        shortages = {admission.shortage for admission in admissions} - {""}
        raise SetupError(
            f"rank {self._rank}: ranks {sorted({rank for rank, _ in missing})} have not "
            f"connected after {self._options.setup_timeout:g} s"
            + (f"; {refused} connections could not prove themselves" if refused else "")
            + "".join(f"; accepting failed: {shortage}" for shortage in sorted(shortages))
        )


def _new_socket(where: Any, *, over_tcp: bool) -> socket.socket:
    if over_tcp:
        return socket.socket(family_of(where[0]), socket.SOCK_STREAM)
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _watch_tcp(sock: socket.socket, seconds: float) -> None:
    """Disable Nagle's delay, and notice a lost host after ``seconds`` of silence.

    An idle connection sends probes. The one after ``seconds`` may still be answered, so that it
    ends up to two intervals later.
    """
    if sock.family == socket.AF_UNIX:
        return
    interval = _probe_interval(seconds)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, interval)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, math.ceil(seconds / interval) + 1)


def _probe_interval(seconds: float) -> int:
    return max(1, round(seconds / 10))


def _end_when_unanswered(sock: socket.socket, seconds: float) -> None:
    """Notice a lost host also while data is in flight to it.

    The kernel applies this time to probes too, and counts it from the last answer: an interval
    before the loss, and two before the probe that may still be answered.

    Not for connections that carry payloads: a stopped process leaves those unread, and this timer
    takes its kernel's full receive window for silence.
    """
    most = seconds + 2 * _probe_interval(seconds)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(most * 1000))


def _read_facts(text: str, peer: int, own: Facts) -> Facts:
    """A peer's facts from the store, which others may be able to write."""
    try:
        fields = handshake.read_object(text)
        _compare(own, fields)
        if (address := fields["tcp_address"]) is not None:
            fields["tcp_address"] = _read_address(*address)
        facts = Facts(**fields)
        for name, value in asdict(facts).items():
            ours = getattr(own, name)
            if name != "tcp_address" and type(value) is not type(ours):
                raise TypeError(f"{name} is {str(value)[:80]!r}")
        for kind, result in facts.found.items():
            if not isinstance(result, dict):
                raise TypeError(f"found {kind} is {str(result)[:80]!r}")
            if "missing" not in result:
                read_places(result["places"])
        if facts.rank != peer:
            raise ValueError(f"they are of rank {facts.rank}")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ProtocolError(
            f"rank {own.rank}: the store holds broken facts of rank {peer}: {error}"
        ) from error
    return facts


def _read_address(host: Any, port: Any) -> tuple[str, int]:
    """A host and a port of TCP, such as a socket can connect to."""
    if type(port) is not int or not 0 < port < 65536:
        raise ValueError(f"tcp_address has port {str(port)[:80]}, expected 1 to 65535")
    if not isinstance(host, str) or not host.isascii() or "\0" in host:
        raise ValueError(f"tcp_address has host {str(host)[:80]!r}")
    return host, port


def _compare(own: Facts, peer: dict[str, Any]) -> None:
    """Raise ``VersionMismatch`` for facts of another version, or of other settings."""
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

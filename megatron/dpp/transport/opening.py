"""Sets up a native transport: meets the peers, chooses a kind per link, joins the links.

Each link first exchanges bells (one host only) and *offers* over its authenticated control
connection: the channels that a side receives, and the stage's board if it leads one. Then each kind
joins its links, and C++ takes the connections over.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
import platform
from collections.abc import Sequence
from typing import Any

from torch._C._distributed_c10d import Store

from megatron.dpp.errors import ConfigError, SetupError, Text, VersionMismatch
from megatron.dpp.transport.admission import Connection
from megatron.dpp.transport.base import ChannelSpec, LinkInfo
from megatron.dpp.transport.board_hosts import BoardHosts, hosts_of
from megatron.dpp.transport.choose import Choice, choose
from megatron.dpp.transport.gpu import device_index, gpu_facts
from megatron.dpp.transport.joining import Facts, PeerLink, Request, Setup
from megatron.dpp.transport.kinds import AUTO, find, kinds_of_boards, kinds_of_links
from megatron.dpp.transport.native import NativeBoard, NativeTransport, load_native
from megatron.dpp.transport.rendezvous import CONTROL, Rendezvous, host_identity

_LOOPBACK = "127.0.0.1"
_LONGEST_LIST = 2000
"""Characters of a list of channels that a set-up message holds beside its other fields."""


def open_native(request: Request, kind: str) -> NativeTransport:
    """Open a transport with links of ``kind`` (``auto``: of suitable kinds).

    Raises:
        SetupError: the system refused a descriptor, a thread or a socket, or the store is gone.
        TransportError: see ``errors.py``.
    """
    try:
        return _Opening(request, kind).run(request.store)
    except (OSError, RuntimeError) as error:  # RuntimeError: of a thread, or of the store
        is_full = isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)
        raise SetupError(
            f"rank {request.rank}: the set-up of the links ended: {error}"
            + (" (ulimit -n)" if is_full else "")
        ) from error


class _Opening:
    """The steps of opening, in the order in which ``run`` calls them."""

    def __init__(self, request: Request, kind: str) -> None:
        self._rank, self._options = request.rank, request.options
        self._device, self._kind = request.device, kind
        self._board_ranks = list(request.board_ranks)
        self._board_counters = request.board_counters
        self._incoming, self._outgoing = request.incoming, request.outgoing
        self._library = load_native()
        self._facts: dict[int, Facts] = {}  # of the peers, and of all members of the board
        self._board: BoardHosts | None = None
        self._choices: dict[int, Choice] = {}
        self._notes: dict[int, str] = {}  # appended to the reasons of links

    def run(self, store: Store) -> NativeTransport:
        """Open the transport, or leave nothing behind."""
        others = self._channel_peers() | set(self._board_ranks) - {self._rank}
        with Rendezvous(store, self._rank, self._options, self._tcp_host()) as rendezvous:
            own = self._own_facts(rendezvous)
            self._facts = rendezvous.exchange(own, sorted(others))
            self._board = self._find_board(own)
            peers = self._peers()
            self._choices = {peer: self._choose(own, peer) for peer in peers}
            connections = rendezvous.connect(self._wanted_connections())
        native = self._make_native(len(peers))
        try:
            self._join(native, own, connections)
            native.start()
        except BaseException as error:
            # A peer that has finished its own set-up would take a goodbye alone for good order.
            native.abort(f"{type(error).__name__}: {error}")
            native.close()
            raise
        finally:
            for connection in connections.values():
                connection.close()
        return self._wrap(native, own)

    def _wrap(self, native: Any, own: Facts) -> NativeTransport:
        board = None
        if self._board is not None:
            board = NativeBoard(
                native,
                index=self._board_ranks.index(self._rank),
                size=len(self._board_ranks),
                spans_hosts=len(self._board.heads) > 1,
            )
        notes = self._notes
        links = [
            LinkInfo(
                peer,
                how.kind.name,
                Text(how.reason + notes.get(peer, ""), how.reason, notes.get(peer)),
                self._facts[peer].pid if self._facts[peer].host == own.host else 0,
            )
            for peer, how in self._choices.items()
        ]
        return NativeTransport(
            native,
            rank=self._rank,
            incoming=self._incoming,
            outgoing=self._outgoing,
            device=self._device,
            links=links,
            board=board,
            in_place={
                peer for peer, how in self._choices.items() if how.kind.device_memory and own.gpu
            },
            abandon_after=self._options.abandon_after,
        )

    def _channel_peers(self) -> set[int]:
        peers = {spec.source for spec in self._incoming}
        peers |= {spec.destination for spec in self._outgoing}
        if self._rank in peers:
            raise ConfigError(f"rank {self._rank} has a channel to itself beside others")
        return peers

    def _peers(self) -> list[int]:
        return sorted(self._channel_peers() | set(self._board.partners if self._board else ()))

    def _find_board(self, own: Facts) -> BoardHosts | None:
        if not self._board_ranks:
            return None
        host_of = {rank: facts.host for rank, facts in self._facts.items()} | {self._rank: own.host}
        return hosts_of(self._rank, self._board_ranks, host_of)

    def _tcp_host(self) -> str | None:
        """The address to listen on for other hosts; None for no address."""
        forced = self._kind != AUTO and find(self._kind).between_hosts
        return self._options.node_ips or (_LOOPBACK if forced else None)

    def _own_facts(self, rendezvous: Rendezvous) -> Facts:
        gpu, gpu_access = gpu_facts(self._library, self._device)
        return Facts(
            rank=self._rank,
            abi=self._library.abi_version,
            host=host_identity(),
            hostname=platform.node(),
            uid=os.getuid(),
            pid=os.getpid(),
            device=self._device.type,
            unix_address=rendezvous.unix_address,
            tcp_address=rendezvous.tcp_address,
            settings={
                name: getattr(self._options, name)
                for name in ("checksum", "workload", "tcp_connections")
            },
            gpu=gpu,
            gpu_access=gpu_access,
            found={
                kind.name: kind.look(self._library, self._tcp_host(), self._options, self._device)
                for kind in kinds_of_links(self._kind)
                if kind.look
            },
        )

    def _choose(self, own: Facts, peer: int) -> Choice:
        if peer in self._channel_peers():
            return choose(own, self._facts[peer], kinds_of_links(self._kind), self._kind)
        return choose(own, self._facts[peer], kinds_of_boards())

    def _wanted_connections(self) -> list[tuple[Facts, str, bool]]:
        return [
            (self._facts[peer], purpose, choice.kind.between_hosts)
            for peer, choice in self._choices.items()
            for purpose in (CONTROL, *choice.connections(self._options))
        ]

    def _make_native(self, num_peers: int) -> Any:
        spin = self._options.spin
        if spin is None:
            # With fewer cores than ranks, a spinning rank takes the core that its peer needs.
            local = int(os.environ.get("LOCAL_WORLD_SIZE", num_peers + 1))
            spin = len(os.sched_getaffinity(0)) >= local
        return self._library.Transport(
            rank=self._rank,
            timeout=self._options.timeout,
            checksum=self._options.checksum,
            max_pending=self._options.max_pending,
            spin=spin,
            incoming=[_as_tuple(spec) for spec in self._incoming],
            outgoing=[_as_tuple(spec) for spec in self._outgoing],
        )

    def _join(
        self, native: Any, own: Facts, connections: dict[tuple[int, str], Connection]
    ) -> None:
        """Make all links; every round first sends to all peers, then receives from all."""
        links = {peer: self._link(peer, connections) for peer in self._choices}
        for peer, link in links.items():
            between_hosts = self._choices[peer].kind.between_hosts
            link.send({}, () if between_hosts else [native.bell_fd()])
        for peer, link in links.items():
            count = 0 if self._choices[peer].kind.between_hosts else 1
            self._add_peer(native, connections[peer, CONTROL], link.receive_fds(count))
        board_fd = -1
        board = self._board
        if board is not None and board.is_head:
            leader = -1 if board.upstream is None else board.upstream
            board_fd = native.make_board(self._board_counters, board.followers, board.hosts, leader)
        for link in links.values():
            self._send_offer(link, board_fd)
        for link in links.values():
            self._receive_offer(native, link)
        gpu = device_index(self._device) if own.gpu else -1
        setup = Setup(
            extension=self._library, native=native, options=self._options, facts=own, gpu=gpu,
            peer_facts=self._facts,
            has_other_kind={peer for peer, choice in self._choices.items() if choice.instead},
        )  # fmt: skip
        self._join_kinds(setup, list(links.values()))

    def _link(self, peer: int, connections: dict[tuple[int, str], Connection]) -> PeerLink:
        control = connections[peer, CONTROL].sock
        control.settimeout(self._options.setup_timeout)
        purposes = self._choices[peer].connections(self._options)
        return PeerLink(
            rank=self._rank,
            peer=peer,
            sock=control,
            incoming=_channels_with(self._incoming, peer),
            outgoing=_channels_with(self._outgoing, peer),
            data=[connections[peer, use].sock for use in purposes],
        )

    def _join_kinds(self, setup: Setup, links: Sequence[PeerLink]) -> None:
        """Join the links kind by kind; all ranks go through the kinds in one order."""
        for kind in kinds_of_links():
            mine = [link for link in links if self._choices[link.peer].kind is kind]
            if mine and kind.join:
                self._notes |= kind.join(setup, mine)
                self._fall_back(setup)

    def _fall_back(self, setup: Setup) -> None:
        """Give the links whose set-up has failed, which both ends know, to the next kind."""
        for peer, why in setup.failed.items():
            failed = self._choices[peer]
            assert failed.instead is not None
            before = failed.instead.reason
            reason = Text(f"{before} [{failed.kind.name}: {why}]", before, why)
            self._choices[peer] = dataclasses.replace(failed.instead, reason=reason)
            setup.native.describe_peer(peer, self._description(peer))
        setup.failed.clear()

    def _add_peer(self, native: Any, control: Connection, fds: list[int]) -> None:
        peer = control.peer
        try:
            socket_fd = os.dup(control.sock.fileno())
        except OSError:
            for fd in fds:
                os.close(fd)
            raise
        pidfd, control.pidfd = control.pidfd, -1
        bell_fd = fds[0] if fds else -1
        native.add_peer(peer, self._description(peer), socket_fd, pidfd, bell_fd)

    def _description(self, peer: int) -> str:
        """A peer's name in errors."""
        facts, kind = self._facts[peer], self._choices[peer].kind.name
        return f"rank {peer} (pid {facts.pid} on {facts.hostname}, {kind})"

    def _send_offer(self, link: PeerLink, board_fd: int) -> None:
        message: dict[str, Any] = {"channels": _digest(self._incoming, link.incoming)}
        fds = []
        if self._board is not None and link.peer in self._board.partners:
            message["board"] = self._board_shape()
            if link.peer in self._board.followers:
                fds.append(board_fd)
        link.send(message, fds)

    def _receive_offer(self, native: Any, link: PeerLink) -> None:
        board = self._board
        follows = board is not None and not board.is_head and link.peer == board.upstream
        message, fds = link.receive(int(follows))
        try:
            self._compare_offer(message, link)
            if board is not None and follows:
                link.require_fds(fds, 1)
                index, lines = board.members.index(self._rank), board.num_lines
                native.use_board(
                    fds.pop(), index, lines, self._board_counters, link.peer, board.is_relayed
                )
        finally:
            for fd in fds:
                os.close(fd)

    def _board_shape(self) -> list[int]:
        return [len(self._board_ranks), self._board_counters]

    def _compare_offer(self, message: dict[str, Any], link: PeerLink) -> None:
        ours = _digest(self._outgoing, link.outgoing)
        theirs = message.get("channels")
        if theirs != ours:
            raise VersionMismatch(
                f"rank {self._rank} wants to send on the channels {ours}, rank {link.peer} has "
                f"opened {theirs} (chunk, direction, slot bytes, depth; of many, number and "
                "hash); start both with equal settings"
            )
        partner = self._board is not None and link.peer in self._board.partners
        if partner and message.get("board") != self._board_shape():
            raise VersionMismatch(
                f"rank {self._rank} expects a board of {self._board_shape()} (members, counters), "
                f"rank {link.peer} has {message.get('board')}"
            )


def _channels_with(specs: Sequence[ChannelSpec], peer: int) -> list[int]:
    """Indices of the channels with one peer, in the order on which both sides agree."""
    mine = [i for i, spec in enumerate(specs) if peer in (spec.source, spec.destination)]
    return sorted(mine, key=lambda i: (specs[i].chunk, specs[i].direction))


def _digest(specs: Sequence[ChannelSpec], indices: Sequence[int]) -> list[Any]:
    """The text that both ends of a link compare: channels or, of more than a message has room
    for, their number and a hash."""
    listed = [list(_as_tuple(specs[index])[2:]) for index in indices]
    text = json.dumps(listed)
    if len(text) <= _LONGEST_LIST:
        return listed
    return [len(listed), hashlib.sha256(text.encode()).hexdigest()]


def _as_tuple(spec: ChannelSpec) -> tuple[int, int, int, int, int, int]:
    return (
        spec.source,
        spec.destination,
        spec.chunk,
        int(spec.direction),
        spec.slot_bytes,
        spec.depth,
    )

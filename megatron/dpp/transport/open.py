"""Opens a transport: meets the peers, chooses a kind for each link, joins the links.

Each link first exchanges bells (one host only) and *offers* over its authenticated control
connection: the channels that a side receives, and the stage's board if it leads one. Then each kind
joins its links, and C++ takes the connections over.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import json
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._distributed_c10d import Store

from megatron.dpp.errors import (
    ConfigError,
    SetupError,
    Text,
    TransportUnavailable,
    VersionMismatch,
    number_fault,
    setting,
)
from megatron.dpp.transport.base import ChannelSpec, LinkInfo, Transport
from megatron.dpp.transport.handshake import Connection
from megatron.dpp.transport.joining import BoardHosts, Facts, PeerLink, Request, Setup
from megatron.dpp.transport.kinds import (
    AUTO,
    TransportKind,
    find,
    kinds_of_boards,
    kinds_of_links,
)
from megatron.dpp.transport.meet import CONTROL, Meeting, host_identity
from megatron.dpp.transport.native import (
    NativeBoard,
    NativeTransport,
    device_index,
    load_native,
)
from megatron.dpp.transport.options import TransportOptions

_LOOPBACK = "127.0.0.1"
_MOST_COUNTERS = 1 << 20
_LONGEST_LIST = 2000
"""Characters of a list of channels that a set-up message holds beside its other fields."""


def open_transport(
    channels: Sequence[ChannelSpec],
    *,
    rank: int,
    store: Store | None,
    device: torch.device | str = "cpu",
    kind: str = AUTO,
    options: TransportOptions | None = None,
    board_ranks: Sequence[int] | None = None,
    board_counters: int = 0,
) -> Transport:
    """Open this rank's side of its channels; returns when all of its peers have opened theirs.

    Args:
        channels: every channel that this rank sends or receives; both ends must name equal specs.
        rank: this process's global rank.
        store: where the job's ranks find each other; None where this rank has no links.
        device: where ``take`` puts tensors.
        kind: ``auto`` chooses per link and says why in ``links()``; any other kind is used or is an
            error.
        options: see :class:`TransportOptions`.
        board_ranks: the global ranks of one pipeline stage, leader first; gives
            ``transport.board``.
        board_counters: how many counters each member of the board posts.

    Raises:
        ConfigError: ``channels`` do not concern ``rank``, or ``kind`` is unknown.
        TransportUnavailable: ``kind`` is not possible on a link; the message says why.
        SetupError, AuthError, VersionMismatch: see ``errors.py``.
    """
    for spec in channels:
        if rank not in (spec.source, spec.destination) or spec.source == spec.destination:
            raise ConfigError(
                f"rank {rank} shares the channel {spec} with no other rank: a pipeline of one rank "
                "has one chunk"
            )
    if fault := number_fault(board_counters, 0, _MOST_COUNTERS):
        raise ConfigError(f"board_counters {fault}")
    request = Request(
        channels=channels,
        rank=rank,
        store=store,
        device=torch.device(device),
        options=options or TransportOptions(),
        board_ranks=tuple(board_ranks or ()),
        board_counters=board_counters,
    )
    if store is None and request.others:
        raise ConfigError(f"rank {rank} has links with other ranks and no store to find them")
    own = None if kind == AUTO else find(kind).open
    return own(request) if own else open_native(request, kind)


def open_native(request: Request, kind: str) -> NativeTransport:
    """Open a transport with links of ``kind`` (``auto``: of suitable kinds).

    Raises:
        SetupError: the system refused a descriptor, a thread or a socket, or the store is gone.
        TransportError: see ``errors.py``.
    """
    try:
        return _Opening(request, kind).run()
    except (OSError, RuntimeError) as error:  # RuntimeError: of a thread, or of the store
        is_full = isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)
        raise SetupError(
            f"rank {request.rank}: the set-up of the links ended: {error}"
            + (" (ulimit -n)" if is_full else "")
        ) from error


@dataclass(frozen=True)
class Choice:
    """The kind of a link, and why it was taken."""

    kind: TransportKind
    reason: str
    instead: Choice | None = None
    """The next kind, for a kind whose set-up may fail."""

    def connections(self, options: TransportOptions) -> tuple[str, ...]:
        """Purposes of the connections that the link may need besides the control connection."""
        own = self.kind.connections(options)
        return own + (self.instead.connections(options) if self.instead else ())


def choose(own: Facts, peer: Facts, kinds: Sequence[TransportKind], wanted: str = AUTO) -> Choice:
    """The first of ``kinds`` that can link two ranks: a pure function, equal on both.

    Args:
        wanted: ``DppConfig.transport``.

    Raises:
        TransportUnavailable: none of them can; says why.
    """
    one, other = sorted((own, peer), key=lambda facts: facts.rank)
    obstacles: list[str] = []
    passed_over = ""  # why a better kind for other hosts is not possible
    for index, kind in enumerate(kinds):
        assert kind.obstacle is not None
        against = kind.obstacle(one, other)
        if against is None:
            note = ""
            if any(s.device != "cpu" and not (kind.device_memory and s.gpu) for s in (one, other)):
                note = "; CUDA tensors pass through the host's memory"
            if kind.between_hosts and passed_over:
                note = Text(f"{note} [{passed_over}]", passed_over)
            if wanted != AUTO:
                return Choice(kind, Text(f"asked for: {wanted}{note}", note))
            instead = choose(own, peer, kinds[index + 1 :]) if kind.may_fail else None
            return Choice(kind, Text(kind.reason + note, note), instead)
        obstacles.append(Text(f"{kind.name}: {against}", against))
        if kind.between_hosts:
            passed_over = obstacles[-1]
    transport = setting("transport", wanted)
    raise TransportUnavailable(
        f"{transport} between rank {one.rank} ({one.hostname}) and rank {other.rank} "
        f"({other.hostname}): {'; '.join(obstacles) or 'it links no ranks'}",
        transport,
        *obstacles,
    )


def gpu_facts(library: Any, device: torch.device) -> tuple[str, dict[str, bool]]:
    """The UUID of our GPU, and for each visible GPU whether ours can write into its memory.

    Empty without a GPU, or without NVIDIA's driver.
    """
    if device.type != "cuda":
        return "", {}
    try:
        own = library.CudaDevice(device_index(device))
    except TransportUnavailable:
        return "", {}
    return own.uuid, {uuid: own.access_to(uuid) in ("same", "yes") for uuid in own.visible()}


class _Opening:
    """The steps of opening, in the order in which ``run`` calls them."""

    def __init__(self, request: Request, kind: str) -> None:
        self._request, self._kind = request, kind
        self._rank, self._options = request.rank, request.options
        self._board_ranks = list(request.board_ranks)
        self._incoming, self._outgoing = request.incoming, request.outgoing
        self._library = load_native()
        self._own: Facts | None = None
        self._facts: dict[int, Facts] = {}  # of the peers, and of all members of the board
        self._host_of = {request.rank: host_identity()}
        self._board: BoardHosts | None = None
        self._choices: dict[int, Choice] = {}
        self._in_place: set[int] = set()

    def run(self) -> NativeTransport:
        """Open the transport, or leave nothing behind."""
        connections: dict[tuple[int, str], Connection] = {}
        if self._request.others:
            connections = self._meet()
        elif self._board_ranks:
            self._board = BoardHosts.of(self._rank, self._board_ranks, self._host_of)
        native = self._make_native()
        try:
            self._join(native, connections)
            native.start()
        except BaseException as error:
            # A peer that has finished its own set-up would take a goodbye alone for good order.
            native.abort(f"{type(error).__name__}: {error}")
            native.close()
            raise
        finally:
            for connection in connections.values():
                connection.close()
        return self._wrap(native)

    def _meet(self) -> dict[tuple[int, str], Connection]:
        """Choose the kinds of all links, and connect."""
        store = self._request.store
        with Meeting(store, self._rank, self._options, self._tcp_host()) as meeting:
            self._own = own = self._own_facts(meeting)
            self._facts = meeting.exchange(own, sorted(self._request.others))
            self._host_of |= {rank: facts.host for rank, facts in self._facts.items()}
            if self._board_ranks:
                self._board = BoardHosts.of(self._rank, self._board_ranks, self._host_of)
            partners = self._board.partners if self._board else ()
            for peer in sorted({*self._request.peers, *partners}):
                is_peer = peer in self._request.peers
                kinds = kinds_of_links(self._kind) if is_peer else kinds_of_boards()
                wanted = self._kind if is_peer else AUTO
                self._choices[peer] = choose(own, self._facts[peer], kinds, wanted)
            return meeting.connect(
                [
                    (self._facts[peer], purpose, choice.kind.between_hosts)
                    for peer, choice in self._choices.items()
                    for purpose in (CONTROL, *choice.connections(self._options))
                ]
            )

    def _wrap(self, native: Any) -> NativeTransport:
        board = None
        if self._board is not None:
            board = NativeBoard(
                native,
                index=self._board_ranks.index(self._rank),
                size=len(self._board_ranks),
                spans_hosts=self._board.spans_hosts,
            )
        here = self._host_of[self._rank]
        return NativeTransport(
            native,
            self._request,
            links=[
                LinkInfo(
                    peer,
                    choice.kind.name,
                    choice.reason,
                    self._facts[peer].pid if self._host_of[peer] == here else 0,
                )
                for peer, choice in self._choices.items()
            ],
            board=board,
            in_place=self._in_place,
        )

    def _tcp_host(self) -> str | None:
        """The address to listen on for other hosts; None for no address."""
        forced = self._kind != AUTO and find(self._kind).between_hosts
        return self._options.node_ips or (_LOOPBACK if forced else None)

    def _own_facts(self, meeting: Meeting) -> Facts:
        options, device = self._options, self._request.device
        gpu, gpu_access = gpu_facts(self._library, device)
        return Facts(
            rank=self._rank,
            abi=self._library.abi_version,
            host=self._host_of[self._rank],
            hostname=platform.node(),
            uid=os.getuid(),
            pid=os.getpid(),
            device=device.type,
            unix_address=meeting.unix_address,
            tcp_address=meeting.tcp_address,
            token=meeting.token_name,
            settings={
                name: getattr(options, name) for name in ("checksum", "workload", "tcp_connections")
            },
            gpu=gpu,
            gpu_access=gpu_access,
            found={
                kind.name: kind.look(self._library, self._tcp_host(), options, device)
                for kind in kinds_of_links(self._kind)
                if kind.look
            },
        )

    def _make_native(self) -> Any:
        spin = self._options.spin
        if spin is None:
            # With fewer cores than ranks, a spinning rank takes the core that its peer needs.
            local = int(os.environ.get("LOCAL_WORLD_SIZE", len(self._choices) + 1))
            spin = len(os.sched_getaffinity(0)) >= local
        return self._library.Transport(
            rank=self._rank,
            timeout=self._options.timeout,
            checksum=self._options.checksum,
            max_pending=self._options.max_pending,
            spin=spin,
            incoming=[dataclasses.astuple(spec) for spec in self._incoming],
            outgoing=[dataclasses.astuple(spec) for spec in self._outgoing],
        )

    def _join(self, native: Any, connections: dict[tuple[int, str], Connection]) -> None:
        """Make all links; every round first sends to all peers, then receives from all."""
        links = {peer: self._link(peer, connections) for peer in self._choices}
        on_this_host = {p for p, choice in self._choices.items() if not choice.kind.between_hosts}
        for peer, link in links.items():
            link.send({}, [native.bell_fd()] if peer in on_this_host else ())
        for peer, link in links.items():
            _, bell = link.receive(int(peer in on_this_host))
            self._add_peer(native, connections[peer, CONTROL], bell)
        board_fd = -1
        board = self._board
        if board is not None and board.is_head:
            leader = -1 if board.upstream is None else board.upstream
            counters = self._request.board_counters
            board_fd = native.make_board(counters, board.followers, board.hosts, leader)
        for link in links.values():
            self._send_offer(link, board_fd)
        for link in links.values():
            self._receive_offer(native, link)
        if self._own is not None:
            self._join_kinds(native, self._own, links)

    def _join_kinds(self, native: Any, own: Facts, links: dict[int, PeerLink]) -> None:
        setup = Setup(
            extension=self._library, native=native, options=self._options, facts=own,
            gpu=device_index(self._request.device) if own.gpu else -1, peer_facts=self._facts,
            has_other_kind={peer for peer, choice in self._choices.items() if choice.instead},
        )  # fmt: skip
        for kind in kinds_of_links():  # in one order on all ranks
            mine = [link for peer, link in links.items() if self._choices[peer].kind is kind]
            if mine and kind.join:
                for peer, note in kind.join(setup, mine).items():
                    reason = self._choices[peer].reason
                    self._choices[peer] = dataclasses.replace(
                        self._choices[peer], reason=Text(reason + note, reason, note)
                    )
                self._fall_back(setup)
        if own.gpu:
            self._in_place = {p for p, how in self._choices.items() if how.kind.device_memory}

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

    def _add_peer(self, native: Any, control: Connection, bell: list[int]) -> None:
        peer = control.peer
        with contextlib.ExitStack() as stack:
            for fd in bell:
                stack.callback(os.close, fd)
            socket_fd = os.dup(control.sock.fileno())
            stack.pop_all()
        pidfd, control.pidfd = control.pidfd, -1
        native.add_peer(peer, self._description(peer), socket_fd, pidfd, bell[0] if bell else -1)

    def _description(self, peer: int) -> str:
        """A peer's name in errors."""
        facts, kind = self._facts[peer], self._choices[peer].kind.name
        return f"rank {peer} (pid {facts.pid} on {facts.hostname}, {kind})"

    def _board_shape(self, peer: int) -> list[int] | None:
        """Members and counters of the board that this rank and a peer share; None for none."""
        if self._board is None or peer not in self._board.partners:
            return None
        return [len(self._board_ranks), self._request.board_counters]

    def _send_offer(self, link: PeerLink, board_fd: int) -> None:
        offer = {
            "channels": _digest(self._incoming, link.incoming),
            "board": self._board_shape(link.peer),
        }
        follows = self._board is not None and link.peer in self._board.followers
        link.send(offer, [board_fd] if follows else ())

    def _receive_offer(self, native: Any, link: PeerLink) -> None:
        board = self._board
        follows = board is not None and not board.is_head and link.peer == board.upstream
        message, fds = link.receive(int(follows))
        try:
            self._compare_offer(message, link)
            if board is not None and follows:
                index, counters = board.members.index(self._rank), self._request.board_counters
                native.use_board(
                    fds.pop(), index, board.num_lines, counters, link.peer, board.is_relayed
                )
        finally:
            for fd in fds:
                os.close(fd)

    def _compare_offer(self, message: dict[str, Any], link: PeerLink) -> None:
        ours, theirs = _digest(self._outgoing, link.outgoing), message.get("channels")
        if theirs != ours:
            raise VersionMismatch(
                f"rank {self._rank} wants to send on the channels {ours}, rank {link.peer} has "
                f"opened {theirs} (chunk, direction, slot bytes, depth; of many, number and "
                "hash); start both with equal settings"
            )
        shape = self._board_shape(link.peer)
        if shape is not None and message.get("board") != shape:
            raise VersionMismatch(
                f"rank {self._rank} expects a board of {shape} (members, counters), "
                f"rank {link.peer} has {message.get('board')}"
            )


def _channels_with(specs: Sequence[ChannelSpec], peer: int) -> list[int]:
    """Indices of the channels with one peer, in the order on which both sides agree."""
    mine = [i for i, spec in enumerate(specs) if peer in (spec.source, spec.destination)]
    return sorted(mine, key=lambda i: (specs[i].chunk, specs[i].direction))


def _digest(specs: Sequence[ChannelSpec], indices: Sequence[int]) -> list[Any]:
    """The text that both ends of a link compare: channels or, of more than a message has room
    for, their number and a hash."""
    listed = [list(map(int, dataclasses.astuple(specs[index])))[2:] for index in indices]
    text = json.dumps(listed)
    if len(text) <= _LONGEST_LIST:
        return listed
    return [len(listed), hashlib.sha256(text.encode()).hexdigest()]

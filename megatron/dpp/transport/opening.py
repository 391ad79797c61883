"""Sets up a native transport: meets the peers, chooses a kind per link, exchanges slots.

Per link, over its authenticated control connection: first the bells (one host only), then an
*offer* from each side: the channels that it receives, with what the kind needs to send into them,
and the stage's board if it leads one. Only then does C++ take the connections over.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from typing import Any

import torch
from torch._C._distributed_c10d import Store

from megatron.dpp.errors import (
    ConfigError,
    ProtocolError,
    TransportUnavailable,
    VersionMismatch,
)
from megatron.dpp.transport import handshake
from megatron.dpp.transport.base import ChannelSpec, LinkInfo
from megatron.dpp.transport.choose import GPU_KINDS, Choice, Facts, choose
from megatron.dpp.transport.gpu import GpuLink, GpuLinks, device_index, gpu_facts
from megatron.dpp.transport.native import NativeBoard, NativeTransport, load_native
from megatron.dpp.transport.options import TransportOptions
from megatron.dpp.transport.rdma import Place, RdmaPeer, find_place, join_rdma
from megatron.dpp.transport.rendezvous import CONTROL, Connection, Rendezvous, host_identity

_DATA = ("data 0", "data 1")
"""Purposes of a link's connections; messages from 4 MiB up are spread over all of ``_DATA``."""

_BETWEEN_HOSTS = ("rdma", "tcp")
"""Kinds whose control connection is TCP, also when both ranks are on one host."""

_LOOPBACK = "127.0.0.1"


def open_native(
    channels: Sequence[ChannelSpec],
    *,
    rank: int,
    store: Store,
    device: torch.device,
    kind: str,
    options: TransportOptions,
    board_ranks: Sequence[int] | None = None,
    board_counters: int = 0,
) -> NativeTransport:
    """See :func:`megatron.dpp.transport.open_transport`."""
    board = list(board_ranks or ())
    return _Opening(channels, rank, device, kind, options, board, board_counters).run(store)


class _Opening:
    """The steps of opening, in the order in which ``run`` calls them."""

    def __init__(
        self,
        channels: Sequence[ChannelSpec],
        rank: int,
        device: torch.device,
        kind: str,
        options: TransportOptions,
        board_ranks: list[int],
        board_counters: int,
    ) -> None:
        self._rank = rank
        self._device = device
        self._kind = kind
        self._options = options
        self._board_ranks = board_ranks
        self._board_counters = board_counters
        self._incoming = [spec for spec in channels if spec.destination == rank]
        self._outgoing = [spec for spec in channels if spec.source == rank]
        self._library = load_native()
        self._facts: dict[int, Facts] = {}
        self._choices: dict[int, Choice] = {}
        self._place: Place | None = None
        self._gpu = -1  # the GPU whose tensors our links can read and write
        self._gpu_ways: dict[int, str] = {}  # how links reach it, for their reasons

    def run(self, store: Store) -> NativeTransport:
        """Open the transport, or leave nothing behind."""
        peers = self._peers()
        with Rendezvous(store, self._rank, self._options, self._tcp_host()) as rendezvous:
            own = self._own_facts(rendezvous)
            self._facts = rendezvous.exchange(own, peers)
            self._choices = {peer: self._choose(own, peer) for peer in peers}
            connections = rendezvous.connect(self._wanted_connections())
        native = self._make_native(len(peers))
        try:
            self._join(native, connections)
            native.start()
        except BaseException as error:
            # A peer that is done with its own set-up would take a mere goodbye for good order.
            native.abort(f"{type(error).__name__}: {error}")
            native.close()
            raise
        finally:
            for connection in connections.values():
                connection.close()
        return self._wrap(native)

    def _wrap(self, native: Any) -> NativeTransport:
        board = None
        if self._board_ranks:
            index = self._board_ranks.index(self._rank)
            board = NativeBoard(native, index, len(self._board_ranks))
        links = [
            LinkInfo(peer, how.kind, how.reason + self._gpu_ways.get(peer, ""))
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
            dtype_names=self._library.dtype_names,
            in_place={link.peer for link in links if self._in_place(link.kind)},
            abandon_after=self._options.abandon_after,
        )

    def _in_place(self, kind: str) -> bool:
        """Whether links of a kind carry CUDA tensors without help."""
        return kind in GPU_KINDS or (kind == "rdma" and self._gpu >= 0)

    def _peers(self) -> list[int]:
        peers = {spec.source for spec in self._incoming}
        peers |= {spec.destination for spec in self._outgoing}
        if self._rank in peers:
            raise ConfigError(f"rank {self._rank} has a channel to itself beside others")
        return sorted(peers | set(self._board_partners()))

    def _board_partners(self) -> list[int]:
        """The leader talks with all members, a follower with the leader."""
        if not self._board_ranks:
            return []
        leader, *followers = self._board_ranks
        return followers if self._rank == leader else [leader]

    def _tcp_host(self) -> str | None:
        """Where to listen for other hosts: nowhere unless told, or if such a kind is forced."""
        return self._options.node_ips or (_LOOPBACK if self._kind in _BETWEEN_HOSTS else None)

    def _find_place(self) -> str:
        """Sets our RDMA port; returns why there is none, where one would be of use."""
        if self._kind not in ("auto", "rdma"):
            return f"--dpp-transport {self._kind}"
        self._place, why = find_place(self._library, self._tcp_host())
        return why

    def _own_facts(self, rendezvous: Rendezvous) -> Facts:
        gpu, gpu_access = gpu_facts(self._library, self._device)
        self._gpu = device_index(self._device) if gpu else -1
        no_rdma = self._find_place()
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
            settings={"checksum": self._options.checksum, "workload": self._options.workload},
            gpu=gpu,
            gpu_access=gpu_access,
            rdma=self._place.network if self._place else "",
            no_rdma=no_rdma,
        )

    def _choose(self, own: Facts, peer: int) -> Choice:
        if peer in self._board_partners() and not self._carries_channels(peer):
            return choose(own, self._facts[peer], "shm")
        return choose(own, self._facts[peer], self._kind)

    def _carries_channels(self, peer: int) -> bool:
        specs = (*self._incoming, *self._outgoing)
        return any(peer in (spec.source, spec.destination) for spec in specs)

    def _wanted_connections(self) -> list[tuple[Facts, str, bool]]:
        wanted = []
        for peer, choice in self._choices.items():
            over_tcp = choice.kind in _BETWEEN_HOSTS
            purposes = (CONTROL, *_DATA) if choice.kind == "tcp" else (CONTROL,)
            wanted += [(self._facts[peer], purpose, over_tcp) for purpose in purposes]
        return wanted

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

    def _join(self, native: Any, connections: dict[tuple[int, str], Connection]) -> None:
        """Every step first sends to all peers, then receives from all: nobody waits in a circle."""
        controls = {peer: connections[peer, CONTROL] for peer in self._choices}
        for peer, control in controls.items():
            control.sock.settimeout(self._options.setup_timeout)
            shared = self._choices[peer].kind not in _BETWEEN_HOSTS
            with handshake.joining(self._rank, peer, control.sock):
                handshake.send_message(control.sock, {}, [native.bell_fd()] if shared else None)
        for peer, control in controls.items():
            with handshake.joining(self._rank, peer, control.sock):
                _, fds = handshake.receive_message(control.sock, 1)
            self._add_peer(native, peer, control, fds)
        board_fd = -1
        if self._board_ranks and self._rank == self._board_ranks[0]:
            size, followers = len(self._board_ranks), self._board_ranks[1:]
            board_fd = native.make_board(size, self._board_counters, followers)
        for peer, control in controls.items():
            self._send_offer(native, peer, control, board_fd)
        for peer, control in controls.items():
            self._receive_offer(native, peer, control)
            if self._choices[peer].kind == "tcp":
                data = [connections[peer, purpose].sock.detach() for purpose in _DATA]
                incoming = _channels_with(self._incoming, peer)
                native.add_tcp_link(peer, incoming, _channels_with(self._outgoing, peer), data)
        self._join_gpus(native, controls)
        self._join_rdma(native, controls)

    def _join_gpus(self, native: Any, controls: dict[int, Connection]) -> None:
        links = [
            GpuLink(
                peer,
                self._choices[peer].kind,
                control.sock,
                _channels_with(self._incoming, peer),
                _channels_with(self._outgoing, peer),
            )
            for peer, control in controls.items()
            if self._choices[peer].kind in GPU_KINDS
        ]
        if not links:
            return
        gpu = GpuLinks(self._library, native, self._rank, self._device, self._options)
        for peer, fault in gpu.join(links).items():
            self._gpu_ways[peer] = f"; nothing is launched ahead: {fault}"

    def _join_rdma(self, native: Any, controls: dict[int, Connection]) -> None:
        peers = [
            RdmaPeer(
                peer,
                control.sock,
                _channels_with(self._incoming, peer),
                _channels_with(self._outgoing, peer),
            )
            for peer, control in controls.items()
            if self._choices[peer].kind == "rdma"
        ]
        if peers and self._gpu < 0 and self._options.gpudirect == "on":
            raise TransportUnavailable(
                f"--dpp-gpudirect on: rank {self._rank} has no GPU of NVIDIA "
                f"(device {self._device})"
            )
        if peers and self._place:
            join_rdma(
                self._library, native, self._rank, self._place, self._options, peers, self._gpu
            )
            self._gpu_ways |= {p.peer: f"; {p.link.gpu_way}" for p in peers if p.link.gpu_way}

    def _add_peer(self, native: Any, peer: int, control: Connection, fds: list[int]) -> None:
        facts, kind = self._facts[peer], self._choices[peer].kind
        about = f"rank {peer} (pid {facts.pid} on {facts.hostname}, {kind})"
        socket_fd = os.dup(control.sock.fileno())
        pidfd, control.pidfd = control.pidfd, -1
        native.add_peer(peer, about, socket_fd, pidfd, fds[0] if fds else -1)

    def _send_offer(self, native: Any, peer: int, control: Connection, board_fd: int) -> None:
        indices = _channels_with(self._incoming, peer)
        message: dict[str, Any] = {"channels": _digest(self._incoming, indices)}
        fds = []
        if indices and self._choices[peer].kind == "shm":
            fds.append(native.make_shm_slots(peer, indices))
        if board_fd >= 0 and peer in self._board_ranks:
            message["board"] = [len(self._board_ranks), self._board_counters]
            fds.append(board_fd)
        with handshake.joining(self._rank, peer, control.sock):
            handshake.send_message(control.sock, message, fds)

    def _receive_offer(self, native: Any, peer: int, control: Connection) -> None:
        with handshake.joining(self._rank, peer, control.sock):
            message, fds = handshake.receive_message(control.sock, 2)
        try:
            self._compare_offer(message, peer)
            indices = _channels_with(self._outgoing, peer)
            if indices and self._choices[peer].kind == "shm":
                native.use_shm_slots(peer, indices, fds.pop(0))
            if self._board_ranks and peer == self._board_ranks[0]:
                index, size = self._board_ranks.index(self._rank), len(self._board_ranks)
                native.use_board(fds.pop(0), index, size, self._board_counters, peer)
        except IndexError as error:
            raise ProtocolError(
                f"rank {self._rank}: rank {peer} sent too few descriptors"
            ) from error
        finally:
            for fd in fds:
                os.close(fd)

    def _compare_offer(self, message: dict[str, Any], peer: int) -> None:
        ours = _digest(self._outgoing, _channels_with(self._outgoing, peer))
        theirs = message.get("channels")
        if theirs != ours:
            raise VersionMismatch(
                f"rank {self._rank} wants to send on the channels {ours}, rank {peer} has opened "
                f"{theirs} (chunk, direction, slot bytes, depth); start both with equal settings"
            )
        board = [len(self._board_ranks), self._board_counters]
        follows = bool(self._board_ranks) and peer == self._board_ranks[0]
        if follows and message.get("board") != board:
            raise VersionMismatch(
                f"rank {self._rank} expects a board of {board} (members, counters), rank {peer} "
                f"has {message.get('board')}"
            )


def _channels_with(specs: Sequence[ChannelSpec], peer: int) -> list[int]:
    """Indices of the channels with one peer, in the order on which both sides agree."""
    mine = [i for i, spec in enumerate(specs) if peer in (spec.source, spec.destination)]
    return sorted(mine, key=lambda i: (specs[i].chunk, specs[i].direction))


def _digest(specs: Sequence[ChannelSpec], indices: list[int]) -> list[list[int]]:
    return [list(_as_tuple(specs[index])[2:]) for index in indices]


def _as_tuple(spec: ChannelSpec) -> tuple[int, int, int, int, int, int]:
    return (
        spec.source,
        spec.destination,
        spec.chunk,
        int(spec.direction),
        spec.slot_bytes,
        spec.depth,
    )

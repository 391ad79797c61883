"""The Python face of the C++ transport: sets it up, and translates tensors to addresses.

Everything that happens per message is here or in C++; nothing per message allocates in C++. CUDA
tensors pass through the host unless a link's kind can read them in place.
"""

from __future__ import annotations

import os
import platform
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch._C._distributed_c10d import Store

from megatron.dpp.errors import (
    ConfigError,
    ProtocolError,
    TransferTimeout,
    TransportUnavailable,
    VersionMismatch,
)
from megatron.dpp.transport import handshake
from megatron.dpp.transport.base import (
    Board,
    ChannelSpec,
    LinkInfo,
    Message,
    Transport,
    check_payload,
)
from megatron.dpp.transport.options import TransportOptions
from megatron.dpp.transport.rendezvous import Connection, Facts, Rendezvous, host_identity


def load_native() -> Any:
    """The extension module; ``TransportUnavailable`` with what to do where it was not built."""
    try:
        from megatron.dpp.transport import _native  # type: ignore[attr-defined]
    except ImportError as error:
        raise TransportUnavailable(
            f"the C++ extension is not there ({error}); build it with "
            "`python setup.py build_ext --inplace` (needs g++), or use --dpp-transport dist"
        ) from error
    return _native


class _NativeBoard(Board):
    """The stage's board; see :class:`~megatron.dpp.transport.base.Board`."""

    def __init__(self, native: Any, index: int, size: int) -> None:
        self.index = index
        self.size = size
        self._native = native

    def post(self, counters: Sequence[int]) -> None:
        self._native.board_post(counters)

    def common(self) -> Sequence[int]:
        counters: list[int] = self._native.board_common()
        return counters

    def append(self, word: int) -> None:
        if not 0 <= word < 1 << 63:
            raise ValueError(f"board word {word} is outside 0..2**63-1")
        self._native.board_append(word)

    def next(self) -> int | None:
        word: int | None = self._native.board_next()
        return word


class NativeTransport(Transport):
    """One rank's channels in C++. Made by :func:`open_native`."""

    def __init__(
        self,
        native: Any,
        *,
        rank: int,
        incoming: Sequence[ChannelSpec],
        outgoing: Sequence[ChannelSpec],
        device: torch.device,
        links: Sequence[LinkInfo],
        board: Board | None,
        dtype_names: Sequence[str],
    ) -> None:
        self.rank = rank
        self.incoming = incoming
        self.outgoing = outgoing
        self.board = board
        self._native = native
        self._device = device
        self._staged = device.type != "cpu"
        self._links = links
        self._num_incoming = len(incoming)
        self._dtypes = [getattr(torch, name, None) for name in dtype_names]
        self._codes = {dtype: code for code, dtype in enumerate(self._dtypes) if dtype is not None}
        # Tensors whose copy is not done, per channel: (number of the put, tensor).
        self._kept: list[deque[tuple[int, torch.Tensor]]] = [deque() for _ in outgoing]
        self._num_kept = 0
        self._num_puts = [0] * len(outgoing)

    def put(
        self,
        channel: int,
        tensor: torch.Tensor,
        *,
        iteration: int,
        microbatch: int,
        part: int = 0,
        num_parts: int = 1,
    ) -> None:
        spec = self.outgoing[channel]
        check_payload(tensor, spec)
        if tensor.is_cuda:
            tensor = tensor.cpu()
        code = self._codes.get(tensor.dtype)
        if code is None or tensor.dim() > 8:
            raise ValueError(f"{spec}: cannot send {tensor.dtype} with {tensor.dim()} dimensions")
        pending = self._native.put(
            channel,
            tensor.data_ptr(),
            tensor.nbytes,
            code,
            tensor.shape,
            iteration,
            microbatch,
            part,
            num_parts,
            0,
        )
        self._num_puts[channel] += 1
        if pending:
            # detach(): the caller may replace tensor.data, the storage has to stay.
            self._kept[channel].append((self._num_puts[channel], tensor.detach()))
            self._num_kept += 1

    def poll(self) -> Sequence[int]:
        if self._num_kept:
            self._drop_sent()
        arrived: list[int] = self._native.poll(self._num_incoming)
        return arrived

    def _drop_sent(self) -> None:
        for channel, kept in enumerate(self._kept):
            if kept:
                done = self._native.done(channel)
                while kept and kept[0][0] <= done:
                    kept.popleft()
                    self._num_kept -= 1

    def take(self, channel: int) -> Message:
        code, shape, num_bytes, iteration, microbatch, part, num_parts, sent_ns, arrived_ns = (
            self._native.head(channel)
        )
        tensor = torch.empty(shape, dtype=self._dtypes[code])
        self._native.take(channel, tensor.data_ptr(), num_bytes, 0)
        if self._staged:
            tensor = tensor.to(self._device)
        return Message(tensor, iteration, microbatch, part, num_parts, sent_ns, arrived_ns)

    def wait(self, seconds: float) -> bool:
        changed: bool = self._native.wait(seconds)
        return changed

    def ring(self) -> None:
        """End ``wait`` from another thread of this process."""
        self._native.ring()

    def pending(self) -> int:
        self._native.check()
        self._drop_sent()
        pending: int = self._native.pending()
        return pending

    def flush(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while True:
            self._native.poll(
                self._num_incoming
            )  # first, so that what finishes later ends the wait
            left = self.pending()
            if left == 0:
                return
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise TransferTimeout(
                    f"rank {self.rank}: {left} puts are still pending after {seconds:g} s; their receivers are "
                    "alive but take nothing (--dpp-timeout)"
                )
            self._native.wait(remaining)

    def links(self) -> Sequence[LinkInfo]:
        return self._links

    def departed(self, peer: int) -> bool:
        left: bool = self._native.departed(peer)
        return left

    def abort(self, reason: str) -> None:
        self._native.abort(reason)

    def close(self) -> None:
        self._native.close()
        for kept in self._kept:
            kept.clear()
        self._num_kept = 0


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
    return _Opening(
        channels, rank, store, device, kind, options, list(board_ranks or ()), board_counters
    ).run()


class _Opening:
    """The steps of opening, in the order in which they are called by ``run``."""

    def __init__(
        self,
        channels: Sequence[ChannelSpec],
        rank: int,
        store: Store,
        device: torch.device,
        kind: str,
        options: TransportOptions,
        board_ranks: list[int],
        board_counters: int,
    ) -> None:
        self._rank = rank
        self._store = store
        self._device = device
        self._kind = kind
        self._options = options
        self._board_ranks = board_ranks
        self._board_counters = board_counters
        self._incoming = [spec for spec in channels if spec.destination == rank]
        self._outgoing = [spec for spec in channels if spec.source == rank]
        self._library = load_native()

    def run(self) -> NativeTransport:
        """Open the transport or leave nothing behind."""
        peers = self._peers()
        with Rendezvous(self._store, self._rank, self._options) as rendezvous:
            facts = rendezvous.exchange(self._own_facts(rendezvous), peers)
            links = [self._choose(facts[peer]) for peer in peers]
            connections = rendezvous.connect(facts)
        native = self._make_native(len(peers))
        try:
            self._join(native, connections, facts)
            native.start()
        except BaseException:
            native.close()
            raise
        finally:
            for connection in connections.values():
                connection.sock.close()
        board = None
        if self._board_ranks:
            index = self._board_ranks.index(self._rank)
            board = _NativeBoard(native, index, len(self._board_ranks))
        return NativeTransport(
            native,
            rank=self._rank,
            incoming=self._incoming,
            outgoing=self._outgoing,
            device=self._device,
            links=links,
            board=board,
            dtype_names=self._library.dtype_names,
        )

    def _peers(self) -> list[int]:
        peers = {spec.source for spec in self._incoming}
        peers |= {spec.destination for spec in self._outgoing}
        peers |= set(self._board_partners())
        if self._rank in peers:
            raise ConfigError(
                f"rank {self._rank} has a channel to itself beside channels to others"
            )
        return sorted(peers)

    def _board_partners(self) -> list[int]:
        """The leader talks with all members, a follower with the leader."""
        if not self._board_ranks:
            return []
        leader, *followers = self._board_ranks
        return followers if self._rank == leader else [leader]

    def _own_facts(self, rendezvous: Rendezvous) -> Facts:
        return Facts(
            rank=self._rank,
            abi=self._library.abi_version,
            host=host_identity(),
            hostname=platform.node(),
            uid=os.getuid(),
            pid=os.getpid(),
            device=self._device.type,
            unix_address=rendezvous.unix_address,
            settings={"checksum": self._options.checksum, "workload": self._options.workload},
        )

    def _choose(self, peer: Facts) -> LinkInfo:
        if self._kind not in ("auto", "shm"):
            raise TransportUnavailable(
                f"--dpp-transport {self._kind}: not possible between rank {self._rank} and rank {peer.rank}"
            )
        if peer.host != host_identity():
            raise TransportUnavailable(
                f"rank {self._rank} and rank {peer.rank} ({peer.hostname}) are on different hosts: shm cannot reach"
            )
        return LinkInfo(peer.rank, "shm", f"same host ({peer.hostname}): shared memory")

    def _make_native(self, num_peers: int) -> Any:
        spin = self._options.spin
        if spin is None:
            # With fewer cores than ranks, a spinning rank takes the core that its peer needs.
            local = int(os.environ.get("LOCAL_WORLD_SIZE", num_peers + 1))
            spin = len(os.sched_getaffinity(0)) > local
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
        self, native: Any, connections: dict[int, Connection], facts: dict[int, Facts]
    ) -> None:
        """Exchange offers (slots, bells, the board) with every peer: first all sends, then all
        receives.
        """
        for peer in connections:
            connections[peer].sock.settimeout(self._options.setup_timeout)
        for connection in connections.values():
            handshake.send_message(connection.sock, {"bell": True}, [native.bell_fd()])
        for peer, connection in connections.items():
            _, fds = handshake.receive_message(connection.sock, 1)
            about = f"rank {peer} (pid {facts[peer].pid} on {facts[peer].hostname}, shm)"
            socket_fd = os.dup(connection.sock.fileno())
            native.add_peer(peer, about, socket_fd, connection.pidfd, fds[0] if fds else -1)
        board_fd = -1
        if self._board_ranks and self._rank == self._board_ranks[0]:
            board_fd = native.make_board(
                len(self._board_ranks), self._board_counters, self._board_ranks[1:]
            )
        for peer, connection in connections.items():
            self._send_offer(native, peer, connection, board_fd)
        for peer, connection in connections.items():
            self._receive_offer(native, peer, connection)

    def _send_offer(self, native: Any, peer: int, connection: Connection, board_fd: int) -> None:
        indices = _channels_with(self._incoming, peer)
        message: dict[str, Any] = {"channels": [_as_tuple(self._incoming[i]) for i in indices]}
        fds = []
        if indices:
            fds.append(native.make_shm_slots(peer, indices))
        if board_fd >= 0 and peer in self._board_ranks:
            message["board"] = [len(self._board_ranks), self._board_counters]
            fds.append(board_fd)
        handshake.send_message(connection.sock, message, fds)

    def _receive_offer(self, native: Any, peer: int, connection: Connection) -> None:
        message, fds = handshake.receive_message(connection.sock, 2)
        try:
            self._compare_offer(message, peer)
            indices = _channels_with(self._outgoing, peer)
            if indices:
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
        indices = _channels_with(self._outgoing, peer)
        ours = [list(_as_tuple(self._outgoing[i])) for i in indices]
        theirs = message.get("channels")
        if theirs != ours:
            raise VersionMismatch(
                f"rank {self._rank} wants to send on the channels {ours}, rank {peer} has opened {theirs} "
                "(source, destination, chunk, direction, slot bytes, depth); start both with equal "
                "settings"
            )
        board = [len(self._board_ranks), self._board_counters]
        if self._board_ranks and peer == self._board_ranks[0] and message.get("board") != board:
            raise VersionMismatch(
                f"rank {self._rank} expects a board of {board} (members, counters), rank {peer} has "
                f"{message.get('board')}"
            )


def _channels_with(specs: Sequence[ChannelSpec], peer: int) -> list[int]:
    """Indices of the channels with one peer, in the order on which both sides agree."""
    mine = [i for i, spec in enumerate(specs) if peer in (spec.source, spec.destination)]
    return sorted(mine, key=lambda i: (specs[i].chunk, specs[i].direction))


def _as_tuple(spec: ChannelSpec) -> tuple[int, int, int, int, int, int]:
    return (
        spec.source,
        spec.destination,
        spec.chunk,
        int(spec.direction),
        spec.slot_bytes,
        spec.depth,
    )

"""The objects that all kinds share while links are set up: requests, facts, links.

Per message nothing of this runs.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron.dpp.errors import (
    ProtocolError,
    TransportError,
)
from megatron.dpp.transport.base import ChannelSpec
from megatron.dpp.transport.messages import fitting, joining, receive_message, send_message
from megatron.dpp.transport.options import TransportOptions

_SEED_BITS = 63


@dataclass(frozen=True, kw_only=True)
class Request:
    """The arguments of ``open_transport``, except ``kind``."""

    channels: Sequence[ChannelSpec]
    rank: int
    store: Any
    device: torch.device
    options: TransportOptions
    board_ranks: Sequence[int]
    board_counters: int

    @property
    def peers(self) -> set[int]:
        """The other ends of the channels."""
        return {
            spec.destination if spec.source == self.rank else spec.source for spec in self.channels
        }

    @property
    def others(self) -> set[int]:
        """The peers, and the other members of the board."""
        return (self.peers | {*self.board_ranks}) - {self.rank}

    @property
    def outgoing(self) -> list[ChannelSpec]:
        """The channels on which this rank sends."""
        return [spec for spec in self.channels if spec.source == self.rank]

    @property
    def incoming(self) -> list[ChannelSpec]:
        """The channels on which this rank receives."""
        return [spec for spec in self.channels if spec.destination == self.rank]


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The facts that a rank publishes about itself.

    Args:
        host: equal for processes that can pass each other shared memory over an abstract socket;
            differs between machines, and between network namespaces of one machine.
        tcp_address: host and port where it listens for other hosts; empty if it does not.
        token: a hash of the job's token and its file, by which a wrong one is known.
        settings: options that both sides of a link must share.
        gpu: UUID of its GPU; empty without a GPU of NVIDIA.
        gpu_access: for each GPU that it sees, whether its own GPU can write there.
        found: by kind, the result of that kind's ``look``.
    """

    rank: int
    abi: int
    host: str
    hostname: str
    uid: int
    pid: int
    device: str
    unix_address: str
    tcp_address: list[Any]
    token: str
    settings: dict[str, int | float | bool]
    gpu: str = ""
    gpu_access: dict[str, bool] = field(default_factory=dict)
    found: dict[str, dict[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """This rank's side of a set-up.

    Args:
        extension: the C++ extension module.
        native: its ``Transport``, not started yet.
        gpu: number of the GPU whose tensors links may carry; -1 without one.
        peer_facts: by rank, at least of the peers.
        has_other_kind: peers whose link gets another kind if its set-up fails.
        failed: by such a peer, the reason for which the set-up has failed; equal on both ends.
    """

    extension: Any
    native: Any
    options: TransportOptions
    facts: Facts
    gpu: int
    peer_facts: Mapping[int, Facts] = field(default_factory=dict)
    has_other_kind: Collection[int] = ()
    failed: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class PeerLink:
    """One peer, the connections to it, and our channels with it in the order of both sides.

    Every round of a set-up first sends to all peers and then receives from all, so that ranks never
    wait for each other in a circle.

    Args:
        rank: this rank, for errors.
        sock: the authenticated control connection. Descriptors travel over unix sockets only.
        data: the further connections that the kind has asked for.
    """

    rank: int
    peer: int
    sock: socket.socket
    incoming: Sequence[int]
    outgoing: Sequence[int]
    data: Sequence[socket.socket] = ()

    def send(self, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
        """Send one set-up message; the descriptors stay ours."""
        with joining(self.rank, self.peer, self.sock):
            send_message(self.sock, message, fds)

    def receive(self, most: int = 0, least: int | None = None) -> tuple[dict[str, Any], list[int]]:
        """Receive one set-up message and its descriptors, which the caller then owns.

        Args:
            most: descriptors that may come.
            least: descriptors that have to come; by default ``most``.

        Raises:
            ProtocolError: there are fewer, or more.
        """
        least = most if least is None else least
        with joining(self.rank, self.peer, self.sock):
            message, fds = receive_message(self.sock, most)
        if len(fds) < least:
            for fd in fds:
                os.close(fd)
            raise ProtocolError(
                f"rank {self.rank}: rank {self.peer} sent {len(fds)} descriptors, expected {least}"
            )
        return message, fds


@dataclass(frozen=True, kw_only=True)
class BoardHosts:
    """One rank's view of a board, whose members may be on several hosts.

    The members on one host share a block of memory, which the first of them, the host's head,
    makes. The heads exchange notes with the board's leader, which is the first head.

    Args:
        members: on this rank's host, its head first.
        is_head: this rank makes the block of its host.
        followers: the members that read that block.
        hosts: the heads of the other hosts, if this rank leads the board.
        upstream: the member from which this rank gets the words; None for the leader.
        is_relayed: the leader is on another host.
        num_lines: of the block: one per member here and, on the leader's host, one per other host.
        spans_hosts: there are several.
    """

    members: Sequence[int]
    is_head: bool
    followers: Sequence[int]
    hosts: Sequence[int]
    upstream: int | None
    is_relayed: bool
    num_lines: int
    spans_hosts: bool

    @classmethod
    def of(cls, rank: int, ranks: Sequence[int], host_of: Mapping[int, str]) -> BoardHosts:
        """The view of ``rank`` of a board of ``ranks``, leader first."""
        by_host: dict[str, list[int]] = {}
        for member in ranks:
            by_host.setdefault(host_of[member], []).append(member)
        leader, *others = (members[0] for members in by_host.values())
        head, *followers = members = by_host[host_of[rank]]
        above = leader if rank == head else head
        return cls(
            members=members,
            is_head=rank == head,
            followers=followers if rank == head else [],
            hosts=others if rank == leader else [],
            upstream=None if rank == leader else above,
            is_relayed=head != leader,
            num_lines=len(members) + (len(others) if head == leader else 0),
            spans_hosts=bool(others),
        )

    @property
    def partners(self) -> list[int]:
        """The members that this rank has a link with."""
        upstream = [] if self.upstream is None else [self.upstream]
        return [*upstream, *self.followers, *self.hosts]


def link_faults(
    links: Sequence[PeerLink],
    write: Callable[[PeerLink, int], object],
    fault_of: Callable[[PeerLink, int], str],
    settle: Callable[[PeerLink], object] = lambda link: None,
) -> dict[int, str]:
    """Write a pattern through each link and compare it at the receiver.

    Args:
        write: writes the pattern of a seed into the peer's slots, or begins to.
        fault_of: compares our slots with the pattern of a seed; returns the difference or "".
        settle: waits until what was begun is there, once all links have begun.

    Returns:
        By peer, what a link that does not deliver does instead; equal on both ends.
    """
    seeds = {link.peer: secrets.randbits(_SEED_BITS) for link in links}
    begun = {link.peer: _fault_in(link, write, seeds[link.peer]) for link in links}
    for link in links:
        unwritten = begun[link.peer] or _fault_in(link, settle)
        link.send({"seed": seeds[link.peer], "unwritten": unwritten})
    faults: dict[int, str] = {}
    for link in links:
        message, _ = link.receive()
        fault = str(message.get("unwritten", ""))
        if not fault and (wrong := fault_of(link, _seed(link, message))):
            fault = f"rank {link.rank}: {wrong}"
        faults[link.peer] = fitting(fault)
        link.send({"fault": faults[link.peer]})
    for link in links:
        said = [faults[link.peer], str(link.receive()[0].get("fault", ""))]
        # Both directions may fail: the lower rank's word comes first on both ends.
        faults[link.peer] = next(filter(None, said[:: 1 if link.rank < link.peer else -1]), "")
    return {peer: fault for peer, fault in faults.items() if fault}


def _seed(link: PeerLink, message: dict[str, Any]) -> int:
    seed = message.get("seed")
    if type(seed) is not int or not 0 <= seed < 1 << _SEED_BITS:
        raise ProtocolError(
            f"rank {link.rank}: rank {link.peer} sent {str(seed)[:80]!r} as the seed of a pattern, "
            f"expected a number of {_SEED_BITS} bits"
        )
    return seed


def _fault_in(link: PeerLink, call: Callable[..., object], *given: object) -> str:
    """The error that a call about a link raises, as one line, or ""."""
    try:
        call(link, *given)
    except TransportError as error:
        return fitting(f"rank {link.rank}: {error}")
    return ""


def undelivered(link: PeerLink, name: str, fault: str) -> str:
    """The sentence about a link that does not deliver."""
    return (
        f"the {name} link with rank {link.peer} does not deliver what is written: {fault}. An "
        "IOMMU or ACS redirects its traffic"
    )

"""Opens the links of a schedule, and counts what has arrived on them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

import torch

from megatron.dpp.config import DppConfig
from megatron.dpp.direction import Direction
from megatron.dpp.hosts import address_towards
from megatron.dpp.inject import Injector
from megatron.dpp.runtime.delayed import delayed
from megatron.dpp.runtime.topology import Topology
from megatron.dpp.schedule import Geometry
from megatron.dpp.transport import TransportOptions, kinds, open_transport
from megatron.dpp.transport.base import ChannelSpec, Transport
from megatron.dpp.transport.options import tuned

_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
_NAP_SECONDS = 0.05
_ABANDON_SECONDS = 3.0
"""Time after which a rank that has not noticed a lost peer hangs in a collective."""


class Links:
    """An opened transport, the tasks that its channels serve, and counts of what was read.

    Args:
        transport: opened with :meth:`Topology.channels`.
        topology: of this rank.
        num_received: tensors of a boundary that a chunk is given by the stage before it.
        num_sent: tensors that a chunk hands to the stage after it.
    """

    def __init__(
        self, transport: Transport, topology: Topology, num_received: int = 1, num_sent: int = 1
    ) -> None:
        self.transport, incoming, outgoing = transport, transport.incoming, transport.outgoing
        self.receiving = [(spec.direction, spec.chunk) for spec in incoming]
        """The task that each incoming channel feeds, as (direction, chunk)."""
        self._index_of = {key: index for index, key in enumerate(self.receiving)}
        self._sending = {
            (spec.direction, topology.sending_chunk(spec)): index
            for index, spec in enumerate(outgoing)
        }
        before, after = num_received, num_sent
        forward = Direction.FORWARD
        self.tensors_in = [before if s.direction == forward else after for s in incoming]
        """Messages per microbatch on each incoming channel: tensors of the boundary that it comes
        from.
        """
        self.tensors_out = [after if s.direction == forward else before for s in outgoing]
        """Messages per microbatch on each outgoing channel."""
        self.consumed = [0] * len(incoming)
        """Microbatches of earlier iterations, per incoming channel."""
        self.whole = max(self.tensors_in, default=1) == 1
        """Every microbatch is one tensor on each channel."""
        self.why_not_ahead = why_not_ahead(transport)

    def incoming(self, direction: Direction, chunk: int) -> int | None:
        """Index of the channel that feeds a task of ``chunk``; None where the task needs no
        message.
        """
        return self._index_of.get((direction, chunk))

    def outgoing(self, direction: Direction, chunk: int) -> int | None:
        """Index of the channel that takes the result of ``chunk``; None at the ends of the
        pipeline.
        """
        return self._sending.get((direction, chunk))

    def poll(self) -> Sequence[int]:
        """Microbatches that have arrived on each incoming channel with all of their tensors."""
        return self._in_microbatches(self.transport.poll())

    def coming(self) -> Sequence[int]:
        """As :meth:`poll`, with microbatches in flight that may be taken; empty if none may."""
        return () if self.why_not_ahead else self._in_microbatches(self.transport.coming())

    def _in_microbatches(self, messages: Sequence[int]) -> Sequence[int]:
        if self.whole:
            return messages
        return [total // parts for total, parts in zip(messages, self.tensors_in, strict=False)]

    def consume(self, geometry: Geometry) -> None:
        """Count the microbatches of an iteration that is over."""
        for index, (direction, _) in enumerate(self.receiving):
            if not (geometry.forward_only and direction == Direction.BACKWARD):
                self.consumed[index] += geometry.num_microbatches


def own_address(config: DppConfig) -> str | None:
    """This rank's address of ``node_ips``, or without it the one that packets to the master
    carry; None with one node.
    """
    world_size = torch.distributed.get_world_size()
    ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    given = config.node_ip(torch.distributed.get_rank(), world_size, ranks_per_node)
    master = os.environ.get("MASTER_ADDR")
    if given is None and master and ranks_per_node < world_size:
        return address_towards(master)
    return given


def _address_of(config: DppConfig) -> str:
    """The owner of ``own_address``, for ``TransportOptions.address_of``."""
    if not config.node_ips:
        return "route"
    per_rank = len(config.node_ips.split(",")) == torch.distributed.get_world_size()
    return "rank" if per_rank else "node"


def links_of(
    topology: Topology,
    receives: Sequence[int],
    sends: Sequence[int],
    config: DppConfig,
    log: Callable[[str], None],
    *,
    stage_ranks: Sequence[int] = (),
    injector: Injector | None = None,
    device: torch.device | None = None,
) -> Links:
    """Open the links of a pipeline; messages are late where ``injector`` delays them.

    Args:
        receives, sends: as of :meth:`Topology.channels`.
        log: called with a line about the link to each neighbour.
        stage_ranks, device: as of :func:`open_links`.
    """
    specs = topology.channels(receives, sends, config.slots)
    transport = delayed(open_links(specs, config, stage_ranks, device), injector, topology.ranks)
    own = topology.ranks[topology.rank]
    for link in transport.links():
        log(f"dynamic pipeline: rank {own} -> {link.peer}: {link.kind} ({link.reason})")
    return Links(transport, topology, len(receives), len(sends))


def injector_of(config: DppConfig, topology: Topology, seed: int) -> Injector | None:
    """Slows this rank's tasks down as ``config.inject`` says, or None."""
    if not config.inject:
        return None
    place = topology.rank, topology.num_ranks
    return Injector(config.inject, *place, seed, num_chunks=topology.num_chunks)


def await_message(
    transport: Transport, channel: int, seen: int, seconds: float, *label: int, ahead: bool = False
) -> None:
    """Wait until more than ``seen`` messages have arrived on a channel; ``ahead``: or one in flight
    that may be taken.

    Args:
        label: the message's iteration and microbatch, for the error.

    Raises:
        PeerDead: the sender has closed its links.
        TransferTimeout: nothing came for ``seconds``.
    """
    begin, source = time.monotonic(), transport.incoming[channel].source
    while True:
        left = transport.departed(source)  # before the look at what it sent
        arrived = transport.poll()
        if ((ahead and transport.coming()) or arrived)[channel] > seen:
            return
        waited = time.monotonic() - begin
        if left or waited > seconds:
            raise transport.overdue(channel, waited, iteration=label[0], microbatch=label[1])
        transport.wait(_NAP_SECONDS)


def open_links(
    specs: Sequence[ChannelSpec],
    config: DppConfig,
    stage_ranks: Sequence[int] = (),
    device: torch.device | None = None,
) -> Transport:
    """Open a transport for these channels, found through torch.distributed's store.

    Args:
        specs: every channel that begins or ends at this rank.
        config: kind, timeout, checksum, chunk size and addresses.
        stage_ranks: ranks that share a board with this one, leader first; empty for none.
        device: of what arrives; None for the GPU, if there is one.
    """
    rank = torch.distributed.get_rank()
    # A pipeline of one rank has no arrivals, so the ranks of its stage agree without a board.
    store = torch.distributed.distributed_c10d._get_default_store() if specs else None
    return open_transport(
        specs,
        rank=rank,
        store=store,
        device=device or torch.device("cuda" if torch.cuda.is_available() else "cpu"),
        kind=config.transport,
        options=TransportOptions(
            timeout=config.timeout,
            checksum=config.checksum,
            gpudirect=config.gpudirect,
            node_ips=own_address(config),
            address_of=_address_of(config),
            token_file=config.token_file,
            abandon_after=_ABANDON_SECONDS,
            **tuned(),
        ),
        board_ranks=(stage_ranks or None) if specs else None,
        # Two per channel: what has arrived, and what has arrived or is in flight.
        board_counters=2 * sum(spec.destination == rank for spec in specs),
    )


def why_not_ahead(transport: Transport) -> str | None:
    """The reason why tasks are not launched ahead of their inputs; None if they are, or if it makes
    no difference.
    """
    waits = any(kinds.find(link.kind).announces for link in transport.links())
    if waits and os.environ.get(_CONNECTIONS) == "1":
        return f"with {_CONNECTIONS}=1 a GPU that waits would hold up what it has to send"
    return None

"""What dynamic and static schedules open in the same way: links, and a device's pace."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import parallel_state

from megatron.dpp.config import DppConfig
from megatron.dpp.hosts import address_towards
from megatron.dpp.runtime.pace import DevicePace, HostPace, Pace
from megatron.dpp.runtime.topology import Topology
from megatron.dpp.transport import TransportOptions, kinds, open_transport
from megatron.dpp.transport.base import ChannelSpec, Transport

_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
_ABANDON_SECONDS = 3.0
"""A rank that has not noticed a lost peer by then waits in a collective that will not end."""


def pipeline_of(chunks: list[torch.nn.Module], pg_collection: Any = None) -> Topology:
    """This rank's place in its pipeline, from the given process groups or megatron-core's own."""
    group = (
        pg_collection.pp if pg_collection else parallel_state.get_pipeline_model_parallel_group()
    )
    ranks = torch.distributed.get_process_group_ranks(group)
    return Topology(tuple(ranks), torch.distributed.get_rank(group), len(chunks))


def own_address(config: DppConfig) -> str | None:
    """This rank's part of ``--node-ips``; torchrun says how many ranks a node has.

    Left out, it is the address that packets to the master carry. None with one node only.
    """
    world_size = torch.distributed.get_world_size()
    ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    given = config.node_ip(torch.distributed.get_rank(), world_size, ranks_per_node)
    master = os.environ.get("MASTER_ADDR")
    if given is None and master and ranks_per_node < world_size:
        return address_towards(master)
    return given


def open_links(
    specs: Sequence[ChannelSpec], config: DppConfig, stage_ranks: Sequence[int] = ()
) -> Transport:
    """Open a transport for these channels, found through torch.distributed's store.

    Args:
        specs: every channel that begins or ends at this rank.
        config: kind, timeout, checksum, chunk size and addresses.
        stage_ranks: ranks that share a board with this one, leader first; empty for none.
    """
    rank = torch.distributed.get_rank()
    # A pipeline of one rank has no arrivals, so the ranks of its stage agree without a board.
    store = torch.distributed.distributed_c10d._get_default_store() if specs else None
    return open_transport(
        specs,
        rank=rank,
        store=store,
        device=torch.device("cuda" if torch.cuda.is_available() else "cpu"),
        kind=config.transport,
        options=TransportOptions(
            timeout=config.timeout,
            checksum=config.checksum,
            workload=config.workload,
            gpudirect=config.gpudirect,
            node_ips=own_address(config),
            abandon_after=_ABANDON_SECONDS,
        ),
        board_ranks=(stage_ranks or None) if specs else None,
        board_counters=sum(spec.destination == rank for spec in specs),
    )


def why_not_ahead(config: DppConfig, transport: Transport) -> str | None:
    """Why tasks are not launched ahead of their inputs though ``config`` asks for it; None where
    they are, or where that makes no difference.
    """
    announced = any(kinds.find(link.kind).announces for link in transport.links())
    waits = announced and transport.board is None
    if config.launch_ahead and waits and os.environ.get(_CONNECTIONS) == "1":
        return f"with {_CONNECTIONS}=1 a GPU that waits would hold up what it has to send"
    return None


def pace_for(config: DppConfig, follow: bool) -> Pace:
    """How far the host may run ahead here: not at all on a CPU, a little on a GPU."""
    if torch.cuda.is_available():
        lookahead = None if config.lookahead < 0 else config.lookahead * 1e-3
        return DevicePace(lookahead, follow)
    return HostPace()

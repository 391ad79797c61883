"""Opens a transport, with a suitable kind for each link."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch._C._distributed_c10d import Store

from megatron.dpp.errors import ConfigError, number_fault
from megatron.dpp.transport.base import ChannelSpec, Transport
from megatron.dpp.transport.fake import FakeNetwork
from megatron.dpp.transport.joining import Request
from megatron.dpp.transport.kinds import AUTO, find
from megatron.dpp.transport.options import TransportOptions

_MOST_COUNTERS = 1 << 20


def open_transport(
    channels: Sequence[ChannelSpec],
    *,
    rank: int,
    store: Store | None,
    device: torch.device | str = "cpu",
    kind: str = "auto",
    options: TransportOptions | None = None,
    board_ranks: Sequence[int] | None = None,
    board_counters: int = 0,
) -> Transport:
    """Open this rank's side of its channels; returns when all of its peers have opened theirs.

    Args:
        channels: every channel that this rank sends or receives; both ends must name equal specs.
        rank: this process's global rank.
        store: where the job's ranks find each other; None when all channels stay in this process.
        device: where ``take`` puts tensors.
        kind: ``auto`` chooses per link and says why in ``links()``; any other kind is used or is an
            error.
        options: see :class:`TransportOptions`; equal on all ranks.
        board_ranks: the global ranks of one pipeline stage, leader first; gives
            ``transport.board``.
        board_counters: how many counters each member of the board posts.

    Raises:
        ConfigError: ``channels`` do not concern ``rank``, or ``kind`` is unknown.
        TransportUnavailable: ``kind`` is not possible on a link; the message says why.
        SetupError, AuthError, VersionMismatch: see ``errors.py``.
    """
    for spec in channels:
        if rank not in (spec.source, spec.destination):
            raise ConfigError(f"rank {rank} neither sends nor receives on the channel {spec}")
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
    if store is None:
        return _open_in_process(request)
    if kind != AUTO and (open_own := find(kind).open):
        return open_own(request)
    from megatron.dpp.transport.opening import open_native

    return open_native(request, kind)


def _open_in_process(request: Request) -> Transport:
    rank, channels = request.rank, request.channels
    others = {spec.source for spec in channels} | {spec.destination for spec in channels}
    if others - {rank} or set(request.board_ranks) - {rank}:
        raise ConfigError(
            f"rank {rank} has channels with other ranks; open_transport needs a store to find them"
        )
    return FakeNetwork(channels).transport(
        rank, board_ranks=request.board_ranks, board_counters=request.board_counters
    )

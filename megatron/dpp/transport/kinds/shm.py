"""Kind ``shm``: CPU tensors within a host, in sealed shared memory of the receiver.

The C++ side is ``csrc/transport/shm.h``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron.dpp.transport.joining import Facts, PeerLink, Setup
from megatron.dpp.transport.kinds import TransportKind


def obstacle(one: Facts, other: Facts) -> str | None:
    """Reason why two ranks cannot share memory."""
    if one.host != other.host:
        return f"{one.hostname} and {other.hostname} do not share memory"
    if one.uid != other.uid:
        return f"the processes belong to users {one.uid} and {other.uid}"
    return None


def join(setup: Setup, links: Sequence[PeerLink]) -> Mapping[int, str]:
    """Pass each sender the descriptor of its slots."""
    for link in links:
        if link.incoming:
            link.send({}, [setup.native.make_shm_slots(link.peer, link.incoming)])
    for link in links:
        if link.outgoing:
            setup.native.use_shm_slots(link.peer, link.outgoing, *link.receive(1)[1])
    return {}


KIND = TransportKind(
    name="shm",
    preference=30,
    reason="same host, same user: shared memory",
    obstacle=obstacle,
    join=join,
    carries_board=True,
)

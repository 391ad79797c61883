"""Kind ``tcp``: different hosts without RDMA, one control connection and several data connections.

The C++ side is ``csrc/transport/tcp.h``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron.dpp.errors import Text, setting
from megatron.dpp.transport.joining import Facts, PeerLink, Setup
from megatron.dpp.transport.kinds import TransportKind
from megatron.dpp.transport.options import TransportOptions


def obstacle(one: Facts, other: Facts) -> str | None:
    """Reason why two ranks cannot connect over TCP."""
    for side in (one, other):
        if not side.tcp_address:
            node_ips = setting("node_ips")
            return Text(
                f"rank {side.rank} on {side.hostname} listens on no address; name this host's "
                f"address with {node_ips}",
                node_ips,
            )
    return None


def connections(options: TransportOptions) -> tuple[str, ...]:
    """Purposes of the data connections."""
    return tuple(f"data {index}" for index in range(options.tcp_connections))


def join(setup: Setup, links: Sequence[PeerLink]) -> Mapping[int, str]:
    """Hand the data connections over; large messages are spread over all of them."""
    for link in links:
        data = [sock.detach() for sock in link.data]
        setup.native.add_tcp_link(link.peer, link.incoming, link.outgoing, data)
    return {}


KIND = TransportKind(
    name="tcp",
    preference=50,
    reason="different hosts, and no RDMA link: TCP",
    obstacle=obstacle,
    join=join,
    between_hosts=True,
    carries_board=True,
    connections=connections,
)

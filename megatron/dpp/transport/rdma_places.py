"""The RDMA ports that a rank offers its peers, and those at the two ends of a link.

Both ends call :func:`ways` with equal arguments. ``rdma_ports.py`` finds a rank's ports.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class Place:
    """A port of an RDMA device, and the index of this host's address there.

    Args:
        ipv6: the address of a RoCE port is of IPv6, else of IPv4.
        subnet: equal for ports that reach each other without a router; "" where it is not known.
        distance: the first number of ``pci_distance`` from the rank's GPU; 0 without one.
    """

    device: str
    port: int
    gid_index: int
    infiniband: bool
    ipv6: bool = False
    subnet: str = ""
    distance: int = 0

    @property
    def network(self) -> str:
        """Name of the network; a port reaches only ports of an equal network."""
        if self.infiniband:
            return "InfiniBand"
        return "RoCE v2 over IPv6" if self.ipv6 else "RoCE v2"

    @property
    def name(self) -> str:
        """Device and port, for log lines."""
        return f"{self.device} port {self.port}"


def read_places(found: Sequence[Mapping[str, Any]]) -> list[Place]:
    """The ports in a rank's facts, nearest first.

    Raises:
        TypeError: a field is missing, unknown, or of the wrong type.
    """
    places = [Place(**fields_of) for fields_of in found]
    for place in places:
        for field in fields(Place):
            value = getattr(place, field.name)
            if type(value).__name__ != field.type:
                raise TypeError(f"{field.name} is {str(value)[:80]!r}")
    return places


def ways(one: Sequence[Place], other: Sequence[Place]) -> list[tuple[Place, Place]]:
    """The pairs of ports over which two ranks try to link, the best first; empty for none.

    The nearest ports, and within one subnet where several pairs are as near. If no router leads
    from the one to the other, the nearest ones in one subnet are next.

    Args:
        one: the lower rank's ports, nearest first.
        other: the higher rank's.
    """
    pairs = [
        (a.distance + b.distance, not _is_one_subnet(a, b), i + j, i, j)
        for i, a in enumerate(one)
        for j, b in enumerate(other)
        if a.network == b.network
    ]
    best = sorted(pairs)[:1]
    if best and best[0][1]:
        best += sorted(pair for pair in pairs if not pair[1])[:1]
    return [(one[i], other[j]) for *_, i, j in best]


def _is_one_subnet(one: Place, other: Place) -> bool:
    return one.subnet == other.subnet != ""

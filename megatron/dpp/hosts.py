"""The address of this host, IPv4 or IPv6, for links to other hosts, and its network interface.

Nothing here imports torch, sends a packet or needs a tool of the system.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import time
from collections.abc import Sequence

from megatron.dpp.errors import ConfigError

_ANY_PORT = 9
_RESOLVE_SECONDS = 20.0  # a cluster may publish the name of a node a little after its start


def networks() -> dict[str, tuple[str, str]]:
    """Addresses of this host (its network namespace), each with its interface and its network, like
    ``10.0.0.0/16``: IPv4 first, then IPv6, without those that are valid on one link only.
    """
    import psutil  # type: ignore[import-untyped]

    found = {}
    for family in (socket.AF_INET, socket.AF_INET6):
        for name, entries in psutil.net_if_addrs().items():
            for entry in entries:
                if entry.family == family and not _is_of_one_link(entry.address):
                    length = int(ipaddress.ip_address(entry.netmask)).bit_count()
                    address = ipaddress.ip_interface(f"{entry.address}/{length}")
                    found[str(address.ip)] = name, str(address.network)
    return found


def addresses() -> dict[str, str]:
    """The keys of :func:`networks`, each with its interface."""
    return {address: name for address, (name, _) in networks().items()}


def _is_of_one_link(text: str) -> bool:
    return ":" in text and ipaddress.ip_address(text).is_link_local


def family_of(address: str) -> socket.AddressFamily:
    """The family of sockets that can be bound to ``address``."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def with_port(address: str, port: int) -> str:
    """``address`` and ``port`` as one text."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def address_towards(host: str, patience: float = _RESOLVE_SECONDS) -> str:
    """The source address of packets from this host to ``host``; loopback if that is loopback.

    A name with addresses of both families counts as one of IPv4.

    Args:
        host: name or address.
        patience: seconds to wait for the name to resolve.

    Raises:
        ConfigError: the name does not resolve, no route leads there, or the address is valid on one
            link only.
    """
    deadline = time.monotonic() + patience
    while True:
        try:
            return _source_towards(host)
        except OSError as error:
            if not isinstance(error, socket.gaierror) or time.monotonic() > deadline:
                raise ConfigError(f"MASTER_ADDR={host}: {error.strerror or error}") from error
        time.sleep(0.5)


def _source_towards(host: str) -> str:
    entries = socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM)
    refusal = OSError(f"no address of a known family ({len(entries)} entries)")
    for family, kind, _, _, where in sorted(entries, key=lambda one: one[0] != socket.AF_INET):
        if _is_of_one_link(str(where[0])):
            refusal = OSError(f"{where[0]} is valid on one link only; give a routable address")
            continue
        try:
            with socket.socket(family, kind) as probe:
                probe.connect(where)  # of a datagram socket: looks up the route
                return str(probe.getsockname()[0])
        except OSError as error:
            refusal = error
    raise refusal


def own_interface(master: str, own: Sequence[str] = ()) -> tuple[str, str]:
    """Address and interface of this host for links to other hosts.

    Args:
        master: name or address of node 0.
        own: addresses that ``DppConfig.node_ips`` gives to this host; the route to ``master``
            decides without them.

    Raises:
        ConfigError: an address of ``own`` is not one of this host.
    """
    here = addresses()
    for address in own:
        if not _can_be_bound(address):
            raise ConfigError(
                f"NODE_IPS gives {address} to this node, which has "
                f"{', '.join(f'{known} ({name})' for known, name in here.items()) or 'none'}: "
                "the order is that of the nodes (NODE_RANK), one address each or one per rank"
            )
    address = str(ipaddress.ip_address(own[0])) if own else address_towards(master)
    return address, here.get(address, "")


def is_loopback(address: str) -> bool:
    """True for an address or name that other hosts cannot reach."""
    try:
        return address == "localhost" or ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _can_be_bound(address: str) -> bool:
    """True for addresses of this host, also those of no list, as of the loopback's network."""
    with (
        contextlib.suppress(OSError),
        socket.socket(family_of(address), socket.SOCK_DGRAM) as probe,
    ):
        probe.bind((address, 0))
        return True
    return False

"""The address of this host, IPv4 or IPv6, for links to other hosts, and its network interface.

Nothing here imports torch, sends a packet or needs a tool of the system.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct
import time
from collections.abc import Sequence
from pathlib import Path

from megatron.dpp.errors import ConfigError

LOOPBACK = "127.0.0.1"
_LOOPBACK_SECONDS = 5.0
_SIOCGIFADDR = 0x8915
_ANY_PORT = 9
_LINK_LOCAL = 0x20
_RESOLVE_SECONDS = 20.0  # a cluster may publish the name of a node a little after its start


def addresses() -> dict[str, str]:
    """Addresses of this host (its network namespace), each with its interface: IPv4 first, then
    IPv6, without those that are valid on one link only.
    """
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            with contextlib.suppress(OSError):  # an interface without an IPv4 address
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, request)
                found[socket.inet_ntoa(answer[20:24])] = name
    with contextlib.suppress(OSError):  # a kernel without IPv6
        for line in Path("/proc/net/if_inet6").read_text(encoding="utf-8").splitlines():
            digits, _, _, scope, _, name = line.split()
            if int(scope, 16) != _LINK_LOCAL:
                found[str(ipaddress.IPv6Address(bytes.fromhex(digits)))] = name
    return found


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
        if family == socket.AF_INET6 and ipaddress.ip_address(str(where[0])).is_link_local:
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
    here, own = addresses(), [_canonical(address) for address in own]
    for address in own:
        if address not in here and address not in _secondary(address):
            raise ConfigError(
                f"NODE_IPS gives {address} to this node, which has "
                f"{', '.join(f'{known} ({name})' for known, name in here.items()) or 'none'}: "
                "the order is that of the nodes (NODE_RANK), one address each or one per rank"
            )
    address = own[0] if own else address_towards(master)
    return address, here.get(address, "")


def _canonical(address: str) -> str:
    """The one spelling of an address; other text as it is."""
    try:
        return str(ipaddress.ip_address(address))
    except ValueError:
        return address


def loopback_fault() -> str:
    """The reason why processes of this host cannot meet at its loopback address; empty where they
    can."""
    try:
        with socket.create_server((LOOPBACK, 0)) as server:
            socket.create_connection(server.getsockname(), _LOOPBACK_SECONDS).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def is_loopback(address: str) -> bool:
    """True for an address or name that other hosts cannot reach."""
    try:
        return address == "localhost" or ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _secondary(address: str) -> tuple[str, ...]:
    """``address`` if it can be bound: an interface's further addresses are in no list."""
    try:
        with socket.socket(family_of(address), socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return ()
    return (address,)

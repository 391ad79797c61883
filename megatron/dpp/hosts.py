"""The IPv4 address of this host for links to other hosts, and its network interface.

Nothing here imports torch, sends a packet or needs a tool of the system.
"""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct
import time
from collections.abc import Sequence

from megatron.dpp.errors import ConfigError

_SIOCGIFADDR = 0x8915
_ANY_PORT = 9
_RESOLVE_SECONDS = 20.0  # a cluster may publish the name of a node a little after its start


def addresses() -> dict[str, str]:
    """IPv4 addresses of this host (its network namespace), each with its interface."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            with contextlib.suppress(OSError):  # an interface without an IPv4 address
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, request)
                found[socket.inet_ntoa(answer[20:24])] = name
    return found


def address_towards(host: str, patience: float = _RESOLVE_SECONDS) -> str:
    """The source address of packets from this host to ``host``; loopback if that is loopback.

    Args:
        host: name or IPv4 address.
        patience: seconds to wait for the name to resolve.

    Raises:
        ConfigError: the name does not resolve, or no route leads there.
    """
    deadline = time.monotonic() + patience
    while True:
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.connect((host, _ANY_PORT))  # of a datagram socket: looks up the route
                return str(probe.getsockname()[0])
        except OSError as error:
            if not isinstance(error, socket.gaierror) or time.monotonic() > deadline:
                raise ConfigError(f"MASTER_ADDR={host}: {error.strerror or error}") from error
        time.sleep(0.5)


def own_interface(master: str, own: Sequence[str] = ()) -> tuple[str, str]:
    """Address and interface of this host for links to other hosts.

    Args:
        master: name or address of node 0.
        own: addresses that ``--node-ips`` gives to this host; the route to ``master`` decides
            without them.

    Raises:
        ConfigError: an address of ``own`` is not one of this host.
    """
    here = addresses()
    for address in own:
        if address not in here and address not in _secondary(address):
            raise ConfigError(
                f"NODE_IPS gives {address} to this node, which has "
                f"{', '.join(f'{known} ({name})' for known, name in here.items()) or 'none'}: "
                "the order is that of the nodes (NODE_RANK), one address each or one per rank"
            )
    address = own[0] if own else address_towards(master)
    return address, here.get(address, "")


def _secondary(address: str) -> tuple[str, ...]:
    """``address`` if it can be bound: an interface's further addresses are in no list."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return ()
    return (address,)

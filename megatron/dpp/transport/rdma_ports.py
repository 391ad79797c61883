"""The RDMA ports that a rank may use, the nearest first, and those at the two ends of a link."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megatron.dpp.errors import Text, TransportError, setting
from megatron.dpp.hosts import family_of, networks
from megatron.dpp.transport.messages import read_fields
from megatron.dpp.transport.options import RdmaOptions, TransportOptions, variable

NEAREST = "nearest"
"""Value of ``DPP_RDMA_DEVICES`` that allows every port."""

_MAPPED = "00000000000000000000ffff"  # an IPv4 address as a GID begins so
_LINK_LOCAL = "fe80"
_FLID, _NO_FLID = slice(8, 12), "0000"
_ROCE = "RoCE v2"

Port = Mapping[str, Any]
"""An entry of ``rdma_ports`` of the C++ extension."""


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
    return [read_fields(Place, place) for place in found]


def way(one: Sequence[Place], other: Sequence[Place]) -> tuple[Place, Place] | None:
    """The ports over which two ranks link: the nearest ones, within one subnet where several pairs
    are as near; None where no network has both.

    Args:
        one: the lower rank's ports, nearest first.
        other: the higher rank's.
    """
    pairs = [
        (a.distance + b.distance, a.subnet != b.subnet or not a.subnet, i + j, i, j)
        for i, a in enumerate(one)
        for j, b in enumerate(other)
        if a.network == b.network
    ]
    return (one[min(pairs)[3]], other[min(pairs)[4]]) if pairs else None


@dataclass(frozen=True, kw_only=True)
class Node:
    """The facts of a node beside its ports.

    Args:
        gpu: path of the rank's GPU in the tree of PCI devices; None without one.
        turn: of the rank among those that share equally near ports.
        cards: a path like ``gpu`` for each device.
        subnets: subnet by address of the host, IPv4 or IPv6.
        infiniband: (device, port) pairs behind the interface with the node's address, where it is
            an IP-over-InfiniBand interface.
        refused: reasons why some devices could not be opened.
    """

    gpu: Path | None = None
    turn: int = 0
    cards: Mapping[str, Path] = field(default_factory=dict)
    subnets: Mapping[str, str] = field(default_factory=dict)
    infiniband: Sequence[tuple[str, int]] = ()
    refused: Sequence[str] = ()


def find_places(
    library: Any, address: str | None, options: TransportOptions, device: torch.device
) -> tuple[list[Place], str]:
    """The ports that this rank may use, the best first; the reason if there is none.

    Args:
        library: the C++ extension.
        address: address of this host for links to other hosts; None if it is not known.
        options: the ports that may be used, and what the address stands for.
        device: of the rank's tensors.
    """
    if address is None:
        node_ips = setting("node_ips")
        return [], Text(f"this host's address is not known ({node_ips})", node_ips)
    try:
        ports, refused = library.rdma_ports()
    except TransportError as error:
        return [], str(error)
    names, own = {port["device"] for port in ports}, networks()
    node = Node(
        gpu=gpu_path(device),
        turn=int(os.environ.get("LOCAL_RANK", "0")),
        cards={name: Path(f"/sys/class/infiniband/{name}/device").resolve() for name in names},
        subnets={address: network for address, (_, network) in own.items()},
        infiniband=_infiniband_interfaces(own.get(address, ("", ""))[0]),
        refused=refused,
    )
    return choose_places(ports, options.rdma, address, node, options.address_of)


def choose_places(
    ports: Sequence[Port], options: RdmaOptions, address: str, node: Node, address_of: str
) -> tuple[list[Place], str]:
    """The ports that a rank may use, the best first; the reason if there is none.

    A rank with a GPU takes the ports by their PCI distance from it, unless an address names its
    port. Another rank takes the port with the node's address.

    Args:
        ports: every port of this host.
        options: ports that may be used, and the index of the address.
        address: address of this host; preferred among a port's addresses.
        address_of: as in ``TransportOptions``.
    """
    if options.devices:
        usable, why = _named(ports, options.devices)
    else:
        own, why = choose_place(ports, address, node, gid_index=options.gid_index)
        usable = [] if address_of == "rank" else _by_path(ports, own, node, address_of)
        if not usable and own is not None:
            return [own], why
    places, wanted = [], _gid_of(address)
    for distance, port in _nearest_first(usable, node):
        index = _best_address(port, wanted) if options.gid_index < 0 else options.gid_index
        place, lacking = _place_on(port, index, node, distance)
        places += [] if place is None else [place]
        why = lacking or why
    return places, why


def choose_place(
    ports: Sequence[Port], address: str, node: Node, *, gid_index: int = -1
) -> tuple[Place | None, str]:
    """The port that has ``address``, or None and the reason.

    Args:
        ports: every port of this host.
        address: address of this host for links to other hosts.
        gid_index: index of the address to use; -1 takes the one that is ``address``.
    """
    if not ports:
        return None, "; ".join(node.refused) or "no RDMA device"
    wanted = _gid_of(address)
    for port in ports:
        if port["infiniband"]:
            behind = (port["device"], port["port"]) in node.infiniband
            found = _best_address(port, wanted) if behind and port["addresses"] else None
        else:
            indices = {kind: index for index, gid, kind in port["addresses"] if gid == wanted}
            found = indices.get(_ROCE)
        if found is not None:
            if not port["active"]:
                why = "is not active (cable, switch, ibv_devinfo)"
                return None, f"{_name(port)}, which has {address}, {why}"
            return _place_on(port, found if gid_index < 0 else gid_index, node)
    there = "; ".join([", ".join(map(_name, ports)), *node.refused])
    node_ips = setting("node_ips")
    return None, Text(
        f"no RDMA port has the address {address} (there are {there}): name the address of the "
        f"RDMA interface with {node_ips}, or its device with {variable('devices')}",
        node_ips,
    )


def _named(ports: Sequence[Port], wanted: str) -> tuple[list[Port], str]:
    """The active ports that ``DPP_RDMA_DEVICES`` names; the reason if there is none."""
    names = {*wanted.split(",")}
    usable = [
        port
        for port in ports
        if wanted == NEAREST or names & {port["device"], f"{port['device']}:{port['port']}"}
        if port["active"] and port["addresses"]
    ]
    there = [_name(port) + ("" if port["active"] else " (not active)") for port in ports]
    listed = ", ".join(there) or "none"
    return usable, f"{variable('devices')}={wanted}: no such active port (there are {listed})"


def _by_path(ports: Sequence[Port], own: Place | None, node: Node, address_of: str) -> list[Port]:
    """The ports among which PCI distance decides; empty where the address does.

    Args:
        own: the port with the node's address. Where ``node_ips`` names it, it says which of
            InfiniBand and RoCE is meant.
    """
    usable = [port for port in ports if port["active"] and _is_addressed(port)]
    if own is not None and address_of == "node":
        usable = [port for port in usable if port["infiniband"] == own.infiniband]
    if node.gpu is not None and len(usable) > 1:
        return usable
    # InfiniBand needs no IP address.
    return [port for port in usable if port["infiniband"] and own is None]


def _is_addressed(port: Port) -> bool:
    """True for a port with an address that is known beyond its own wire."""
    if port["infiniband"]:
        return bool(port["addresses"])
    return any(
        kind == _ROCE and not gid.startswith(_LINK_LOCAL) for _, gid, kind in port["addresses"]
    )


def _nearest_first(usable: Sequence[Port], node: Node) -> list[tuple[int, Port]]:
    """Ports with their distances; of equally near ones, each rank of a node begins at another."""
    gpu = node.gpu
    distances = [
        (0, 0) if gpu is None else pci_distance(gpu, node.cards[port["device"]]) for port in usable
    ]
    found = sorted(zip(distances, usable, strict=True), key=lambda entry: entry[0])
    num_nearest = sum(distance == min(distances) for distance in distances)
    start = node.turn % max(1, num_nearest)
    order = found[start:num_nearest] + found[:start] + found[num_nearest:]
    return [(distance[0], port) for distance, port in order]


def _best_address(port: Port, wanted: str) -> int:
    """Index of the address of a port that a link uses.

    On RoCE the host's own address, else a routable one of its family, else any. Both ends of a link
    then take addresses of one family, as RoCE requires. On InfiniBand the first one with a LID for
    routers (FLID), else the first one.
    """

    def worth(entry: tuple[int, str, str]) -> tuple[bool, ...]:
        _, gid, kind = entry
        roce = port["infiniband"] or kind == _ROCE
        routable = not gid.startswith(_LINK_LOCAL)
        related = gid.startswith(_MAPPED) == wanted.startswith(_MAPPED)
        return (roce, gid == wanted, routable and related, routable)

    if port["infiniband"]:
        routable = (entry for entry in port["addresses"] if entry[1][_FLID] != _NO_FLID)
        return int(next(routable, port["addresses"][0])[0])
    return int(max(port["addresses"], key=worth)[0])


def _gid_of(address: str) -> str:
    """The GID that a RoCE port has for an IP address."""
    family = family_of(address)
    digits = socket.inet_pton(family, address).hex()
    return digits if family == socket.AF_INET6 else _MAPPED + digits


def _place_on(
    port: Port, gid_index: int, node: Node, distance: int = 0
) -> tuple[Place | None, str]:
    gids = {index: gid for index, gid, _ in port["addresses"]}
    kinds, infiniband = {index: kind for index, _, kind in port["addresses"]}, port["infiniband"]
    if gid_index not in kinds or not (infiniband or kinds[gid_index] == _ROCE):
        there = ", ".join(f"{index} ({kind})" for index, kind in kinds.items())
        return None, (
            f"{_name(port)} has no {'address' if infiniband else _ROCE + ' address'} with "
            f"index {gid_index}; there are {there or 'none'} "
            f"({variable('gid_index')})"
        )
    gid = gids[gid_index]
    return Place(
        device=port["device"],
        port=port["port"],
        gid_index=gid_index,
        infiniband=infiniband,
        ipv6=not infiniband and not gid.startswith(_MAPPED),
        subnet=_subnet_of(gid, node, infiniband=infiniband),
        distance=distance,
    ), ""


def _subnet_of(gid: str, node: Node, *, infiniband: bool) -> str:
    """The subnet of an address of a port; "" if it is not known."""
    if infiniband:
        return gid[: _FLID.start] + gid[_FLID.stop : 16]
    family = socket.AF_INET if gid.startswith(_MAPPED) else socket.AF_INET6
    digits = bytes.fromhex(gid)[-4 if family == socket.AF_INET else 0 :]
    return node.subnets.get(socket.inet_ntop(family, digits), "")


def _name(port: Port) -> str:
    return f"{port['device']} port {port['port']}"


def _infiniband_interfaces(interface: str) -> list[tuple[str, int]]:
    """The InfiniBand device and port under an IP interface; empty for Ethernet."""
    network = Path("/sys/class/net") / interface
    devices = network / "device" / "infiniband"
    if not interface or not devices.is_dir():
        return []
    try:
        port = int((network / "dev_port").read_text(encoding="utf-8")) + 1
    except (OSError, ValueError):
        port = 1
    return [(device.name, port) for device in devices.iterdir()]


def pci_distance(one: Path, other: Path) -> tuple[int, int]:
    """Distance between two PCI devices: the kind of connection, then the number of bridges.

    0 is below one port of a host bridge (PCI switches only), 1 below one host bridge, 2 further.
    The order of these is that of NCCL's PIX and PXB, PHB, and SYS.

    Args:
        one: path of a device under ``/sys/devices``, links resolved.
        other: likewise.
    """
    ours, theirs = one.parts, other.parts
    shared = next(
        (at for at, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b),
        min(len(ours), len(theirs)),
    )
    bridges = len(ours) + len(theirs) - 2 * shared
    root = next((at for at, part in enumerate(ours) if part.startswith("pci")), len(ours))
    return (0 if shared > root + 1 else 1 if shared > root else 2), bridges


def gpu_path(device: torch.device) -> Path | None:
    """Path of a GPU in the tree of PCI devices; None on a CPU, and where PyTorch does not say."""
    facts: Any = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    if not hasattr(facts, "pci_bus_id"):
        return None
    address = f"{facts.pci_domain_id:04x}:{facts.pci_bus_id:02x}:{facts.pci_device_id:02x}.0"
    return Path(f"/sys/bus/pci/devices/{address}").resolve()

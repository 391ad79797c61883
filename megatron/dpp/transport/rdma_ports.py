"""Chooses a rank's RDMA port and the address to use there."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron.dpp.errors import TransportError
from megatron.dpp.hosts import addresses, family_of
from megatron.dpp.transport.options import RdmaOptions

NEAREST = "nearest"
"""Value of ``--dpp-rdma-devices`` that allows every port."""

_MAPPED = "00000000000000000000ffff"  # an IPv4 address as a GID begins so
_LINK_LOCAL = "fe80"
_FLID, _NO_FLID = slice(8, 12), "0000"
_ROCE = "RoCE v2"

Port = Mapping[str, Any]
"""An entry of ``rdma_ports`` of the C++ extension."""


@dataclass(frozen=True)
class Place:
    """A port of an RDMA device, and the index of this host's address there."""

    device: str
    port: int
    gid_index: int
    infiniband: bool

    @property
    def network(self) -> str:
        """Name of the network; a port reaches only ports of an equal network."""
        return "InfiniBand" if self.infiniband else _ROCE

    @property
    def text(self) -> str:
        """Port and network, for log lines."""
        return f"{self.device} port {self.port}, {self.network}"


def find_place(
    library: Any, address: str | None, options: RdmaOptions, device: torch.device
) -> tuple[Place | None, str]:
    """The port of this rank, or None and the reason.

    Args:
        library: the C++ extension.
        address: address of this host for links to other hosts; None if it is not known.
        options: the ports that may be used, and the index of the address.
        device: of the rank's tensors.
    """
    if address is None:
        return None, "this host's address is not known (--node-ips)"
    try:
        ports, refused = library.rdma_ports()
    except TransportError as error:
        return None, str(error)
    if options.devices is None:
        behind = _infiniband_interfaces(addresses().get(address, ""))
        return choose_place(ports, address, behind, refused, gid_index=options.gid_index)
    gpu = _gpu_path(device)
    names = {port["device"] for port in ports}
    cards = {name: _pci_path(f"class/infiniband/{name}/device") for name in names}
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    return choose_named(ports, options, address, gpu, cards, local_rank)


def choose_place(
    ports: Sequence[Port],
    address: str,
    infiniband: Sequence[tuple[str, int]] = (),
    refused: Sequence[str] = (),
    *,
    gid_index: int = -1,
) -> tuple[Place | None, str]:
    """The port that has ``address``, or None and the reason.

    Args:
        ports: every port of this host.
        address: address of this host for links to other hosts.
        infiniband: (device, port) pairs behind the interface that has ``address``, where it is an
            IP-over-InfiniBand interface.
        refused: reasons why some devices could not be opened.
        gid_index: index of the address to use; -1 takes the one that is ``address``.
    """
    if not ports:
        return None, "; ".join(refused) or "no RDMA device"
    wanted = _gid_of(address)
    for port in ports:
        if port["infiniband"]:
            behind = (port["device"], port["port"]) in infiniband
            found = _best_address(port, wanted) if behind and port["addresses"] else None
        else:
            indices = {kind: index for index, gid, kind in port["addresses"] if gid == wanted}
            found = indices.get(_ROCE)
        if found is not None:
            if not port["active"]:
                return None, (
                    f"{_name(port)}, which has {address}, is not active (cable, switch, "
                    "ibv_devinfo)"
                )
            return _place_on(port, found if gid_index < 0 else gid_index)
    there = "; ".join([", ".join(map(_name, ports)), *refused])
    return None, (
        f"no RDMA port has the address {address} (there are {there}): name the address of the "
        "RDMA interface with --node-ips, or its device with --dpp-rdma-devices"
    )


def choose_named(
    ports: Sequence[Port],
    options: RdmaOptions,
    address: str,
    gpu: Path | None,
    cards: Mapping[str, Path],
    local_rank: int,
) -> tuple[Place | None, str]:
    """A port that ``--dpp-rdma-devices`` names, or None and the reason.

    A rank with a GPU takes a port that is nearest to it; ranks share equal ports in turn.

    Args:
        ports: every port of this host.
        options: ports that may be used, and the index of the address.
        address: address of this host; preferred among a port's addresses.
        gpu: path of the rank's GPU in the tree of PCI devices; None without one.
        cards: such a path for each device.
        local_rank: number of the rank on its node.
    """
    wanted = options.devices or NEAREST
    names = wanted.split(",")
    usable = [
        port
        for port in ports
        if wanted == NEAREST
        or port["device"] in names
        or f"{port['device']}:{port['port']}" in names
        if port["active"] and port["addresses"]
    ]
    if not usable:
        there = [_name(port) + ("" if port["active"] else " (not active)") for port in ports]
        return None, (
            f"--dpp-rdma-devices {wanted}: no such active port (there are "
            f"{', '.join(there) or 'none'})"
        )
    if gpu is not None:
        steps = [pci_distance(gpu, cards[port["device"]]) for port in usable]
        usable = [port for port, far in zip(usable, steps, strict=True) if far == min(steps)]
    port = usable[local_rank % len(usable)]
    if options.gid_index >= 0:
        return _place_on(port, options.gid_index)
    return _place_on(port, _best_address(port, _gid_of(address)))


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


def _place_on(port: Port, gid_index: int) -> tuple[Place | None, str]:
    kinds = {index: kind for index, _, kind in port["addresses"]}
    if gid_index not in kinds or not (port["infiniband"] or kinds[gid_index] == _ROCE):
        there = ", ".join(f"{index} ({kind})" for index, kind in kinds.items())
        return None, (
            f"{_name(port)} has no {'address' if port['infiniband'] else _ROCE + ' address'} with "
            f"index {gid_index}; there are {there or 'none'} (--dpp-rdma-gid-index)"
        )
    return Place(port["device"], port["port"], gid_index, port["infiniband"]), ""


def _name(port: Port) -> str:
    return f"{port['device']} port {port['port']}"


def _gpu_path(device: torch.device) -> Path | None:
    """Path of a GPU in the tree of PCI devices; None on a CPU, and where PyTorch does not say."""
    facts: Any = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    if not hasattr(facts, "pci_bus_id"):
        return None
    address = f"{facts.pci_domain_id:04x}:{facts.pci_bus_id:02x}:{facts.pci_device_id:02x}.0"
    return _pci_path(f"bus/pci/devices/{address}")


def _pci_path(entry: str) -> Path:
    return (Path("/sys") / entry).resolve()


def _infiniband_interfaces(interface: str) -> list[tuple[str, int]]:
    """The InfiniBand device and port under an IP interface; empty for Ethernet."""
    network = Path("/sys/class/net") / interface
    devices = network / "device" / "infiniband"
    if not interface or not devices.is_dir():
        return []
    try:
        port = int((network / "dev_port").read_text()) + 1
    except (OSError, ValueError):
        port = 1
    return [(device.name, port) for device in devices.iterdir()]

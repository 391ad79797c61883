"""Setting up links over RDMA: which port of which device, and what two sides tell each other.

``opening.py`` is the caller, over connections that are already authenticated; addresses of memory
and its keys travel nowhere else. Per message nothing of this runs. The C++ side is
``csrc/transport/rdma.h``.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.dpp.errors import ProtocolError, TransportError, TransportUnavailable
from megatron.dpp.hosts import addresses
from megatron.dpp.transport import handshake
from megatron.dpp.transport.options import TransportOptions

_ELEMENT_BYTES = 4
"""--workload counts elements; the widest usual one has four bytes."""


@dataclass(frozen=True)
class Place:
    """A port, and its address there."""

    device: str
    port: int
    gid_index: int
    infiniband: bool

    @property
    def network(self) -> str:
        """Ports reach those of the same kind of network only."""
        return "InfiniBand" if self.infiniband else "RoCE v2"


@dataclass
class RdmaPeer:
    """One peer: the connection to it, and our channels with it in the order of both sides."""

    peer: int
    sock: socket.socket
    incoming: Sequence[int]
    outgoing: Sequence[int]
    link: Any = field(default=None, init=False)


def find_place(library: Any, address: str | None) -> tuple[Place | None, str]:
    """The port that has ``address``, or None and why there is none."""
    if address is None:
        return None, "this host's address is not known (--node-ips)"
    try:
        ports, refused = library.rdma_ports()
    except TransportError as error:
        return None, str(error)
    infiniband = _infiniband_interfaces(addresses().get(address, ""))
    return choose_place(ports, address, infiniband, refused)


def choose_place(
    ports: Sequence[Mapping[str, Any]],
    address: str,
    infiniband: Sequence[tuple[str, int]] = (),
    refused: Sequence[str] = (),
) -> tuple[Place | None, str]:
    """See :func:`find_place`; a pure function.

    Args:
        ports: what ``rdma_ports`` of the C++ side says.
        address: IPv4 address of this host for links to other hosts.
        infiniband: (device, port) pairs behind the interface that has ``address``, where it is an
            IP-over-InfiniBand interface.
        refused: why some devices could not be opened.
    """
    if not ports:
        return None, "; ".join(refused) or "no RDMA device"
    wanted = "00000000000000000000ffff" + socket.inet_aton(address).hex()
    seen = []
    for port in ports:
        name = f"{port['device']} port {port['port']}"
        found = _index_on(port, wanted, (port["device"], port["port"]) in infiniband)
        if found is None:
            seen.append(name)
        elif not port["active"]:
            return None, f"{name}, which has {address}, is not active (cable, switch, ibv_devinfo)"
        else:
            return Place(port["device"], port["port"], found, port["infiniband"]), ""
    there = "; ".join([", ".join(seen), *refused])
    return None, (
        f"no RDMA port has the address {address} (there are {there}): name the address of the "
        "RDMA interface with --node-ips"
    )


def _index_on(port: Mapping[str, Any], wanted: str, behind_interface: bool) -> int | None:
    """The entry of a port's table of addresses to use: RoCE v2 with our IPv4 address, or, on
    InfiniBand, the first."""
    if port["infiniband"]:
        return 0 if behind_interface and port["addresses"] else None
    kinds = {kind: index for index, gid, kind in port["addresses"] if gid == wanted}
    return kinds.get("RoCE v2")


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


def join_rdma(
    library: Any,
    native: Any,
    rank: int,
    place: Place,
    options: TransportOptions,
    peers: Sequence[RdmaPeer],
    gpu: int = -1,
) -> None:
    """Make our slots and queue pairs, and connect them with the peers'.

    With ``gpu``, a device's number, tensors on it are sent and received in place; each side decides
    for itself whether the card reads and writes its GPU's memory. Links where one does are tested.

    All ranks go through the same rounds, first every send, then every receive, so nobody waits in a
    circle. After the second round every queue pair of both sides can receive.

    Raises:
        SetupError: memory cannot be registered, or the ports do not reach each other.
        TransportUnavailable: GPUDirect is asked for and not possible, or a link does not deliver
            what was written.
    """
    for peer in peers:
        peer.link = library.RdmaLink(
            native,
            peer.peer,
            peer.incoming,
            peer.outgoing,
            device=place.device,
            port=place.port,
            gid_index=place.gid_index,
            piece_bytes=options.workload * _ELEMENT_BYTES,
            gpu=gpu,
            gpudirect=options.gpudirect,
            max_pending=options.max_pending,
        )
        _send(rank, peer, {"rdma": peer.link.offer()})
    for peer in peers:
        message = _receive(rank, peer)
        try:
            peer.link.connect(message["rdma"])
        except (KeyError, TypeError, RuntimeError) as error:
            raise ProtocolError(
                f"rank {rank}: rank {peer.peer} sent a broken RDMA offer: {error}"
            ) from error
        _send(rank, peer, {"ready": True})
    for peer in peers:
        _receive(rank, peer)
    _try(rank, [peer for peer in peers if peer.link.needs_test])


def _send(rank: int, peer: RdmaPeer, message: dict[str, Any]) -> None:
    with handshake.joining(rank, peer.peer, peer.sock):
        handshake.send_message(peer.sock, message)


def _receive(rank: int, peer: RdmaPeer) -> dict[str, Any]:
    with handshake.joining(rank, peer.peer, peer.sock):
        return handshake.receive_message(peer.sock)[0]


def _try(rank: int, peers: Sequence[RdmaPeer]) -> None:
    """Write a pattern through each link and look whether it is there. Both sides say why not before
    either gives up."""
    for peer in peers:
        seed = secrets.randbits(63)
        peer.link.write_pattern(seed)
        _send(rank, peer, {"seed": seed})
    faults = []
    for peer in peers:
        message = _receive(rank, peer)
        fault = peer.link.pattern_fault(int(message.get("seed", 0)))
        _send(rank, peer, {"fault": fault})
        faults.append((peer, fault))
    for peer in peers:
        message = _receive(rank, peer)
        faults.append((peer, str(message.get("fault", ""))))
    for peer, fault in faults:
        if fault:
            raise TransportUnavailable(
                f"the RDMA link with rank {peer.peer} does not deliver what is written to GPU "
                f"memory: {fault}. An IOMMU or ACS redirects traffic between card and GPU: turn it "
                "off in the firmware, or use --dpp-gpudirect off"
            )

"""Kind ``rdma``: different hosts with RDMA devices, slots in registered memory of the receiver.

Addresses of memory and its keys travel over the authenticated control connection only. The C++ side
is ``csrc/transport/rdma.h``.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron.dpp.errors import ProtocolError, TransportError, TransportUnavailable
from megatron.dpp.hosts import addresses
from megatron.dpp.transport.joining import Facts, PeerLink, Setup, check_links
from megatron.dpp.transport.kinds import TransportKind, register, tcp

_NAME = "rdma"
_ELEMENT_BYTES = 4
"""Bytes of the widest usual element; --workload counts elements."""


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
        return "InfiniBand" if self.infiniband else "RoCE v2"


def look(library: Any, address: str | None) -> dict[str, Any]:
    """This rank's port, or the reason why there is none."""
    place, missing = find_place(library, address)
    return {"missing": missing} if place is None else {"place": asdict(place)}


def obstacle(one: Facts, other: Facts) -> str | None:
    """Reason why two ranks cannot connect over RDMA."""
    places = []
    for side in (one, other):
        found = side.found.get(_NAME, {"missing": "no RDMA device was looked for"})
        if "missing" in found:
            return f"rank {side.rank} on {side.hostname}: {found['missing']}"
        places.append(Place(**found["place"]))
    if places[0].network != places[1].network:
        return (
            f"rank {one.rank} is on {places[0].network}, rank {other.rank} on {places[1].network}"
        )
    return tcp.obstacle(one, other)  # the control connection's


def find_place(library: Any, address: str | None) -> tuple[Place | None, str]:
    """The port that has ``address``, or None and the reason."""
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
    """The pure part of :func:`find_place`.

    Args:
        ports: the result of ``rdma_ports`` of the C++ extension.
        address: IPv4 address of this host for links to other hosts.
        infiniband: (device, port) pairs behind the interface that has ``address``, where it is an
            IP-over-InfiniBand interface.
        refused: reasons why some devices could not be opened.
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
    """Index of the address to use in a port's table: RoCE v2 with our IPv4 address, or
    InfiniBand's first.
    """
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


def join(setup: Setup, links: Sequence[PeerLink]) -> Mapping[int, str]:
    """Make our slots and queue pairs, and connect them with the peers'.

    With a GPU, tensors on it are sent and received in place. Each side decides for itself whether
    the card reads and writes its GPU's memory; links where one does are tested. After the second
    round every queue pair of both sides can receive.

    Raises:
        SetupError: memory cannot be registered, or the ports do not reach each other.
        TransportUnavailable: GPUDirect is asked for and not possible, or a link does not deliver
            the data that was written.
    """
    if setup.gpu < 0 and setup.options.gpudirect == "on":
        raise TransportUnavailable(
            f"--dpp-gpudirect on: rank {setup.facts.rank} has no GPU of NVIDIA "
            f"(device {setup.facts.device})"
        )
    ours = {link.peer: _make(setup, link) for link in links}
    for link in links:
        message, _ = link.receive()
        try:
            ours[link.peer].connect(message["rdma"])
        except (KeyError, TypeError, RuntimeError) as error:
            raise ProtocolError(
                f"rank {link.rank}: rank {link.peer} sent a broken RDMA offer: {error}"
            ) from error
        link.send({"ready": True})
    for link in links:
        link.receive()
    check_links(
        [link for link in links if ours[link.peer].needs_test],
        lambda link, seed: ours[link.peer].write_pattern(seed),
        lambda link, seed: str(ours[link.peer].pattern_fault(seed)),
        name="RDMA",
        instead="--dpp-gpudirect off",
    )
    return {peer: f"; {made.gpu_way}" for peer, made in ours.items() if made.gpu_way}


def _make(setup: Setup, link: PeerLink) -> Any:
    """Our side of a link, which is offered to the peer."""
    place = Place(**setup.facts.found[_NAME]["place"])
    made = setup.extension.RdmaLink(
        setup.native,
        link.peer,
        link.incoming,
        link.outgoing,
        device=place.device,
        port=place.port,
        gid_index=place.gid_index,
        piece_bytes=setup.options.workload * _ELEMENT_BYTES,
        gpu=setup.gpu,
        gpudirect=setup.options.gpudirect,
        max_pending=setup.options.max_pending,
    )
    link.send({"rdma": made.offer()})
    return made


register(
    TransportKind(
        name=_NAME,
        preference=40,
        reason="different hosts with RDMA devices: RDMA writes",
        obstacle=obstacle,
        look=look,
        join=join,
        between_hosts=True,
        device_memory=True,
    )
)

"""Kind ``rdma``: different hosts with RDMA devices, slots in registered memory of the receiver.

Addresses of memory and its keys travel over the authenticated control connection only. The C++ side
is ``csrc/transport/rdma.h``.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from megatron.dpp.errors import (
    ProtocolError,
    SetupError,
    Text,
    TransportUnavailable,
    from_json,
    one_line,
    setting,
    to_json,
)
from megatron.dpp.transport.joining import Facts, PeerLink, Setup, link_faults, undelivered
from megatron.dpp.transport.kinds import TransportKind, tcp
from megatron.dpp.transport.messages import fitting
from megatron.dpp.transport.options import TransportOptions, variable
from megatron.dpp.transport.rdma_ports import Place, find_places, read_places, way

_NAME = "rdma"
_ELEMENT_BYTES = 4
"""Bytes of the widest usual element; ``workload`` counts elements."""
_PATTERN_SECONDS = 5.0
_LOST_PACKETS = 2
"""Packets of a test pattern that may be lost."""
_TIMEOUT_UNIT = 4.096e-6
"""Seconds after which a packet would be lost with ``DPP_RDMA_TIMEOUT=0``."""


def look(
    library: Any, address: str | None, options: TransportOptions, device: torch.device
) -> dict[str, Any]:
    """The ports that this rank may use, or the reason why there is none."""
    places, missing = find_places(library, address, options, device)
    return (
        {"places": [asdict(place) for place in places]} if places else {"missing": to_json(missing)}
    )


def obstacle(one: Facts, other: Facts) -> str | None:
    """Reason why two ranks cannot connect over RDMA."""
    places = []
    for side in (one, other):
        found = side.found.get(_NAME, {"missing": "no RDMA device was looked for"})
        if "missing" in found:
            why = from_json(found["missing"])
            return Text(f"rank {side.rank} on {side.hostname}: {why}", why)
        places.append(read_places(found["places"]))
    if way(*places) is None:
        networks = [" and ".join(sorted({place.network for place in side})) for side in places]
        return f"rank {one.rank} is on {networks[0]}, rank {other.rank} on {networks[1]}"
    return tcp.obstacle(one, other)  # the control connection's


def join(setup: Setup, links: Sequence[PeerLink]) -> Mapping[int, str]:
    """Make our slots and queue pairs, connect them with the peers', and test the links.

    Queue pairs connect without a packet, so each link has to deliver a pattern. With a GPU, tensors
    on it are sent and received in place. Each side decides for itself whether the card reads and
    writes its GPU's memory. A link where that does not deliver is set up again with buffers in the
    host's memory.

    A link that cannot be set up is left in ``setup.failed`` where it has another kind to go to.

    Raises:
        SetupError: memory cannot be registered, or the ports do not reach each other.
        TransportUnavailable: a link does not deliver and has no other kind to go to. Or GPUDirect
            is asked for and not possible, or does not deliver the data that was written.
    """
    if setup.gpu < 0 and setup.options.gpudirect == "on":
        on = setting("gpudirect", "on")
        raise TransportUnavailable(
            f"{on}: rank {setup.facts.rank} has no GPU of NVIDIA (device {setup.facts.device})", on
        )
    ports = {link.peer: _own_port(setup, link.peer) for link in links}
    return Joining(setup, ports).join(links)


def _own_port(setup: Setup, peer: int) -> Place:
    """Our end of the way to a peer."""
    sides = sorted((setup.facts, setup.peer_facts[peer]), key=lambda facts: facts.rank)
    pair = way(*(read_places(side.found[_NAME]["places"]) for side in sides))
    assert pair is not None  # obstacle() has asked
    return pair[setup.facts.rank > peer]


@dataclass(frozen=True)
class Joining:
    """Links while they are set up, each over one port. Both ends hear of each other's faults.

    Args:
        places: our port by peer.
    """

    setup: Setup
    places: Mapping[int, Place]

    def join(self, links: Sequence[PeerLink]) -> dict[int, str]:
        """Set links up; returns by peer the text about those that work."""
        setup = self.setup
        ours = self._set_up(links, setup.options.gpudirect)
        untrue = self._untrue(links, ours)
        for peer in untrue:
            self._drop(peer, ours)
        ours |= self._set_up([link for link in links if link.peer in untrue], "off")
        said = {}
        for peer, made in ours.items():
            place, how = self.places[peer], untrue.get(peer) or made.gpu_way
            routing = ", adaptive routing" if _is_adaptive(setup, place) else ""
            said[peer] = f"; {place.name}, {place.network}, {_settings(made)}{routing}"
            said[peer] += f"; {how}" if how else ""
        return said

    def _set_up(self, links: Sequence[PeerLink], gpudirect: str) -> dict[int, Any]:
        """Make, connect and test links; returns our sides of those that work, by peer.

        After the second round every queue pair of both sides can receive.
        """
        ours: dict[int, Any] = {}
        for link in links:
            with self._noting(link):
                ours[link.peer] = _make(self.setup, link, self.places[link.peer], gpudirect)
            made = ours.get(link.peer)
            link.send({"failed": self.fault(link)} if made is None else {"rdma": made.offer()})
        for link in links:
            message, _ = link.receive()
            self.hear(link, message)
            if not self.fault(link):
                with self._noting(link):
                    _connect(ours[link.peer], link, message)
            link.send({"failed": self.fault(link)})
        for link in links:
            self.hear(link, link.receive()[0])
            if self.fault(link):
                self._drop(link.peer, ours)
        # Test the memory of the host.
        self._keep_those_that_deliver([link for link in links if link.peer in ours], ours, "path")
        staged = [link for link in links if link.peer in ours and ours[link.peer].in_host_memory]
        self._keep_those_that_deliver(staged, ours, "slots")
        return ours

    def _keep_those_that_deliver(
        self, links: Sequence[PeerLink], ours: dict[int, Any], test: str
    ) -> None:
        found = self._undelivered(links, ours, test)
        for link in links:
            if link.peer in found:
                self._agree(link, found[link.peer])
                self._drop(link.peer, ours)

    def _drop(self, peer: int, ours: dict[int, Any]) -> None:
        ours.pop(peer, None)
        self.setup.native.drop_link(peer)

    def _undelivered(
        self, links: Sequence[PeerLink], ours: Mapping[int, Any], test: str
    ) -> dict[int, str]:
        """By peer, what a link does with the pattern of a test instead of delivering it; equal on
        both ends.
        """
        patience = _patience(self.setup.options)
        deadline = time.monotonic() + patience

        def post(link: PeerLink, seed: int) -> None:
            ours[link.peer].post_pattern(test, seed)

        def settle(link: PeerLink) -> None:
            if not ours[link.peer].await_pattern(max(0.0, deadline - time.monotonic())):
                raise SetupError(
                    f"a write to rank {link.peer} over {self.places[link.peer].name} has not "
                    f"completed after {patience:.1f} s"
                )

        def fault_of(link: PeerLink, seed: int) -> str:
            fault = ours[link.peer].pattern_fault(test, seed)
            return f"{fault} over {self.places[link.peer].name}" if fault else ""

        return link_faults(links, post, fault_of, settle)

    def _untrue(self, links: Sequence[PeerLink], ours: Mapping[int, Any]) -> dict[int, str]:
        """By peer, why its link must not use GPUDirect although both ends could set it up.

        Raises:
            TransportUnavailable: it was asked for.
        """
        tested = [link for link in links if link.peer in ours]
        tested = [link for link in tested if not ours[link.peer].in_host_memory]
        faults = self._undelivered(tested, ours, "slots")
        found = {
            link.peer: undelivered(link, "GPUDirect", faults[link.peer])
            for link in tested
            if link.peer in faults
        }
        if found and self.setup.options.gpudirect == "on":
            on, off = setting("gpudirect", "on"), setting("gpudirect", "off")
            raise TransportUnavailable(
                f"{on}: rank {self.setup.facts.rank}: {next(iter(found.values()))}: turn it off "
                f"in the firmware, or use {off}",
                on,
                off,
            )
        return {peer: f"staged in the host's memory: {why}" for peer, why in found.items()}

    def fault(self, link: PeerLink) -> str:
        """The fault of a link, or "" without one."""
        return self.setup.failed.get(link.peer, "")

    @contextlib.contextmanager
    def _noting(self, link: PeerLink) -> Iterator[None]:
        """Note a fault of our end; raise it where the link has no other kind to go to, or where
        GPUDirect was asked for.
        """
        try:
            yield
        except (SetupError, TransportUnavailable) as error:
            if not self._may_fail(link):
                raise
            self.setup.failed[link.peer] = fitting(f"rank {link.rank}: {error}")

    def hear(self, link: PeerLink, message: Mapping[str, Any]) -> None:
        """Note the fault in a peer's message, unless there is one already."""
        if not message.get("failed"):
            return
        failed = fitting(message["failed"]) or "no reason given"
        if link.peer not in self.setup.has_other_kind:
            raise SetupError(f"rank {link.rank}: RDMA with rank {link.peer} failed there: {failed}")
        self.setup.failed.setdefault(link.peer, failed)

    def _agree(self, link: PeerLink, fault: str) -> None:
        """Note what a link does not deliver, which both ends know; raise it as :meth:`_noting`."""
        if self._may_fail(link):
            self.setup.failed[link.peer] = fault
            return
        on = self.setup.options.gpudirect == "on"
        asked = setting("gpudirect", "on") if on else setting("transport", "rdma")
        check = (
            f"check the subnet manager and {variable('pkey_index')}"
            if self.places[link.peer].infiniband
            else "open UDP port 4791 (RoCE v2) between the hosts, check the MTU of the switches"
        )
        node_ips, transport = setting("node_ips"), setting("transport", "tcp")
        raise TransportUnavailable(
            f"rank {link.rank}: {asked}: {fault}. An RDMA link has to deliver a test pattern at "
            f"the start: {check}, name ports of one network with {variable('devices')} or "
            f"{node_ips}, or use {transport}",
            asked,
            node_ips,
            transport,
        )

    def _may_fail(self, link: PeerLink) -> bool:
        return link.peer in self.setup.has_other_kind and self.setup.options.gpudirect != "on"


def _patience(options: TransportOptions) -> float:
    """Seconds that a link has for a pattern: some packets may be lost and are then sent again."""
    num_lost = min(options.rdma.retries, _LOST_PACKETS)
    again = num_lost * math.ldexp(_TIMEOUT_UNIT, options.rdma.timeout)
    return min(_PATTERN_SECONDS + again, options.setup_timeout / 4)


def _connect(made: Any, link: PeerLink, message: Mapping[str, Any]) -> None:
    try:
        made.connect(message["rdma"])
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ProtocolError(
            f"rank {link.rank}: rank {link.peer} sent a broken RDMA offer: {error}"
        ) from error


def _settings(made: Any) -> str:
    """The settings of a link's queue pairs as the card has them, for log lines."""
    try:
        found = made.attributes()
    except SetupError as error:  # the link works without an answer
        return one_line(error)
    return (
        f"GID index {found['gid_index']}, traffic class {found['traffic_class']}, "
        f"service level {found['service_level']}, partition key {found['pkey_index']}, "
        f"time-out {found['timeout']}, retries {found['retries']}"
    )


def _is_adaptive(setup: Setup, place: Place) -> bool:
    asked = setup.options.rdma.adaptive_routing
    return asked == "on" or (asked == "auto" and place.infiniband)


def _make(setup: Setup, link: PeerLink, place: Place, gpudirect: str) -> Any:
    """Our side of a link."""
    options = setup.options.rdma
    return setup.extension.RdmaLink(
        setup.native,
        link.peer,
        link.incoming,
        link.outgoing,
        device=place.device,
        port=place.port,
        gid_index=place.gid_index,
        traffic_class=options.traffic_class,
        service_level=options.service_level,
        pkey_index=options.pkey_index,
        timeout=options.timeout,
        retries=options.retries,
        adaptive_routing=_is_adaptive(setup, place),
        piece_bytes=setup.options.workload * _ELEMENT_BYTES,
        gpu=setup.gpu,
        gpudirect=gpudirect,
        max_pending=setup.options.max_pending,
    )


KIND = TransportKind(
    name=_NAME,
    preference=40,
    reason="different hosts with RDMA devices: RDMA writes",
    obstacle=obstacle,
    look=look,
    join=join,
    between_hosts=True,
    device_memory=True,
    may_fail=True,
)

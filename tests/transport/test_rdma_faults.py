"""Faults of an RDMA path, and its addresses, over the double of libibverbs."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from megatron.dpp.errors import PeerDead, ProtocolError, SetupError, TransportUnavailable
from megatron.dpp.transport.joining import PeerLink
from megatron.dpp.transport.kinds import rdma
from megatron.dpp.transport.options import RdmaOptions
from tests.transport.conftest import Trouble
from tests.transport.kinds import (
    carries,
    fake_verbs,
    opened,
    pair,
    take_next,
    until_arrived,
    until_failure,
)
from tests.transport.test_rdma import GONE, until_events_are_read

MIB = 1 << 20
SOON = {"setup_timeout": 6.0}
"""A link is given a quarter of it to deliver the test pattern."""
REFUSED = f"(refused an RDMA write: remote access error|{GONE})"
"""Or the refused rank's queue pair, which is then in the error state, answers no more."""
Offer = dict[str, Any]


def test_a_queue_pair_of_the_peer_that_is_gone(trouble: Trouble) -> None:
    """Both processes live, and their control connection too."""
    with opened("rdma", pair()) as (a, b):
        carries(a, b)
        trouble("break-pairs", 1)
        a.put(0, torch.ones(10), iteration=0, microbatch=1)
        errors = [until_failure(a), until_failure(b)]
    for rank, error in enumerate(errors):
        told = "reported by" in str(error)  # the other rank saw it first, and blames this one
        assert type(error) is PeerDead
        assert f"rank {rank if told else 1 - rank} (pid" in str(error), error
        assert "cannot be reached over RDMA any more" in str(error), error


def test_a_port_that_is_up_again_carries_messages_and_has_no_blame(trouble: Trouble) -> None:
    with opened("rdma", pair()) as (a, b):
        for number, down in ((1, 1), (2, 0)):
            trouble("port-down", down)
            until_events_are_read(number)
        a.put(0, torch.ones(10), iteration=0, microbatch=0)
        until_arrived(b)  # a take would send credit, which could meet the error first
        trouble("error-status", 12)
        a.put(0, torch.ones(10), iteration=0, microbatch=1)
        seen = until_failure(a)
    assert "retry counter exceeded" in str(seen) and "which is down" not in str(seen)


def test_a_region_that_is_smaller_than_the_slots_is_found_at_the_start(trouble: Trouble) -> None:
    trouble("short-regions", 2)  # the slots of both ranks
    with pytest.raises(TransportUnavailable) as caught, opened("rdma", pair(MIB), **SOON):
        pass
    assert re.search(rf"rank [01]: rank [01] \(pid .*\) {REFUSED}", str(caught.value)), caught.value
    trouble("short-regions", 2)
    with opened("auto", pair(MIB), **SOON) as (a, b):
        assert [end.links()[0].kind for end in (a, b)] == ["tcp", "tcp"]


def offers(monkeypatch: pytest.MonkeyPatch, change: Callable[[Offer], Offer], *by: int) -> None:
    """Ranks offer their ends of a link with a change."""
    original = PeerLink.send

    def send(self: PeerLink, message: Offer, fds: Sequence[int] = ()) -> None:
        if self.rank in by and "rdma" in message:
            message = {"rdma": change(dict(message["rdma"]))}
        original(self, message, fds)

    monkeypatch.setattr(PeerLink, "send", send)


def stale_key(offer: Offer) -> Offer:
    return {**offer, "rkey": offer["rkey"] + 1000}


def stale_pairs(offer: Offer) -> Offer:
    return {**offer, "queue_pairs": [number + 1000 for number in offer["queue_pairs"]]}


@pytest.mark.parametrize("by", [0, 1])
@pytest.mark.parametrize(("change", "text"), [(stale_key, REFUSED), (stale_pairs, GONE)])
def test_an_offer_of_an_earlier_start_is_found_by_the_pattern(
    trouble: Trouble, monkeypatch: pytest.MonkeyPatch, change: Callable[[Offer], Offer],
    text: str, by: int,
) -> None:  # fmt: skip
    trouble("reset", 0)
    offers(monkeypatch, change, by)
    named = rf"rank [01]: rank [01] \(pid \d+ on .*\) {text}"
    with pytest.raises(TransportUnavailable, match=named), opened("rdma", pair(), **SOON):
        pass
    with opened("auto", pair(), **SOON) as (a, b):
        links = [end.links()[0] for end in (a, b)]
        carries(a, b)
    assert [link.kind for link in links] == ["tcp", "tcp"]
    assert all(re.search(named, link.reason) for link in links), links


def without_packets(offer: Offer) -> Offer:
    return {name: value for name, value in offer.items() if name != "first_packets"}


def of_one_pair(offer: Offer) -> Offer:
    return {**offer, "queue_pairs": offer["queue_pairs"][:1]}


@pytest.mark.parametrize("kind", ["rdma", "auto"])
@pytest.mark.parametrize(
    ("change", "text"),
    [
        (without_packets, "rank 0: rank 1 sent a broken RDMA offer: .*first_packets"),
        (of_one_pair, r"rank 1 \(pid .*\) sent an offer of 1 queue pairs"),
    ],
)
def test_an_offer_of_another_version_is_refused(
    trouble: Trouble, monkeypatch: pytest.MonkeyPatch, change: Callable[[Offer], Offer],
    text: str, kind: str,
) -> None:  # fmt: skip
    trouble("reset", 0)
    offers(monkeypatch, change, 1)
    with pytest.raises(ProtocolError, match=text), opened(kind, pair(), **SOON):
        pass


# Links that connect and carry nothing -------------------------------------------------------------

LOST = r"rank [01]: a write to rank [01] over fake0 port 1 has not completed after 1\.5 s"
WRONG = r"rank [01]: byte 0 of 4096 arrived wrong over fake0 port 1"


CARRIES = r"rank [01]: DppConfig\(transport='rdma'\): "
LOCKED, APART = "ulimit -l unlimited", "in one RDMA network"


@pytest.mark.parametrize(
    ("fault", "value", "text", "asked_for"),
    [
        # It carries nothing.
        ("lose-writes", 1000, LOST, CARRIES),  # UDP port 4791 is closed both ways
        ("lose-writes", 1, LOST, CARRIES),  # one queue pair of one rank finds no way
        ("lose-host-writes", 1, WRONG, CARRIES),
        ("error-status", 12, "rank [01]: .*transport retry counter exceeded", CARRIES),
        # It cannot be set up.
        ("fail-registration", 1, LOCKED, ""),  # one rank alone meets it
        ("fail-registration", 100, LOCKED, ""),
        ("fail-connection", 100, APART, ""),
    ],
)
def test_a_link_that_is_none_is_tcp_by_auto_and_an_error_where_it_was_asked_for(
    trouble: Trouble, fault: str, value: int, text: str, asked_for: str
) -> None:
    trouble(fault, value)
    large = torch.arange(1 << 18)
    with opened("auto", pair(large.nbytes), **SOON) as (a, b):
        reasons = [end.links()[0].reason for end in (a, b)]
        assert [end.links()[0].kind for end in (a, b)] == ["tcp", "tcp"]
        for sender, receiver in ((a, b), (b, a)):
            sender.put(0, large, iteration=0, microbatch=0)
            assert torch.equal(take_next(receiver, 0, 0).tensor, large)
    for reason in reasons:
        assert re.search(rf"^different hosts.*\[rdma: (?=rank [01]).*{text}.*\]$", reason), reason
    assert reasons[0] == reasons[1] or value == 100  # else both met it
    trouble(fault, value if fault == "error-status" else 100)
    error = TransportUnavailable if asked_for else SetupError
    with pytest.raises(error) as caught, opened("rdma", pair(), **SOON):
        pass
    said = str(caught.value)
    assert re.search(f"{asked_for}.*{text}", said), said
    if asked_for:
        for knob in ("UDP port 4791", "DPP_RDMA_DEVICES", "DppConfig(transport='tcp')"):
            assert knob in said and "has to deliver a test pattern" in said, said


def test_the_test_waits_for_packets_that_are_sent_again(
    trouble: Trouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two losses of 4.3 s each, or of what the flag says, and no longer."""
    monkeypatch.setattr(rdma, "_PATTERN_SECONDS", 0.5)
    trouble("lose-writes", 1000)
    options = RdmaOptions(timeout=18)  # 1.07 s
    with opened("auto", pair(), rdma=options, setup_timeout=40.0) as (a, _):
        reason = a.links()[0].reason
    assert "has not completed after 2.6 s" in reason, reason


# Addresses of queue pairs -------------------------------------------------------------------------

HOPS = 64


def connected_path() -> dict[str, Any]:
    """The path of the last queue pair that was connected."""
    numbers = (ctypes.c_long * 21)()
    fake_verbs().fake_verbs_path(numbers)
    names = ("has_route", "lid", "gid_index", "hop_limit", "traffic_class")
    found: dict[str, Any] = dict(zip(names, numbers, strict=False))
    return {**found, "gid": bytes(numbers[5:]).hex()}


def gid(subnet: int, flid: int = 0) -> str:
    """The double's address in a subnet of InfiniBand."""
    return f"fe800000{flid:04x}{subnet:04x}0200000000000001"


def connected(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> dict[str, Any]:
    """The path of a link whose ends offer what is changed, after a message each way."""
    offers(monkeypatch, lambda offer: {**offer, **changes}, 0, 1)
    with opened("rdma", pair(), rdma=RdmaOptions(devices="fake0")) as (a, b):
        for sender, receiver in ((a, b), (b, a)):
            carries(sender, receiver)
        assert "fake0 port 1, InfiniBand, GID index " in a.links()[0].reason
    return connected_path()


@pytest.mark.parametrize(
    ("port", "peer", "has_route", "lid", "gid_index"),
    [
        ({}, {"lid": 9}, 0, 9, 0),  # the LID is enough within a subnet
        ({"subnet": 5}, {"lid": 9}, 0, 9, 0),
        ({"needs-route": 1}, {"lid": 9}, 1, 9, 0),
        ({}, {"lid": 9, "gid": gid(5)}, 1, 9, 0),
        ({}, {"lid": 0}, 1, 0, 0),
        # Routers forward to a LID that is in the address.
        ({"flid": 0x21}, {"lid": 9, "gid": gid(5, 0x1234)}, 1, 0x1234, 1),
        ({"flid": 0x21}, {"lid": 9, "gid": gid(0, 0x1234)}, 0, 9, 1),
    ],
)
def test_an_infiniband_path_has_a_route_where_it_needs_one(
    trouble: Trouble, monkeypatch: pytest.MonkeyPatch, port: dict[str, int],
    peer: dict[str, Any], has_route: int, lid: int, gid_index: int,
) -> None:  # fmt: skip
    for name, value in {"infiniband": 1, **port}.items():
        trouble(name, value)
    found = connected(monkeypatch, **peer)
    assert (found["has_route"], found["lid"]) == (has_route, lid)
    if has_route:
        own = gid(port.get("subnet", 0), port.get("flid", 0))
        assert found["gid"] == peer.get("gid", own)
        assert (found["gid_index"], found["hop_limit"]) == (gid_index, HOPS)


@pytest.mark.parametrize(
    ("family", "address", "gid"),
    [
        ("ipv4", "127.0.0.1", "00000000000000000000ffff7f000001"),
        ("ipv6", "::1", "00000000000000000000000000000001"),
    ],
)
def test_a_roce_path_has_the_gid_of_the_hosts_family(
    trouble: Trouble, family: str, address: str, gid: str
) -> None:
    trouble(family, 1)
    with opened("rdma", pair(), node_ips=address) as (a, b):
        carries(a, b)
        network = "RoCE v2 over IPv6" if family == "ipv6" else "RoCE v2"
        assert f"{network}, GID index 2, traffic class 106" in a.links()[0].reason
    expected = {"has_route": 1, "lid": 0, "gid_index": 2, "hop_limit": HOPS, "gid": gid}
    assert connected_path() == {**expected, "traffic_class": 106}

"""The addresses that queue pairs get on InfiniBand and on RoCE, over a double of libibverbs."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from megatron.dpp.transport.joining import PeerLink
from megatron.dpp.transport.options import RdmaOptions
from tests.transport.conftest import Trouble
from tests.transport.kinds import fake_verbs, opened, pair, take_next

HOPS = 64


def path() -> dict[str, Any]:
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
    original = PeerLink.send

    def send(self: PeerLink, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
        if "rdma" in message:
            message = {"rdma": {**message["rdma"], **changes}}
        original(self, message, fds)

    monkeypatch.setattr(PeerLink, "send", send)
    with opened("rdma", pair(), rdma=RdmaOptions(devices="fake0")) as (a, b):
        for sender, receiver in ((a, b), (b, a)):
            sender.put(0, torch.ones(3), iteration=0, microbatch=0)
            assert take_next(receiver, 0, 0).microbatch == 0
        assert "fake0 port 1, InfiniBand, GID index " in a.links()[0].reason
    return path()


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
        a.put(0, torch.ones(3), iteration=0, microbatch=0)
        assert take_next(b, 0, 0).microbatch == 0
        network = "RoCE v2 over IPv6" if family == "ipv6" else "RoCE v2"
        assert f"{network}, GID index 2, traffic class 106" in a.links()[0].reason
    expected = {"has_route": 1, "lid": 0, "gid_index": 2, "hop_limit": HOPS, "gid": gid}
    assert path() == {**expected, "traffic_class": 106}

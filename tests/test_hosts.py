"""The address of this host that other hosts reach."""

from __future__ import annotations

import re
import socket
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from megatron.dpp import hosts
from megatron.dpp.config import DppConfig
from megatron.dpp.errors import ConfigError


def test_the_route_decides_without_an_address() -> None:
    assert hosts.own_interface("127.0.0.1") == ("127.0.0.1", "lo")
    assert hosts.addresses()["127.0.0.1"] == "lo"


@pytest.mark.parametrize("other", ["192.0.2.1", "2001:DB8::1", "999.1.1.1"])
def test_an_address_that_is_not_ours_is_refused(other: str) -> None:
    said = f"NODE_IPS gives {other} to this node, which has"
    with pytest.raises(ConfigError, match=re.escape(said)):
        hosts.own_interface("127.0.0.1", [other])


def test_a_further_address_of_an_interface_is_ours_without_its_name() -> None:
    assert "127.0.0.2" not in hosts.addresses()
    assert hosts.own_interface("127.0.0.1", ["127.0.0.2"]) == ("127.0.0.2", "")


def test_addresses_of_one_link_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def entry(address: str, netmask: str) -> Any:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return SimpleNamespace(family=family, address=address, netmask=netmask)

    local = entry("fe80::1%eth0", "ffff:ffff:ffff:ffff::")
    own = [entry("fd00::2", "ffff:ffff::"), local, entry("10.0.7.1", "255.255.0.0")]
    hardware = SimpleNamespace(family=socket.AF_PACKET, address="0a:00:00:00:00:01", netmask=None)
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"eth0": [hardware, *own]})
    assert hosts.networks() == {
        "10.0.7.1": ("eth0", "10.0.0.0/16"), "fd00::2": ("eth0", "fd00::/32")
    }  # fmt: skip
    assert list(hosts.addresses()) == ["10.0.7.1", "fd00::2"]


def test_a_name_that_is_not_known_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"MASTER_ADDR=nowhere\.invalid"):
        hosts.address_towards("nowhere.invalid", patience=0.0)


@pytest.fixture
def with_ipv6() -> None:
    """Skips where this host has no IPv6."""
    if "::1" not in hosts.addresses():
        pytest.skip("no IPv6 on this host")


@pytest.mark.usefixtures("with_ipv6")
def test_an_address_of_ipv6_has_an_interface_and_one_spelling() -> None:
    assert hosts.own_interface("::1") == ("::1", "lo")
    assert hosts.own_interface("127.0.0.1", ["0:0::1"]) == ("::1", "lo")


def answer(monkeypatch: pytest.MonkeyPatch, *found: str) -> None:
    """Let every name have these addresses."""
    entries = [
        (hosts.family_of(text), socket.SOCK_DGRAM, 17, "", (text, 9) + (0, 2) * (":" in text))
        for text in found
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: entries)


def test_a_name_of_both_families_counts_as_one_of_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, "::1", "127.0.0.1")
    assert hosts.address_towards("node0") == "127.0.0.1"


@pytest.mark.usefixtures("with_ipv6")
def test_the_other_family_is_tried_where_no_route_leads(monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, "::1", "255.255.255.255")  # a broadcast is refused
    assert hosts.address_towards("node0") == "::1"


def test_an_address_of_one_link_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, "fe80::1%lo")
    with pytest.raises(ConfigError, match=r"MASTER_ADDR=.*valid on one link only"):
        hosts.address_towards("node0")


@pytest.mark.parametrize(
    "text",
    [
        *("[::1]", "10.0.0.1,::1:", "fe80::1%lo", "fe80::1", "fd00::1%eth0", "::ffff:10.0.0.1"),
        *("::", "0.0.0.0", "ff02::1", "224.0.0.1"),
    ],
)
def test_what_no_host_can_be_reached_at_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"node_ips=.* is not an IPv4 or IPv6 address by which"):
        DppConfig(node_ips=text)


def test_nodes_on_one_cable_may_have_addresses_of_one_link() -> None:
    """Of IPv4, which need no name of the interface."""
    assert DppConfig(node_ips="169.254.0.1,169.254.0.2").node_ip(1, 2, 1) == "169.254.0.2"


def test_there_is_an_address_per_node_or_per_rank() -> None:
    per_node, per_rank = (
        DppConfig(node_ips=text) for text in ("10.0.0.1,FD00:0::2", "10.0.0.1,10.0.0.2,10.0.0.3")
    )
    assert [per_node.node_ip(rank, 4, 2) for rank in (1, 2)] == ["10.0.0.1", "fd00::2"]
    assert per_rank.node_ip(2, 3, 3) == "10.0.0.3" and DppConfig().node_ip(0, 4, 2) is None
    with pytest.raises(ConfigError, match=r"one per node \(3\) or one per rank \(6\)"):
        per_node.node_ip(0, 6, 2)

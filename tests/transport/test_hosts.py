"""Links between hosts. Two network namespaces joined by a veth pair are the hosts; root only."""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import struct
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.dpp.config import DppConfig
from megatron.dpp.errors import ConfigError, PeerDead
from megatron.dpp.transport.rendezvous import Rendezvous
from tests.transport.kinds import PATIENCE, forked, open_from_file, pair, take_next

CLONE_NEWNET = 0x40000000
LISTENING = "0A"
ADDRESSES = ("10.213.71.1", "10.213.71.2")


@dataclass(frozen=True)
class Hosts:
    """Two network namespaces; rank r lives in ``names[r]``, behind ``devices[r]``."""

    names: tuple[str, str]
    devices: tuple[str, str]

    def enter(self, rank: int) -> None:
        """Move this process to a host."""
        with open(f"/run/netns/{self.names[rank]}") as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), "setns")

    def cut(self) -> None:
        """Pull the cable out of host 1."""
        _ip("-n", self.names[1], "link", "set", self.devices[1], "down")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=PATIENCE)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and the ip command")
    tag = os.getpid()
    made = Hosts((f"dpp-{tag}-0", f"dpp-{tag}-1"), (f"dpp{tag}a", f"dpp{tag}b"))
    try:
        try:
            for name in made.names:
                _ip("netns", "add", name)
            _ip("link", "add", made.devices[0], "type", "veth", "peer", "name", made.devices[1])
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
        for name, device, address in zip(made.names, made.devices, ADDRESSES, strict=True):
            _ip("link", "set", device, "netns", name)
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", device)
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", device, "up")
        yield made
    finally:
        for name in made.names:  # the devices go with them
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def _listening_addresses() -> set[str]:
    """Local addresses of this host's listening TCP sockets."""
    rows = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    found = [row[1].split(":")[0] for row in rows if row[3] == LISTENING]
    return {socket.inet_ntoa(struct.pack("<I", int(address, 16))) for address in found}


def test_hosts_talk_over_tcp_on_the_named_address_alone(hosts: Hosts, tmp_path: Path) -> None:
    def body(rank: int, path: str, results: Any) -> None:
        hosts.enter(rank)
        heard: set[str] = set()
        connect = Rendezvous.connect

        def listen_and_connect(self: Rendezvous, wanted: Any) -> Any:
            heard.update(_listening_addresses())
            return connect(self, wanted)

        Rendezvous.connect = listen_and_connect  # type: ignore[method-assign]
        big = torch.arange(3 << 20, dtype=torch.int32)  # striped over the connections
        channels = pair(big.nbytes)
        with open_from_file("auto", channels, rank, path, node_ips=ADDRESSES[rank]) as transport:
            transport.put(0, big, iteration=0, microbatch=rank)
            message = take_next(transport, 0, 0)
            transport.flush(PATIENCE)
            equal = bool(torch.equal(message.tensor, big))
            results.put((rank, transport.links()[0].kind, message.microbatch, equal, heard))

    with forked(2, body, tmp_path) as (_, results):
        found = sorted(results.get(timeout=PATIENCE) for _ in range(2))
    assert found == [(r, "tcp", 1 - r, True, {ADDRESSES[r]}) for r in range(2)]


@pytest.mark.parametrize("busy", [False, True])
def test_a_lost_host_is_noticed(hosts: Hosts, busy: bool, tmp_path: Path) -> None:
    def body(rank: int, path: str, results: Any) -> None:
        hosts.enter(rank)
        transport = open_from_file("tcp", pair(), rank, path, node_ips=ADDRESSES[rank])
        results.put(rank)
        try:
            while True:
                if busy and transport.pending() == 0:
                    transport.put(0, torch.ones(1000), iteration=0, microbatch=0)
                for _ in range(transport.poll()[0] - len(taken)):
                    taken.append(transport.take(0).microbatch)
                transport.wait(0.05 if busy else PATIENCE)
        except PeerDead as error:
            results.put((time.monotonic_ns(), rank, str(error)))
        transport.close()

    taken: list[int] = []
    with forked(2, body, tmp_path) as (_, results):
        assert {results.get(timeout=PATIENCE) for _ in range(2)} == {0, 1}
        time.sleep(0.2)
        cut_ns = time.monotonic_ns()
        hosts.cut()
        reports = [results.get(timeout=PATIENCE) for _ in range(2)]
    for noticed_ns, rank, text in reports:
        seconds = (noticed_ns - cut_ns) * 1e-9
        print(f"rank {rank} noticed after {seconds:.2f} s: {text}")
        assert f"rank {1 - rank} (pid" in text
        assert seconds < 6.0  # 3 s by the sockets' timers; the rest is for a busy machine


def test_an_address_per_node_or_per_rank() -> None:
    per_node = DppConfig(node_ips="10.0.0.1,10.0.0.2")
    assert [per_node.node_ip(rank, 4, 2) for rank in range(4)] == ["10.0.0.1"] * 2 + [
        "10.0.0.2"
    ] * 2
    per_rank = DppConfig(node_ips="10.0.0.1,10.0.0.2,10.0.0.3,10.0.0.4")
    assert per_rank.node_ip(2, 4, 2) == "10.0.0.3"
    assert DppConfig().node_ip(0, 4, 2) is None
    with pytest.raises(ConfigError, match=r"one per node \(3\) or one per rank \(6\)"):
        per_node.node_ip(0, 6, 2)
    with pytest.raises(ConfigError, match="'node7' is not an IPv4 address"):
        DppConfig(node_ips="10.0.0.1,node7")

"""Links between hosts, which are network namespaces (``tests/netns.py``)."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.dpp.config import DppConfig
from megatron.dpp.errors import ConfigError, PeerDead
from megatron.dpp.transport.rendezvous import Rendezvous
from tests.netns import ADDRESSES, Hosts, two_hosts
from tests.transport.kinds import PATIENCE, forked, open_from_file, pair, take_next

LISTENING = "0A"


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with two_hosts() as made:
        yield made


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
        options = {"node_ips": ADDRESSES[rank], "peer_timeout": 3.0}
        transport = open_from_file("tcp", pair(), rank, path, **options)
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
        assert seconds < 20.0  # 3 s by the sockets' timers, whose default is 30; machines are busy


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

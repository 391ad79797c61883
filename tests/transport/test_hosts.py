"""Links between hosts, which are network namespaces (``tests/netns.py``), and jobs side by side."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.dpp.errors import PeerDead
from megatron.dpp.hosts import addresses
from megatron.dpp.transport.kinds import kinds_of_links
from megatron.dpp.transport.meet import Meeting
from tests.netns import ADDRESSES, Hosts
from tests.runtime.launcher import free_port
from tests.transport.blackouts import survive
from tests.transport.kinds import PATIENCE, forked, open_from_file, opened, pair, take_next
from tests.transport.test_tcp import remembered

LISTENING = "0A"
MIB = 1 << 20


def _listening_addresses() -> set[str]:
    """Local addresses of this host's listening TCP sockets."""
    rows = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    found = [row[1].split(":")[0] for row in rows if row[3] == LISTENING]
    return {socket.inet_ntoa(struct.pack("<I", int(address, 16))) for address in found}


def test_hosts_talk_over_tcp_on_the_named_address_alone(hosts: Hosts, tmp_path: Path) -> None:
    def body(rank: int, path: str, results: Any) -> None:
        hosts.enter(rank)
        heard: set[str] = set()
        connect = Meeting.connect

        def listen_and_connect(self: Meeting, wanted: Any) -> Any:
            heard.update(_listening_addresses())
            return connect(self, wanted)

        Meeting.connect = listen_and_connect  # type: ignore[method-assign]
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
        options = {"node_ips": ADDRESSES[rank], "peer_timeout": 1.0}
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
        assert f"rank {1 - rank} (pid" in text and "cannot be reached: nothing has come" in text
        assert "that host is down, or the network between is cut" in text
        assert "; the oldest missing message here is number" in text
        assert seconds < 20.0  # 3 s by the sockets' timers, whose default is 36; machines are busy


def test_a_cut_link_is_told_from_a_slow_peer_before_its_host_counts_as_gone(
    hosts: Hosts, tmp_path: Path
) -> None:
    def body(rank: int, path: str, results: Any) -> None:
        hosts.enter(rank)
        options = {"node_ips": ADDRESSES[rank], "peer_timeout": 20.0}
        with open_from_file("tcp", pair(), rank, path, **options) as transport:
            transport.put(0, torch.ones(3), iteration=4, microbatch=7)
            take_next(transport, 0, 0)
            texts = [str(transport.overdue(0, 1.0, iteration=4, microbatch=8))]
            results.put((rank, texts))
            deadline = time.monotonic() + PATIENCE
            while not transport.trouble() and time.monotonic() < deadline:
                time.sleep(0.1)
            texts.append(str(transport.overdue(0, 1.0, iteration=4, microbatch=8)))
            results.put((rank, texts))
            os._exit(0)

    with forked(2, body, tmp_path) as (_, results):
        assert {results.get(timeout=PATIENCE)[0] for _ in range(2)} == {0, 1}
        time.sleep(0.2)
        hosts.cut()
        reports = [results.get(timeout=PATIENCE) for _ in range(2)]
    for rank, (slow, cut) in reports:
        begin = f"rank {rank}: microbatch 8 of iteration 4 "
        assert slow.startswith(begin) and f"rank {1 - rank} is alive" in slow
        assert "(over tcp microbatch 7 of iteration 4 came last)" in slow
        lost = f"nothing has come from the host of rank {1 - rank} for "
        assert cut.startswith(begin) and lost in cut, cut
        assert "s (tcp): it is down, or the network between is cut" in cut


def free_ports(count: int) -> int:
    """The first of so many free ports in a row."""
    while True:
        first = free_port()
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(first, first + count):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
            return first


def test_ranks_listen_on_the_named_ports_alone_and_again() -> None:
    first = free_ports(2)
    for _ in range(2):  # connections of the first time do not keep the ports
        ports = {"listen_ports": (first, first + 1), "setup_timeout": 5.0}
        with remembered() as made, opened("tcp", pair(), **ports):
            assert made[1, 0, "control"].getsockname()[1] in ports["listen_ports"]


BLACKOUTS = [2.0, *(pytest.param(s, marks=pytest.mark.slow) for s in (5.0, 20.0))]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("seconds", BLACKOUTS)
def test_a_blackout_is_survived_without_a_lost_message(
    hosts: Hosts, seconds: float, tmp_path: Path
) -> None:
    survive("tcp", hosts, seconds, tmp_path)


def test_ranks_talk_over_ipv6() -> None:
    if "::1" not in addresses():
        pytest.skip("no IPv6 on this host")
    large = torch.arange(3 * MIB, dtype=torch.int32)
    with opened("tcp", pair(large.nbytes), node_ips="::1") as (a, b):
        a.put(0, large, iteration=0, microbatch=0)
        assert torch.equal(take_next(b, 0, 0).tensor, large)
        b.put(0, large, iteration=0, microbatch=1)
        assert take_next(a, 0, 0).microbatch == 1


@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_jobs_of_two_users_run_side_by_side(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same port and the same names in the environment, as two users may choose them."""
    if os.geteuid() != 0:
        pytest.skip("becoming two users needs root")
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    folder = tempfile.mkdtemp(prefix="dpp-two-users-")  # pytest's own lets nobody else in
    os.chmod(folder, 0o777)
    users = (65533, 65534)
    kinds_of_links()  # imports them: these users may not be allowed to read Python's files

    def body(number: int, path: str, results: Any) -> None:
        job, rank = divmod(number, 2)
        os.setgroups([])
        os.setgid(users[job])
        os.setuid(users[job])
        with open_from_file(kind, pair(), rank, f"{path}-{job}") as transport:
            transport.put(0, torch.ones(8), iteration=0, microbatch=10 * job + rank)
            results.put((job, rank, take_next(transport, 0, 0).microbatch))
            transport.flush(PATIENCE)

    with contextlib.ExitStack() as stack:
        stack.callback(lambda: [each.unlink() for each in Path(folder).iterdir()])
        _, results = stack.enter_context(forked(4, body, Path(folder)))
        found = sorted(results.get(timeout=PATIENCE) for _ in range(4))
    os.rmdir(folder)
    assert found == [(0, 0, 1), (0, 1, 0), (1, 0, 11), (1, 1, 10)]

"""Links between hosts without IPv4, and jobs of two users side by side on one host."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.dpp.transport.kinds import kinds_of_links
from tests.netns import SIX, two_hosts
from tests.transport.kinds import PATIENCE, forked, open_from_file, pair, take_next


def exchange(rank: int, transport: Any, value: int) -> int:
    """Send a message, and the value of the one that comes."""
    transport.put(0, torch.full((8,), value), iteration=0, microbatch=0)
    got = int(take_next(transport, 0, 0).tensor[0])
    transport.flush(PATIENCE)
    return got


def test_hosts_that_have_ipv6_alone_are_linked(tmp_path: Path) -> None:
    with two_hosts(SIX) as hosts:

        def body(rank: int, path: str, results: Any) -> None:
            hosts.enter(rank)
            address = hosts.addresses[rank]
            with open_from_file("tcp", pair(), rank, path, node_ips=address) as transport:
                results.put((rank, exchange(rank, transport, 10 + rank), transport.links()[0].kind))

        with forked(2, body, tmp_path) as (_, results):
            found = sorted(results.get(timeout=PATIENCE) for _ in range(2))
    assert found == [(0, 11, "tcp"), (1, 10, "tcp")]


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
            results.put((job, rank, exchange(rank, transport, 10 * job + rank)))

    with contextlib.ExitStack() as stack:
        stack.callback(lambda: [each.unlink() for each in Path(folder).iterdir()])
        _, results = stack.enter_context(forked(4, body, Path(folder)))
        found = sorted(results.get(timeout=PATIENCE) for _ in range(4))
    os.rmdir(folder)
    assert found == [(0, 0, 1), (0, 1, 0), (1, 0, 11), (1, 1, 10)]

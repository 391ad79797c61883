"""A killed rank is named on all others, whatever its role: leader, follower, and the place of its
stage in the pipeline.

Two stages of ``WIDTH`` members each, whose boards join all pipelines. The ranks exchange messages
and words until one of them is killed.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import FileStore

from megatron.dpp.errors import TransportError
from megatron.dpp.transport import (
    ChannelSpec,
    Direction,
    Transport,
    TransportOptions,
    open_transport,
)
from tests.netns import ADDRESSES, Hosts, two_hosts
from tests.transport.kinds import PATIENCE, forked, of_rank

WIDTH, RANKS = 3, 6
CHANNELS = [
    spec
    for rank in range(WIDTH)
    for spec in (
        ChannelSpec(rank, rank + WIDTH, 0, Direction.FORWARD, 1 << 12),
        ChannelSpec(rank + WIDTH, rank, 0, Direction.BACKWARD, 1 << 12),
    )
]
ROLES = {0: "first leader", 2: "first follower", 3: "last leader", 5: "last follower"}


def open_one(rank: int, path: str, address: str | None) -> Transport:
    first = rank // WIDTH * WIDTH
    return open_transport(
        of_rank(CHANNELS, rank),
        rank=rank,
        store=FileStore(path),
        options=TransportOptions(setup_timeout=PATIENCE, peer_timeout=3.0, node_ips=address),
        board_ranks=range(first, first + WIDTH),
        board_counters=1,
    )


def exchange(transport: Transport, opened: Callable[[], object]) -> None:
    """Send, take, post and read until something goes wrong; ``opened`` is called when words and
    messages flow.
    """
    board, sent, taken, words = transport.board, 0, 0, 0
    assert board is not None
    while True:
        if transport.pending() == 0:
            transport.put(0, torch.full((8,), sent), iteration=0, microbatch=sent)
            sent += 1
        (arrived,) = transport.poll()
        board.post([arrived])
        if board.index == 0:
            if board.common()[0] > words:
                board.append(words)
                words += 1
        elif board.next() is not None:
            words += 1
        while taken < arrived:
            transport.take(0)
            taken += 1
        if words == 20:
            opened()
        transport.wait(0.01)


def kill(victim: int, folder: Path, host_of: Callable[[int], Hosts | None]) -> float:
    """Kill a rank while all exchange; seconds until the last of the others named it."""

    def body(rank: int, path: str, results: Any) -> None:
        hosts, host = host_of(rank), rank % WIDTH % 2
        if hosts is not None:
            hosts.enter(host)
        transport = open_one(rank, path, ADDRESSES[host] if hosts else None)
        try:
            exchange(transport, lambda: results.put(("flows", rank)))
        except TransportError as error:
            results.put(("ended", rank, str(error), time.monotonic()))
        transport.close()

    with forked(RANKS, body, folder) as (processes, results):
        flowing: set[int] = set()
        while len(flowing) < RANKS:
            flowing.add(results.get(timeout=PATIENCE)[1])
        killed = time.monotonic()
        os.kill(processes[victim].pid or 0, signal.SIGKILL)
        reports: dict[int, tuple[str, float]] = {}
        while len(reports) < RANKS - 1:
            report = results.get(timeout=PATIENCE)
            if report[0] == "ended":
                reports[report[1]] = report[2:]
    for rank, (text, _) in reports.items():
        assert f"rank {victim} (pid" in text, (rank, text)
    return max(moment for _, moment in reports.values()) - killed


@pytest.mark.parametrize("victim", ROLES, ids=ROLES.get)
def test_a_killed_rank_of_any_role_is_named_on_all_others(victim: int, tmp_path: Path) -> None:
    seconds = kill(victim, tmp_path, lambda _: None)
    print(f"all others named it after {seconds * 1e3:.0f} ms")


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with two_hosts() as made:
        yield made


@pytest.mark.slow
@pytest.mark.parametrize("victim", range(RANKS))
def test_and_between_hosts(victim: int, hosts: Hosts, tmp_path: Path) -> None:
    """Members 0 and 2 of each stage are on one host, member 1 is on the other."""
    seconds = kill(victim, tmp_path, lambda _: hosts)
    print(f"all others named it after {seconds * 1e3:.0f} ms")
    assert seconds < 3.0

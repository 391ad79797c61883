"""Ranks killed at random moments of random traffic: what the survivors see, and what is left."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import FileStore

from megatron.dpp.errors import PeerDead, TransportError
from megatron.dpp.transport import (
    ChannelSpec,
    Direction,
    Transport,
    TransportOptions,
    open_transport,
)
from tests.netns import ADDRESSES, Hosts
from tests.shared_memory import none_left
from tests.transport.kinds import (
    GPU_KINDS,
    HAS_GPU,
    NATIVE_KINDS,
    NIXL,
    PATIENCE,
    Results,
    forked,
    of_rank,
    open_from_file,
    prepared,
)
from tests.transport.meeting import descriptors_and_threads, leaked

RANKS = 3
KILLED_KINDS = NATIVE_KINDS if HAS_GPU else (*NATIVE_KINDS, *GPU_KINDS)
"""The doubled CUDA driver is for machines without one."""
LARGEST = 1 << 18
RING = [
    ChannelSpec(rank, (rank + 1) % RANKS, 0, Direction.FORWARD, LARGEST) for rank in range(RANKS)
]


def _exchange(transport: Transport, chance: random.Random) -> None:
    """Send and check numbered messages of random sizes until something goes wrong."""
    sent = taken = 0
    while True:
        if transport.pending() < 2:
            payload = torch.full((chance.randrange(LARGEST),), sent % 251, dtype=torch.uint8)
            transport.put(0, payload, iteration=0, microbatch=sent)
            sent += 1
        if transport.poll()[0] == taken:
            transport.wait(PATIENCE)
            continue
        message = transport.take(0)
        if message.microbatch != taken or not bool((message.tensor == taken % 251).all()):
            raise AssertionError(f"message {message.microbatch} is torn or not number {taken}")
        taken += 1


def _kill_one(seed: int, folder: Path, kinds: Sequence[str] = KILLED_KINDS) -> float:
    """Kill a random rank; check the others. Seconds until the last of them raised."""
    chance, kind = random.Random(seed), kinds[seed % len(kinds)]

    def body(rank: int, path: str, results: Results) -> None:
        before = descriptors_and_threads()
        transport = open_from_file(kind, RING, rank, path)
        results.put("open")
        try:
            _exchange(transport, random.Random(f"{seed}/{rank}"))
        except (TransportError, AssertionError) as error:
            noticed = time.monotonic_ns()
            transport.close()
            said = type(error).__name__, str(error)
            del transport
            results.put((*said, noticed, leaked(before)))

    place = folder / str(seed)
    place.mkdir()
    with prepared(kind), forked(RANKS, body, place) as (ranks, results):
        for _ in ranks:
            assert results.get(PATIENCE) == "open", f"seed {seed}, {kind}"
        time.sleep(chance.random() * 0.03)
        victim = chance.randrange(RANKS)
        killed_ns = time.monotonic_ns()
        os.kill(ranks[victim].pid or 0, signal.SIGKILL)
        reports = [results.get(PATIENCE) for _ in range(RANKS - 1)]
    for name, text, _, left in reports:
        assert (name, left) == (PeerDead.__name__, (0, 0)), (seed, reports)
        assert f"rank {victim} (pid" in text, (seed, reports)
    return (max(noticed for _, _, noticed, _ in reports) - killed_ns) * 1e-9


def test_survivors_of_a_kill_raise_and_leave_nothing(tmp_path: Path) -> None:
    with none_left():
        for seed in range(len(KILLED_KINDS)):
            _kill_one(seed, tmp_path)


@pytest.mark.nixl
def test_survivors_over_nixl_raise_and_leave_nothing(tmp_path: Path) -> None:
    with none_left():
        for seed in range(3):
            _kill_one(seed, tmp_path, [NIXL])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_thousand_kills(tmp_path: Path) -> None:
    with none_left():
        seconds = sorted(_kill_one(seed, tmp_path) for seed in range(1000))
    print(f"noticed after {seconds[500] * 1e3:.1f} ms (median), {seconds[-1] * 1e3:.1f} ms (most)")
    assert seconds[-1] < 1.0


# Two stages of ``WIDTH`` members each, whose boards join all pipelines ----------------------------

WIDTH, MEMBERS = 3, 6
LINES = [
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
        of_rank(LINES, rank),
        rank=rank,
        store=FileStore(path),
        options=TransportOptions(setup_timeout=PATIENCE, peer_timeout=3.0, node_ips=address),
        board_ranks=range(first, first + WIDTH),
        board_counters=1,
    )


def exchange_with_board(transport: Transport, opened: Callable[[], object]) -> None:
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


def kill_member(victim: int, folder: Path, host_of: Callable[[int], Hosts | None]) -> float:
    """Kill a rank while all exchange; seconds until the last of the others named it."""

    def body(rank: int, path: str, results: Any) -> None:
        hosts, host = host_of(rank), rank % WIDTH % 2
        if hosts is not None:
            hosts.enter(host)
        transport = open_one(rank, path, ADDRESSES[host] if hosts else None)
        try:
            exchange_with_board(transport, lambda: results.put(("flows", rank)))
        except TransportError as error:
            results.put(("ended", rank, str(error), time.monotonic()))
        transport.close()

    with forked(MEMBERS, body, folder) as (processes, results):
        flowing: set[int] = set()
        while len(flowing) < MEMBERS:
            flowing.add(results.get(timeout=PATIENCE)[1])
        killed = time.monotonic()
        os.kill(processes[victim].pid or 0, signal.SIGKILL)
        reports: dict[int, tuple[str, float]] = {}
        while len(reports) < MEMBERS - 1:
            report = results.get(timeout=PATIENCE)
            if report[0] == "ended":
                reports[report[1]] = report[2:]
    for rank, (text, _) in reports.items():
        assert f"rank {victim} (pid" in text, (rank, text)
    return max(moment for _, moment in reports.values()) - killed


@pytest.mark.parametrize("victim", ROLES, ids=ROLES.get)
def test_a_killed_rank_of_any_role_is_named_on_all_others(victim: int, tmp_path: Path) -> None:
    seconds = kill_member(victim, tmp_path, lambda _: None)
    print(f"all others named it after {seconds * 1e3:.0f} ms")


@pytest.mark.slow
@pytest.mark.parametrize("victim", range(MEMBERS))
def test_and_between_hosts(victim: int, hosts: Hosts, tmp_path: Path) -> None:
    """Members 0 and 2 of each stage are on one host, member 1 is on the other."""
    seconds = kill_member(victim, tmp_path, lambda _: hosts)
    print(f"all others named it after {seconds * 1e3:.0f} ms")
    assert seconds < 3.0

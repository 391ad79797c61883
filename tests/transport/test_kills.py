"""Ranks killed at random moments of random traffic: what the survivors see, and what is left."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from megatron.dpp.errors import PeerDead, TransportError
from megatron.dpp.transport import ChannelSpec, Direction, Transport
from tests.shared_memory import none_left
from tests.transport.kinds import (
    GPU_KINDS,
    HAS_GPU,
    NATIVE_KINDS,
    NIXL,
    PATIENCE,
    inheritance_kept,
    open_from_file,
    prepared,
)

RANKS = 3
KILLED_KINDS = NATIVE_KINDS if HAS_GPU else (*NATIVE_KINDS, *GPU_KINDS)
"""The doubled CUDA driver is for machines without one."""
LARGEST = 1 << 18
RING = [
    ChannelSpec(rank, (rank + 1) % RANKS, 0, Direction.FORWARD, LARGEST) for rank in range(RANKS)
]


@dataclass(frozen=True)
class Report:
    """Error, time of notice and leaks of one survivor."""

    error: str
    text: str
    noticed_ns: int
    leaked: tuple[int, int]  # descriptors and threads


def _descriptors_and_threads() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def _leaked(before: tuple[int, int]) -> tuple[int, int]:
    """Leaked descriptors and threads. The kernel lists a thread for a moment after its join."""
    for _ in range(100):
        after = _descriptors_and_threads()
        if after <= before:
            break
        time.sleep(0.01)
    return after[0] - before[0], after[1] - before[1]


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


def _live(kind: str, rank: int, path: str, seed: int, parent: Connection) -> None:
    torch.set_num_threads(1)
    before = _descriptors_and_threads()
    transport = open_from_file(kind, RING, rank, path)
    parent.send("open")
    try:
        _exchange(transport, random.Random(f"{seed}/{rank}"))
    except (TransportError, AssertionError) as error:
        noticed = time.monotonic_ns()
        transport.close()
        parent.send(Report(type(error).__name__, str(error), noticed, _leaked(before)))


@contextlib.contextmanager
def _ring(kind: str, seed: int, path: str) -> Iterator[list[tuple[int, Connection]]]:
    """Process id and pipe of every rank, all of them open; killed with the block."""
    context = multiprocessing.get_context("fork")
    ranks = []
    for rank in range(RANKS):
        ours, theirs = context.Pipe()
        process = context.Process(target=_live, args=(kind, rank, path, seed, theirs), daemon=True)
        with inheritance_kept():
            process.start()
        theirs.close()
        ranks.append((process, ours))
    try:
        for rank, (_, pipe) in enumerate(ranks):
            assert pipe.poll(PATIENCE), f"rank {rank} does not open, seed {seed}, {kind}"
            assert pipe.recv() == "open"
        yield [(process.pid or 0, pipe) for process, pipe in ranks]
    finally:
        for process, pipe in ranks:
            process.kill()
            process.join(PATIENCE)
            pipe.close()


def _kill_one(seed: int, folder: Path, kinds: Sequence[str] = KILLED_KINDS) -> float:
    """Kill a random rank; check the others. Seconds until the last of them raised."""
    chance, kind = random.Random(seed), kinds[seed % len(kinds)]
    with prepared(kind), _ring(kind, seed, str(folder / f"store{seed}")) as ranks:
        time.sleep(chance.random() * 0.03)
        victim = chance.randrange(RANKS)
        killed_ns = time.monotonic_ns()
        os.kill(ranks.pop(victim)[0], signal.SIGKILL)
        reports = []
        for _, pipe in ranks:
            assert pipe.poll(PATIENCE), f"a survivor says nothing, seed {seed}, {kind}"
            reports.append(pipe.recv())
    for report in reports:
        assert report.error == PeerDead.__name__, (seed, report)
        assert f"rank {victim} (pid" in report.text, (seed, report)
        assert report.leaked == (0, 0), (seed, report)
    return max(report.noticed_ns - killed_ns for report in reports) * 1e-9


def test_survivors_of_a_kill_raise_and_leave_nothing(tmp_path: Path) -> None:
    with none_left():
        for seed in range(4):
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

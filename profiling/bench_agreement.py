#!/usr/bin/env python
"""What it costs that the tensor-parallel ranks of a stage agree on every task.

    python profiling/bench_agreement.py

Two processes, the leader and one follower of a stage, over the real board; no task is run. Printed
are microseconds per decision: of a rank that decides alone, of the leader, of the follower, and how
long after the leader the follower has the decision; it waits for it as the executor does. That is
done with 0.1 ms and with 2 ms between the decisions. Each process keeps to a core of its own, which
should be idle.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

_ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(_ROOT))

from megatron.dpp.runtime.agreement import Decider, decider_for  # noqa: E402
from megatron.dpp.schedule import Geometry, Scheduler  # noqa: E402
from megatron.dpp.transport import open_transport  # noqa: E402
from megatron.dpp.transport.base import ChannelSpec, Direction, Transport  # noqa: E402

_CHANNELS = [(0, 0), (0, 1), (1, 0), (1, 1)]
"""(direction, chunk) of what a stage in the middle of a pipeline with two chunks receives."""
_DEADLINE = 60.0

Sample = tuple[int, int]
"""When a call of ``next`` that gave an action began and returned; ns on this host's clock."""


def _decide_all(decider: Decider, transport: Transport | None, pause: float) -> list[Sample]:
    """Run one iteration's decisions. One more message arrives before each look, so that each has
    something to post; ``pause`` seconds lie between a leader's decisions, as tasks would.
    """
    most = decider.scheduler.geometry.num_microbatches
    arrived, looks, samples = [0] * len(_CHANNELS), 0, []
    end = time.monotonic() + _DEADLINE
    while not decider.scheduler.done:
        channel = looks % len(_CHANNELS)
        arrived = [*arrived]
        arrived[channel] = min(arrived[channel] + 1, most)
        looks += 1
        begin = time.monotonic_ns()
        action = decider.next(arrived)
        now = time.monotonic_ns()
        if action is not None:
            samples.append((begin, now))
            if pause and not decider.followed:
                _stay(pause)
        elif transport is not None:
            transport.wait(0.05)
        if time.monotonic() > end:
            raise SystemExit(f"{len(samples)} decisions in {_DEADLINE:g} s: the peer is gone")
    return samples


def _stay(seconds: float) -> None:
    if seconds >= 1e-3:
        time.sleep(seconds)
        return
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def _member(rank: int, port: int, microbatches: int, pauses: list[float], results: Any) -> None:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    store = TCPStore("127.0.0.1", port, is_master=rank == 0)
    # The board needs no channel; the two ranks of a real stage have theirs with other stages.
    spec = ChannelSpec(0, 1, 0, Direction.FORWARD, 64)
    found: list[list[Sample]] = []
    with open_transport(
        [spec], rank=rank, store=store, board_ranks=[0, 1], board_counters=len(_CHANNELS)
    ) as transport:
        for round_, pause in enumerate(pauses):
            scheduler = _scheduler(microbatches)
            decider = decider_for(scheduler, _CHANNELS, transport.board)
            store.set(f"ready {round_} {rank}", "1")
            store.wait([f"ready {round_} {peer}" for peer in (0, 1)])
            # Counters on a board only grow: the arrivals of a new round follow the last ones.
            decider.start([round_ * microbatches] * len(_CHANNELS))
            decider.next = _shifted(decider, round_ * microbatches)  # type: ignore[method-assign]
            found.append(_decide_all(decider, transport, pause))
        results.put((rank, found))
        store.set(f"done {rank}", "1")
        store.wait(["done 0", "done 1"])


def _shifted(decider: Decider, base: int) -> Any:
    plain = decider.next
    return lambda arrived: plain([base + count for count in arrived])


def _scheduler(microbatches: int) -> Scheduler:
    geometry = Geometry(4, 1, 2, microbatches, w_pieces=(2, 2))
    return Scheduler(geometry, policy="dynamic", split_backward=True, cap=1e9)


def _us(values: list[int]) -> str:
    ordered = sorted(values)
    return f"{statistics.median(ordered) / 1e3:8.1f} {ordered[int(len(ordered) * 0.9)] / 1e3:8.1f}"


def _lengths(samples: list[Sample]) -> list[int]:
    return [end - begin for begin, end in samples]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--microbatches", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    pauses = [pause for pause in (100e-6, 2e-3) for _ in range(args.rounds)]
    alone = [_lengths(_alone(args.microbatches, pause)) for pause in pauses]
    found = _run_pair(args.microbatches, pauses)
    print("microseconds per decision           median   9 of 10")
    for pause in (100e-6, 2e-3):
        rounds = [index for index, used in enumerate(pauses) if used == pause]
        leader = [sample for index in rounds for sample in found[0][index]]
        follower = [sample for index in rounds for sample in found[1][index]]
        late = [after[1] - before[1] for before, after in zip(leader, follower, strict=True)]
        own = [length for index in rounds for length in alone[index]]
        print(f"{pause * 1e3:g} ms apart: alone".ljust(34) + _us(own))
        print("  leader".ljust(34) + _us(_lengths(leader)))
        print("  follower".ljust(34) + _us(_lengths(follower)))
        print("  follower behind the leader".ljust(34) + _us([max(value, 0) for value in late]))


def _alone(microbatches: int, pause: float) -> list[Sample]:
    decider = decider_for(_scheduler(microbatches), _CHANNELS, None)
    decider.start([0] * len(_CHANNELS))
    return _decide_all(decider, None, pause)


def _run_pair(microbatches: int, pauses: list[float]) -> dict[int, list[list[Sample]]]:
    context = multiprocessing.get_context("spawn")
    results, port = context.Queue(), _free_port()
    members = [
        context.Process(target=_member, args=(rank, port, microbatches, pauses, results))
        for rank in (0, 1)
    ]
    for member in members:
        member.start()
    try:
        return dict(results.get(timeout=_DEADLINE * len(pauses)) for _ in members)
    finally:
        for member in members:
            member.join(5)
            member.kill()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    main()

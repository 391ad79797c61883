#!/usr/bin/env python
"""Time the decisions that the tensor-parallel ranks of a stage agree on.

    python profiling/bench_agreement.py

Two processes, the leader and one follower of a stage, share the real board; no task runs. Printed
are microseconds per decision: of a rank that decides alone, of the leader, of the follower, and how
long after the leader the follower has the decision; it waits for it as the executor does. Decisions
are 0.1 ms or 2 ms apart. Each process keeps to a core of its own, which should be idle.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import harness
from torch.distributed import TCPStore

from megatron.dpp.errors import exit_with
from megatron.dpp.runtime.agreement import Decider, decider_for
from megatron.dpp.schedule import Geometry, Scheduler
from megatron.dpp.transport import open_transport
from megatron.dpp.transport.base import ChannelSpec, Direction, Transport

_CHANNELS = [(0, 0), (0, 1), (1, 0), (1, 1)]
"""(direction, chunk) of the receives of a stage amid a pipeline with two chunks."""
_PAUSES = (100e-6, 2e-3)
_DEADLINE = 60.0

Sample = tuple[int, int]
"""Begin and end of a call of ``next`` that gave an action; ns on this host's clock."""


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


def _member(rank: int, port: int, microbatches: int, pauses: list[float]) -> list[list[Sample]]:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    store = TCPStore("127.0.0.1", port, is_master=rank == 0)
    # The board needs no channel; the two ranks of a real stage have theirs with other stages.
    spec = ChannelSpec(0, 1, 0, Direction.FORWARD, 64)
    found: list[list[Sample]] = []
    with open_transport(
        [spec], rank=rank, store=store, board_ranks=[0, 1], board_counters=2 * len(_CHANNELS)
    ) as transport:
        for round_, pause in enumerate(pauses):
            # Counters on a board only grow: the arrivals of a new round follow the last ones.
            links = _links(transport, round_ * microbatches)
            decider = decider_for(_scheduler(microbatches), links)
            harness.meet(store, rank, 2, f"round {round_}")
            decider.next = _shifted(decider, round_ * microbatches)  # type: ignore[method-assign]
            found.append(_decide_all(decider, transport, pause))
        harness.meet(store, rank, 2, "end")
    harness.leave(store, rank, 2)
    return found


def _links(transport: Any, before: int = 0) -> Any:
    """Channels of which so many messages were consumed before."""
    consumed = [before] * len(_CHANNELS)
    return SimpleNamespace(transport=transport, receiving=_CHANNELS, consumed=consumed)


def _shifted(decider: Decider, base: int) -> Any:
    plain = decider.next
    return lambda arrived: plain([base + count for count in arrived])


def _scheduler(microbatches: int) -> Scheduler:
    geometry = Geometry(4, 1, 2, microbatches, w_pieces=(2, 2))
    return Scheduler(geometry, policy="dynamic", split_backward=True, cap=1e9)


def _alone(microbatches: int, pause: float) -> list[Sample]:
    decider = decider_for(_scheduler(microbatches), _links(SimpleNamespace(board=None)))
    return _decide_all(decider, None, pause)


def _row(name: str, samples: Sequence[Sample]) -> tuple[str, str, str]:
    took = [max(end - begin, 0) / 1e3 for begin, end in samples]
    return name, f"{statistics.median(took):.1f}", f"{harness.quantile(took, 0.9):.1f}"


def main() -> int:
    args = harness.new_parser(__doc__, microbatches=128, rounds=5).parse_args()
    pauses = [pause for _ in range(args.rounds + 1) for pause in _PAUSES]
    alone = [_alone(args.microbatches, pause) for pause in pauses]
    port, most = harness.free_port(), _DEADLINE * len(pauses)
    pair = harness.run_members(_member, 2, port, args.microbatches, pauses, timeout=most)
    rows = []
    for first, pause in enumerate(_PAUSES, len(_PAUSES)):  # the first round of each is untimed
        chosen = range(first, len(pauses), len(_PAUSES))
        own, leader, follower = (
            [sample for index in chosen for sample in rounds[index]] for rounds in (alone, *pair)
        )
        late = [(before[1], after[1]) for before, after in zip(leader, follower, strict=True)]
        rows += [
            _row(f"{pause * 1e3:g} ms apart: alone", own),
            _row("leader", leader),
            _row("follower", follower),
            _row("follower behind the leader", late),
        ]
    harness.print_table("microseconds per decision | median | 9 of 10", rows)
    return 0


if __name__ == "__main__":
    exit_with(main)

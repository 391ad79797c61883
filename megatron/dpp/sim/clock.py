"""The virtual clock: drives the schedulers of all ranks over given
:class:`~megatron.dpp.sim.costs.Costs`.

Like the executor, it tells a rank what has arrived, asks a free rank for its next action, and sends
the output on. Sends never block a rank. Messages of a directed pair of ranks share its bandwidth;
each channel delivers in order.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Protocol

from megatron.dpp.direction import Direction
from megatron.dpp.errors import ScheduleError
from megatron.dpp.schedule import DIRECTION_OF, Action, Kind
from megatron.dpp.sim.costs import Costs
from megatron.dpp.sim.result import Result, SimulatedTask, format_grid

SAME_TIME = 1e-9
"""Events closer than this, relative to the current time, arrive together, before any decision."""


class Lane(Protocol):
    """Decides for one rank: a :class:`~megatron.dpp.schedule.Scheduler`, or a fixed order."""

    @property
    def done(self) -> bool: ...
    @property
    def peak_held(self) -> float: ...
    @property
    def fused(self) -> bool:
        """The last ``B`` includes a ``W`` that might have been deferred."""
        ...

    def arrived(self, direction: Direction, chunk: int, total: int) -> None: ...
    def next(self) -> Action | None: ...


def simulate(
    lanes: Sequence[Lane],
    costs: Costs,
    *,
    split_backward: bool,
    w_pieces: Sequence[int] | None = None,
) -> Result:
    """Run one iteration. Stage ``s`` is chunk ``s // p`` of rank ``s % p``, as in Megatron.

    Args:
        lanes: by rank; ``p`` of them.
        split_backward: a ``B`` takes its own time; otherwise also that of its ``W``.
        w_pieces: pieces of each stage's ``W``, with equal shares of its time; a stage with 0 has
            its ``W`` in its ``B``.

    Raises:
        ScheduleError: the simulation is stuck, or a policy chose what may not run. The message has
            the grid so far.
    """
    clock = _Clock(lanes, costs, split_backward, w_pieces)
    clock.run()
    own = [_own_work(costs, rank, len(lanes)) for rank in range(len(lanes))]
    return Result(clock.slots, [lane.peak_held for lane in lanes], own)


def _own_work(costs: Costs, rank: int, num_ranks: int) -> float:
    work = sum(sum(row) for kind in costs.durations for row in kind[rank::num_ranks])
    slow = costs.slow_times.get(rank)
    return work if slow is None else slow.end(0.0, work)


class _Clock:
    def __init__(
        self,
        lanes: Sequence[Lane],
        costs: Costs,
        split_backward: bool,
        w_pieces: Sequence[int] | None,
    ) -> None:
        num_ranks = self._num_ranks = len(lanes)
        self.slots: list[list[SimulatedTask]] = [[] for _ in lanes]
        self._lanes, self._costs = lanes, costs
        self._split, self._pieces = split_backward, w_pieces
        self._free_at = [0.0] * num_ranks
        self._idle = [True] * num_ranks
        # (time, number, rank, direction or None when the rank becomes free, chunk, total)
        self._events: list[tuple[float, int, int, Direction | None, int, int]] = []
        self._number = 0
        self._link_free: dict[tuple[int, int], float] = {}
        self._channel_last = [[0.0] * costs.num_stages for _ in range(2)]
        self._sent = [[0] * costs.num_stages for _ in range(2)]

    def run(self) -> None:
        for rank in range(len(self._lanes)):
            self._start_next(rank, 0.0)
        events, pop = self._events, heapq.heappop
        while events:
            now = events[0][0]
            until = now + SAME_TIME * max(1.0, now)
            touched = set()
            while events and events[0][0] <= until:
                _, _, rank, direction, chunk, total = pop(events)
                if direction is None:
                    self._idle[rank] = True
                else:
                    self._lanes[rank].arrived(direction, chunk, total)
                touched.add(rank)
            for rank in sorted(touched):
                if self._idle[rank]:
                    self._start_next(rank, now)
        if not all(lane.done for lane in self._lanes):
            raise ScheduleError(self._stuck())

    def _start_next(self, rank: int, now: float) -> None:
        try:
            action = self._lanes[rank].next()
        except ScheduleError as error:
            raise type(error)(f"{error}\n{format_grid(self.slots)}") from error
        if action is None:
            return
        stage = action.chunk * self._num_ranks + rank
        start = max(now, self._free_at[rank])
        work = self._work(action, stage)
        slow = self._costs.slow_times.get(rank)
        end = sent = start + work if slow is None else slow.end(start, work)
        if action.kind == Kind.B and self._lanes[rank].fused:  # its output leaves before its W
            work = self._costs.durations[Kind.W][stage][action.microbatch]
            end = sent + work if slow is None else slow.end(sent, work)
        self.slots[rank].append(SimulatedTask(action, start, end))
        free = self._free_at[rank] = end + self._costs.overhead.get(rank, 0.0)
        self._idle[rank] = False
        self._push(free, rank, None, 0, 0)
        if action.kind != Kind.W:
            self._send(action, stage, sent)

    def _work(self, action: Action, stage: int) -> float:
        kind, _, microbatch, _ = action
        work = self._costs.durations[kind][stage][microbatch]
        pieces = 1 if self._pieces is None else self._pieces[stage]
        if kind == Kind.B and not (self._split and pieces):
            work += self._costs.durations[Kind.W][stage][microbatch]
        elif kind == Kind.W:
            work /= pieces
        return work

    def _send(self, action: Action, stage: int, time: float) -> None:
        """Send the output of ``action``, which ends at ``time``, to the next stage."""
        direction = DIRECTION_OF[action.kind]
        target = stage + 1 if direction == Direction.FORWARD else stage - 1
        if not 0 <= target < self._costs.num_stages:
            return
        source_rank = stage % self._num_ranks
        chunk, rank = divmod(target, self._num_ranks)
        if source_rank != rank:
            hop = self._costs.hops[min(stage, target)]
            scale = hop.scale[direction][action.microbatch] if hop.scale else 1.0
            pair = (source_rank, rank)
            leaves = max(time, self._link_free.get(pair, 0.0)) + hop.occupancy * scale
            self._link_free[pair] = leaves
            last = self._channel_last[direction]
            time = last[target] = max(last[target], leaves + hop.latency * scale)
        self._sent[direction][target] += 1
        self._push(time, rank, direction, chunk, self._sent[direction][target])

    def _push(
        self, time: float, rank: int, direction: Direction | None, chunk: int, total: int
    ) -> None:
        self._number += 1
        heapq.heappush(self._events, (time, self._number, rank, direction, chunk, total))

    def _stuck(self) -> str:
        lines = ["the simulation is stuck: no task may run and work is left"]
        for rank, lane in enumerate(self._lanes):
            stall = getattr(lane, "stall", None)
            if stall is not None:
                lines.append(f"rank {rank}: {stall().text}")
        return "\n".join([*lines, format_grid(self.slots)])

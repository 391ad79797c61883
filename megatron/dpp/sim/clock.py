"""The virtual clock: runs the schedulers of all ranks against a
:class:`~megatron.dpp.sim.costs.Costs`.

It does what the executor does, without executing: tell a rank what has arrived, ask it for the next
action when it is free, put the output on its way. Sends never block a rank; messages of one
directed pair of ranks share its bandwidth; delivery per channel is first in, first out. A
simulation that gets stuck raises with its grid printed.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from megatron.dpp.direction import Direction
from megatron.dpp.errors import ScheduleError
from megatron.dpp.schedule import DIRECTION_OF, Action, Kind
from megatron.dpp.sim.costs import Costs

_SAME_TIME = 1e-9
"""Events closer than this, relative to the time of day, are one moment: all arrive before anybody
decides.
"""


class Lane(Protocol):
    """What decides for one rank: a :class:`~megatron.dpp.schedule.Scheduler`, or a fixed order."""

    @property
    def done(self) -> bool: ...
    @property
    def peak_held(self) -> float: ...
    def arrived(self, direction: Direction, chunk: int, total: int) -> None: ...
    def next(self) -> Action | None: ...


class Slot(NamedTuple):
    """A task that ran on a rank from ``start`` to ``end``."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Result:
    """What happened. All lists are by rank; times in the unit of the costs, memory in chunk
    activations.
    """

    slots: list[list[Slot]]
    peak_held: list[float]
    own: list[float]
    """What each rank alone would need for all its tasks, without a wait, at the speed it has."""

    @property
    def makespan(self) -> float:
        return max(slot.end for slots in self.slots for slot in slots)

    @property
    def ratio(self) -> float:
        """Makespan over the busiest rank's own work: 1 is perfect, and no schedule is below it."""
        return self.makespan / max(self.own)

    @property
    def actions(self) -> list[list[Action]]:
        return [[slot.action for slot in slots] for slots in self.slots]


@dataclass(frozen=True)
class Placement:
    """Which rank and chunk hold a stage. ``where[stage]`` is ``(rank, chunk)``;
    ``stages[rank][chunk]`` its inverse.
    """

    where: tuple[tuple[int, int], ...]
    stages: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, where: Sequence[tuple[int, int]]) -> Placement:
        ranks = 1 + max(rank for rank, _ in where)
        stages = [dict[int, int]() for _ in range(ranks)]
        for stage, (rank, chunk) in enumerate(where):
            stages[rank][chunk] = stage
        return cls(tuple(where), tuple(tuple(s[c] for c in range(len(s))) for s in stages))


def interleaved_placement(num_ranks: int, num_chunks: int) -> Placement:
    """Megatron's: stage ``s`` is chunk ``s // num_ranks`` of rank ``s % num_ranks``."""
    return Placement.of([(s % num_ranks, s // num_ranks) for s in range(num_ranks * num_chunks)])


def simulate(
    lanes: Sequence[Lane],
    costs: Costs,
    placement: Placement,
    *,
    split_backward: bool,
    w_pieces: Sequence[int] | None = None,
    lead: float = 0.0,
) -> Result:
    """Run one iteration.

    Args:
        lanes: by rank.
        split_backward: a ``B`` takes its own time; otherwise that of its ``W`` too.
        w_pieces: pieces of each stage's ``W``, each an equal share of its time; a stage with none
            has its ``W`` in its ``B``.
        lead: a rank chooses this long before its running task ends (a GPU's queue); 0 is at its
            end.

    Raises:
        ScheduleError: nothing can run and something is left, or a policy chose what may not run;
            with the grid so far.
    """
    clock = _Clock(lanes, costs, placement, split_backward, w_pieces, lead)
    clock.run()
    own = [_own_work(costs, rank, stages) for rank, stages in enumerate(placement.stages)]
    return Result(clock.slots, [lane.peak_held for lane in lanes], own)


def _own_work(costs: Costs, rank: int, stages: Sequence[int]) -> float:
    work = sum(sum(kind[stage]) for kind in costs.durations for stage in stages)
    slow = costs.slow_times.get(rank)
    return work if slow is None else slow.end(0.0, work)


class _Clock:
    def __init__(
        self,
        lanes: Sequence[Lane],
        costs: Costs,
        placement: Placement,
        split_backward: bool,
        w_pieces: Sequence[int] | None,
        lead: float,
    ) -> None:
        num_ranks = len(lanes)
        self.slots: list[list[Slot]] = [[] for _ in lanes]
        self._lanes, self._costs, self._placement = lanes, costs, placement
        self._split, self._pieces, self._lead = split_backward, w_pieces, lead
        self._free_at = [0.0] * num_ranks
        self._idle = [True] * num_ranks
        # (time, number, rank, direction or None when the rank becomes free, chunk, total)
        self._events: list[tuple[float, int, int, Direction | None, int, int]] = []
        self._number = 0
        self._link_free: dict[tuple[int, int], float] = {}
        self._channel_last = [[0.0] * costs.num_stages for _ in range(2)]

    def run(self) -> None:
        for rank in range(len(self._lanes)):
            self._start_next(rank, 0.0)
        events, pop = self._events, heapq.heappop
        while events:
            now = events[0][0]
            until = now + _SAME_TIME * max(1.0, now)
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
            raise type(error)(f"{error}\n{self._grid()}") from error
        if action is None:
            return
        stage = self._placement.stages[rank][action.chunk]
        start = max(now, self._free_at[rank])
        work = self._work(action, stage)
        slow = self._costs.slow_times.get(rank)
        end = start + work if slow is None else slow.end(start, work)
        self.slots[rank].append(Slot(action, start, end))
        free = self._free_at[rank] = end + self._costs.overhead.get(rank, 0.0)
        self._idle[rank] = False
        self._push(max(start, free - self._lead), rank, None, 0, 0)
        if action.kind != Kind.W:
            self._send(action, stage, end)

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
        """Put the output of ``action``, which is finished at ``time``, on its way to the next
        stage.
        """
        direction = DIRECTION_OF[action.kind]
        target = stage + 1 if direction == Direction.FORWARD else stage - 1
        where = self._placement.where
        if not 0 <= target < len(where):
            return
        source_rank, rank, chunk = where[stage][0], *where[target]
        if source_rank != rank:
            hop = self._costs.hops[min(stage, target)]
            scale = hop.scale[direction][action.microbatch] if hop.scale else 1.0
            pair = (source_rank, rank)
            leaves = max(time, self._link_free.get(pair, 0.0)) + hop.occupancy * scale
            self._link_free[pair] = leaves
            last = self._channel_last[direction]
            time = last[target] = max(last[target], leaves + hop.latency * scale)
        self._push(time, rank, direction, chunk, action.microbatch + 1)

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
        return "\n".join([*lines, self._grid()])

    def _grid(self) -> str:
        from megatron.dpp.sim.grid import format_grid

        return format_grid(self.slots)

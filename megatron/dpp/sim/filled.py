"""Megatron's order of F and B with W in the waits, timed without an event loop.

Each rank's F and B keep their order, so the time of a task follows from those before it. Results
are those of :func:`~megatron.dpp.sim.clock.simulate` with the policy ``megatron``, in a fraction of
the time: a plan that a step waits for needs that.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Sequence

from megatron.dpp.schedule import Kind
from megatron.dpp.schedule.caps import ROUNDING
from megatron.dpp.schedule.reference import Reference
from megatron.dpp.sim.clock import SAME_TIME
from megatron.dpp.sim.costs import Costs, Shape
from megatron.dpp.sim.schedules import ScheduleConfig

_UNKNOWN = math.inf


_Task = tuple[int, int, int, int, int]
"""1 for a B, its stage and microbatch, the stage that its output goes to, and the rank of that, or
-1.
"""


class FilledOrder:
    """Times one shape's microbatches in any order of theirs; ranks know all sizes beforehand.

    Args:
        shape, costs: of the microbatches as they are given. No rank is slow at times, hosts take
            no time, and messages are not scaled.
        config: its cap, split or fused backwards, and ``beta`` count.
    """

    def __init__(self, shape: Shape, costs: Costs, config: ScheduleConfig) -> None:
        self._unit, self._costs, ranks = shape.unit, costs, range(shape.num_ranks)
        self._sizes = shape.sizes or (shape.unit,) * shape.num_microbatches
        self._tasks = [_tasks(shape, config, rank) for rank in ranks]
        self._limits = [math.floor((cap + ROUNDING) * shape.unit) for cap in config.caps(shape)]
        self._as_static = config.cap == "static" and bool(shape.sizes)
        self._kept = 1.0 - config.beta if config.split_backward else 0.0

    def __call__(self, order: Sequence[int]) -> tuple[float, float]:
        """The time of the iteration, and the most that a rank holds, in chunk activations, with the
        microbatches in this order.
        """
        sizes, limits = [self._sizes[i] for i in order], self._limits
        if self._as_static:
            most = max(_peak(each, sizes) for each in self._tasks)
            limits = [min(limit, most) for limit in limits]
        run = _Run(self._costs.permuted(order), sizes, len(self._tasks), self._kept)
        waiting = list(range(len(limits)))
        while waiting:
            rank = waiting.pop()
            waiting += run.advance(rank, self._tasks[rank], limits[rank])
        return max(run.free), max(run.peaks) / self._unit


def _tasks(shape: Shape, config: ScheduleConfig, rank: int) -> list[_Task]:
    found: list[_Task] = []
    ranks = shape.num_ranks
    for kind, chunk, i, _ in Reference.of(config.geometry(shape, rank)).order:
        stage = chunk * ranks + rank
        target = stage + 1 if kind is Kind.F else stage - 1
        goes = 0 <= target < shape.num_stages
        found.append((int(kind), stage, i, target, target % ranks if goes else -1))
    return found


def _peak(tasks: Sequence[_Task], sizes: Sequence[int]) -> int:
    """The most that these tasks hold with fused backwards."""
    steps = (-sizes[i] if backward else sizes[i] for backward, _, i, _, _ in tasks)
    return max(itertools.accumulate(steps))


class _Run:
    """One iteration.

    Args:
        kept: share of an activation that a deferred W keeps; 0 where backwards are fused.
    """

    def __init__(self, costs: Costs, sizes: Sequence[int], ranks: int, kept: float) -> None:
        stages, number = costs.num_stages, len(sizes)
        self._sizes, self._hops, self._durations = sizes, costs.hops, costs.durations
        self._kept_of = [math.ceil(kept * size) for size in sizes]
        self._split = kept > 0
        # Times at which inputs (0) and gradients (1) arrive at each stage.
        self._arrives = [[[_UNKNOWN] * number for _ in range(stages)] for _ in range(2)]
        self._arrives[0][0] = self._arrives[1][-1] = [0.0] * number
        self._places, self.free, self.peaks = [0] * ranks, [0.0] * ranks, [0] * ranks
        self._held, self._kept = [0] * ranks, [0] * ranks
        self._deferred: list[deque[tuple[int, int]]] = [deque() for _ in range(ranks)]
        self._leaves = [[0.0] * ranks for _ in range(ranks)]

    def advance(self, rank: int, tasks: Sequence[_Task], limit: float) -> set[int]:
        """Run a rank's tasks up to the first whose input is not known; returns the ranks that its
        outputs go to. Before a forward that passes ``limit`` all W run that are deferred.
        """
        durations, sizes, weights = self._durations, self._sizes, self._durations[Kind.W]
        arrives, deferred, leaves = self._arrives, self._deferred[rank], self._leaves[rank]
        now, held, kept, told = self.free[rank], self._held[rank], self._kept[rank], set()
        place, end = self._places[rank], len(tasks)
        while place < end:
            backward, stage, i, target, to = tasks[place]
            known = arrives[backward][stage][i]
            if known == _UNKNOWN:
                break
            size = sizes[i]
            while deferred and (
                known > now + SAME_TIME * max(1.0, now)
                or not (backward or held + size + kept <= limit)
            ):
                its_stage, its = deferred.popleft()
                kept -= self._kept_of[its]
                now += weights[its_stage][its]
            now = max(now, known) + durations[backward][stage][i]
            if not backward:
                held += size
                self.peaks[rank] = max(self.peaks[rank], held + kept)
            else:
                held -= size
                if self._split:
                    kept += self._kept_of[i]
                    deferred.append((stage, i))
                else:
                    now += weights[stage][i]
            if to == rank:
                arrives[backward][target][i] = now
            elif to >= 0:
                hop = self._hops[min(stage, target)]
                leaves[to] = max(now, leaves[to]) + hop.occupancy
                arrives[backward][target][i] = leaves[to] + hop.latency
                told.add(to)
            place += 1
        if place == end:
            now += sum(weights[stage][i] for stage, i in deferred)
            deferred.clear()
        self._places[rank], self.free[rank] = place, now
        self._held[rank], self._kept[rank] = held, kept
        return told

"""The order of microbatches: named orders, and hill climbing over simulated iterations.

Where microbatches are unlike, their order matters more than the order of tasks. A plan is made of
sizes and settings alone and draws with a fixed seed, so every rank that plans finds the same one.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron.dpp.errors import ConfigError
from megatron.dpp.schedule import Kind
from megatron.dpp.schedule.caps import ROUNDING
from megatron.dpp.schedule.reference import Reference
from megatron.dpp.sim.clock import SAME_TIME
from megatron.dpp.sim.costs import Costs, Shape
from megatron.dpp.sim.lengths import LengthCosts
from megatron.dpp.sim.result import Result
from megatron.dpp.sim.schedules import ScheduleConfig

_UNKNOWN = math.inf
_Task = tuple[int, int, int, int, int]
"""1 for a B, its stage and microbatch, the stage that its output goes to, and the rank of that, or
-1.
"""


class FilledOrder:
    """Times one shape's microbatches in any order, in Megatron's order of F and B with W in the
    waits; ranks know all sizes beforehand.

    Each rank's F and B keep their order, so the time of a task follows from those before it, and no
    event loop is needed. Results are those of :func:`~megatron.dpp.sim.clock.simulate` with the
    policy ``megatron``, in a fraction of the time: a plan that a step waits for needs that.

    Args:
        shape, costs: of the microbatches as they are given. No rank is slow at times, hosts take
            no time, and messages are not scaled.
        config: its cap, and split or fused backwards count.
    """

    def __init__(self, shape: Shape, costs: Costs, config: ScheduleConfig) -> None:
        self._unit, self._costs, ranks = shape.unit, costs, range(shape.num_ranks)
        self._sizes = shape.sizes or (shape.unit,) * shape.num_microbatches
        self._tasks = [_tasks(shape, config, rank) for rank in ranks]
        self._limits = [math.floor((cap + ROUNDING) * shape.unit) for cap in config.caps(shape)]
        self._as_static = config.cap == "static" and bool(shape.sizes)
        self._split = config.split_backward

    def __call__(self, order: Sequence[int]) -> tuple[float, float]:
        """The time of the iteration, and the most that a rank holds, in chunk activations, with the
        microbatches in this order.
        """
        sizes, limits = [self._sizes[i] for i in order], self._limits
        if self._as_static:
            most = max(_peak(each, sizes) for each in self._tasks)
            limits = [min(limit, most) for limit in limits]
        run = _Run(self._costs.permuted(order), sizes, len(self._tasks), split=self._split)
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
    """One iteration. A deferred W keeps the activation.

    Args:
        split: weight gradients are deferred; otherwise backwards are fused.
    """

    def __init__(self, costs: Costs, sizes: Sequence[int], ranks: int, *, split: bool) -> None:
        stages, number = costs.num_stages, len(sizes)
        self._sizes, self._hops, self._durations = sizes, costs.hops, costs.durations
        self._split = split
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
                kept -= sizes[its]
                now += weights[its_stage][its]
            now = max(now, known) + durations[backward][stage][i]
            if not backward:
                held += size
                self.peaks[rank] = max(self.peaks[rank], held + kept)
            else:
                held -= size
                if self._split:
                    kept += size
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


Run = Callable[[Shape, Costs], Result]
"""Simulates a schedule."""
Timed = Callable[[Sequence[int]], tuple[float, float]]
"""Time of an iteration with the microbatches in an order, and the most that a rank holds."""

_MARGIN = 0.002
"""Share of the time that another order must gain."""
_ROUNDING = 1e-9


@dataclass(frozen=True)
class PlannedOrder:
    """An order of microbatches.

    Args:
        order: the microbatches' numbers in it.
        name: of the order that it is, or was climbed from.
        time, held: simulated time of the iteration, and the most that a rank holds in it, in chunk
            activations.
        drawn_time, drawn_held: those of the microbatches as they were given.
    """

    order: list[int]
    name: str
    time: float
    held: float
    drawn_time: float
    drawn_held: float

    @property
    def gain(self) -> float:
        """Share of the drawn order's time that it saves."""
        return 1.0 - self.time / self.drawn_time


def plan_order(
    sizes: Sequence[int],
    num_ranks: int,
    *,
    num_chunks: int = 1,
    squares: Sequence[int] = (),
    costs: LengthCosts | None = None,
    config: ScheduleConfig | None = None,
    hop: float = 0.01,
    memory: float | None = 1.0,
    simulations: int = 200,
) -> PlannedOrder:
    """The fastest order found of a replica's microbatches.

    Args:
        sizes: tokens of each microbatch.
        num_ranks, num_chunks: of the pipeline.
        squares: sum of the squared lengths of each microbatch's sequences; empty for one sequence
            in each.
        costs: time of a rank's tasks; by default a transformer's of hidden size 4,096.
        config: the schedule; by default Megatron's order with a split backward, in the static
            schedule's memory.
        hop: time of a message, in forwards of a chunk.
        memory: most that an order may hold on a rank, over what the given one holds; None for what
            the cap allows.
        simulations: most that are tried beside the named orders; 0 for these alone.

    Raises:
        ConfigError: there are no microbatches, or a size is below 1.
    """
    if not sizes or min(sizes) < 1 or len(squares) not in (0, len(sizes)):
        raise ConfigError(f"sizes {list(sizes)[:8]}: expected tokens of each microbatch, above 0")
    squares = squares or [size * size for size in sizes]
    work = list(zip(sizes, squares, strict=True))
    drawn = (costs or LengthCosts.transformer()).of_works(work, num_ranks, num_chunks, hop)
    shape = Shape(num_ranks, num_chunks, len(sizes), sizes=tuple(sizes), largest=max(sizes))
    config = config or ScheduleConfig(policy="megatron", cap="static", sizes_at_start=True)
    by_order = config.policy == "megatron" and config.sizes_at_start
    timed = FilledOrder(shape, drawn, config) if by_order else simulated(config.run, shape, drawn)
    return best_order(shape, drawn, timed, memory=memory, simulations=simulations)


def best_order(
    shape: Shape, costs: Costs, timed: Timed, *, memory: float | None = None, simulations: int = 0
) -> PlannedOrder:
    """The best order of a shape's microbatches under one schedule; the drawn one if none gains.

    Args:
        memory: as in :func:`plan_order`.
        simulations: most steps of hill climbing from the best named order.
    """
    totals = [sum(row[0][i] for row in costs.durations) for i in range(shape.num_microbatches)]
    drawn = best = PlannedOrder(list(range(len(totals))), "drawn", *timed(range(len(totals))) * 2)
    most = math.inf if memory is None else drawn.held * (memory + _ROUNDING)

    def tried(name: str, order: list[int]) -> PlannedOrder:
        time, held = timed(order)
        if time >= best.time or held > most:
            return best
        return dataclasses.replace(best, order=order, name=name, time=time, held=held)

    for name, order in orders(totals, shape.num_ranks):
        best = tried(name, order)
    own = max(
        sum(sum(row) for kind in costs.durations for row in kind[rank :: shape.num_ranks])
        for rank in range(shape.num_ranks)
    )
    rng = random.Random(len(totals))
    for _ in range(simulations if len(totals) > 1 else 0):
        if best.time <= own * (1 + _MARGIN):  # no order is faster
            break
        best = tried(f"climbed from {best.name.rpartition(' from ')[2]}", _moved(best.order, rng))
    return best if best.gain > _MARGIN else drawn


def simulated(run: Run, shape: Shape, costs: Costs) -> Timed:
    """Times orders by whole simulations of a schedule."""

    def timed(order: Sequence[int]) -> tuple[float, float]:
        found = run(*in_order(order, shape, costs))
        return found.makespan, max(found.peak_held)

    return timed


def in_order(order: Sequence[int], shape: Shape, costs: Costs) -> tuple[Shape, Costs]:
    """The same microbatches in another order."""
    sizes = tuple(shape.sizes[i] for i in order) if shape.sizes else ()
    return dataclasses.replace(shape, sizes=sizes), costs.permuted(order)


def _moved(order: Sequence[int], rng: random.Random) -> list[int]:
    """Two microbatches change places, or one goes elsewhere."""
    found, (a, b) = list(order), rng.sample(range(len(order)), 2)
    if rng.random() < 0.5:
        found[a], found[b] = found[b], found[a]
    else:
        found.insert(b, found.pop(a))
    return found


def orders(costs: Sequence[float], num_ranks: int) -> list[tuple[str, list[int]]]:
    """The named orders of microbatches of these costs."""
    ascending = sorted(range(len(costs)), key=lambda i: costs[i])
    first = ascending[: 2 * num_ranks]
    return [
        ("ascending", ascending),
        ("descending", ascending[::-1]),
        ("small-big-small", ascending[::2] + ascending[1::2][::-1]),
        ("small, then descending", first + ascending[2 * num_ranks :][::-1]),
    ]

"""Variation of costs, and the fourteen named conditions under which schedules are compared.

A :data:`Change` turns quiet costs into varied ones; changes can be chained. The unit of time is a
whole rank's forward of a mean microbatch. Its ``B`` and its ``W`` take one unit each, a chunk's
tasks ``1 / v``, and a hop 0.01 of a chunk's forward unless a condition says otherwise.
``docs/simulator.md`` lists the conditions.
"""

from __future__ import annotations

import dataclasses
import math
import random
import statistics
from collections.abc import Callable, Mapping
from types import MappingProxyType

from megatron.dpp.schedule import Kind
from megatron.dpp.sim.costs import Costs, Hop, Shape, SlowTimes, even_costs

_HOP = 0.01
_SLOW = 6.0
"""Mean length of a slow time, in units of a rank's forward."""

Change = Callable[[Costs, Shape, random.Random], Costs]
Factor = Callable[[Kind, int, int], float]


def uniform(shape: Shape, hop: float = _HOP) -> Costs:
    """Costs with equal tasks, in the unit above. ``hop`` is in chunk forwards."""
    chunk = 1.0 / shape.num_chunks
    times = (chunk, chunk, chunk)
    return even_costs(shape.num_stages, shape.num_microbatches, times=times, hop=hop * chunk)


def jitter(sigma: float) -> Change:
    """Scales every task by a lognormal factor of mean 1."""
    return _scaling(lambda shape, rng: lambda *_: _lognormal(rng, sigma))


def lengths(sigma: float) -> Change:
    """Scales each microbatch by one lognormal factor of mean 1 on all stages."""

    def factors(shape: Shape, rng: random.Random) -> Factor:
        drawn = [_lognormal(rng, sigma) for _ in range(shape.num_microbatches)]
        return lambda kind, stage, i: drawn[i]

    return _scaling(factors)


def slow_rank(factor: float, rank: int | None = None) -> Change:
    """Makes all tasks of one rank (a random one unless given) ``factor`` times as long."""

    def factors(shape: Shape, rng: random.Random) -> Factor:
        slow = rng.randrange(shape.num_ranks) if rank is None else rank
        return lambda kind, stage, i: factor if stage % shape.num_ranks == slow else 1.0

    return _scaling(factors)


def heavy_head(extra: float) -> Change:
    """Adds ``extra`` whole ranks' forwards to each of F, B and W of the last virtual stage. Unlike
    microbatches take of it by their tokens.
    """

    def change(costs: Costs, shape: Shape, rng: random.Random) -> Costs:
        sizes = shape.sizes or (1,) * shape.num_microbatches
        each = extra * rank_forward(costs, shape) / statistics.fmean(sizes)
        last = shape.num_stages - 1
        return map_tasks(
            costs, lambda kind, stage, i, t: t + each * sizes[i] if stage == last else t
        )

    return change


def overhead(chunk_forwards: float) -> Change:
    """Makes every rank idle for this time after each of its tasks."""

    def change(costs: Costs, shape: Shape, rng: random.Random) -> Costs:
        after = chunk_forwards * rank_forward(costs, shape) / shape.num_chunks
        return dataclasses.replace(costs, overhead=dict.fromkeys(range(shape.num_ranks), after))

    return change


def transient_one(costs: Costs, shape: Shape, rng: random.Random) -> Costs:
    """Makes one rank at a time twice slower for a while, then another."""
    intervals: dict[int, list[tuple[float, float]]] = {}
    for start, end in _slow_intervals(costs, shape, rng, 0.2):
        intervals.setdefault(rng.randrange(shape.num_ranks), []).append((start, end))
    slow = {rank: SlowTimes(times, 2.0) for rank, times in intervals.items()}
    return dataclasses.replace(costs, slow_times=slow)


def transient_all(factor: float, share: float) -> Change:
    """Makes every rank, independently, ``factor`` times slower for about ``share`` of the time."""

    def change(costs: Costs, shape: Shape, rng: random.Random) -> Costs:
        slow = {
            rank: SlowTimes(_slow_intervals(costs, shape, rng, share), factor)
            for rank in range(shape.num_ranks)
        }
        return dataclasses.replace(costs, slow_times=slow)

    return change


def slow_link(
    chunk_forwards: float, *, random_each: bool = False, rank: int | None = None
) -> Change:
    """Slows all hops between one rank (a random one unless given) and the next, both ways.

    Args:
        chunk_forwards: time of a hop.
        random_each: scales each message by an exponential factor of mean 1.
    """

    def change(costs: Costs, shape: Shape, rng: random.Random) -> Costs:
        pairs = shape.num_ranks if shape.num_chunks > 1 else shape.num_ranks - 1
        slow = rng.randrange(max(1, pairs)) if rank is None else rank
        hop = chunk_forwards * rank_forward(costs, shape) / shape.num_chunks
        hops = list(costs.hops)
        for stage in range(slow, len(hops), shape.num_ranks):
            scale: tuple[list[float], ...] = ()
            if random_each:
                scale = tuple(
                    [rng.expovariate(1.0) for _ in range(shape.num_microbatches)] for _ in range(2)
                )
            hops[stage] = Hop(hop / 2, hop / 2, scale)
        return dataclasses.replace(costs, hops=hops)

    return change


def chain(*changes: Change) -> Change:
    """Applies one change after the other."""

    def change(costs: Costs, shape: Shape, rng: random.Random) -> Costs:
        for each in changes:
            costs = each(costs, shape, rng)
        return costs

    return change


def map_tasks(costs: Costs, function: Callable[[Kind, int, int, float], float]) -> Costs:
    """``costs`` with each duration replaced by ``function(kind, stage, microbatch, duration)``."""

    def table(kind: Kind) -> list[list[float]]:
        return [
            [function(kind, stage, i, time) for i, time in enumerate(row)]
            for stage, row in enumerate(costs.durations[kind])
        ]

    return dataclasses.replace(costs, durations=(table(Kind.F), table(Kind.B), table(Kind.W)))


def rank_forward(costs: Costs, shape: Shape) -> float:
    """Mean time of a whole rank's forward of one microbatch: the unit of time."""
    total = sum(sum(row) for row in costs.durations[Kind.F])
    return total / (shape.num_ranks * shape.num_microbatches)


def _scaling(factors: Callable[[Shape, random.Random], Factor]) -> Change:
    def change(costs: Costs, shape: Shape, rng: random.Random) -> Costs:
        factor = factors(shape, rng)
        return map_tasks(costs, lambda kind, stage, i, time: time * factor(kind, stage, i))

    return change


def _slow_intervals(
    costs: Costs, shape: Shape, rng: random.Random, share: float
) -> list[tuple[float, float]]:
    """Slow intervals between healthy ones, until later than any schedule ends."""
    unit = rank_forward(costs, shape)
    healthy, slow = unit * _SLOW * (1 - share) / share, unit * _SLOW
    horizon = 12.0 * unit * (shape.num_microbatches + 2 * shape.num_ranks)
    intervals, time = [], 0.0
    while time < horizon:
        start = time + rng.expovariate(1 / healthy)
        time = start + rng.expovariate(1 / slow)
        intervals.append((start, time))
    return intervals


def _lognormal(rng: random.Random, sigma: float) -> float:
    return math.exp(sigma * rng.gauss(0.0, 1.0) - sigma * sigma / 2)


CONDITIONS: Mapping[str, Change] = MappingProxyType(
    {
        "unif": chain(),
        "com10": lambda costs, shape, rng: uniform(shape, hop=0.1),
        "jit.1": jitter(0.1),
        "jit.3": jitter(0.3),
        "str1.2": slow_rank(1.2),
        "str1.5": slow_rank(1.5),
        "str2": slow_rank(2.0),
        "tr1": transient_one,
        "trN": transient_all(2.0, 0.2),
        "lnk1": slow_link(chunk_forwards=1.0),
        "lnk2": slow_link(chunk_forwards=2.0),
        "lnkR": slow_link(chunk_forwards=1.0, random_each=True),
        "head": heavy_head(0.5),
        "len": lengths(0.5),
    }
)
"""The named conditions, as changes of :func:`uniform`."""


def condition_costs(name: str, shape: Shape, seed: int) -> Costs:
    """Costs of ``shape`` under the condition ``name``."""
    p, v, m = shape.num_ranks, shape.num_chunks, shape.num_microbatches
    rng = random.Random(f"{name} {p} {v} {m} {seed}")  # else each shape had the same slow rank
    return CONDITIONS[name](uniform(shape), shape, rng)

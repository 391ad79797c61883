"""The fourteen conditions that a schedule is judged under, as the design defines them.

The unit of time is a whole rank's forward of a mean microbatch; its ``B`` and its ``W`` take one
each, and a chunk's tasks ``1 / v``. A hop takes 0.01 of a chunk's forward unless the condition says
otherwise. ``docs/simulator.md`` has the list. Used by the command line, the tests and
``profiling/sim_tables.py``.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Mapping
from types import MappingProxyType

from megatron.dpp.schedule import Kind
from megatron.dpp.sim.costs import Costs, Hop, SlowTimes, even_costs

_HOP = 0.01
_HEALTHY, _SLOW = 24.0, 6.0
"""Mean lengths of the healthy and the slow times of a transient, in units of a rank's forward."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """``num_ranks`` ranks of ``num_chunks`` chunks, ``num_microbatches`` microbatches."""

    num_ranks: int
    num_chunks: int
    num_microbatches: int

    @property
    def num_stages(self) -> int:
        return self.num_ranks * self.num_chunks


Condition = Callable[[Shape, random.Random], Costs]


def uniform(shape: Shape, rng: random.Random | None = None, *, hop: float = _HOP) -> Costs:
    """All tasks alike. ``hop`` is in units of a chunk's forward."""
    chunk = 1.0 / shape.num_chunks
    return even_costs(
        shape.num_stages, shape.num_microbatches, times=(chunk, chunk, chunk), hop=hop * chunk
    )


def jitter(sigma: float) -> Condition:
    """Every task takes a lognormal factor of mean 1."""

    def make(shape: Shape, rng: random.Random) -> Costs:
        return scale_tasks(uniform(shape), lambda *_: _lognormal(rng, sigma))

    return make


def lengths(sigma: float) -> Condition:
    """A microbatch takes one lognormal factor of mean 1 on all stages."""

    def make(shape: Shape, rng: random.Random) -> Costs:
        factors = [_lognormal(rng, sigma) for _ in range(shape.num_microbatches)]
        return scale_tasks(uniform(shape), lambda kind, stage, i: factors[i])

    return make


def straggler(factor: float, rank: int | None = None) -> Condition:
    """All tasks of one rank (a random one unless given) take ``factor`` times as long."""

    def make(shape: Shape, rng: random.Random) -> Costs:
        slow = rng.randrange(shape.num_ranks) if rank is None else rank
        p = shape.num_ranks
        return scale_tasks(
            uniform(shape), lambda kind, stage, i: factor if stage % p == slow else 1.0
        )

    return make


def transient_one(shape: Shape, rng: random.Random) -> Costs:
    """One rank at a time works at half speed, for a while; then another."""
    intervals: dict[int, list[tuple[float, float]]] = {}
    time, horizon = 0.0, _horizon(shape)
    while time < horizon:
        start = time + rng.expovariate(1 / _HEALTHY)
        rank = rng.randrange(shape.num_ranks)
        time = start + rng.expovariate(1 / _SLOW)
        intervals.setdefault(rank, []).append((start, time))
    slow = {rank: SlowTimes(times) for rank, times in intervals.items()}
    return dataclasses.replace(uniform(shape), slow_times=slow)


def transient_all(factor: float = 2.0, share: float = 0.2) -> Condition:
    """Every rank, on its own, is ``factor`` times slower for about ``share`` of the time."""

    def make(shape: Shape, rng: random.Random) -> Costs:
        slow = {}
        healthy = _SLOW * (1 - share) / share
        for rank in range(shape.num_ranks):
            intervals, time, horizon = [], 0.0, _horizon(shape)
            while time < horizon:
                start = time + rng.expovariate(1 / healthy)
                time = start + rng.expovariate(1 / _SLOW)
                intervals.append((start, time))
            slow[rank] = SlowTimes(intervals, factor)
        return dataclasses.replace(uniform(shape), slow_times=slow)

    return make


def slow_link(hop: float, *, random_each: bool = False, rank: int | None = None) -> Condition:
    """Between one rank and the next (a random one unless given) a hop takes ``hop`` chunk forwards,
    both ways.

    Args:
        random_each: each message takes an exponential factor of mean 1.
    """

    def make(shape: Shape, rng: random.Random) -> Costs:
        pairs = shape.num_ranks if shape.num_chunks > 1 else shape.num_ranks - 1
        slow = rng.randrange(max(1, pairs)) if rank is None else rank
        costs, chunk = uniform(shape), 1.0 / shape.num_chunks
        hops = list(costs.hops)
        for stage in range(slow, len(hops), shape.num_ranks):
            scale: tuple[list[float], list[float]] | tuple[()] = ()
            if random_each:
                draws = [
                    [rng.expovariate(1.0) for _ in range(shape.num_microbatches)] for _ in "FB"
                ]
                scale = (draws[0], draws[1])
            hops[stage] = Hop(hop * chunk / 2, hop * chunk / 2, scale)
        return dataclasses.replace(costs, hops=hops)

    return make


def heavy_head(extra: float) -> Condition:
    """The last virtual stage takes ``extra`` more (in whole ranks' forwards) for each of F, B and
    W.
    """

    def make(shape: Shape, rng: random.Random) -> Costs:
        last, factor = shape.num_stages - 1, 1 + extra * shape.num_chunks
        return scale_tasks(uniform(shape), lambda kind, stage, i: factor if stage == last else 1.0)

    return make


def scale_tasks(costs: Costs, factor: Callable[[Kind, int, int], float]) -> Costs:
    """``costs`` with every task's duration multiplied by ``factor(kind, stage, microbatch)``."""

    def table(kind: Kind) -> list[list[float]]:
        return [
            [time * factor(kind, stage, i) for i, time in enumerate(row)]
            for stage, row in enumerate(costs.durations[kind])
        ]

    return dataclasses.replace(costs, durations=(table(Kind.F), table(Kind.B), table(Kind.W)))


CONDITIONS: Mapping[str, Condition] = MappingProxyType(
    {
        "unif": uniform,
        "com10": lambda shape, rng: uniform(shape, hop=0.1),
        "jit.1": jitter(0.1),
        "jit.3": jitter(0.3),
        "str1.2": straggler(1.2),
        "str1.5": straggler(1.5),
        "str2": straggler(2.0),
        "tr1": transient_one,
        "trN": transient_all(),
        "lnk1": slow_link(1.0),
        "lnk2": slow_link(2.0),
        "lnkR": slow_link(1.0, random_each=True),
        "head": heavy_head(0.5),
        "len": lengths(0.5),
    }
)


def _lognormal(rng: random.Random, sigma: float) -> float:
    return math.exp(sigma * rng.gauss(0.0, 1.0) - sigma * sigma / 2)


def _horizon(shape: Shape) -> float:
    """Later than any schedule of ``shape`` ends: all work of a rank three times over, and the
    filling.
    """
    return 12.0 * (shape.num_microbatches + 2 * shape.num_ranks)

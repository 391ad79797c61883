"""Whole schedules: dynamic policies, the static schedules to compare them with, recorded orders."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from megatron.dpp.direction import Direction
from megatron.dpp.schedule import (
    DIRECTION_OF,
    Action,
    Allowance,
    Geometry,
    Kind,
    Memory,
    Policy,
    Scheduler,
    StaticSizes,
    beside_head,
    parse_cap,
    sliced_allowance,
)
from megatron.dpp.sim.clock import Lane, simulate
from megatron.dpp.sim.costs import Costs, Shape
from megatron.dpp.sim.result import Result


class FixedOrder:
    """Follows ``order``, every task of a rank, and waits where the next task is not ready, in the
    place of a Scheduler. Megatron's own orders are the policy ``megatron`` instead.

    Args:
        split: a ``W`` frees the activation, not its ``B``.
        shares: size of each microbatch in that of the largest; empty where they are equal.
    """

    def __init__(
        self,
        order: Sequence[Action],
        geometry: Geometry,
        *,
        split: bool = False,
        shares: Sequence[float] = (),
    ) -> None:
        self._order, self._frees, self._geometry = order, Kind.W if split else Kind.B, geometry
        self._shares = shares or [1.0] * geometry.num_microbatches
        # Inputs from the data and gradients from the loss need no message.
        self._first = 0 if geometry.is_first else None
        self._last = geometry.num_chunks - 1 if geometry.is_last else None
        self._position = 0
        self._arrived: tuple[dict[int, int], dict[int, int]] = ({}, {})
        self.held = 0.0
        self.peak_held = 0.0
        self.fused = False

    @property
    def done(self) -> bool:
        return self._position == len(self._order)

    def arrived(self, direction: Direction, chunk: int, total: int) -> None:
        """Report that ``total`` messages of a channel have arrived."""
        self._arrived[direction][chunk] = total

    def next(self) -> Action | None:
        """The next task of the list if its input has arrived."""
        if self.done:
            return None
        action = self._order[self._position]
        if action.kind != Kind.W and not self._is_here(action):
            return None
        self._position += 1
        change = (action.kind is Kind.F) - (action.kind is self._frees)
        self.held += change * self._shares[action.microbatch]
        self.peak_held = max(self.peak_held, self.held)
        return action

    def _is_here(self, action: Action) -> bool:
        implied = self._first if action.kind == Kind.F else self._last
        if action.chunk == implied:
            return True
        arrived = self._arrived[DIRECTION_OF[action.kind]].get(action.chunk, 0)
        return arrived > self._geometry.position(action.kind, action.microbatch)


def gpipe_order(geometry: Geometry) -> list[Action]:
    """All forwards, then all backwards (Huang et al., "GPipe", 2019); one chunk per rank."""
    microbatches = range(geometry.num_microbatches)
    return [Action(Kind.F, 0, i) for i in microbatches] + [
        Action(Kind.B, 0, i) for i in microbatches
    ]


def zb_h1_order(geometry: Geometry) -> list[Action]:
    """ZB-H1 (Qi et al., "Zero Bubble Pipeline Parallelism", 2023), with one chunk per rank.

    1F1B with ``W`` apart from ``B``, and 1F1B's memory. Rank ``r`` defers its first ``r`` ``W``,
    then runs one after each ``B``; the deferred ones fill the end.
    """
    m, behind = geometry.num_microbatches, geometry.num_ranks - 1 - geometry.rank
    warmup = min(behind, m)
    order = [Action(Kind.F, 0, i) for i in range(warmup)]
    weights = 0
    for i in range(m):
        if i + warmup < m:
            order.append(Action(Kind.F, 0, i + warmup))
        order.append(Action(Kind.B, 0, i))
        if i >= geometry.rank:
            order.append(Action(Kind.W, 0, weights))
            weights += 1
    return order + [Action(Kind.W, 0, i) for i in range(weights, m)]


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Settings of a simulated schedule.

    Args:
        policy: a policy or its name.
        cap: as ``DppConfig.activation_cap``, or ``none`` for no limit. With ``static`` the limit is
            what the static schedule holds in this iteration.
        split_backward: ``W`` are tasks of their own.
        stock: deferred backwards from which a ``B`` includes its ``W``, if no other ``W`` of its
            chunk is deferred.
        w_pieces: pieces of every chunk's ``W``, or of each stage's.
        group: microbatch group size; ``None`` is the number of ranks.
        memory: of each rank. With it, what ``B`` frees and a cap in bytes follow from an
            activation's size, and the last rank leaves room for the LM head, as in training.
            Without it ``B`` frees nothing.
        sizes_at_start: ranks know the sizes of all microbatches when the iteration begins;
            otherwise, as in training, when a microbatch's first forward on the rank begins. Those
            of linked microbatches are always known.
        kappa: memory of the keys and values of linked microbatches, as in
            :class:`~megatron.dpp.schedule.Scheduler`.
    """

    policy: str | Policy = "dynamic"
    cap: str = "auto"
    split_backward: bool = True
    w_pieces: int | tuple[int, ...] = 1
    group: int | None = None
    memory: tuple[Memory, ...] = ()
    sizes_at_start: bool = False
    kappa: float = 0.0
    stock: float = math.inf

    def lanes(self, shape: Shape) -> list[Lane]:
        """A scheduler per rank."""
        return [self._scheduler(shape, rank) for rank in range(shape.num_ranks)]

    def caps(self, shape: Shape) -> list[float]:
        """The cap of each rank, in chunk activations."""
        ranks = range(shape.num_ranks)
        return [self._allowance(shape, self.geometry(shape, rank)).chunks for rank in ranks]

    def run(self, shape: Shape, costs: Costs) -> Result:
        """Simulate one iteration."""
        lanes, pieces = self.lanes(shape), self._pieces(shape)
        return simulate(lanes, costs, split_backward=self.split_backward, w_pieces=pieces)

    def _pieces(self, shape: Shape) -> tuple[int, ...]:
        pieces = self.w_pieces
        return pieces if isinstance(pieces, tuple) else (pieces,) * shape.num_stages

    def geometry(self, shape: Shape, rank: int) -> Geometry:
        return Geometry(
            shape.num_ranks,
            rank,
            shape.num_chunks,
            shape.num_microbatches,
            group=self.group,
            w_pieces=self._pieces(shape)[rank :: shape.num_ranks],
            groups=shape.groups,
        )

    def _scheduler(self, shape: Shape, rank: int) -> Scheduler:
        geometry = self.geometry(shape, rank)
        allowance = self._allowance(shape, geometry)
        at_start = self.sizes_at_start or bool(shape.groups)
        make = partial(
            _Learner if shape.sizes and not at_start else Scheduler,
            geometry,
            policy=self.policy,
            cap=allowance.chunks,
            weights=allowance.weights,
            limits=allowance.limits,
            split_backward=self.split_backward,
            stock=self.stock,
            beta=self.memory[rank].beta if self.memory and self.split_backward else 0.0,
            largest=shape.unit,
            kappa=self.kappa,
        )
        scheduler = make(sizes=(shape.sizes or None) if at_start else None)
        if isinstance(scheduler, _Learner):
            scheduler.coming = shape.sizes
        return scheduler

    def _allowance(self, shape: Shape, geometry: Geometry) -> Allowance:
        if self.cap == "none":
            return Allowance(float(2 * geometry.num_chunks * geometry.num_microbatches))
        memory = self.memory[geometry.rank] if self.memory else None
        cap = parse_cap(self.cap, geometry, memory.activation_bytes or None if memory else None)
        if geometry.groups:
            return sliced_allowance(cap, geometry, shape.sizes, shape.unit, self.kappa)
        known = memory is not None and self.split_backward
        found = beside_head(cap, geometry, memory) if known else Allowance(cap.chunks)
        if not (cap.as_static and shape.sizes):
            return found
        so_far = StaticSizes()
        so_far.add(geometry, shape.sizes, found.weights)
        return found.with_static(so_far, shape.unit)


class _Learner(Scheduler):
    """A scheduler that learns a microbatch's size when its first forward begins."""

    coming: Sequence[int] = ()

    def next(self) -> Action | None:
        action = super().next()
        if action is not None and action.kind is Kind.F and action.chunk == 0:
            self.learn(action.microbatch, self.coming[action.microbatch])
        return action


STATIC = ("gpipe", "1f1b", "interleaved", "zb-h1")
"""Static schedules to compare with. All but ``interleaved`` have one chunk per rank, whatever
the shape says.
"""


def run_static(name: str, shape: Shape, costs: Costs) -> Result:
    """Simulate one of :data:`STATIC` over the same costs.

    For schedules of one chunk per rank a rank's stages are joined: a task takes the time of all its
    chunks' tasks, a hop that of the hop to the next rank.
    """
    config = ScheduleConfig(policy="megatron", cap="megatron", split_backward=False)
    if name == "interleaved":
        return config.run(shape, costs)
    if shape.num_chunks > 1:
        costs = join_chunks(costs, shape)
        shape = dataclasses.replace(shape, num_chunks=1)
    if name == "1f1b":
        return config.run(shape, costs)
    split, order = {"zb-h1": (True, zb_h1_order), "gpipe": (False, gpipe_order)}[name]
    p, m = shape.num_ranks, shape.num_microbatches
    geometries = [Geometry(p, rank, 1, m) for rank in range(p)]
    shares = [size / shape.unit for size in shape.sizes]
    lanes = [FixedOrder(order(one), one, split=split, shares=shares) for one in geometries]
    return simulate(lanes, costs, split_backward=split)


def replay(orders: Sequence[Sequence[Action]], costs: Costs, num_chunks: int) -> float:
    """Makespan of recorded orders: no decisions, only waiting.

    A simulation decides anew and may go another way after a microsecond's difference. A replay
    keeps each rank's order, so it shows what the costs explain of the run as it was.

    Args:
        orders: each rank's tasks, ``W`` piece by piece; pieces have equal shares of their task.
        num_chunks: chunks per rank, laid out as Megatron does.

    Raises:
        ScheduleError: the orders wait for each other.
    """
    p, m = len(orders), costs.num_microbatches
    lanes = [
        FixedOrder(order, Geometry(p, rank, num_chunks, m)) for rank, order in enumerate(orders)
    ]
    pieces = [
        max((a.piece + 1 for a in orders[stage % p] if a.chunk == stage // p), default=1)
        for stage in range(costs.num_stages)
    ]
    return simulate(lanes, costs, split_backward=True, w_pieces=pieces).makespan


def join_chunks(costs: Costs, shape: Shape) -> Costs:
    """Costs of the same model with one chunk per rank, which does the work of all its stages."""
    p = shape.num_ranks

    def joined(rows: list[list[float]]) -> list[list[float]]:
        return [[sum(times) for times in zip(*rows[rank::p], strict=True)] for rank in range(p)]

    forward, backward, weight = (joined(rows) for rows in costs.durations)
    return Costs((forward, backward, weight), costs.hops[: p - 1], costs.slow_times, costs.overhead)

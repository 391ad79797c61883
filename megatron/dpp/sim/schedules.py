"""Whole schedules by name: the dynamic policies and the static ones they are compared with.

Each name stands for what decides on every rank, whether its backward is split, and where its stages
lie; `simulate` of ``clock.py`` runs it. Used by the command line, the tests and
``profiling/sim_tables.py``.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from megatron.dpp.errors import ConfigError
from megatron.dpp.schedule import Geometry, Memory, Policy, Scheduler, beside_head, parse_cap
from megatron.dpp.sim.clock import Lane, Result, interleaved_placement, simulate
from megatron.dpp.sim.costs import Costs, Shape
from megatron.dpp.sim.fixed import FixedOrder, gpipe_order, zb_h1_order


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How a schedule decides.

    Args:
        policy: a policy or its name.
        cap: as ``--dpp-activation-cap``, or ``none`` for no limit.
        split_backward: ``W`` apart from ``B``.
        beta: share of an activation that ``B`` frees.
        w_pieces: pieces of every chunk's ``W``, or of each stage's.
        group: microbatch group size, ``None`` for the number of ranks.
        memory: of each rank; with it ``beta`` and a cap in bytes follow from what an activation
            takes, and the last rank leaves room for the LM head, all as in training.
    """

    policy: str | Policy = "dynamic"
    cap: str = "auto"
    split_backward: bool = True
    beta: float = 0.0
    w_pieces: int | tuple[int, ...] = 1
    group: int | None = None
    memory: tuple[Memory, ...] = ()

    def lanes(self, shape: Shape) -> list[Lane]:
        """A scheduler per rank."""
        return [self._scheduler(shape, rank) for rank in range(shape.num_ranks)]

    def caps(self, shape: Shape) -> list[float]:
        """What each rank may hold, in chunk activations."""
        return [self._cap(self._geometry(shape, rank)) for rank in range(shape.num_ranks)]

    def run(self, shape: Shape, costs: Costs, *, lead: float = 0.0) -> Result:
        """Simulate one iteration."""
        return simulate(
            self.lanes(shape),
            costs,
            interleaved_placement(shape.num_ranks, shape.num_chunks),
            split_backward=self.split_backward,
            w_pieces=self._pieces(shape),
            lead=lead,
        )

    def _pieces(self, shape: Shape) -> tuple[int, ...]:
        pieces = self.w_pieces
        return pieces if isinstance(pieces, tuple) else (pieces,) * shape.num_stages

    def _geometry(self, shape: Shape, rank: int) -> Geometry:
        return Geometry(
            shape.num_ranks,
            rank,
            shape.num_chunks,
            shape.num_microbatches,
            group=self.group,
            w_pieces=self._pieces(shape)[rank :: shape.num_ranks],
        )

    def _scheduler(self, shape: Shape, rank: int) -> Scheduler:
        geometry = self._geometry(shape, rank)
        return Scheduler(
            geometry,
            policy=self.policy,
            cap=self._cap(geometry),
            split_backward=self.split_backward,
            beta=self.memory[rank].beta if self.memory and self.split_backward else self.beta,
        )

    def _cap(self, geometry: Geometry) -> float:
        if self.cap == "none":
            return float(2 * geometry.num_chunks * geometry.num_microbatches)
        if not self.memory:
            return parse_cap(self.cap, geometry).chunks
        memory = self.memory[geometry.rank]
        cap = parse_cap(self.cap, geometry, memory.activation_bytes or None)
        return beside_head(cap, geometry, memory) if self.split_backward else cap.chunks


STATIC = ("gpipe", "1f1b", "interleaved", "zb-h1")
"""Static schedules to compare with. All but ``interleaved`` give a rank one chunk, whatever
``--chunks`` says.
"""


def find_plan(name: str, *, group: int | None = None, **settings: Any) -> Plan:
    """The plan of a policy's name; ``earlier-dpp`` is the rule of earlier implementations.

    That rule is: the first ready backward, else the first ready forward, fused, without a limit of
    memory.
    """
    if name == "earlier-dpp":
        return Plan(policy="depth-first", cap="none", split_backward=False, group=group)
    return Plan(policy=name, group=group, **settings)


def run_static(
    name: str, shape: Shape, costs: Costs, *, beta: float = 0.0, group: int | None = None
) -> Result:
    """Simulate one of :data:`STATIC` over the same costs.

    Schedules of one chunk per rank get a rank's stages joined: a task takes what those of its
    chunks take, a hop what the hop to the next rank takes.

    Args:
        group: microbatch group size of ``interleaved``, ``None`` for the number of ranks.

    Raises:
        ConfigError: an unknown name.
    """
    if name not in STATIC:
        raise ConfigError(f"schedule {name}: expected one of {', '.join(STATIC)}")
    plan = Plan(policy="megatron", cap="megatron", split_backward=False, group=group)
    if name == "interleaved":
        return plan.run(shape, costs)
    if shape.num_chunks > 1:
        costs = join_chunks(costs, shape)
        shape = dataclasses.replace(shape, num_chunks=1)
    if name == "1f1b":
        return plan.run(shape, costs)
    split, order = (True, zb_h1_order) if name == "zb-h1" else (False, gpipe_order)
    lanes = []
    for rank in range(shape.num_ranks):
        geometry = Geometry(shape.num_ranks, rank, 1, shape.num_microbatches)
        first, last = 0 if geometry.is_first else None, 0 if geometry.is_last else None
        kept = 1.0 - beta if split else 0.0
        lanes.append(FixedOrder(order(geometry), first=first, last=last, kept=kept))
    placement = interleaved_placement(shape.num_ranks, 1)
    return simulate(lanes, costs, placement, split_backward=split)


def join_chunks(costs: Costs, shape: Shape) -> Costs:
    """Costs of the same model with one chunk per rank, which has the work of all its stages."""
    p = shape.num_ranks

    def joined(rows: list[list[float]]) -> list[list[float]]:
        return [[sum(times) for times in zip(*rows[rank::p], strict=True)] for rank in range(p)]

    forward, backward, weight = (joined(rows) for rows in costs.durations)
    return Costs((forward, backward, weight), costs.hops[: p - 1], costs.slow_times, costs.overhead)

"""Whole schedules by name: the dynamic policies and the static ones they are compared with.

Each name stands for what decides on every rank, whether its backward is split, and where its stages
lie; `simulate` of ``clock.py`` runs it. Used by the command line, the tests and
``profiling/sim_tables.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.dpp.schedule import Geometry, Policy, Scheduler, parse_cap
from megatron.dpp.sim.clock import Lane, Result, interleaved_placement, simulate
from megatron.dpp.sim.conditions import Shape
from megatron.dpp.sim.costs import Costs


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How a schedule decides.

    Args:
        policy: a policy or its name.
        cap: as ``--dpp-activation-cap``, or ``none`` for no limit.
        split_backward: ``W`` apart from ``B``.
        beta: share of an activation that ``B`` frees.
        w_pieces: pieces of every chunk's ``W``.
        group: microbatch group size, ``None`` for the number of ranks.
    """

    policy: str | Policy = "dynamic"
    cap: str = "auto"
    split_backward: bool = True
    beta: float = 0.0
    w_pieces: int = 1
    group: int | None = None

    def lanes(self, shape: Shape) -> list[Lane]:
        """A scheduler per rank."""
        return [self._scheduler(shape, rank) for rank in range(shape.num_ranks)]

    def run(self, shape: Shape, costs: Costs, *, lead: float = 0.0) -> Result:
        """Simulate one iteration."""
        return simulate(
            self.lanes(shape),
            costs,
            interleaved_placement(shape.num_ranks, shape.num_chunks),
            split_backward=self.split_backward,
            w_pieces=[self.w_pieces] * shape.num_chunks,
            lead=lead,
        )

    def _scheduler(self, shape: Shape, rank: int) -> Scheduler:
        geometry = Geometry(
            shape.num_ranks,
            rank,
            shape.num_chunks,
            shape.num_microbatches,
            group=self.group,
            w_pieces=(self.w_pieces,) * shape.num_chunks,
        )
        unlimited = float(2 * shape.num_chunks * shape.num_microbatches)
        return Scheduler(
            geometry,
            policy=self.policy,
            cap=unlimited if self.cap == "none" else parse_cap(self.cap, geometry).chunks,
            split_backward=self.split_backward,
            beta=self.beta,
        )

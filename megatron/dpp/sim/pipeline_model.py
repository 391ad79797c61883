"""A run's pipeline as planners simulate it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron.dpp.schedule import Kind
from megatron.dpp.sim.lengths import LengthCosts
from megatron.dpp.sim.result import Result
from megatron.dpp.sim.schedules import ScheduleConfig
from megatron.dpp.sim.slices import Row, SlicedPipeline

Rows = Sequence[Sequence[int] | Row]
"""Microbatches in their order: the lengths of each one's sequences, or a row of slices."""

_HOP = 0.01
"""Time of a message in mean chunk forwards."""
_KAPPA = 0.35
"""Memory of keys, values and their gradients over that of activations: where all heads have keys of
their own, as a run takes it until it is measured."""


@dataclass(frozen=True, kw_only=True)
class PipelineModel:
    """A pipeline as a planner simulates it.

    Args:
        longest: most tokens of a microbatch.
        policy: of the dynamic schedule; None for a static one.
        cap: as ``activation_cap``, not in bytes.
        costs: time of a rank's tasks.
        overhead: time from a task's end to the next one's start at least, in the unit of ``costs``.
        hop: time of a message, in the unit of ``costs``; None for 1 % of the mean chunk forward.
        head: what the LM head adds to the last rank's F, B and W, as a share of their time per
            token.
    """

    num_ranks: int
    num_chunks: int
    longest: int
    policy: str | None
    cap: str = "auto"
    split_backward: bool = True
    costs: LengthCosts = field(default_factory=LengthCosts)
    overhead: float = 0.0
    hop: float | None = None
    head: float = 0.0

    def run(self, microbatches: Rows, policy: str | None = None) -> Result:
        """Simulate a step with these microbatches in this order, in the unit of ``costs``.

        Args:
            policy: in place of the model's; of a dynamic schedule.

        Raises:
            ConfigError: the schedule cannot run them, as the cap is too small.
        """
        rows = [as_row(each) for each in microbatches]
        schedule = ScheduleConfig(policy="megatron", cap="megatron", split_backward=False)
        if self.policy is not None:
            schedule = ScheduleConfig(
                policy=policy or self.policy, cap=self.cap, split_backward=self.split_backward,
                kappa=_KAPPA,
            )  # fmt: skip
        pipeline = SlicedPipeline(
            num_ranks=self.num_ranks, num_chunks=self.num_chunks, longest=self.longest,
            costs=self.costs, schedule=schedule, overhead=self.overhead, hop=self._hop(rows),
            head=self._head,
        )  # fmt: skip
        return pipeline.run(rows)

    def seconds(self, microbatches: Rows, policy: str | None = None) -> float:
        """Time of such a step."""
        return self.run(microbatches, policy).makespan

    def busy_seconds(self, microbatches: Rows) -> float:
        """Time of the last rank's own tasks in such a step, and between them."""
        units = [unit for each in microbatches for unit in as_row(each).units]
        split = self.split_backward and self.policy is not None
        num_tasks = (3 if split else 2) * len(units) * self.num_chunks
        heads = sum(self._head) * sum(unit.tokens for unit in units)
        return num_tasks * self.overhead + heads + sum(
            self.costs.of_work(kind, unit.tokens, unit.squares) for unit in units for kind in Kind
        )  # fmt: skip

    def least_seconds(self, microbatches: Rows) -> float:
        """Lower bound on :meth:`seconds` in any order, without simulation: the last rank's tasks,
        after an input has passed the other ranks.
        """
        rows = [as_row(each) for each in microbatches]
        units = [unit for row in rows for unit in row.units]
        first = min(self.costs.of_work(Kind.F, unit.tokens, unit.squares) for unit in units)
        passing = (self.num_ranks - 1) * (first / self.num_chunks + self._hop(rows))
        return passing + self.busy_seconds(rows) - self.overhead

    def num_tasks(self, microbatches: Rows) -> int:
        """Tasks of such a step on all ranks, which the simulation's own time follows."""
        units = sum(len(as_row(each).ends) for each in microbatches)
        return len(Kind) * units * self.num_ranks * self.num_chunks

    @property
    def _head(self) -> tuple[float, float, float]:
        """Time of a token in the head's F, B and W."""
        forward, backward, weight = self.costs.per_token
        return self.head * forward, self.head * backward, self.head * weight

    def _hop(self, rows: Sequence[Row]) -> float:
        if self.hop is not None:
            return self.hop
        forwards = [self.costs.time(Kind.F, row.lengths) for row in rows]
        return _HOP * statistics.fmean(forwards) / self.num_chunks


def as_row(microbatch: Sequence[int] | Row) -> Row:
    """A microbatch of whole sequences as the row of one unit; a row as it is."""
    if isinstance(microbatch, Row):
        return microbatch
    return Row(tuple(range(len(microbatch))), tuple(microbatch), (sum(microbatch),))

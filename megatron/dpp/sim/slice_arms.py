"""Comparison of cut and uncut batches by simulation.

Unit of time: a token's share of a rank's forward without attention. Where nothing else is given, a
task takes longer by 1 % of the forward of 4,096 tokens than its work, and a message takes as much.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron.dpp.errors import ConfigError
from megatron.dpp.schedule import Kind
from megatron.dpp.sim.lengths import LengthCosts
from megatron.dpp.sim.packing import pack
from megatron.dpp.sim.result import Result
from megatron.dpp.sim.schedules import ScheduleConfig
from megatron.dpp.sim.slices import (
    Row,
    SlicedPipeline,
    cut,
    groups_of,
    row_cost,
)
from megatron.dpp.slice_sizes import MOST_TOKENS, auto_tokens

KAPPA = 0.09
"""Keys of a cut sequence as a share of its activations: hidden size 4,096, 8 groups of 32 heads,
nothing recomputed."""
OVERHEAD = 0.01
"""Of a task and of a message, as a share of a rank's forward of 4,096 tokens."""
STATIC, TODAY = "static, packed", "dynamic, packed"
STATIC_SLICED, SLICED = "static, sliced", "dynamic, sliced"
LESS = "dynamic, sliced, 0.6 memory"
ARMS = (STATIC, TODAY, STATIC_SLICED, SLICED, LESS)


@dataclass(frozen=True)
class Figure:
    """One arm of one batch.

    Args:
        num_chunks: of each rank.
        num_units: that run through the pipeline.
        time: over the work of a rank.
        peak: most activations and keys that a rank holds, in tokens through all of its layers.
    """

    num_chunks: int
    num_units: int
    time: float
    peak: float


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Settings of the arms.

    Args:
        num_chunks: of the uncut arms and of the static sliced one; the dynamic ones have one.
        tokens: of a slice; None for ``auto``.
        overhead: time after a task, in chunk forwards of a batch's mean sequence; None for
            :data:`OVERHEAD`.
        hop: time of a message, likewise.
        head: of the LM head in each of F, B and W, in a rank's forwards of a batch's mean sequence.
            A unit takes of it what its tokens are of the batch's.
    """

    num_ranks: int
    num_chunks: int
    tokens: int | None
    overhead: float | None = None
    hop: float | None = None
    head: float = 0.0
    costs: LengthCosts = LengthCosts.transformer()  # noqa: RUF009 - frozen

    def slice_tokens(self, lengths: Sequence[int]) -> int:
        """Tokens of a slice for a batch."""
        return self.tokens or auto_tokens(sum(lengths), self.num_ranks)

    def figures(self, lengths: Sequence[int]) -> dict[str, Figure]:
        """All arms of one batch, each in its best order."""
        head = self._head(lengths)
        static, today = self._uncut(lengths)
        rows = cut(lengths, self.slice_tokens(lengths), self.costs)
        work = sum(row_cost(row, self.costs) for row in rows) + 3 * head * sum(lengths)
        units, longest = sum(groups_of(rows)), max(lengths)
        v = self.num_chunks

        def figure(result: Result, chunks: int, number: int) -> Figure:
            return Figure(
                chunks, number, result.makespan / work, max(result.peak_held) * longest / chunks
            )

        found = {
            STATIC: figure(static[1], v, len(static[0])),
            TODAY: figure(today[1], v, len(today[0])),
        }
        order = ScheduleConfig(policy="megatron", cap="none", split_backward=False, kappa=KAPPA)
        found[STATIC_SLICED] = figure(self._pipeline(v, lengths, order).best(rows)[1], v, units)
        for name, share in ((SLICED, 1.0), (LESS, 0.6)):
            cap = f"{share * found[STATIC].peak / longest:.6f}seq"
            schedule = ScheduleConfig(cap=cap if len(rows) < units else "static", kappa=KAPPA)
            found[name] = figure(self._pipeline(1, lengths, schedule).best(rows)[1], 1, units)
        return found

    def _forward(self, lengths: Sequence[int]) -> float:
        """A rank's forward of the mean sequence."""
        return statistics.fmean(self.costs.time(Kind.F, [length]) for length in lengths)

    def _head(self, lengths: Sequence[int]) -> float:
        """Time of a token in the LM head, in each of F, B and W."""
        return self.head * self._forward(lengths) / statistics.fmean(lengths)

    def _pipeline(
        self, num_chunks: int, lengths: Sequence[int], schedule: ScheduleConfig
    ) -> SlicedPipeline:
        usual = OVERHEAD * self.costs.time(Kind.F, [MOST_TOKENS])
        chunk = self._forward(lengths) / self.num_chunks
        overhead, hop = (
            usual if given is None else given * chunk for given in (self.overhead, self.hop)
        )
        return SlicedPipeline(
            num_ranks=self.num_ranks, num_chunks=num_chunks, longest=max(lengths),
            costs=self.costs, schedule=schedule, overhead=overhead, hop=hop,
            head=(self._head(lengths),) * 3,
        )  # fmt: skip

    def _uncut(self, lengths: Sequence[int]) -> list[tuple[list[Row], Result]]:
        """The static schedule and the dynamic one, each with its best number of packed rows."""
        p, longest = self.num_ranks, max(lengths)
        least = -(-sum(lengths) // longest)
        numbers = [n for n in (2 * p, 4 * p, 8 * p) if least <= n <= len(lengths)]
        packed = [rows for n in numbers or [len(lengths)] if (rows := self._packed(lengths, n))]
        packed = packed or [[_row(lengths, [i]) for i in range(len(lengths))]]
        static = ScheduleConfig(policy="megatron", cap="megatron", split_backward=False)
        return [
            min(
                (self._pipeline(self.num_chunks, lengths, one).best(rows) for rows in packed),
                key=lambda found: found[1].makespan,
            )
            for one in (
                static,
                replace(static, policy="dynamic", cap="static", split_backward=True),
            )
        ]

    def _packed(self, lengths: Sequence[int], number: int) -> list[Row]:
        """Rows of equal cost, as long as the longest sequence at most; none if they do not fit."""
        costs = [self.costs.total([length]) for length in lengths]
        try:
            bins = pack(lengths, max(lengths), "even", costs=costs, num_bins=number)
        except ConfigError:
            return []
        return [_row(lengths, each) for each in bins]


def _row(lengths: Sequence[int], indices: Sequence[int]) -> Row:
    own = tuple(lengths[i] for i in indices)
    return Row(tuple(indices), own, (sum(own),))


def table(comparison: Comparison, batches: Sequence[Sequence[int]]) -> list[str]:
    """Lines of text: means of all arms over batches."""
    found = [comparison.figures(lengths) for lengths in batches]
    tokens = sorted({comparison.slice_tokens(lengths) for lengths in batches})
    sizes = f"{tokens[0]}" + (f" to {tokens[-1]}" if len(tokens) > 1 else "")
    lines = [
        f"{comparison.num_ranks} ranks, {len(batches)} batch(es) of {len(batches[0])} sequences, "
        f"slices of {sizes} tokens",
        f"{'schedule':28s} {'chunks':>6s} {'units':>6s} {'time':>7s} {'of static':>10s} "
        f"{'memory':>7s}",
    ]
    base = statistics.fmean(one[STATIC].time for one in found)
    for name in ARMS:
        each = [one[name] for one in found]
        time = statistics.fmean(figure.time for figure in each)
        memory = statistics.fmean(one[name].peak / one[STATIC].peak for one in found)
        units = statistics.fmean(figure.num_units for figure in each)
        lines.append(
            f"{name:28s} {each[0].num_chunks:6d} {units:6.0f} {time:7.3f} {time / base:10.3f} "
            f"{memory:7.2f}"
        )
    lines += [
        "time: makespan / the busiest rank's own work; of static: over the first row's; memory:",
        "activations and keys that a rank holds at most, over the first row's. Each row in its",
        "best order; the dynamic ones at the first row's memory, or what their slices need",
    ]
    return lines

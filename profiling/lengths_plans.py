"""Plans of one drawn batch, for bench_lengths.py: which sequences share a microbatch, in which
order. The planner's simulation finds the fastest."""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import harness

from megatron.dpp.schedule import Kind
from megatron.dpp.sim.costs import Shape
from megatron.dpp.sim.lengths import MIXES, LengthCosts, sft
from megatron.dpp.sim.orders import orders
from megatron.dpp.sim.schedules import ScheduleConfig

PACKED_ROW = 8192
"""Tokens of every microbatch of ``packed8k``."""

LENGTHS = ("sft", "long", "packed8k")
"""Names of distributions: one sequence per microbatch, or rows full of sequences as drawn."""

PLANS = ("drawn", "sorted", "ordered", "packed", "best")
"""As drawn; ascending by cost; the fastest named order; packed evenly, as drawn; the fastest named
order of either."""

_HOP = 0.01
"""Time of a message in chunk forwards."""
_PER_RANK = 4
"""Microbatches per rank that packing makes at least, if there are enough sequences."""
_SCHEDULES = {
    "static": ScheduleConfig(policy="megatron", cap="megatron", split_backward=False),
    "ours": ScheduleConfig(policy="dynamic"),
}
_PRECISE = 1e-3
"""Precision of an overhead, as a share of a microbatch's mean time."""

Microbatches = list[list[int]]
"""Sequences of each microbatch, as indices."""


def longest_of(mix: str) -> int:
    """Most tokens of a microbatch as drawn."""
    return MIXES[mix].longest if mix in MIXES else PACKED_ROW


class Plans:
    """One drawn batch and its plans.

    Args:
        mix: a name of :data:`LENGTHS`.
        rows: microbatches as drawn.
        longest: most tokens of a microbatch.
        costs: time of a rank's tasks.
    """

    def __init__(
        self, mix: str, rng: random.Random, *, rows: int, ranks: int, chunks: int, longest: int,
        costs: LengthCosts,
    ) -> None:  # fmt: skip
        self.longest, self._ranks, self._chunks, self._costs = longest, ranks, chunks, costs
        self.lengths: list[int] = []
        self._rows: Microbatches = []
        for _ in range(rows):
            drawn = MIXES[mix].draw(rng, 1)[0] if mix in MIXES else _full_row(rng)
            lengths = [min(length, longest) for length in drawn]
            self._rows.append([len(self.lengths) + i for i in range(len(lengths))])
            self.lengths += lengths
        self._packed = self._rows if mix not in MIXES else self._evenly()

    def _evenly(self) -> Microbatches:
        """The costliest sequence first, into the cheapest of as few microbatches as hold all."""
        costs, step = [self._costs.total([length]) for length in self.lengths], self._ranks
        count, total = len(self.lengths), sum(self.lengths)
        least = max(-(-total // self.longest), min(_PER_RANK * step, count))
        for number in range(-(-least // step) * step, count + 1, step):
            bins: Microbatches = [[] for _ in range(number)]
            for index in sorted(range(count), key=lambda i: -costs[i]):
                room = [b for b in bins if sum(self.of([[*b, index]])[0]) <= self.longest]
                if not room:
                    break
                min(room, key=lambda b: (sum(costs[i] for i in b), len(b))).append(index)
            else:
                return [sorted(each) for each in bins]
        return [[index] for index in range(count)]

    def of(self, microbatches: Microbatches) -> list[list[int]]:
        """The lengths of each microbatch's sequences."""
        return [[self.lengths[index] for index in each] for each in microbatches]

    def seconds(self, schedule: str, microbatches: Microbatches, overhead: float = 0.0) -> float:
        """Simulated time of a step, in the unit of the costs.

        Args:
            schedule: static or ours.
            overhead: time from a task's end to the next one's start at least, in the same unit.
        """
        works = [(sum(row), sum(n * n for n in row)) for row in self.of(microbatches)]
        unit = statistics.fmean(self._costs.of_work(Kind.F, *work) for work in works)
        costs = self._costs.of_works(works, self._ranks, self._chunks, _HOP)
        costs = replace(costs, overhead=dict.fromkeys(range(self._ranks), overhead / unit))
        sizes = tuple(tokens for tokens, _ in works)
        shape = Shape(self._ranks, self._chunks, len(works), sizes, self.longest)
        return _SCHEDULES[schedule].run(shape, costs).makespan * unit

    def overhead(self, schedule: str, microbatches: Microbatches, seconds: float) -> float:
        """The overhead of a task with which a step is simulated to take as long as measured."""
        low, high = 0.0, seconds / len(microbatches)
        while high - low > _PRECISE * seconds / len(microbatches):
            middle = (low + high) / 2
            less = self.seconds(schedule, microbatches, middle) < seconds
            low, high = (middle, high) if less else (low, middle)
        return low

    def planned(self, schedule: str, plan: str) -> tuple[str, Microbatches]:
        """A plan's name and microbatches; ``plan`` is one of :data:`PLANS`."""
        if plan in ("drawn", "packed"):
            return plan, self._rows if plan == "drawn" else self._packed
        found = self._ordered(self._rows)
        if plan == "sorted":
            return "ascending", found["ascending"]
        if plan == "best" and self._packed is not self._rows:
            packed = self._ordered(self._packed)
            found |= {f"packed, {name}": each for name, each in packed.items()}
        name = min(found, key=lambda one: self.seconds(schedule, found[one]))
        return name, found[name]

    def _ordered(self, microbatches: Microbatches) -> dict[str, Microbatches]:
        costs = [self._costs.total(lengths) for lengths in self.of(microbatches)]
        named = orders(costs, self._ranks)
        found = {name: [microbatches[i] for i in order] for name, order in named}
        return {"drawn": microbatches, **found}


def _full_row(rng: random.Random) -> list[int]:
    """Sequences that fill one row; the last is cut."""
    row: list[int] = []
    while sum(row) < PACKED_ROW:
        row.append(min(sft(rng), PACKED_ROW - sum(row)))
    return row


def drawn_batches(args: Any, *, longest: int, costs: LengthCosts) -> list[Plans]:
    """Batches as the command line of bench_lengths.py asks for them."""
    rng, rows = random.Random(args.seed), args.microbatches or 8 * args.ranks
    return [
        Plans(
            args.lengths, rng, rows=rows, ranks=args.ranks, chunks=args.chunks, longest=longest,
            costs=costs,
        )
        for _ in range(args.batches)
    ]  # fmt: skip


def print_predictions(args: Any, sizes: Sequence[int]) -> None:
    """Print the simulated time of each plan over that of the static schedule as drawn."""
    shown = []
    for size, mix in itertools.product(sizes, LENGTHS):
        own = argparse.Namespace(**{**vars(args), "ranks": size, "lengths": mix})
        costs = LengthCosts.transformer()
        batches = drawn_batches(own, longest=longest_of(mix), costs=costs)
        drawn = [each.seconds("static", each.planned("static", "drawn")[1]) for each in batches]
        for schedule in ("static", "ours"):
            means = [
                statistics.fmean(
                    each.seconds(schedule, each.planned(schedule, plan)[1]) / base
                    for each, base in zip(batches, drawn, strict=True)
                )
                for plan in PLANS
            ]
            shown.append((size, mix, schedule, *(f"{mean:.3f}" for mean in means)))
    harness.print_table(f"ranks | lengths | schedule | {' | '.join(PLANS)}", shown)


def mean_tokens(batches: Sequence[Plans]) -> float:
    """Tokens of a batch, the mean."""
    return sum(sum(each.lengths) for each in batches) / len(batches)

#!/usr/bin/env python3
"""The sources of the dynamic gain, simulated: split backward, order at run time, memory.

    python profiling/bench_ingredients.py --ranks 2,4,8 --seeds 20

Prints a row per number of ranks and case: the time of the static schedule and of each arm of
``megatron/dpp/sim/arms.py``, the parts of the dynamic schedule's gain, which add up to the whole,
and peaks in whole ranks' activations (of the longest sequence where lengths are unlike).
"""

from __future__ import annotations

import dataclasses
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import harness

from megatron.dpp.errors import exit_with
from megatron.dpp.sim import conditions
from megatron.dpp.sim.arms import (
    DYNAMIC,
    DYNAMIC_STATIC,
    FUSED,
    MEGATRON_W,
    Arms,
    part_cells,
    parts,
)
from megatron.dpp.sim.costs import Costs, Shape
from megatron.dpp.sim.lengths import MIXES, LengthCosts

_HOP = 0.01
_SHOWN = (MEGATRON_W, FUSED, DYNAMIC_STATIC, DYNAMIC)


def _changed(change: conditions.Change | None) -> Callable[[Shape, int], tuple[Shape, Costs]]:
    def draw(shape: Shape, seed: int) -> tuple[Shape, Costs]:
        costs = conditions.uniform(shape, _HOP)
        return shape, change(costs, shape, random.Random(f"change {seed}")) if change else costs

    return draw


def _unlike(name: str) -> Callable[[Shape, int], tuple[Shape, Costs]]:
    def draw(shape: Shape, seed: int) -> tuple[Shape, Costs]:
        rng, mix = random.Random(f"lengths {seed}"), MIXES[name]
        rows = mix.draw(rng, shape.num_microbatches)
        sizes = tuple(map(sum, rows))
        works = [(sum(row), sum(length * length for length in row)) for row in rows]
        costs = LengthCosts.transformer().of_works(works, shape.num_ranks, shape.num_chunks, _HOP)
        return dataclasses.replace(shape, sizes=sizes, largest=mix.longest), costs

    return draw


CASES = {
    "equal": (2, _changed(None)),
    "equal, 8p microbatches": (8, _changed(None)),
    "jitter 0.3": (2, _changed(conditions.jitter(0.3))),
    "transients 2x:20%": (8, _changed(conditions.transient_all(2.0, 0.2))),
    "lengths of fine-tuning": (8, _unlike("sft")),
    "lengths of long context": (8, _unlike("long")),
}
"""Name -> microbatches per rank, and the shape and costs of a seed."""


@dataclass(frozen=True)
class Row:
    """A case on ``ranks`` ranks. ``times`` and ``peaks`` are means over seeds, by arm; ``saved`` is
    each ingredient's share of the static arm's time, by arm."""

    ranks: int
    case: str
    static: str
    times: dict[str, float]
    peaks: dict[str, float]
    saved: dict[str, dict[str, float]]

    def cells(self) -> list[object]:
        """The row of the table."""
        arms = (self.static, *_SHOWN)
        shown = [f"{self.times[name]:.4g} ({self.peaks[name]:.2f})" for name in arms]
        gains = part_cells(self.saved[DYNAMIC], ("W", "order", "memory"))
        return [self.ranks, self.case, *shown, *gains]


def rows_of(ranks: int, chunks: int, seeds: int) -> list[Row]:
    """The rows of one pipeline."""
    arms, found = Arms(chunks), []
    for case, (per_rank, draw) in CASES.items():
        drawn = [draw(Shape(ranks, chunks, per_rank * ranks), seed) for seed in range(seeds)]
        results = {name: [arms.run(name, *each) for each in drawn] for name in arms.names}
        times = {n: statistics.fmean(r.makespan for r in each) for n, each in results.items()}
        peaks = {
            name: statistics.fmean(max(one.peak_held) / chunks for one in each)
            for name, each in results.items()
        }
        found.append(Row(ranks, case, arms.static, times, peaks, parts(times, arms.steps)))
    return found


def main() -> int:
    """Simulate all rows and print them."""
    parser = harness.new_parser(
        __doc__, ranks=("2,4,8", "pipeline sizes"), chunks=(2, "chunks per rank"),
        seeds=(20, "seeds, of which rows are means"), json=("", "write the rows there"),
    )  # fmt: skip
    args = parser.parse_args()
    words = args.ranks.split(",")
    if not all(word.isdecimal() and int(word) >= 2 for word in words):
        parser.error(f"--ranks {args.ranks}: expected sizes of 2 or more, like 2,4,8")
    if min(args.chunks, args.seeds) < 1:
        parser.error("--chunks and --seeds must be at least 1")
    rows = [row for word in words for row in rows_of(int(word), args.chunks, args.seeds)]
    harness.print_table(
        f"p | case | {rows[0].static} | Megatron's order + W | dynamic fused | "
        "dynamic, cap `static` | dynamic, default cap | W, % | order, % | memory, % | all, %",
        (row.cells() for row in rows),
    )
    harness.write_json(args.json, {"arguments": vars(args), "rows": [vars(row) for row in rows]})
    return 0


if __name__ == "__main__":
    exit_with(main)

#!/usr/bin/env python3
"""Sequences in slices against packed ones, on stages that sleep.

    python profiling/bench_sliced_sleeping.py --ranks 4 --shortest 16384 --longest 65536

Sleeping stages need no cores: real processes and the real executor over the real transport run
Megatron's order of packed rows and the dynamic order of slices; a task sleeps as long as its tokens
and keys are to take. A tenth of the sequences is long, the others are as in fine-tuning. Each arm
has the best of the simulator's named orders, and its prediction stands beside the measurement.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from typing import Any

import harness
import torch.distributed as dist
from bench_sleeping import HIDDEN, ListedNaps, SleepingRunner, cpu_rank, open_pipeline, run_step

from megatron.dpp.schedule import Kind
from megatron.dpp.sim.costs import Shape
from megatron.dpp.sim.lengths import LengthCosts, sft
from megatron.dpp.sim.packing import pack
from megatron.dpp.sim.schedules import ScheduleConfig
from megatron.dpp.sim.slice_arms import KAPPA
from megatron.dpp.sim.slices import Row, SlicedPipeline, cut, groups_of, row_cost
from megatron.dpp.slice_sizes import auto_tokens

_COSTS = LengthCosts.transformer()
_WARM_UP = 0.02
"""Share of a task's time in the untimed step of each arm."""

Arm = tuple[str, SlicedPipeline, list[Row]]


def arms(args: Any, lengths: list[int]) -> list[Arm]:
    """Megatron's order of packed rows in two chunks, and slices in one chunk."""
    p, longest = args.ranks, max(lengths)

    def pipeline(chunks: int, **more: Any) -> SlicedPipeline:
        return SlicedPipeline(
            num_ranks=p, num_chunks=chunks, longest=longest, costs=_COSTS,
            schedule=ScheduleConfig(**more),
        )  # fmt: skip

    order = {"policy": "megatron", "split_backward": False}
    static = pipeline(2, cap="megatron", **order)
    found = []
    least = -(-sum(lengths) // longest)
    costs = [_COSTS.total([length]) for length in lengths]
    for number in {max(least, n) for n in (2 * p, 4 * p) if n <= len(lengths)}:
        bins = pack(lengths, longest, "even", costs=costs, num_bins=number)
        own = [(each, tuple(lengths[i] for i in each)) for each in bins]
        found.append(static.best([Row(tuple(each), of, (sum(of),)) for each, of in own]))
    packed = min(found, key=lambda one: one[1].makespan)[0]
    rows = cut(lengths, auto_tokens(sum(lengths), p), _COSTS)
    held = max(*static.run(packed).peak_held, 4) / 2  # few sequences need two in any order
    arms: list[Arm] = [("static, packed", static, packed)]
    for name, chunks, more in (
        ("static, sliced", 1, {"cap": "none", "kappa": KAPPA, **order}),
        ("dynamic, sliced", 1, {"cap": f"{held:.6f}seq", "kappa": KAPPA}),
    ):
        sliced = pipeline(chunks, **more)
        arms.append((name, sliced, sliced.best(rows)[0]))
    return arms


class Step:
    """The executor over channels whose slots hold the longest unit of an arm."""

    def __init__(self, pipeline: SlicedPipeline, rows: list[Row]) -> None:
        self.pipeline, self.units = pipeline, [unit for row in rows for unit in row.units]
        self.sizes, groups = [unit.tokens for unit in self.units], groups_of(rows)
        self.groups = groups if max(groups) > 1 else ()
        p, v = pipeline.num_ranks, pipeline.num_chunks
        self.shape = Shape(p, v, len(self.units), tuple(self.sizes), pipeline.longest, self.groups)
        self.links = open_pipeline(p, v, max(self.sizes), "shm")
        self.iteration = 0

    def run(self, unit_seconds: float) -> float:
        """Seconds of one step, of the slowest rank."""
        schedule, v = self.pipeline.schedule, self.pipeline.num_chunks
        seconds = {
            kind: [
                unit_seconds * _COSTS.of_work(kind, each.tokens, each.squares) / v
                for each in self.units
            ]
            for kind in Kind
        }
        split, scheduler = schedule.split_backward, schedule.lanes(self.shape)[dist.get_rank()]
        dist.barrier()
        start = time.perf_counter()
        run_step(
            self.links, scheduler, SleepingRunner(ListedNaps(seconds, fused=not split), self.sizes),
            self.iteration, split=split, sizes_agree=bool(self.groups),
            count_tokens=lambda tensor: tensor.numel() // HIDDEN,
        )  # fmt: skip
        self.iteration += 1
        (took,) = harness.over_ranks(time.perf_counter() - start)
        return float(took)


def measure(args: Any) -> list[dict[str, Any]]:
    """A row per arm: mean seconds of the batches, simulated and measured."""
    rows: dict[str, dict[str, Any]] = {}
    for seed in range(args.batches):
        rng = random.Random(seed)
        lengths = [
            rng.randint(args.shortest, args.longest) if rng.random() < 0.1 else sft(rng)
            for _ in range(args.sequences)
        ]
        found = arms(args, lengths)
        work = sum(row_cost(row, _COSTS) for row in found[0][2])
        unit = args.seconds / work
        for name, pipeline, order in found:
            step = Step(pipeline, order)
            step.run(_WARM_UP * unit)
            row = rows.setdefault(name, {"arm": name, "simulated": [], "measured": []})
            row["simulated"].append(unit * pipeline.run(order).makespan)
            row["measured"].append(step.run(unit))
            row["units"] = len(step.units)
            step.links.transport.close()
    return list(rows.values())


def report(args: Any, rows: list[dict[str, Any]]) -> None:
    """Print the table, and write JSON when asked to."""
    print(
        f"\n{args.ranks} ranks, {args.batches} batch(es) of {args.sequences} sequences, a tenth of "
        f"{args.shortest} to {args.longest} tokens; a rank's own work sleeps {args.seconds} s\n"
    )
    means = {row["arm"]: statistics.fmean(row["measured"]) for row in rows}
    first = next(iter(means.values()))
    harness.print_table(
        "schedule | units | simulated s | measured s | measured / simulated | / static, packed",
        [
            (row["arm"], row["units"], f"{statistics.fmean(row['simulated']):.2f}",
             f"{means[row['arm']]:.2f}",
             f"{means[row['arm']] / statistics.fmean(row['simulated']):.3f}",
             f"{means[row['arm']] / first:.3f}")
            for row in rows
        ],
    )  # fmt: skip
    harness.write_json(args.json, {"arguments": vars(args), "rows": rows})


def parse_arguments() -> Any:
    """The command line, checked."""
    parser = harness.new_parser(
        __doc__, ranks=4, sequences=32, batches=2, shortest=16384, longest=65536,
        seconds=(12.0, "of a rank's own work in a step"), json=("", "file for the results"),
    )  # fmt: skip
    args = parser.parse_args()
    if args.ranks < 2:
        parser.error(f"--ranks {args.ranks}: expected 2 or more")
    if not 1 <= args.shortest <= args.longest:
        parser.error(
            f"--shortest {args.shortest} --longest {args.longest}: expected 1 <= shortest <= "
            "longest"
        )
    if args.sequences < 2 * args.ranks or args.batches < 1:
        parser.error(
            f"--sequences {args.sequences} --batches {args.batches}: expected twice the ranks or "
            "more, and 1 or more"
        )
    if not args.seconds > 0:
        parser.error(f"--seconds {args.seconds}: must be above 0")
    return args


def main() -> int:
    """Start one process per rank, or be one of them."""
    args = parse_arguments()
    if "RANK" not in os.environ:
        return harness.start_ranks(args.ranks, OMP_NUM_THREADS="1", PYTHONWARNINGS="ignore")
    with cpu_rank():
        rows = measure(args)
        if dist.get_rank() == 0:
            report(args, rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

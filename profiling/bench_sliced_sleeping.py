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
import torch
import torch.distributed as dist
from bench_sleeping import SleepingRunner, _sleep_exactly, cpu_rank

from megatron.dpp.config import DppConfig
from megatron.dpp.schedule import Geometry, Kind
from megatron.dpp.sim.costs import Shape
from megatron.dpp.sim.lengths import LengthCosts, sft
from megatron.dpp.sim.packing import pack
from megatron.dpp.sim.schedules import ScheduleConfig
from megatron.dpp.sim.slice_arms import KAPPA
from megatron.dpp.sim.slices import Row, SlicedPipeline, cut, groups_of, row_cost
from megatron.dpp.slice_sizes import auto_tokens
from megatron.dpp.trace import NullRecorder

_HIDDEN = 8
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
    held = max(static.run(packed).peak_held) / 2
    arms: list[Arm] = [("static, packed", static, packed)]
    for name, chunks, more in (
        ("static, sliced", 1, {"cap": "none", "kappa": KAPPA, **order}),
        ("dynamic, sliced", 1, {"cap": f"{held:.6f}seq", "kappa": KAPPA}),
    ):
        sliced = pipeline(chunks, **more)
        arms.append((name, sliced, sliced.best(rows)[0]))
    return arms


class Runner(SleepingRunner):
    """The executor's runner; its tensors have their unit's tokens."""

    def __init__(self, seconds: dict[Kind, list[float]], sizes: list[int], *, fused: bool) -> None:
        self._seconds, self._sizes, self._fused = seconds, sizes, fused
        super().__init__(self._nap)  # type: ignore[arg-type]

    def _nap(self, kind: str, chunk: int, unit: int) -> None:
        more = self._seconds[Kind.W][unit] if self._fused and kind == "B" else 0.0
        _sleep_exactly(self._seconds[Kind[kind]][unit] + more)

    def forward(self, chunk: int, microbatch: int, received: Any) -> torch.Tensor:
        super().forward(chunk, microbatch, received)
        return torch.zeros(self._sizes[microbatch], 1, _HIDDEN)

    def backward(self, chunk: int, microbatch: int, received: Any) -> torch.Tensor:
        super().backward(chunk, microbatch, received)
        return torch.zeros(self._sizes[microbatch], 1, _HIDDEN)


class Step:
    """The executor over channels whose slots hold the longest unit of an arm."""

    def __init__(self, pipeline: SlicedPipeline, rows: list[Row]) -> None:
        from megatron.dpp.runtime.links import Links, open_links
        from megatron.dpp.runtime.topology import Topology

        self.pipeline, self.units = pipeline, [unit for row in rows for unit in row.units]
        self.sizes, groups = [unit.tokens for unit in self.units], groups_of(rows)
        self.groups = groups if max(groups) > 1 else ()
        p, v = pipeline.num_ranks, pipeline.num_chunks
        self.geometry = Geometry(p, dist.get_rank(), v, len(self.units), groups=self.groups)
        topology = Topology(tuple(range(p)), dist.get_rank(), v)
        slot = max(self.sizes) * _HIDDEN * 4
        channels = topology.channels([slot], [slot], 2)
        self.links = Links(open_links(channels.specs, DppConfig(transport="shm")), channels)
        self.iteration = 0

    def run(self, unit_seconds: float) -> float:
        """Seconds of one step, of the slowest rank."""
        from megatron.dpp.runtime.agreement import decider_for
        from megatron.dpp.runtime.executor import Executor
        from megatron.dpp.runtime.timer import HostTimer

        pipeline, split = self.pipeline, self.pipeline.schedule.split_backward
        p, v = pipeline.num_ranks, pipeline.num_chunks
        shape = Shape(p, v, len(self.units), tuple(self.sizes), pipeline.longest, self.groups)
        seconds = {
            kind: [
                unit_seconds * _COSTS.of_work(kind, each.tokens, each.squares) / v
                for each in self.units
            ]
            for kind in Kind
        }
        scheduler = pipeline.schedule.lanes(shape)[dist.get_rank()]
        decider = decider_for(scheduler, self.links.channels.receiving, None)
        decider.start(self.links.consumed)
        dist.barrier()
        start = time.perf_counter()
        Executor(
            runner=Runner(seconds, self.sizes, fused=not split), decider=decider,
            links=self.links, recorder=NullRecorder(), timer=HostTimer(), injector=None,
            split_backward=split, iteration=self.iteration, timeout=60.0,
            count_tokens=lambda tensor: tensor.numel() // _HIDDEN, sizes_agree=bool(self.groups),
        ).run()  # fmt: skip
        self.links.consume(self.geometry)
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

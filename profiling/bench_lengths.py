#!/usr/bin/env python3
"""Schedules for microbatches of unlike length, on stages that sleep.

    python profiling/bench_lengths.py --ranks 4,8

Sleeping stages need no cores: real processes, the real executor over the real transport, and
megatron-core's own schedule with ``variable_seq_lengths``. A task sleeps as long as its sequences
of drawn length are to take; messages have the length's shape. The simulator's prediction stands
beside each measurement.

The arms are the static schedule and ours, each as drawn (one sequence per microbatch), in the best
of the named orders, and ``best``: packed or not, in whichever order is simulated to be fastest. The
static schedule sends over our channels, which need no exchange of shapes and are as asynchronous
as those of the simulator; ``static, gloo`` is megatron-core's own exchange.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import harness
import torch
import torch.distributed as dist
from lengths_plans import (
    LENGTHS,
    Microbatches,
    Plans,
    drawn_batches,
    longest_of,
    mean_tokens,
    print_predictions,
)
from sleeping import (
    HIDDEN,
    ListedNaps,
    SleepingChunk,
    SleepingRunner,
    cpu_rank,
    megatron_step,
    open_exchange,
    open_pipeline,
    run_step,
)

from megatron.dpp.errors import exit_with
from megatron.dpp.runtime.static import over_channels
from megatron.dpp.schedule import Geometry, Kind, Scheduler, parse_cap
from megatron.dpp.sim.lengths import LengthCosts

_COSTS = LengthCosts.transformer()
_ARMS = (
    ("static, gloo", "drawn"),
    *(("static", plan) for plan in ("drawn", "ordered", "best")),
    *(("ours", plan) for plan in ("drawn", "ordered", "best")),
)
_FACTS = ("predicted", "overhead", "with overhead", "measured")
"""Seconds of each row: simulated, of each task as the short step tells, simulated with it, real."""
_SHORT = 0.05
"""Share of a task's time in the steps before the timed one: the first warms up, the second tells
the overhead of a task.
"""


class Batch:
    """One iteration's microbatches in an order, and the seconds that each task is to take."""

    def __init__(self, plans: Plans, microbatches: Microbatches, unit: float) -> None:
        lengths = plans.of(microbatches)
        self.sizes, self.longest = [sum(each) for each in lengths], plans.longest
        self.seconds = {kind: [unit * _COSTS.time(kind, n) for n in lengths] for kind in Kind}


class Static:
    """megatron-core's own schedule.

    Args:
        exchange: takes its messages; None for its own exchange over gloo, with shapes ahead.
    """

    def __init__(self, exchange: Any) -> None:
        self._exchange = exchange

    def step(self, args: argparse.Namespace, batch: Batch) -> None:
        """Run one iteration."""
        naps, exchange = ListedNaps(batch.seconds, fused=True), self._exchange
        with over_channels(exchange) if exchange else contextlib.nullcontext():
            megatron_step(
                args.ranks, args.chunks, len(batch.sizes), batch.longest,
                lambda config, chunk: SleepingChunk(config, naps, chunk, batch.sizes),
                variable_seq_lengths=exchange is None, moe_token_dispatcher_type="alltoall",
            )  # fmt: skip

    def close(self) -> None:
        if self._exchange is not None:
            self._exchange.transport.close()


class Ours:
    """The executor over channels whose slots hold the longest microbatch."""

    def __init__(self, links: Any) -> None:
        self._links, self._iteration = links, 0

    def step(self, args: argparse.Namespace, batch: Batch) -> None:
        """Run one iteration."""
        geometry = Geometry(args.ranks, dist.get_rank(), args.chunks, len(batch.sizes))
        cap = parse_cap("auto", geometry).chunks
        run_step(
            self._links, Scheduler(geometry, cap=cap, largest=batch.longest),
            SleepingRunner(ListedNaps(batch.seconds, fused=False), batch.sizes), self._iteration,
            count_tokens=lambda tensors: tensors.numel() // HIDDEN,
        )  # fmt: skip
        self._iteration += 1

    def close(self) -> None:
        self._links.transport.close()


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row per arm: predicted and measured seconds of a step, of each batch."""
    from megatron.core import parallel_state

    v, longest = args.chunks, longest_of(args.lengths)
    batches = drawn_batches(args, longest=longest, costs=_COSTS)
    lengths = [length for batch in batches for length in batch.lengths]
    unit = args.forward_ms * 1e-3 / statistics.fmean(_COSTS.time(Kind.F, [n]) for n in lengths)
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=args.ranks,
        virtual_pipeline_model_parallel_size=v if v > 1 else None,
    )
    schedules = {
        "static, gloo": Static(None),
        "static": Static(open_exchange(args.ranks, longest, args.transport)),
        "ours": Ours(open_pipeline(args.ranks, v, longest, args.transport)),
    }
    rows = [
        {"ranks": args.ranks, "tokens": mean_tokens(batches), "schedule": name, "plan": plan,
         **{fact: [] for fact in _FACTS}, "chosen": []}
        for name, plan in _ARMS
    ]  # fmt: skip
    for plans in batches:
        for row in rows:
            _measure_arm(args, row, plans, schedules[row["schedule"]].step, unit)
    for schedule in schedules.values():
        schedule.close()
    parallel_state.destroy_model_parallel()
    return rows


def _measure_arm(
    args: argparse.Namespace, row: dict[str, Any], plans: Plans, step: Any, unit: float
) -> None:
    """Add one batch to an arm's row; ``unit`` is the seconds of the costs' unit."""
    simulated = row["schedule"].split(",")[0]
    chosen, microbatches = plans.planned(simulated, row["plan"])
    short, rank = Batch(plans, microbatches, unit * _SHORT), unit * args.chunks
    step(args, short)
    idle = _seconds(partial(step, args, short))
    each = plans.overhead(simulated, microbatches, idle / rank / _SHORT) * _SHORT
    batch = Batch(plans, microbatches, unit)
    took = [_seconds(partial(step, args, batch)) for _ in range(args.rounds)]
    row["predicted"].append(rank * plans.seconds(simulated, microbatches))
    row["overhead"].append(rank * each)
    row["with overhead"].append(rank * plans.seconds(simulated, microbatches, each))
    row["measured"].append(statistics.median(took))
    row["chosen"].append(chosen)


def _seconds(step: Callable[[], None]) -> float:
    dist.barrier()
    start = time.perf_counter()
    step()
    (seconds,) = harness.over_ranks(time.perf_counter() - start)
    return seconds


def report(args: argparse.Namespace, rows: Sequence[dict[str, Any]]) -> None:
    """Print the table of all sizes, and what the last arms gain over the static ones."""
    print(
        f"\nsleeping stages, {args.chunks} chunks per rank, lengths {args.lengths}, "
        f"{args.batches} batches, F of the mean sequence {args.forward_ms:g} ms, torch "
        f"{torch.__version__}, {os.cpu_count()} cores\n"
    )
    means = [{**row, **{fact: statistics.fmean(row[fact]) for fact in _FACTS}} for row in rows]
    base = {(row["ranks"], row["plan"]): row for row in means if row["schedule"] == "static"}
    shown = []
    for row in means:
        gains = []
        for plan in ("drawn", "best"):
            gain = [base[row["ranks"], plan][n] / row[n] for n in ("measured", "predicted")]
            gains.append(f"{gain[0]:.2f} ({gain[1]:.2f})")
        guess, took, chosen = row["predicted"], row["measured"], dict.fromkeys(row["chosen"])
        shown.append(
            (row["ranks"], row["schedule"], row["plan"], " / ".join(chosen), f"{guess:.3f}",
             f"{took:.3f}", f"{took / guess:.3f}", f"{1e6 * row['overhead']:.0f}",
             f"{took / row['with overhead']:.3f}", *gains)
        )  # fmt: skip
    harness.print_table(
        "ranks | schedule | plan | chosen | predicted s | measured s | measured / predicted | "
        "overhead of a task, us | measured / predicted with it | "
        "gain over static drawn (predicted) | over static best (predicted)",
        shown,
    )


def run_sizes(args: argparse.Namespace, sizes: Sequence[int]) -> int:
    """Start a pipeline of each size, one after the other, and report all of them."""
    rows: list[dict[str, Any]] = []
    quiet = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    for size in sizes:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "rows.json"
            if harness.start_ranks(size, f"--ranks={size}", f"--json={path}", **quiet):
                return 1
            rows += json.loads(path.read_text(encoding="utf-8"))["rows"]
    report(args, rows)
    harness.write_json(args.json, {"arguments": vars(args), "rows": rows})
    return 0


def parse_arguments() -> tuple[argparse.Namespace, list[int]]:
    """The command line, and the sizes of pipelines; a bad one ends the program with a line."""
    parser = harness.new_parser(
        __doc__,
        ranks=("2", "pipeline ranks, or several sizes like 4,8"),
        predict=(False, "only print the simulated time of each plan, of all lengths"),
        chunks=2,
        microbatches=(0, "of a batch as drawn; 0: 8 per rank"),
        lengths=("sft", f"{', '.join(LENGTHS)}"),
        forward_ms=(8.0, "of a chunk's F of the mean sequence"),
        batches=(2, "batches drawn"),
        rounds=(1, "timed steps of each batch"),
        seed=0,
        transport=("auto", "kind of our channels"),
        json=("", "write the rows there"),
    )
    args = parser.parse_args()
    words = args.ranks.split(",")
    if not all(word.isdecimal() and int(word) >= 2 for word in words):
        parser.error(f"--ranks {args.ranks}: expected 2 or more, or sizes like 4,8")
    sizes = [int(word) for word in words]
    if args.lengths not in LENGTHS:
        parser.error(f"--lengths {args.lengths}: expected one of {', '.join(LENGTHS)}")
    for size in sizes:
        if args.chunks > 1 and args.microbatches % size:
            parser.error(f"--microbatches {args.microbatches}: must be a multiple of {size} ranks")
    for name in ("chunks", "batches", "rounds", "forward_ms"):
        if getattr(args, name) <= 0:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)}: must be above 0")
    args.ranks = sizes[0]
    return args, sizes


def main() -> int:
    args, sizes = parse_arguments()
    if args.predict:
        print_predictions(args, sizes)
        return 0
    if "RANK" not in os.environ:
        return run_sizes(args, sizes)
    with cpu_rank():
        rows = measure(args)
        if dist.get_rank() == 0:
            harness.write_json(args.json, {"rows": rows})
    return 0


if __name__ == "__main__":
    exit_with(main)

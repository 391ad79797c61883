#!/usr/bin/env python3
"""Compare pipeline schedules on stages that sleep, side by side in one run.

    python profiling/bench_schedule.py --ranks 4 --microbatches 8 --schedules static2,split2
    python profiling/bench_schedule.py --ranks 4 --inject transient:2x:20% --microbatches 16

Stages sleep instead of computing (sleeping.py), so that two cores can stand for eight ranks;
bench_plugin.py measures real models on GPUs. Printed per schedule: the median time of a step
(slowest rank), its ratio to the busiest rank's own work, how much slower the static schedule of as
many chunks is, and what comes from what.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import arms
import harness
import torch.distributed as dist
from sleeping import (
    DynamicPipeline,
    Naps,
    SleepingChunk,
    cpu_rank,
    injector_of,
    megatron_step,
    open_exchange,
)

from megatron.dpp.command_line import renamed
from megatron.dpp.errors import ConfigError, exit_with, require, said
from megatron.dpp.inject import Injector
from megatron.dpp.schedule import Geometry, parse_cap
from megatron.dpp.schedule.reference import padded_microbatches

_SCHEDULES = (
    "static, megatron (its order, split backward), fused or split, and the number of chunks per "
    "rank; with a prefix, linksstatic2 uses our links, capsplit2 has the cap static, and "
    "tracedsplit2 writes a trace"
)


@dataclass(frozen=True)
class Name:
    """A schedule's name on the command line, taken apart."""

    text: str
    kind: str
    num_chunks: int
    traced: bool = False
    links: bool = False
    capped: bool = False

    @classmethod
    def parse(cls, text: str) -> Name:
        match = re.fullmatch(
            r"(links)?(static)(\d+)|(traced)?(cap)?(megatron|fused|split)(\d+)", text
        )
        if match is None:
            raise ConfigError(
                f"--schedules {text}: expected static, megatron, fused or split and the number of "
                "chunks, as in static2,split2 (prefixes: --help)"
            )
        links, static, chunks, traced, cap, kind, ours = match.groups()
        return cls(text, static or kind, int(chunks or ours), bool(traced), bool(links), bool(cap))

    @property
    def arm(self) -> str:
        """The name in :data:`arms.ARMS`."""
        if self.kind == "static":
            return arms.LINKS if self.links else arms.STATIC
        name = {"split": "dynamic"}.get(self.kind, self.kind)
        return f"{name}, cap static" if self.capped else name


def parse_arguments() -> argparse.Namespace:
    parser = harness.new_parser(
        __doc__,
        ranks=(4, "pipeline size"),
        schedules=("static1,static2,static4,fused2,split1,split2,split4", _SCHEDULES),
        inject=("", "variability, as --dpp-inject; none if empty"),
        cap=("auto", "as --dpp-activation-cap"),
        transport=("auto", "as --dpp-transport"),
        rounds=(4, "timed steps"),
        sleep_ms=(20.0, "a chunk's F"),
    )
    add = parser.add_argument
    add("--microbatches", type=int, nargs="+", default=[8], metavar="N", help="one run of each")
    add("--trace-dir", type=Path, default=Path("benchmark"), metavar="DIR", help="of traced ones")
    add("--json", type=Path, metavar="FILE", help="also write the results here")
    args = parser.parse_args()
    args.names = [Name.parse(text) for text in args.schedules.split(",")]
    try:
        _check(args)
    except ConfigError as error:
        naming = renamed({"activation_cap": "--cap", "inject": "--inject"})
        raise ConfigError(said(error, naming)) from None
    return args


def _check(args: argparse.Namespace) -> None:
    """Refuse a parsed command line that cannot run: a ConfigError names flag, value and rule."""
    _at_least_one("--ranks", args.ranks)
    _at_least_one("--rounds", args.rounds)
    require(args.sleep_ms > 0, f"--sleep-ms {args.sleep_ms:g}: must be above 0")
    for num in args.microbatches:
        _at_least_one("--microbatches", num)
        for name in args.names:
            _check_schedule(args, name, num)


def _at_least_one(flag: str, value: int) -> None:
    require(value >= 1, f"{flag} {value}: must be at least 1")


def _check_schedule(args: argparse.Namespace, name: Name, num: int) -> None:
    _at_least_one(f"--schedules {name.text}: chunks", name.num_chunks)
    geometry = Geometry(args.ranks, 0, name.num_chunks, num)
    if name.kind == "static":
        least = padded_microbatches(geometry)
        require(
            least == num,
            f"--schedules {name.text} with --microbatches {num}: megatron-core's interleaved "
            f"schedule wants a multiple of the ranks, {args.ranks}; {least} would do",
        )
    else:
        parse_cap(args.cap, geometry)
    if args.inject:
        Injector(args.inject, 0, args.ranks, num_chunks=name.num_chunks)


def run_static(args: argparse.Namespace, v: int, m: int, iteration: int) -> float:
    """One step of megatron-core's own schedule; seconds this rank's tasks slept."""
    naps = Naps(args, v, iteration, fused=True)
    megatron_step(args.ranks, v, m, lambda config, c: SleepingChunk(config, naps, c))
    return naps.total


def open_static(args: argparse.Namespace, v: int, *, links: bool) -> Any:
    """Our channels under a static schedule that asks for them, or where links are to be slow; None
    keeps gloo.
    """
    injector = injector_of(args, v)
    if not links and (injector is None or not injector.delays_messages):
        return None
    return open_exchange(args.ranks, args.transport, injector)


def measure(args: argparse.Namespace, name: Any, m: int) -> dict[str, Any]:
    """Median seconds of a schedule's step, and its ratio to the busiest rank's own work."""
    from megatron.core import parallel_state

    from megatron.dpp.runtime.static import over_channels

    static, v = name.kind == "static", name.num_chunks
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=args.ranks,
        virtual_pipeline_model_parallel_size=v if v > 1 else None,
    )
    exchange, pipeline = (open_static(args, v, links=name.links) if static else None), None
    if not static:
        arm = arms.ARMS[name.arm]
        pipeline = DynamicPipeline(
            args, v, split=arm.split, policy=arm.policy or "dynamic",
            cap="" if arm.cap == "auto" else arm.cap, traced=name.traced,
        )  # fmt: skip
    took, ratios = [], []
    for iteration in range(args.rounds + 1):
        dist.barrier()
        start = time.perf_counter()
        if pipeline is None:
            with over_channels(exchange) if exchange else contextlib.nullcontext():
                own = run_static(args, v, m, iteration)
        else:
            own = pipeline.step(args, m, iteration)
        seconds, work = harness.over_ranks(time.perf_counter() - start, own)
        if iteration:  # the first one warms up
            took.append(seconds)
            ratios.append(seconds / work)
    if pipeline is not None:
        pipeline.close()
    if exchange is not None:
        exchange.transport.close()
    parallel_state.destroy_model_parallel()
    return {
        "schedule": name.text,
        "microbatches": m,
        "ms": statistics.median(took) * 1e3,
        "all_ms": [seconds * 1e3 for seconds in took],
        "ratio": statistics.median(ratios),
    }


def report(args: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """Print the tables, and write JSON when asked to."""
    print(f"\nsleeping stages, PP={args.ranks}, F = {args.sleep_ms} ms, {args.inject or 'quiet'}\n")
    static = {(r["schedule"], r["microbatches"]): r["ms"] for r in rows}
    shown = []
    for row in rows:
        name, m = row["schedule"], row["microbatches"]
        same = static.get((f"static{name.lstrip('abcdefghijklmnopqrstuvwxyz')}", m))
        factor = f"{same / row['ms']:.3f}" if same else "-"
        shown.append((m, name, f"{row['ms'] / 1e3:.3f}", f"{row['ratio']:.3f}", factor))
    harness.print_table(
        "m | schedule | seconds | / busiest rank's own work | static of this v is slower by", shown
    )
    arms.print_gains(measured(args.names, rows))
    settings = {name: str(value) for name, value in vars(args).items()}
    harness.write_json(args.json, {"arguments": settings, "rows": rows})


def measured(names: list[Name], rows: list[dict[str, Any]]) -> list[arms.Measured]:
    """The rows as arms; schedules of as many chunks and microbatches are compared."""
    arm_of = {name.text: name for name in names}
    return [
        arms.Measured(
            arm_of[row["schedule"]].arm,
            f"v={arm_of[row['schedule']].num_chunks}, m={row['microbatches']}",
            "",
            row["all_ms"],
        )
        for row in rows
    ]


def main() -> int:
    args = parse_arguments()
    if "RANK" not in os.environ:
        return harness.start_ranks(args.ranks, OMP_NUM_THREADS="1", PYTHONWARNINGS="ignore")
    with cpu_rank():
        rows = [measure(args, name, m) for m in args.microbatches for name in args.names]
        if dist.get_rank() == 0:
            report(args, rows)
    return 0


if __name__ == "__main__":
    exit_with(main)

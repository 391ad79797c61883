#!/usr/bin/env python
"""Compare predicted with measured gains of removing a cause of lost time.

    python profiling/bench_whatif.py --inject slow-link:1-2:40ms

Real processes and executor over the real transport, as in sleeping.py. Iterations with and
without the trouble take turns in one run, so both meet the same machine. From those with it the
report's own search names the cause and predicts the gain of its removal; those without give the
measured gain. Standard errors are over pairs of neighbours: a busy machine widens them without a
fault of the prediction.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

import harness

from megatron.dpp.errors import exit_with

_UNDISTURBED = 1.01
"""The busiest rank's tasks took at most this times what they take on a quiet machine."""


class EverySecond:
    """An injector's slow links in every second iteration only."""

    def __init__(self, injector: Any, num_microbatches: int) -> None:
        self._injector, self._num_microbatches = injector, num_microbatches
        self.delays_messages = injector.delays_messages

    def message_seconds(self, source: int, destination: int, number: int) -> float:
        """``number`` counts the messages of a channel, each iteration as many as microbatches."""
        if number // self._num_microbatches % 2 == 0:
            return 0.0
        return float(self._injector.message_seconds(source, destination, number))


def main() -> int:
    args = _parse()
    if "RANK" in os.environ:
        _rank(args)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        args.trace_dir = args.trace_dir or folder
        flags = ("--trace-dir", str(args.trace_dir))
        if status := harness.start_ranks(
            args.ranks, *flags, OMP_NUM_THREADS="1", PYTHONWARNINGS="ignore"
        ):
            return status
        print(_compare(args, Path(args.trace_dir)))
    return 0


def _parse() -> argparse.Namespace:
    parser = harness.new_parser(
        __doc__,
        inject=("slow-link:1-2:40ms", "as --dpp-inject"),
        ranks=4,
        chunks=2,
        microbatches=8,
        sleep_ms=(25.0, "a chunk's F, B and W each"),
        pairs=(10, "iterations with, and without"),
    )
    parser.add_argument("--trace-dir", metavar="DIR", help="keep the trace there")
    for name in ("cap", "transport"):
        parser.add_argument(f"--{name}", default="auto", help=argparse.SUPPRESS)
    return parser.parse_args()


def _rank(args: argparse.Namespace) -> None:
    """Iteration 0 warms up; odd ones have the trouble."""
    import sleeping
    import torch.distributed as dist

    from megatron.dpp.inject import Injector

    with sleeping.cpu_rank():
        plain = Injector(args.inject, dist.get_rank(), args.ranks, num_chunks=args.chunks)
        delays = EverySecond(plain, args.microbatches)
        pipeline = sleeping.DynamicPipeline(args, args.chunks, delays, traced=True)
        quiet = argparse.Namespace(**{**vars(args), "inject": ""})
        for iteration in range(2 * args.pairs + 1):
            dist.barrier()
            pipeline.step(args if iteration % 2 else quiet, args.microbatches, iteration)
        pipeline.close()


def _compare(args: argparse.Namespace, run: Path) -> str:
    """The measured gain beside the predicted one, as lines of text."""
    from megatron.dpp.report.align import align
    from megatron.dpp.report.analysis.model import JobShape, read_iterations
    from megatron.dpp.report.analysis.summary import Analysis
    from megatron.dpp.report.reader import open_run

    files = open_run(run)
    alignment = align(files)
    quiet, troubled = (Analysis(files, JobShape.of(files), alignment) for _ in range(2))
    for iteration in read_iterations(files, alignment):
        if iteration.number:
            (troubled if iteration.number % 2 else quiet).add(iteration)
    troubled.find_culprits()
    cause, runs = _removed(troubled)
    lines = [f"{args.inject}, {args.pairs} pairs, removed: {cause}"]
    lines.append(row("all iterations", runs, [1e-3 * times.total_ms for times in quiet.times]))
    if _only_links(args):  # tasks take what they sleep: more comes from the machine
        most = _UNDISTURBED * min(times.ideal_ms for times in [*quiet.times, *troubled.times])
        alike = [1e-3 * times.total_ms for times in quiet.times if times.ideal_ms <= most]
        kept = zip(runs, troubled.times, strict=True)
        undisturbed = [run for run, times in kept if times.ideal_ms <= most]
        lines.append(row("undisturbed ones", undisturbed, alike))
    return "\n".join(lines)


def row(name: str, runs: list[tuple[float, float]], quiet: list[float]) -> str:
    """``runs``: seconds of an iteration with the trouble, and its predicted time without."""
    if not runs or not quiet:
        return f"{name}: none"
    now, then, real = map(statistics.fmean, (*zip(*runs, strict=True), quiet))
    off = [harness.standard_error(times) for times in (quiet, [then for _, then in runs])]
    return (
        f"{name}: with {1e3 * now:.1f} ms ({len(runs)}), without {1e3 * real:.1f} +- "
        f"{1e3 * off[0]:.1f} ({len(quiet)}), predicted without {1e3 * then:.1f} +- "
        f"{1e3 * off[1]:.1f}; gain measured {1 - real / now:.1%}, predicted {1 - then / now:.1%}"
    )


def _removed(troubled: Any) -> tuple[str, list[tuple[float, float]]]:
    """The cause that gains most, and each iteration's time now and predicted without it."""
    from megatron.dpp.report.whatif import WhatIf, recorded_runs, removal

    ranks, runs = troubled.shape.pipelines()[0], recorded_runs(troubled)
    found = [("nobody", [(run.window, run.window) for run in runs])]
    for culprit in troubled.culprits:
        change = removal(culprit, runs, ranks)
        if change is None:
            continue
        one = [WhatIf([run]).predict("", change) for run in runs]
        found.append(
            (
                f"{culprit.kind} {culprit.where(troubled.shape)}",
                [(p.now_ms / 1e3, p.then_ms / 1e3) for p in one],
            )
        )
    return min(found, key=lambda each: sum(then for _, then in each[1]))


def _only_links(args: argparse.Namespace) -> bool:
    return all(word.startswith(("slow-link", "message-delay")) for word in args.inject.split(","))


if __name__ == "__main__":
    exit_with(main)

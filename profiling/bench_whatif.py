#!/usr/bin/env python
"""Does what-if foretell what removing a cause gains? Sleeping ranks, trouble in every second step.

    python profiling/bench_whatif.py --inject slow-link:1-2:40ms

Real processes and executor over the real transport, as in bench_sleeping.py. Iterations with and
without the trouble take turns in one run, so both meet the same machine. From those with it the
report's own search names the cause and predicts the gain of its removal; those without say what
the gain is. Standard errors are over pairs of neighbours: a busy machine widens them, which is not
the prediction's doing.
"""

from __future__ import annotations

import argparse
import math
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(_ROOT))

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
        if status := _launch(args):
            return status
        run = next(path for path in Path(args.trace_dir).iterdir() if path.is_dir())
        print(_compare(args, run))
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n", 1)[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--inject", default="slow-link:1-2:40ms", help="as --dpp-inject")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--chunks", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--sleep-ms", type=float, default=25.0, help="a chunk's F, B and W each")
    parser.add_argument("--pairs", type=int, default=10, help="iterations with, and without")
    parser.add_argument("--trace-dir", help="keep the trace there")
    parser.add_argument("--cap", default="auto", help=argparse.SUPPRESS)
    parser.add_argument("--transport", default="auto", help=argparse.SUPPRESS)
    parser.add_argument("--slots", type=int, default=2, help=argparse.SUPPRESS)
    return parser.parse_args()


def _launch(args: argparse.Namespace) -> int:
    """Start one process per rank; the first failure's status."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {
        **os.environ, "WORLD_SIZE": str(args.ranks), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore",
    }  # fmt: skip
    command = [sys.executable, *sys.argv, "--trace-dir", str(args.trace_dir)]
    processes = [
        subprocess.Popen(command, env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(args.ranks)
    ]
    try:
        return max(process.wait() for process in processes)
    finally:
        for process in processes:
            process.kill()


def _rank(args: argparse.Namespace) -> None:
    """Iteration 0 warms up; odd ones have the trouble."""
    import bench_sleeping
    import torch.distributed as dist

    from megatron.dpp.inject import Injector
    from megatron.dpp.mcore import cpu

    support = cpu.install()
    dist.init_process_group("gloo")
    injector = EverySecond(
        Injector(args.inject, dist.get_rank(), args.ranks, num_chunks=args.chunks),
        args.microbatches,
    )
    links = bench_sleeping.open_links(args, args.chunks, injector)
    recorder = bench_sleeping.open_recorder(args, args.chunks, traced=True)
    quiet = argparse.Namespace(**{**vars(args), "inject": ""})
    for iteration in range(2 * args.pairs + 1):
        dist.barrier()
        troubled = args if iteration % 2 else quiet
        bench_sleeping.run_dynamic(
            troubled, args.chunks, args.microbatches, iteration, links, True, recorder
        )
    recorder.close()
    links.transport.close()
    dist.destroy_process_group()
    support.close()


def _compare(args: argparse.Namespace, run: Path) -> str:
    """The measured gain beside the predicted one, as lines of text."""
    from megatron.dpp.trace.align import align
    from megatron.dpp.trace.analysis.model import read_iterations
    from megatron.dpp.trace.analysis.summary import Analysis
    from megatron.dpp.trace.analysis.work import Shape
    from megatron.dpp.trace.reader import open_run

    files = open_run(run)
    alignment = align(files, lambda file: None)
    quiet, troubled = (Analysis(files, Shape.of(files), alignment) for _ in range(2))
    for iteration in read_iterations(files, alignment):
        if iteration.number:
            (troubled if iteration.number % 2 else quiet).add(iteration)
    troubled.find_culprits(1.15)
    cause, runs = _removed(troubled)
    lines = [f"{args.inject}, {args.pairs} pairs, removed: {cause}"]
    lines.append(_row("all iterations", runs, [_seconds(times) for times in quiet.times]))
    if _only_links(args):  # tasks are to take what they sleep: more is the machine's doing
        least = min(_busiest(times) for times in [*quiet.times, *troubled.times])
        alike = [t for t in quiet.times if _busiest(t) <= _UNDISTURBED * least]
        kept = zip(runs, troubled.times, strict=True)
        undisturbed = [run for run, t in kept if _busiest(t) <= _UNDISTURBED * least]
        lines.append(_row("undisturbed ones", undisturbed, [_seconds(times) for times in alike]))
    return "\n".join(lines)


def _row(name: str, runs: list[tuple[float, float]], quiet: list[float]) -> str:
    """``runs``: seconds of an iteration with the trouble, and its predicted time without."""
    if not runs or not quiet:
        return f"{name}: none"
    now, then, real = (
        statistics.fmean(times)
        for times in ([now for now, _ in runs], [then for _, then in runs], quiet)
    )
    return (
        f"{name}: with {1e3 * now:.1f} ms ({len(runs)}), without {1e3 * real:.1f} +- "
        f"{1e3 * _error(quiet):.1f} ({len(quiet)}), predicted without {1e3 * then:.1f} +- "
        f"{1e3 * _error([then for _, then in runs]):.1f}; gain measured {1 - real / now:.1%}, "
        f"predicted {1 - then / now:.1%}"
    )


def _removed(troubled: Any) -> tuple[str, list[tuple[float, float]]]:
    """The cause that gains most, and each iteration's time now and predicted without it."""
    from megatron.dpp.plan.whatif import WhatIf, recorded, removal, schedule_of

    ranks = troubled.shape.pipelines()[0]
    parts = zip(troubled.works, troubled.links, troubled.times, strict=True)
    runs = [recorded(troubled.shape, ranks, *part) for part in parts]
    split, pieces = runs[0].split, runs[0].num_pieces
    config = schedule_of(troubled.shape.schedule, split=split, w_pieces=pieces)
    found = [("nobody", [(run.window, run.window) for run in runs])]
    for culprit in troubled.culprits:
        change = removal(culprit, runs, ranks)
        one = [WhatIf([run], config).predict("", change) for run in runs]
        found.append((f"{culprit.kind} {culprit.name}", [(p.now, p.then) for p in one]))
    return min(found, key=lambda each: sum(then for _, then in each[1]))


def _only_links(args: argparse.Namespace) -> bool:
    return all(word.startswith(("slow-link", "message-delay")) for word in args.inject.split(","))


def _seconds(times: Any) -> float:
    return 1e-9 * float(times.total)


def _busiest(times: Any) -> int:
    return int(times.ideal)


def _error(values: list[float]) -> float:
    """Standard error of the mean."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


if __name__ == "__main__":
    sys.exit(main())

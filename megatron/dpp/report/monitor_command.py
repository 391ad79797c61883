"""``megatron-dpp monitor``: a live view of a traced run.

    megatron-dpp monitor --benchmark_dir runs/latest [--once | --web]

Shows iteration, loss and tokens/s, and per rank its state, its work and its idle time; with --web
the report as a page. Reads only files: it may start and stop at any time, run on another machine,
and outlive ranks.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.dpp.command_line import ROOT, guarded, new_parser
from megatron.dpp.errors import require
from megatron.dpp.report.analysis.formats import duration, percent
from megatron.dpp.report.analysis.model import Iteration
from megatron.dpp.report.analysis.sentences import straggler_text
from megatron.dpp.report.analysis.stragglers import StragglerSearch
from megatron.dpp.report.analysis.times import IterationTimes, iteration_times
from megatron.dpp.report.analysis.work import JobShape, work_of
from megatron.dpp.report.follow import FollowedFile, FollowedRun, alive
from megatron.dpp.report.reader import find_directory
from megatron.dpp.report.run_files import METRICS, home_of, read_metrics
from megatron.dpp.report.web import serve

_BAR = 20


def _parser(prog: str) -> argparse.ArgumentParser:
    text = "Show a traced run live: iteration, loss, tokens/s, and what every rank does."
    parser = new_parser(prog, text)
    add = parser.add_argument
    add("--benchmark_dir", "--benchmark-dir", default="runs/latest", metavar="DIR",
        help="home or traces of a run (default: runs/latest)")  # fmt: skip
    add("--metrics-file", metavar="FILE", help="loss and tokens/s (default: of the run's home)")
    add("--once", action="store_true", help="print once and end; exit status 3 when a rank is dead")
    add("--interval", type=float, default=2.0, metavar="S", help="seconds between updates (2)")
    add("--iterations", type=int, default=10, metavar="N", help="average over N iterations (10)")
    add = parser.add_argument_group("live page").add_argument
    add("--web", action="store_true", help="serve the report as a page, until Ctrl-C")
    add("--port", type=int, default=8765, metavar="N", help="of the page (8765); 0: any free one")
    add("--host", default="127.0.0.1", metavar="ADDRESS",
        help="of the page (127.0.0.1: this machine alone; 0.0.0.0: everybody)")  # fmt: skip
    add("--baseline", metavar="DIR", help="another run beside it on the page")
    parser.set_defaults(skip=None, iteration=None, threshold=1.15)
    return parser


def main(argv: Sequence[str] | None = None, *, prog: str = "megatron-dpp monitor") -> int:
    """Exit status, with ``--once`` or when all ranks have ended: 0, or 3 when a rank of this host
    died without ending its trace."""
    options = _parser(prog).parse_args(argv)
    try:
        return guarded(prog, lambda: _run(options))
    except KeyboardInterrupt:
        return 0


def _headline(metrics: dict[str, Any], times: list[IterationTimes]) -> str:
    parts = [f"iteration {metrics.get('iteration', times[-1].number if times else '-')}"]
    for name, form in (("lm loss", "{:.4f}"), ("tokens/s", "{:.0f} tokens/s")):
        value = metrics.get(name)
        if isinstance(value, (int, float)):
            parts.append(("loss " if "loss" in name else "") + form.format(value))
    if times:
        parts.append(f"{duration(statistics.median(t.total for t in times) / 1e6)} per iteration")
        parts.append(f"{percent(statistics.fmean(t.bubble for t in times))} idle")
    return "  ".join(parts)


def _state(file: FollowedFile) -> str:
    if file.ended:
        return "ended"
    return {True: "runs", False: "DEAD", None: "remote"}[alive(file.header)]


def _rank_line(file: FollowedFile, times: list[IterationTimes]) -> str:
    rank = file.header.rank
    own = [t.ranks[rank] for t in times]
    if not own:
        done = len(file.iterations)
        return f"{rank:>5}  {_state(file):<7} no iteration in common yet ({done} of its own)"
    busy = statistics.fmean(t.busy / t.window if t.window else 0.0 for t in own)
    causes: dict[str, int] = {}
    for one in own:
        for cause, length in one.idle.items():
            causes[cause] = causes.get(cause, 0) + length
    worst = max(causes, key=lambda cause: causes[cause], default="")
    bar = ("#" * round(busy * _BAR)).ljust(_BAR, ".")
    idle = statistics.fmean(t.bubble for t in own)
    memory = max((t.peaks.get("memory", 0.0) for t in own), default=0.0) / 2**20
    held = max((t.peaks.get("held", 0.0) for t in own), default=0.0)
    return (
        f"{rank:>5}  {_state(file):<7} [{bar}] {busy:>6.1%}  {idle:>6.1%}  "
        f"{worst:<12} {memory:>9.0f}  {held:>5.3g}"
    )


def _stragglers(files: list[FollowedFile], iterations: list[Iteration]) -> list[str]:
    if len(iterations) < 2:
        return []
    shape = JobShape.of([file.header for file in files])
    works = [work_of(iteration) for iteration in iterations]
    waits = dict.fromkeys(shape.pipeline, 0)
    found = StragglerSearch(shape, works, [{} for _ in works], waits).find()
    return [straggler_text(dataclasses.replace(culprit, victims=())) for culprit in found]


def view(run: FollowedRun, metrics: dict[str, Any]) -> str:
    """The whole text of one look."""
    files = sorted(run.files.values(), key=lambda file: file.header.rank)
    iterations = run.iterations()
    times = [iteration_times(iteration) for iteration in iterations]
    lines = [str(run.directory), _headline(metrics, times), ""]
    lines.append(
        f"{'rank':>5}  {'state':<7} {'at work':<{_BAR + 2}} {'':>6}  {'idle':>6}  "
        f"{'mostly':<12} {'memory MiB':>9}  {'held':>4}"
    )
    lines += [_rank_line(file, times) for file in files]
    lines += ["", *(_stragglers(files, iterations) or ["no straggler"])]
    return "\n".join(lines)


def _run(options: argparse.Namespace) -> int:
    require(options.interval > 0, f"--interval {options.interval:g}: must be above 0")
    return serve(options) if options.web else _watch(options)


def _watch(options: argparse.Namespace) -> int:
    run = FollowedRun(find_directory(options.benchmark_dir, ROOT), options.iterations)
    metrics_file = Path(options.metrics_file or home_of(run.directory) / METRICS)
    while True:
        run.poll()
        metrics = read_metrics(metrics_file, last_only=True)[-1:]
        text = view(run, metrics[0] if metrics else {})
        states = {_state(file) for file in run.files.values()}
        erase = "\x1b[H\x1b[2J" if sys.stdout.isatty() and not options.once else ""
        print(erase + text, flush=True)
        if options.once or states <= {"ended", "DEAD"}:
            return 3 if "DEAD" in states else 0
        time.sleep(options.interval)

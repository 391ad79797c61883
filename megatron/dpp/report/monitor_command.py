"""``megatron-dpp monitor``: a live view of a run.

    megatron-dpp monitor runs/latest [--once | --web]

Shows state, iteration, loss, tokens/s and the time left; of a traced run also each rank's work and
idle time; with --web the report as a page. A link such as ``runs/latest`` is followed to the run
that it means. Reads only files: it may start and stop at any time, run on another machine, and
outlive ranks.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from megatron.dpp.command_line import guarded, new_parser
from megatron.dpp.errors import require
from megatron.dpp.report.analysis.formats import duration, number, percent, time_left
from megatron.dpp.report.analysis.report_data import Training
from megatron.dpp.report.analysis.sentences import HOW_TO_TRACE
from megatron.dpp.report.analysis.times import IterationTimes, iteration_times
from megatron.dpp.report.building import names_of
from megatron.dpp.report.follow import FollowedFile, FollowedRun, alive
from megatron.dpp.report.run_files import RunPlace, find_run, read_state, read_training
from megatron.dpp.report.web import serve

_BAR, _CURVE = 20, 60
_HEIGHTS = "▁▂▃▄▅▆▇█"


def build_parser(prog: str) -> argparse.ArgumentParser:
    """The parser of the command."""
    text = "Show a run live: loss, tokens/s, time left, and of a traced run what every rank does."
    parser = new_parser(prog, text, "[RUN] [options]")
    add = parser.add_argument
    add("runs", nargs="*", metavar="RUN", help="home or traces of a run (default: runs/latest)")
    add("--benchmark_dir", "--benchmark-dir", metavar="DIR", help="the same")
    add("--metrics-file", metavar="FILE", help="losses (default: metrics.jsonl in the run's home)")
    add("--once", action="store_true", help="print once and end; exit status 3 for a failed run")
    add("--interval", type=float, default=2.0, metavar="S", help="seconds between updates (2)")
    add = parser.add_argument_group("live page").add_argument
    add("--web", action="store_true", help="serve the report as a page, until Ctrl-C")
    add("--port", type=int, default=8765, metavar="N", help="of the page (8765); 0: any free one")
    add("--host", default="127.0.0.1", metavar="ADDRESS",
        help="of the page (127.0.0.1: this machine alone; 0.0.0.0: everybody)")  # fmt: skip
    add("--baseline", metavar="RUN", help="another run beside it on the page")
    parser.set_defaults(skip=None, iteration=None, threshold=1.15)
    return parser


def main(argv: Sequence[str] | None = None, *, prog: str = "megatron-dpp monitor") -> int:
    """Exit status, with ``--once`` or when the run has ended: 0, or 3 when it failed or a rank of
    this host died without ending its trace.
    """
    options = build_parser(prog).parse_args(argv)
    try:
        return guarded(prog, lambda: _run(options))
    except KeyboardInterrupt:
        return 0


def _run(options: argparse.Namespace) -> int:
    require(options.interval > 0, f"--interval {options.interval:g}: must be above 0")
    return serve(options) if options.web else _watch(options)


def _watch(options: argparse.Namespace) -> int:
    name = names_of(options)[0]
    run: FollowedRun | None = None
    while True:
        place = find_run(name)
        folder = place.traces()
        if folder is None or run is None or run.directory != folder:
            run = None if folder is None else FollowedRun(folder)
        if run is not None:
            run.poll()
        training = read_training(place.home, options.metrics_file, last_only=True)
        state, dead = _state(place.home, run, training)
        if run is None and not training.metrics and state == "ended":
            place.need_traces()
        erase = "\x1b[H\x1b[2J" if sys.stdout.isatty() and not options.once else ""
        print(erase + view(place, run, training, state), flush=True)
        if options.once or state.partition(" ")[0].strip(":") not in ("starting", "running"):
            return 3 if dead or state.startswith("failed") else 0
        time.sleep(options.interval)


def _state(home: Path, run: FollowedRun | None, training: Training) -> tuple[str, bool]:
    """The state of the run, and True if a rank died; where no state was written, by its ranks."""
    ranks = {_rank_state(file) for file in run.files.values()} if run else set()
    if run and ranks and read_state(home) is None:
        return ("ended" if ranks <= {"ended", "DEAD"} else "running"), "DEAD" in ranks
    return training.state, "DEAD" in ranks


def view(place: RunPlace, run: FollowedRun | None, training: Training, state: str) -> str:
    """The whole text of one look."""
    times = [iteration_times(iteration) for iteration in run.iterations()] if run else []
    lines = [f"{run.directory if run else place.home}: {state}", _headline(training, times)]
    x, y = training.series("loss")
    if len(y) > 1:
        lines.append(f"loss  {y[0]:.4g} {_blocks(y)} {y[-1]:.4g}  (iterations {x[0]} to {x[-1]})")
    return "\n".join([*lines, "", *(_ranks(run, times) if run else [HOW_TO_TRACE])])


def _headline(training: Training, times: list[IterationTimes]) -> str:
    loss, speed, left = training.last("loss"), training.last("tokens/s"), training.seconds_left
    parts = [training.progress] if training.metrics or not times else []
    parts += [f"iteration {times[-1].number}"] if times and not training.metrics else []
    parts += [f"loss {loss:.4f}"] if loss is not None else []
    parts += [f"{number(speed)} tokens/s"] if speed else []
    parts += [f"{time_left(left)} left"] if left else []
    if times:
        parts.append(f"{duration(statistics.median(t.total for t in times) / 1e6)} per iteration")
        parts.append(f"{percent(statistics.fmean(t.bubble for t in times))} idle")
    parts += [f"checkpoint {training.checkpoint}"] if training.checkpoint is not None else []
    return "  ".join(parts)


def _blocks(values: Sequence[float]) -> str:
    """At most ``_CURVE`` characters whose heights are the means of neighbours."""
    size = -(-len(values) // _CURVE)
    means = [statistics.fmean(values[i : i + size]) for i in range(0, len(values), size)]
    low, span = min(means), max(means) - min(means)
    top = len(_HEIGHTS) - 1
    return "".join(_HEIGHTS[round((v - low) / span * top) if span else 0] for v in means)


def _rank_state(file: FollowedFile) -> str:
    if file.ended:
        return "ended"
    return {True: "runs", False: "DEAD", None: "remote"}[alive(file.header)]


def _ranks(run: FollowedRun, times: list[IterationTimes]) -> list[str]:
    """A line per rank, in the order of stages."""
    lines = [
        f" rank  stage  {'state':<7} {'at work':<{_BAR + 2}}{'':>7}  {'idle':>6}  {'mostly':<12}"
        f"{'memory MiB':>11}{'held':>6}"
    ]
    layouts = {file: (file.header.layout.pipeline, file.header.rank) for file in run.files.values()}
    for file in sorted(layouts, key=lambda file: layouts[file]):
        stage, rank = layouts[file]
        place = f"{rank:>5}  {stage:>5}  {_rank_state(file):<7}"
        own = [t.ranks[rank] for t in times]
        if not own:
            done = len(file.iterations)
            lines.append(f"{place} no iteration in common yet ({done} of its own)")
            continue
        busy = statistics.fmean(t.busy / t.window if t.window else 0.0 for t in own)
        causes = {cause for t in own for cause in t.idle}
        worst = max(causes, key=lambda c: sum(t.idle.get(c, 0) for t in own), default="")
        peaks = {name: max(t.peaks.get(name, 0.0) for t in own) for name in ("memory", "held")}
        lines.append(
            f"{place} [{('#' * round(busy * _BAR)).ljust(_BAR, '.')}]{busy:>7.1%}  "
            f"{statistics.fmean(t.bubble for t in own):>6.1%}  {worst:<12}"
            f"{peaks['memory'] / 2**20:>11,.0f}{peaks['held']:>6.3g}"
        )
    return lines

"""``megatron-dpp monitor``: a live view of a run.

    megatron-dpp monitor runs/latest [--once | --web]

Shows iteration, loss, tokens/s and the time left; of a traced run also each rank's state, work and
idle time; with --web the report as a page. Reads only files: it may start and stop at any time, run
on another machine, and outlive ranks.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Sequence

from megatron.dpp.command_line import guarded, new_parser
from megatron.dpp.errors import require
from megatron.dpp.report.analysis.formats import duration, mebibytes, number, percent, time_left
from megatron.dpp.report.analysis.model import Iteration
from megatron.dpp.report.analysis.report_data import Training
from megatron.dpp.report.analysis.sentences import HOW_TO_TRACE, straggler_text
from megatron.dpp.report.analysis.stragglers import StragglerSearch
from megatron.dpp.report.analysis.times import IterationTimes, iteration_times
from megatron.dpp.report.analysis.work import JobShape, work_of
from megatron.dpp.report.building import names_of
from megatron.dpp.report.follow import FollowedFile, FollowedRun, alive
from megatron.dpp.report.run_files import RunPlace, find_run, read_training
from megatron.dpp.report.web import serve

_BAR, _CURVE = 20, 60
_HEIGHTS = "▁▂▃▄▅▆▇█"


def build_parser(prog: str) -> argparse.ArgumentParser:
    text = "Show a run live: loss, tokens/s, time left, and of a traced run what every rank does."
    parser = new_parser(prog, text, "[RUN] [options]")
    add = parser.add_argument
    add("runs", nargs="*", metavar="RUN",
        help="home or traces of a run (default: runs/latest); with --web of several")  # fmt: skip
    add("--benchmark_dir", "--benchmark-dir", metavar="DIR", help="the same")
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
    options = build_parser(prog).parse_args(argv)
    try:
        return guarded(prog, lambda: _run(options))
    except KeyboardInterrupt:
        return 0


def _headline(training: Training, times: list[IterationTimes]) -> str:
    metrics = training.metrics[-1] if training.metrics else {}
    number_ = metrics.get("iteration", times[-1].number if times else "-")
    parts = [f"iteration {number_}" + (f" of {training.total}" if training.total else "")]
    for name, form in ((training.loss_name, "loss {:.4f}"), ("tokens/s", "{:.0f} tokens/s")):
        value = metrics.get(name)
        if isinstance(value, (int, float)):
            parts.append(form.format(value))
    if times:
        parts.append(f"{duration(statistics.median(t.total for t in times) / 1e6)} per iteration")
        parts.append(f"{percent(statistics.fmean(t.bubble for t in times))} idle")
    return "  ".join(parts)


def _progress(training: Training) -> str:
    """Time left, memory and checkpoints, where they are known."""
    left, memory = training.seconds_left, training.series("peak memory")[1]
    parts = [f"{time_left(left)} left"] if left else []
    parts += [f"memory {mebibytes(memory[-1])}"] if memory else []
    parts += [f"checkpoint {training.checkpoints[-1]}"] if training.checkpoints else []
    return "  ".join(parts)


def _curves(training: Training) -> list[str]:
    """Loss, gradient norm and tokens/s as lines of blocks."""
    lines = []
    for name in (training.loss_name, "grad norm", "tokens/s"):
        x, y = training.series(name)
        if len(y) > 1:
            ends = f"{number(y[0]):>8} {_blocks(y)} {number(y[-1])}"
            lines.append(f"{name:>10}  {ends}  (iterations {x[0]:g} to {x[-1]:g})")
    return lines


def _blocks(values: Sequence[float]) -> str:
    """At most ``_CURVE`` characters whose heights are the means of neighbours."""
    size = -(-len(values) // _CURVE)
    means = [statistics.fmean(values[i : i + size]) for i in range(0, len(values), size)]
    low, span = min(means), max(means) - min(means)
    top = len(_HEIGHTS) - 1
    return "".join(_HEIGHTS[round((v - low) / span * top) if span else 0] for v in means)


def _state(file: FollowedFile) -> str:
    if file.ended:
        return "ended"
    return {True: "runs", False: "DEAD", None: "remote"}[alive(file.header)]


def _rank_line(file: FollowedFile, times: list[IterationTimes]) -> str:
    rank, stage = file.header.rank, file.header.layout.pipeline
    own = [t.ranks[rank] for t in times]
    if not own:
        done = len(file.iterations)
        place = f"{rank:>5}  {stage:>5}  {_state(file):<7}"
        return f"{place} no iteration in common yet ({done} of its own)"
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
        f"{rank:>5}  {stage:>5}  {_state(file):<7} [{bar}] {busy:>6.1%}  {idle:>6.1%}  "
        f"{worst:<12} {memory:>9.0f}  {held:>5.3g}"
    )


def _stragglers(files: list[FollowedFile], iterations: list[Iteration]) -> list[str]:
    if not iterations:
        return []
    shape = JobShape.of([file.header for file in files])
    works = [work_of(iteration) for iteration in iterations]
    waits = dict.fromkeys(shape.pipeline, 0)
    found = StragglerSearch(shape, works, [{} for _ in works], waits).find()
    return [straggler_text(dataclasses.replace(culprit, victims=()), shape) for culprit in found]


def _ranks(run: FollowedRun, times: list[IterationTimes], iterations: list[Iteration]) -> list[str]:
    files = sorted(
        run.files.values(),
        key=lambda f: (f.header.layout.pipeline, f.header.layout.data, f.header.layout.tensor),
    )
    head = (
        f"{'rank':>5}  {'stage':>5}  {'state':<7} {'at work':<{_BAR + 2}} {'':>6}  {'idle':>6}  "
        f"{'mostly':<12} {'memory MiB':>9}  {'held':>4}"
    )
    lines = [head, *(_rank_line(file, times) for file in files), ""]
    return lines + (_stragglers(files, iterations) or ["no straggler"])


def view(place: RunPlace, run: FollowedRun | None, training: Training) -> str:
    """The whole text of one look."""
    iterations = run.iterations() if run else []
    times = [iteration_times(iteration) for iteration in iterations]
    lines = [str(run.directory if run else place.home), _headline(training, times)]
    lines += [text for text in (_progress(training),) if text]
    lines += _curves(training)
    return "\n".join([*lines, "", *(_ranks(run, times, iterations) if run else [HOW_TO_TRACE])])


def _run(options: argparse.Namespace) -> int:
    require(options.interval > 0, f"--interval {options.interval:g}: must be above 0")
    return serve(options) if options.web else _watch(options)


def _watch(options: argparse.Namespace) -> int:
    place = find_run(names_of(options)[0])
    run: FollowedRun | None = None
    while True:
        folder = place.traces()
        if folder is not None:
            run = run or FollowedRun(folder, options.iterations)
            run.poll()
        training = read_training(place.home, options.metrics_file, last_only=True)
        if run is None and not training.metrics and place.state() == "ended":
            place.need_traces()
        erase = "\x1b[H\x1b[2J" if sys.stdout.isatty() and not options.once else ""
        print(erase + view(place, run, training), flush=True)
        states = {_state(file) for file in run.files.values()} if run else {place.state()}
        if options.once or states <= {"ended", "DEAD"}:
            return 3 if "DEAD" in states else 0
        time.sleep(options.interval)

"""``megatron-dpp report``: the loss of a run, and where the time of a traced one went.

    megatron-dpp report runs/latest
    megatron-dpp report runs/latest --baseline runs/static

Writes ``report.html`` (one file, no network needed) into the run's directory and prints the
findings. With a baseline it says whether losses, norms and learning rates are equal bit by bit.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

from megatron.dpp.command_line import command, new_parser
from megatron.dpp.errors import ConfigError, DataError, require
from megatron.dpp.files.safe_files import replacing
from megatron.dpp.report.align import align
from megatron.dpp.report.analysis.experts import lost_per_forward
from megatron.dpp.report.analysis.model import read_iterations
from megatron.dpp.report.analysis.sentences import (
    EVEN_EXPERTS,
    HOW_TO_TRACE,
    LEAST,
    sentences,
    straggler_text,
    training_sentences,
)
from megatron.dpp.report.analysis.stragglers import SLOW
from megatron.dpp.report.analysis.summary import Analysis, analyse
from megatron.dpp.report.pictures.page import Difference, Report, page
from megatron.dpp.report.pictures.picture import Picture
from megatron.dpp.report.pictures.plots import plot_timeline
from megatron.dpp.report.reader import TraceFile, open_run
from megatron.dpp.report.run_files import RunPlace, Training, find_run, read_state, read_training
from megatron.dpp.report.whatif import (
    WhatIf,
    effects,
    predict_all,
    recorded_runs,
    without_imbalance,
)


def numbers_so_far(files: list[TraceFile]) -> Analysis | None:
    """The numbers of a run that may go on; None before all ranks have finished an iteration."""
    try:
        return analyse(files, align(files))
    except DataError:
        return None


def state_of(place: RunPlace, files: list[TraceFile], training: Training) -> tuple[str, list[int]]:
    """The state of a run, and the ranks that died; where no state was written, by its ranks."""
    open_files = [file for file in files if not file.complete]
    dead = [file.rank for file in open_files if file.alive is False]
    if not files or read_state(place.home) is not None:
        return training.state, dead
    running = len(dead) < len(open_files)
    return ("running" if running else "ended") + (f", rank {dead[0]} died" if dead else ""), dead


def _predict(analysis: Analysis) -> None:
    """Add the predictions of changes, and what each culprit costs. One that costs next to nothing
    is no straggler, however slow it is.
    """
    runs, culprits, shape = recorded_runs(analysis), analysis.culprits, analysis.shape
    costs: list[float | None] = [None] * len(culprits)
    if runs:
        ranks, what_if = shape.pipelines()[0], WhatIf(runs)
        predictions = predict_all(what_if, culprits, shape)
        lost = lost_per_forward(analysis.loads)
        if any(lost.values()):
            change = without_imbalance(ranks, lost)
            predictions.append(what_if.predict(EVEN_EXPERTS, change, in_recorded_order=True))
        analysis.what_if = sorted(predictions, key=lambda row: -row.gain)
        analysis.fidelity = what_if.fidelity
        costs = effects(what_if, culprits, ranks)
    for culprit, effect in zip(culprits, costs, strict=True):
        name, text = culprit.where(shape), straggler_text(culprit, shape)
        harmless = effect is not None and effect < LEAST
        finding = replace(culprit, name=name, text=text, effect=effect)
        (analysis.without_effect if harmless else analysis.stragglers).append(finding)


def _timeline(analysis: Analysis, number: int | None) -> Picture:
    """One iteration as a picture; the typical one without a number."""
    number = analysis.typical().number if number is None else number
    found = next(read_iterations(analysis.files, analysis.alignment, {number}), None)
    if found is None:
        raise ConfigError(f"--iteration {number}: not recorded by every rank")
    return plot_timeline(found, analysis.shape, analysis.name)


def names_of(options: argparse.Namespace) -> list[str]:
    """The runs that the options name: one, or one and its baseline.

    Raises:
        ConfigError: they name more.
    """
    names = [*filter(None, [options.benchmark_dir]), *options.runs] or ["runs/latest"]
    names += [options.baseline] if options.baseline else []
    require(len(names) < 3, f"{len(names)} runs ({', '.join(names)}): expected one, or two")
    return names


def _read(
    place: RunPlace, options: argparse.Namespace, metrics_file: str | None, *, live: bool
) -> Report:
    """A run's numbers; at least its metrics or its traces must be there. Traces of a live run that
    say nothing yet are left out where there are metrics.
    """
    training = read_training(place.home, metrics_file or place.metrics)
    report, folder = Report(training), place.traces()
    if folder is None:
        if not report.training.metrics:
            place.need_traces()
        return report
    try:
        files = open_run(folder)
        report.training.state, _ = state_of(place, files, report.training)
        report.pipeline = analyse(files, align(files), threshold=options.threshold)
    except DataError:
        if not (live and report.training.metrics):
            raise
    return report


def build_report(options: argparse.Namespace, *, live: bool = False) -> Report:
    """All numbers and sentences of a run, and its timeline; without traces those of its metrics.

    Args:
        options: of ``megatron-dpp report``.
        live: traces that say nothing yet are left out where there are metrics.

    Raises:
        DppError: an option that cannot be, or a run that cannot be read.
    """
    require(options.threshold > 1, f"--threshold {options.threshold:g}: must be above 1")
    name, *others = names_of(options)
    place = find_run(name)
    report = _read(place, options, options.metrics_file, live=live)
    if report.pipeline is None:
        require(options.iteration is None, f"--iteration {options.iteration}: the run has no trace")
    else:
        _predict(report.pipeline)
        report.timeline = _timeline(report.pipeline, options.iteration)
    report.sentences = training_sentences(report.training)
    if others:
        report.baseline = _read(find_run(others[0]), options, None, live=live)
        if report.training.metrics and report.baseline.training.metrics:
            report.difference = Difference.of(report.training, report.baseline.training)
            report.sentences += report.difference.sentences()
    report.sentences += sentences(report.pipeline) if report.pipeline else []
    report.sentences += [HOW_TO_TRACE] if place.traces() is None else []
    return report


_PAGE = "report.html"


def build_parser(prog: str) -> argparse.ArgumentParser:
    """The parser of the command."""
    text = (
        "The loss of a run, and with a trace one step's timeline, where the time went, who was "
        "slow, and what a change would gain."
    )
    parser = new_parser(prog, text, "[RUN] [options]")
    add = parser.add_argument
    add("runs", nargs="*", metavar="RUN", help="home, traces or metrics (default: runs/latest)")
    add("--benchmark_dir", "--benchmark-dir", metavar="DIR", help="the same")
    add("--baseline", metavar="RUN", help="another run to compare with, number by number")
    add("--iteration", type=int, metavar="N", help="timeline of iteration N (default: the median)")
    add("--metrics-file", metavar="FILE", help="losses (default: metrics.jsonl in the run's home)")
    add("--threshold", type=float, default=SLOW, metavar="X", help="X times slower is a straggler")
    add("--output", metavar="FILE", help="the HTML (default: report.html in the run's directory)")
    add("--json", action="store_true", help="print the numbers as JSON instead of sentences")
    return parser


def _run(options: argparse.Namespace) -> int:
    report = build_report(options)
    found = report.pipeline
    home = found.files[0].path.parent if found else report.training.home
    output = Path(options.output or home / _PAGE)
    with replacing(str(output)) as file:
        file.write(page(report).encode(errors="backslashreplace"))
    if options.json:
        print(json.dumps(report.numbers(), indent=1))
    else:
        print("\n".join([*report.sentences, f"report: {output}"]))
    return 0


main = command("megatron-dpp report", build_parser, _run)

"""Builds the report of a run from its files."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.dpp.command_line import progress_bar
from megatron.dpp.errors import ConfigError, DataError, require
from megatron.dpp.report.align import Alignment, align
from megatron.dpp.report.analysis.experts import lost_per_forward
from megatron.dpp.report.analysis.model import read_iterations
from megatron.dpp.report.analysis.report_data import (
    Finding,
    OtherOrder,
    Pipeline,
    Prediction,
    Report,
    Timeline,
)
from megatron.dpp.report.analysis.sentences import (
    EVEN_EXPERTS,
    HOW_TO_TRACE,
    LEAST,
    sentences,
    straggler_text,
    training_sentences,
)
from megatron.dpp.report.analysis.summary import Analysis, analyse, summary
from megatron.dpp.report.analysis.timeline import timeline
from megatron.dpp.report.ingredients import gain_lines
from megatron.dpp.report.length_report import length_report
from megatron.dpp.report.reader import TraceFile, open_run
from megatron.dpp.report.recorded import Recorded, recorded_runs
from megatron.dpp.report.run_files import find_run, read_training
from megatron.dpp.report.whatif import (
    Outcome,
    WhatIf,
    effects,
    opposite,
    predict_all,
    without_imbalance,
)


@dataclass
class Traces:
    """The traces of a run, read."""

    files: list[TraceFile]
    alignment: Alignment
    analysis: Analysis


def _load(folder: Path, options: argparse.Namespace, *, quiet: bool) -> Traces:
    files = open_run(folder)
    settings = {"disable": True} if quiet else {}
    with progress_bar(sum(file.size for file in files), **settings) as bar:
        alignment = align(files, lambda file: bar.update(file.size))
    analysis = analyse(files, alignment, skip=options.skip, threshold=options.threshold)
    return Traces(files, alignment, analysis)


def _predict(analysis: Analysis, runs: Sequence[Recorded], into: Pipeline) -> None:
    """Add the predictions of changes, and the culprits with what each costs. One that costs next to
    nothing is no straggler, however slow it is.
    """
    costs: list[float | None] = [None] * len(analysis.culprits)
    shape = analysis.shape
    if runs:
        ranks = shape.pipelines()[0]
        what_if = WhatIf(runs)
        predictions = predict_all(what_if, analysis.culprits, shape)
        lost = lost_per_forward(analysis.loads)
        if any(lost.values()):
            change = without_imbalance(ranks, lost)
            predictions.append(what_if.in_recorded_order(EVEN_EXPERTS, change))
        into.what_if = sorted(map(_prediction, predictions), key=lambda row: -row.gain)
        into.fidelity = what_if.fidelity
        into.other_order = _other_order(what_if, into)
        costs = effects(what_if, analysis.culprits, ranks)
    for culprit, effect in zip(analysis.culprits, costs, strict=True):
        harmless = effect is not None and effect < LEAST
        where, text = culprit.where(shape), straggler_text(culprit, shape)
        finding = Finding(culprit, where, text, effect)
        (into.without_effect if harmless else into.stragglers).append(finding)
    into.totals = dataclasses.replace(into.totals, stragglers=len(into.stragglers))


def _other_order(what_if: WhatIf, found: Pipeline) -> OtherOrder | None:
    """The run's tasks under the other schedule; None with one rank."""
    run = what_if.runs[-1]
    if run.shape.num_ranks < 2:
        return None
    try:
        stretched = what_if.stretched(opposite(run, what_if.config))
    except ConfigError:
        return None
    name = "static" if run.dynamic else "dynamic"
    return OtherOrder(name, 1.0 - (1.0 - found.totals.bubble) / stretched, stretched)


def _prediction(outcome: Outcome) -> Prediction:
    return Prediction(outcome.name, outcome.now * 1e3, outcome.then * 1e3)


def _timeline(traces: Traces, number: int) -> Timeline:
    shown = next(read_iterations(traces.files, traces.alignment, {number}), None)
    require(shown is not None, f"--iteration {number}: not recorded by every rank")
    assert shown is not None
    order = [rank for ranks in traces.analysis.shape.pipelines() for rank in ranks]
    return timeline(shown, order)


def _pipeline(traces: Traces, iteration: int | None) -> tuple[Pipeline, list[Recorded]]:
    analysis = traces.analysis
    runs = recorded_runs(analysis)
    found = summary(analysis)
    _predict(analysis, runs, found)
    number = analysis.typical().number if iteration is None else iteration
    found.timeline = _timeline(traces, number)
    folder = traces.files[0].path.parent
    found.lengths = length_report(analysis.works, analysis.shape, folder, number)
    return found, runs


def _beside(name: str, options: argparse.Namespace, *, quiet: bool) -> Report:
    """Another run, with its numbers only."""
    place = find_run(name)
    folder, training = place.traces(), read_training(place.home)
    if folder is None and not training.metrics:
        place.need_traces()
    found = None if folder is None else summary(_load(folder, options, quiet=quiet).analysis)
    return Report(training, found)


def names_of(options: argparse.Namespace) -> list[str]:
    """The runs that the options name, the main one first."""
    names = options.runs or [options.benchmark_dir or "runs/latest"]
    if options.runs and options.benchmark_dir:
        names = [options.benchmark_dir, *names]
    return [*names, *([options.baseline] if options.baseline else [])]


def resolved(options: argparse.Namespace) -> argparse.Namespace:
    """The same options with the directories that their names mean now: a link may move.

    Raises:
        DataError: there is no such directory.
    """
    places = [find_run(name) for name in names_of(options)]
    runs = [str(place.chosen or place.home) for place in places]
    return argparse.Namespace(
        **{**vars(options), "runs": runs, "benchmark_dir": None, "baseline": None}
    )


def build_report(
    options: argparse.Namespace, *, quiet: bool = False, live: bool = False
) -> tuple[Report, list[Recorded]]:
    """All numbers, sentences and the timeline of a run, for pictures and page; without traces those
    of its metrics.

    Args:
        options: of ``megatron-dpp report``.
        quiet: no progress bar.
        live: traces that say nothing yet are left out where there are metrics.

    Raises:
        DppError: an option that cannot be, or a run that cannot be read.
    """
    require(options.threshold > 1, f"--threshold {options.threshold:g}: must be above 1")
    require((options.skip or 0) >= 0, f"--skip {options.skip}: must be at least 0")
    name, *others = names_of(options)
    place = find_run(name)
    report, runs = Report(read_training(place.home, options.metrics_file)), list[Recorded]()
    folder = place.traces()
    if folder is None and not report.training.metrics:
        place.need_traces()
    if folder is not None:
        try:
            traces = _load(folder, options, quiet=quiet)
            report.pipeline, runs = _pipeline(traces, options.iteration)
        except DataError:
            if not (live and report.training.metrics):
                raise
    else:
        require(options.iteration is None, f"--iteration {options.iteration}: the run has no trace")
    report.others = [_beside(each, options, quiet=quiet) for each in others]
    report.sentences = training_sentences(report.training)
    if report.pipeline is not None:
        report.sentences += [*sentences(report.pipeline), *gain_lines(report, runs)]
    elif folder is None:
        report.sentences.append(HOW_TO_TRACE)
    return report, runs

"""Builds the report of a run from its files."""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Sequence

from megatron.dpp.command_line import ROOT, progress_bar
from megatron.dpp.errors import require
from megatron.dpp.report.align import Alignment, align
from megatron.dpp.report.analysis.experts import lost_per_forward
from megatron.dpp.report.analysis.model import read_iterations
from megatron.dpp.report.analysis.report_data import Finding, Pipeline, Prediction, Report, Timeline
from megatron.dpp.report.analysis.sentences import EVEN_EXPERTS, LEAST, sentences, straggler_text
from megatron.dpp.report.analysis.summary import Analysis, analyse, summary
from megatron.dpp.report.analysis.timeline import timeline
from megatron.dpp.report.length_report import length_report
from megatron.dpp.report.reader import TraceFile, find_directory, open_run
from megatron.dpp.report.recorded import Recorded, recorded_runs
from megatron.dpp.report.run_files import home_of, read_training
from megatron.dpp.report.whatif import Outcome, WhatIf, effects, predict_all, without_imbalance


def _load(
    name: str, skip: int | None, threshold: float, *, quiet: bool
) -> tuple[list[TraceFile], Alignment, Analysis]:
    files = open_run(find_directory(name, ROOT))
    settings = {"disable": True} if quiet else {}
    with progress_bar(sum(file.size for file in files), **settings) as bar:
        alignment = align(files, lambda file: bar.update(file.size))
    analysis = analyse(files, alignment, skip=skip, threshold=threshold)
    return files, alignment, analysis


def _predict(analysis: Analysis, runs: Sequence[Recorded], into: Pipeline) -> None:
    """Add the predictions of changes, and the culprits with what each costs. One that costs next to
    nothing is no straggler, however slow it is.
    """
    costs: list[float | None] = [None] * len(analysis.culprits)
    if runs:
        ranks = analysis.shape.pipelines()[0]
        what_if = WhatIf(runs)
        predictions = predict_all(what_if, analysis.culprits, ranks)
        lost = lost_per_forward(analysis.loads)
        if any(lost.values()):
            change = without_imbalance(ranks, lost)
            predictions.append(what_if.in_recorded_order(EVEN_EXPERTS, change))
        into.what_if = sorted(map(_prediction, predictions), key=lambda row: -row.gain)
        into.fidelity = what_if.fidelity
        costs = effects(what_if, analysis.culprits, ranks)
    for culprit, effect in zip(analysis.culprits, costs, strict=True):
        harmless = effect is not None and effect < LEAST
        finding = Finding(culprit, straggler_text(culprit), effect)
        (into.without_effect if harmless else into.stragglers).append(finding)
    into.totals = dataclasses.replace(into.totals, stragglers=len(into.stragglers))


def _prediction(outcome: Outcome) -> Prediction:
    return Prediction(outcome.name, outcome.now * 1e3, outcome.then * 1e3)


def _timeline(
    files: list[TraceFile], alignment: Alignment, analysis: Analysis, number: int
) -> Timeline:
    shown = next(read_iterations(files, alignment, {number}), None)
    require(shown is not None, f"--iteration {number}: not recorded by every rank")
    assert shown is not None
    return timeline(shown, [rank for ranks in analysis.shape.pipelines() for rank in ranks])


def build_report(
    options: argparse.Namespace, *, quiet: bool = False
) -> tuple[Report, list[Recorded]]:
    """All numbers, sentences and the timeline of a run, for pictures and page; ``quiet`` without a
    progress bar.

    Raises:
        DppError: an option that cannot be, or a run that cannot be read.
    """
    require(options.threshold > 1, f"--threshold {options.threshold:g}: must be above 1")
    require((options.skip or 0) >= 0, f"--skip {options.skip}: must be at least 0")
    load = functools.partial(_load, skip=options.skip, threshold=options.threshold, quiet=quiet)
    files, alignment, analysis = load(options.benchmark_dir)
    runs = recorded_runs(analysis)
    found = summary(analysis)
    _predict(analysis, runs, found)
    number = analysis.typical().number if options.iteration is None else options.iteration
    found.timeline = _timeline(files, alignment, analysis, number)
    folder = files[0].path.parent
    found.lengths = length_report(analysis.works, analysis.shape, folder, number)
    report = Report(read_training(home_of(folder), options.metrics_file), found)
    report.sentences = sentences(found)
    if options.baseline:
        other, _, beside = load(options.baseline)
        training = read_training(home_of(other[0].path.parent))
        report.others.append(Report(training, summary(beside)))
    return report, runs

"""Builds the report of a run from its files."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path

from megatron.dpp.command_line import progress_bar
from megatron.dpp.errors import ConfigError, DataError, require
from megatron.dpp.report.align import align
from megatron.dpp.report.analysis.experts import lost_per_forward
from megatron.dpp.report.analysis.model import read_iterations
from megatron.dpp.report.analysis.report_data import (
    Difference,
    Finding,
    OtherOrder,
    Pipeline,
    Report,
    Training,
)
from megatron.dpp.report.analysis.sentences import (
    EVEN_EXPERTS,
    HOW_TO_TRACE,
    LEAST,
    difference_sentences,
    sentences,
    straggler_text,
    training_sentences,
)
from megatron.dpp.report.analysis.summary import Analysis, analyse, summary
from megatron.dpp.report.pictures.plots import plot_timeline
from megatron.dpp.report.reader import TraceFile, open_run
from megatron.dpp.report.recorded import Recorded, recorded_runs
from megatron.dpp.report.run_files import find_run, read_state, read_training
from megatron.dpp.report.whatif import WhatIf, effects, opposite, predict_all, without_imbalance


def _load(folder: Path, options: argparse.Namespace, *, quiet: bool) -> Analysis:
    files = open_run(folder)
    settings = {"disable": True} if quiet else {}
    with progress_bar(sum(file.size for file in files), **settings) as bar:
        alignment = align(files, lambda file: bar.update(file.size))
    return analyse(files, alignment, skip=options.skip, threshold=options.threshold)


def look(files: list[TraceFile]) -> Pipeline | None:
    """The numbers of a run that may go on; None before all ranks have finished an iteration."""
    try:
        return summary(analyse(files, align(files)))
    except DataError:
        return None


def state_of(home: Path, files: list[TraceFile], training: Training) -> tuple[str, list[int]]:
    """The state of a run, and the ranks that died; where no state was written, by its ranks."""
    open_files = [file for file in files if not file.complete]
    dead = [file.rank for file in open_files if file.alive is False]
    if not files or read_state(home) is not None:
        return training.state, dead
    running = len(dead) < len(open_files)
    return ("running" if running else "ended") + (f", rank {dead[0]} died" if dead else ""), dead


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
        into.what_if = sorted(predictions, key=lambda row: -row.gain)
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


def _timeline(analysis: Analysis, number: int, schedule: str) -> str:
    """One iteration as a picture, with its heading."""
    found = next(read_iterations(analysis.files, analysis.alignment, {number}), None)
    require(found is not None, f"--iteration {number}: not recorded by every rank")
    assert found is not None
    picture = plot_timeline(found, analysis.shape, schedule)
    return f'<h2>{picture.title}</h2><div class="wide">{picture.inline()}</div>'


def difference(one: Training, two: Training) -> Difference:
    """Losses, norms and learning rates of two runs, step by step."""
    equal, largest = [], {}
    lines = [{line["iteration"]: line for line in run.metrics} for run in (one, two)]
    common = sorted(lines[0].keys() & lines[1].keys())
    for name in ("loss", "grad_norm", "lr"):
        pairs = [(lines[0][step].get(name), lines[1][step].get(name)) for step in common]
        apart = [(a, b) for a, b in pairs if a != b]
        if pairs and not apart:
            equal.append(name)
        elif apart:
            numbers = [abs(a - b) for a, b in apart if a is not None and b is not None]
            largest[name] = max(numbers, default=float("nan"))
    return Difference(len(common), equal, largest)


def names_of(options: argparse.Namespace) -> list[str]:
    """The runs that the options name: one, or one and its baseline.

    Raises:
        ConfigError: they name more.
    """
    names = [*filter(None, [options.benchmark_dir]), *options.runs] or ["runs/latest"]
    names += [options.baseline] if options.baseline else []
    require(len(names) < 3, f"{len(names)} runs ({', '.join(names)}): expected one, or two")
    return names


def build_report(
    options: argparse.Namespace, *, quiet: bool = False, live: bool = False
) -> tuple[Report, list[Recorded]]:
    """All numbers and sentences of a run, its timeline, and its recorded costs; without traces
    those of its metrics.

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
            analysis = _load(folder, options, quiet=quiet)
            report.pipeline, runs = summary(analysis), recorded_runs(analysis)
            _predict(analysis, runs, report.pipeline)
            chosen = options.iteration
            number = analysis.typical().number if chosen is None else chosen
            report.timeline = _timeline(analysis, number, report.pipeline.name)
        except DataError:
            if not (live and report.training.metrics):
                raise
    else:
        require(options.iteration is None, f"--iteration {options.iteration}: the run has no trace")
    report.sentences = training_sentences(report.training)
    if others:
        report.baseline = _baseline(others[0], options, quiet=quiet)
        if report.training.metrics and report.baseline.training.metrics:
            report.difference = difference(report.training, report.baseline.training)
            report.sentences += difference_sentences(report.difference)
    report.sentences += sentences(report.pipeline) if report.pipeline else []
    report.sentences += [HOW_TO_TRACE] if folder is None else []
    return report, runs


def _baseline(name: str, options: argparse.Namespace, *, quiet: bool) -> Report:
    """Another run, with its numbers only."""
    place = find_run(name)
    folder, training = place.traces(), read_training(place.home)
    if folder is None and not training.metrics:
        place.need_traces()
    found = None if folder is None else summary(_load(folder, options, quiet=quiet))
    return Report(training, found)

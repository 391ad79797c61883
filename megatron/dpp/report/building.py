"""Builds the report of a run from its files."""

from __future__ import annotations

import argparse
import math
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from megatron.dpp.command_line import progress_bar
from megatron.dpp.errors import ConfigError, DataError, require
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
from megatron.dpp.report.analysis.summary import Analysis, analyse
from megatron.dpp.report.pictures.picture import Picture
from megatron.dpp.report.pictures.plots import plot_timeline
from megatron.dpp.report.reader import TraceFile, open_run
from megatron.dpp.report.run_files import RunPlace, Training, find_run, read_state, read_training
from megatron.dpp.report.whatif import (
    Recorded,
    WhatIf,
    effects,
    predict_all,
    recorded_runs,
    without_imbalance,
)


@dataclass(frozen=True)
class Difference:
    """Two runs' metrics in the steps that both have: names of those that are equal bit by bit, and
    the largest difference of each other one.
    """

    common: int
    equal: list[str]
    largest: dict[str, float]

    @classmethod
    def of(cls, *runs: Training) -> Difference:
        """Compare losses, norms and learning rates of two runs."""
        one, two = ({line["iteration"]: line for line in run.metrics} for run in runs)
        steps, largest = sorted(one.keys() & two.keys()), {}
        for name in ("loss", "grad_norm", "lr") if steps else ():
            pairs = [(one[step].get(name), two[step].get(name)) for step in steps]
            apart = [(a, b) for a, b in pairs if a != b]
            numbers = [abs(a - b) for a, b in apart if a is not None and b is not None]
            largest[name] = max(numbers, default=math.nan) if apart else 0.0
        equal = [name for name, size in largest.items() if size == 0.0]
        return cls(len(steps), equal, {n: size for n, size in largest.items() if n not in equal})

    def sentences(self) -> list[str]:
        """The findings in words."""
        if not self.common:
            return ["The two runs have no step in common."]
        equal = f"Equal bit by bit in all {self.common} common steps: {', '.join(self.equal)}."
        sizes = ", ".join(f"{name} by at most {size:.3g}" for name, size in self.largest.items())
        unlike = f"Different in the {self.common} common steps: {sizes}."
        return [equal] * bool(self.equal) + [unlike] * bool(self.largest)


@dataclass
class Report:
    """All that is known of a run, and of a baseline to set beside it.

    Args:
        training: its metrics.
        pipeline: its traces, None without any.
        baseline: the other run, without a baseline of its own.
        difference: of the two runs' metrics.
        sentences: the findings in words, most important first.
        timeline: one iteration.
    """

    training: Training
    pipeline: Analysis | None = None
    baseline: Report | None = None
    difference: Difference | None = None
    sentences: list[str] = field(default_factory=list)
    timeline: Picture | None = None

    def numbers(self) -> dict[str, Any]:
        """As JSON, without series and timeline."""
        found = self.pipeline.numbers() if self.pipeline else {}
        found["training"] = self.training.numbers()
        if self.sentences:
            found["sentences"] = self.sentences
        if self.baseline:
            found["baseline"] = self.baseline.numbers()
        if self.difference:
            found["difference"] = asdict(self.difference)
        return found


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


def _predict(analysis: Analysis) -> list[Recorded]:
    """Add the predictions of changes, and what each culprit costs. One that costs next to nothing
    is no straggler, however slow it is. Returns the recorded costs.
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
    return runs


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
    report, folder = Report(read_training(place.home, metrics_file)), place.traces()
    if folder is None:
        if not report.training.metrics:
            place.need_traces()
        return report
    try:
        files = open_run(folder)
        report.training.state, _ = state_of(place, files, report.training)
        size = sum(file.size for file in files)
        with progress_bar(size, **{"disable": True} if live else {}) as bar:
            alignment = align(files, lambda file: bar.update(file.size))
        report.pipeline = analyse(files, alignment, skip=options.skip, threshold=options.threshold)
    except DataError:
        if not (live and report.training.metrics):
            raise
    return report


def build_report(
    options: argparse.Namespace, *, live: bool = False
) -> tuple[Report, list[Recorded]]:
    """All numbers and sentences of a run, its timeline, and its recorded costs; without traces
    those of its metrics.

    Args:
        options: of ``megatron-dpp report``.
        live: no progress bar; traces that say nothing yet are left out where there are metrics.

    Raises:
        DppError: an option that cannot be, or a run that cannot be read.
    """
    require(options.threshold > 1, f"--threshold {options.threshold:g}: must be above 1")
    require((options.skip or 0) >= 0, f"--skip {options.skip}: must be at least 0")
    name, *others = names_of(options)
    place, runs = find_run(name), list[Recorded]()
    report = _read(place, options, options.metrics_file, live=live)
    if report.pipeline is None:
        require(options.iteration is None, f"--iteration {options.iteration}: the run has no trace")
    else:
        runs = _predict(report.pipeline)
        report.timeline = _timeline(report.pipeline, options.iteration)
    report.sentences = training_sentences(report.training)
    if others:
        report.baseline = _read(find_run(others[0]), options, None, live=live)
        if report.training.metrics and report.baseline.training.metrics:
            report.difference = Difference.of(report.training, report.baseline.training)
            report.sentences += report.difference.sentences()
    report.sentences += sentences(report.pipeline) if report.pipeline else []
    report.sentences += [HOW_TO_TRACE] if place.traces() is None else []
    return report, runs

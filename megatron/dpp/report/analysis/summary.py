"""All numbers of a traced run. Streams over the iterations and keeps only numbers.

Units are in the names of the fields. Values are means per iteration unless they say otherwise.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from megatron.dpp.errors import DataError
from megatron.dpp.report.align import Alignment
from megatron.dpp.report.analysis.experts import LayerRow, Loads, add_loads, layer_rows
from megatron.dpp.report.analysis.model import JobShape, TracedIteration, read_iterations
from megatron.dpp.report.analysis.stragglers import Culprit, StragglerSearch
from megatron.dpp.report.analysis.times import IterationTimes, RankTimes, iteration_times
from megatron.dpp.report.analysis.work import LinkDelays, TaskTimes, link_samples, work_of
from megatron.dpp.report.reader import TraceFile
from megatron.dpp.trace.vocabulary import IdleCause

_MS = 1e6


@dataclass(frozen=True)
class TracedRun:
    """Facts of a traced run: sizes of its groups, microbatches of its first iteration, iterations
    that count nowhere (``skipped``), and ranks whose files have no end (``cut_short``).
    """

    directory: str
    schedule: str
    data: int
    pipeline: int
    tensor: int
    context: int
    chunks: int
    microbatches: int
    sliced: bool
    started: str
    device: str
    hosts: list[str]
    skipped: list[int]
    clock_uncertainty_us: float
    cut_short: list[int]


@dataclass
class RunTotals:
    """Numbers of the whole run: ``iteration_ms`` is a median; ``ideal_ms`` is the busiest rank's
    own work; ``bubble`` is the idle share of the pipeline, split by cause.
    """

    iteration_ms: float
    mean_ms: float
    window_ms: float
    ideal_ms: float
    ideal_ratio: float
    tail_ms: float
    bubble: float
    bubble_by_cause: dict[str, float]
    stragglers: int = 0


@dataclass(frozen=True)
class IterationRow:
    """One iteration."""

    iteration: int
    total_ms: float
    bubble: float


@dataclass(frozen=True)
class RankRow:
    """One rank, by its place, and its times; ``peaks`` are the largest values of its counters."""

    rank: int
    name: str
    busy_ms: float
    kinds_ms: dict[str, float]
    other_ms: float
    idle_ms: dict[str, float]
    tail_ms: dict[str, float]
    bubble: float
    sent_bytes: float
    peaks: dict[str, float]


@dataclass
class PredictedTime:
    """Time of an iteration as measured, and as simulated with a change. ``gain`` is the share of it
    that is saved, negative for a loss.
    """

    name: str
    now_ms: float
    then_ms: float
    gain: float = field(init=False)

    def __post_init__(self) -> None:
        self.gain = 1.0 - self.then_ms / self.now_ms if self.now_ms else 0.0


@dataclass
class Pipeline:
    """Numbers of a run's traces; ``without_effect`` are culprits that cost next to nothing."""

    run: TracedRun
    totals: RunTotals
    iterations: list[IterationRow]
    ranks: list[RankRow]
    experts: list[LayerRow]
    stragglers: list[Culprit] = field(default_factory=list)
    without_effect: list[Culprit] = field(default_factory=list)
    what_if: list[PredictedTime] = field(default_factory=list)
    fidelity: float = 0.0

    @property
    def name(self) -> str:
        """``dynamic`` or ``static``."""
        return "dynamic" if self.run.schedule == "dpp" else "static"


@dataclass
class Analysis:
    """A run's iterations and stragglers. ``skipped`` iterations count nowhere."""

    files: list[TraceFile]
    shape: JobShape
    alignment: Alignment
    skipped: list[int] = field(default_factory=list)
    times: list[IterationTimes] = field(default_factory=list)
    works: list[TaskTimes] = field(default_factory=list)
    links: list[LinkDelays] = field(default_factory=list)
    loads: Loads = field(default_factory=dict)
    culprits: list[Culprit] = field(default_factory=list)

    def add(self, iteration: TracedIteration) -> None:
        """Take the numbers of one iteration."""
        self.times.append(iteration_times(iteration))
        self.works.append(work_of(iteration))
        self.links.append(link_samples(iteration))

    @property
    def sliced(self) -> bool:
        """Microbatches were slices of sequences in some iteration."""
        return any(any(work.groups.values()) for work in self.works)

    def find_culprits(self, threshold: float) -> None:
        """Look for stragglers over all iterations taken."""
        waits = {
            rank: sum(times.ranks[rank].idle.get(IdleCause.MESSAGE, 0) for times in self.times)
            for rank in self.shape.pipeline
        }
        search = StragglerSearch(self.shape, self.works, self.links, waits, threshold=threshold)
        self.culprits = search.find()

    def typical(self) -> IterationTimes:
        """The iteration whose duration is the median."""
        ordered = sorted(self.times, key=lambda times: times.total)
        return ordered[(len(ordered) - 1) // 2]


def analyse(
    files: list[TraceFile],
    alignment: Alignment,
    *,
    skip: int | None = None,
    threshold: float = 1.15,
) -> Analysis:
    """Read a run and look for stragglers.

    Args:
        files, alignment: of the run.
        skip: leading iterations to leave out, which build kernels and pools (default: 1 of three or
            more).
        threshold: factor above the expected time that makes a rank or stage a straggler.

    Raises:
        DataError: no iteration was finished by every rank, or none is left after ``skip``.
    """
    analysis = Analysis(files, JobShape.of(files), alignment)
    for number, iteration in enumerate(read_iterations(files, alignment)):
        analysis.add(iteration)
        if number >= (1 if skip is None else skip):
            add_loads(analysis.loads, iteration)
    found = len(analysis.times)
    count = (1 if found > 2 else 0) if skip is None else skip
    analysis.skipped = [times.number for times in analysis.times[:count]]
    del analysis.times[:count], analysis.works[:count], analysis.links[:count]
    if not analysis.times:
        raise DataError(
            f"{files[0].path.parent}: {found} iterations that all {len(files)} ranks finished, "
            f"{len(analysis.skipped)} of them skipped; none is left"
        )
    analysis.find_culprits(threshold)
    return analysis


def _rank_row(analysis: Analysis, rank: int) -> RankRow:
    own = [times.ranks[rank] for times in analysis.times]

    def mean(pick: Callable[[RankTimes], float]) -> float:
        return statistics.fmean(map(pick, own))

    def means(parts: list[dict[str, int]]) -> dict[str, float]:
        names = sorted({name for part in parts for name in part})
        return {n: statistics.fmean(part.get(n, 0) for part in parts) / _MS for n in names}

    return RankRow(
        rank=rank,
        name=analysis.shape.name_of(rank),
        busy_ms=mean(lambda t: t.busy) / _MS,
        kinds_ms=means([t.kinds for t in own]),
        other_ms=mean(lambda t: t.other) / _MS,
        idle_ms=means([t.idle for t in own]),
        tail_ms=means([t.tail for t in own]),
        bubble=mean(lambda t: t.bubble),
        sent_bytes=mean(lambda t: t.sent_bytes),
        peaks={name: max(t.peaks.get(name, 0.0) for t in own) for t in own for name in t.peaks},
    )


def _totals(times: list[IterationTimes]) -> RunTotals:
    idle: dict[str, float] = {}
    for one in times:
        for rank in one.ranks.values():
            for cause, length in rank.idle.items():
                share = length / max(rank.window, 1) / len(one.ranks) / len(times)
                idle[cause] = idle.get(cause, 0.0) + share
    window = statistics.fmean(t.window for t in times)
    ideal = statistics.fmean(t.ideal for t in times)
    return RunTotals(
        iteration_ms=statistics.median(t.total for t in times) / _MS,
        mean_ms=statistics.fmean(t.total for t in times) / _MS,
        window_ms=window / _MS,
        ideal_ms=ideal / _MS,
        ideal_ratio=window / ideal if ideal else 0.0,
        tail_ms=statistics.fmean(t.total - t.window for t in times) / _MS,
        bubble=statistics.fmean(t.bubble for t in times),
        bubble_by_cause=dict(sorted(idle.items(), key=lambda item: -item[1])),
    )


def _run(analysis: Analysis) -> TracedRun:
    first, work = analysis.files[0], analysis.works[0]
    groups = next(filter(None, work.groups.values()), ())
    return TracedRun(
        directory=str(first.path.parent),
        schedule=first.layout.schedule,
        data=first.layout.data_size,
        pipeline=first.layout.pipeline_size,
        tensor=first.layout.tensor_size,
        context=first.layout.context_size,
        chunks=first.layout.num_chunks,
        microbatches=len(groups) or max(len(m) for k in work.tasks.values() for m in k.values()),
        sliced=analysis.sliced,
        started=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(first.start_unix_ns / 1e9)),
        device=first.device,
        hosts=sorted({file.host for file in analysis.files}),
        skipped=analysis.skipped,
        clock_uncertainty_us=analysis.alignment.uncertainty_ns / 1000,
        cut_short=[file.rank for file in analysis.files if not file.complete],
    )


def summary(analysis: Analysis) -> Pipeline:
    """The numbers of a run, without findings and predictions; ranks in the order of stages."""
    shape = analysis.shape
    ranks = sorted(shape.pipeline, key=lambda rank: (shape.pipeline[rank], shape.replica[rank]))
    return Pipeline(
        run=_run(analysis),
        totals=_totals(analysis.times),
        iterations=[IterationRow(t.number, t.total / _MS, t.bubble) for t in analysis.times],
        ranks=[_rank_row(analysis, rank) for rank in ranks],
        experts=layer_rows(analysis.loads),
    )

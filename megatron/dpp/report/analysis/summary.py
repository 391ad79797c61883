"""All numbers of a traced run. Streams over the iterations and keeps only numbers.

Units are in the names of the fields. Values are means per iteration unless they say otherwise.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from megatron.dpp.errors import DataError
from megatron.dpp.report.align import Alignment
from megatron.dpp.report.analysis.experts import LayerRow, Loads, add_loads, layer_rows
from megatron.dpp.report.analysis.model import JobShape, TracedIteration, read_iterations
from megatron.dpp.report.analysis.stragglers import SLOW, Culprit, StragglerSearch
from megatron.dpp.report.analysis.times import (
    IterationTimes,
    LinkDelays,
    RankTimes,
    TaskTimes,
    iteration_times,
    link_samples,
    work_of,
)
from megatron.dpp.report.reader import TraceFile
from megatron.dpp.trace.schema import IdleCause


@dataclass(frozen=True)
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
class Analysis:
    """A traced run.

    Args:
        files, shape, alignment: of the run.
        skipped: iterations that count nowhere.
        times, works, links: of the other iterations.
        loads: of experts.
        culprits: stragglers, as found.
        stragglers, without_effect: those that cost time and those that cost next to nothing.
        what_if, fidelity: predictions, and replayed over measured time.
    """

    files: list[TraceFile]
    shape: JobShape
    alignment: Alignment
    skipped: list[int] = field(default_factory=list)
    times: list[IterationTimes] = field(default_factory=list)
    works: list[TaskTimes] = field(default_factory=list)
    links: list[LinkDelays] = field(default_factory=list)
    loads: Loads = field(default_factory=dict)
    culprits: list[Culprit] = field(default_factory=list)
    stragglers: list[Culprit] = field(default_factory=list)
    without_effect: list[Culprit] = field(default_factory=list)
    what_if: list[PredictedTime] = field(default_factory=list)
    fidelity: float = 0.0

    def add(self, iteration: TracedIteration) -> None:
        """Take the numbers of one iteration."""
        self.times.append(iteration_times(iteration))
        self.works.append(work_of(iteration))
        self.links.append(link_samples(iteration))
        add_loads(self.loads, iteration)

    @property
    def name(self) -> str:
        """The schedule: ``dynamic`` or ``static``."""
        return "dynamic" if self.shape.schedule == "dpp" else "static"

    @property
    def sliced(self) -> bool:
        """Microbatches were slices of sequences in some iteration."""
        return any(any(work.groups.values()) for work in self.works)

    @property
    def cut_short(self) -> list[int]:
        """Ranks whose files have no end."""
        return [file.rank for file in self.files if not file.complete]

    @cached_property
    def ranks(self) -> list[RankTimes]:
        """Mean times of every rank, in the order of stages."""
        place, replica = self.shape.pipeline, self.shape.replica
        order = sorted(place, key=lambda rank: (place[rank], replica[rank]))
        return [RankTimes.mean_of([times.ranks[rank] for times in self.times]) for rank in order]

    @cached_property
    def experts(self) -> list[LayerRow]:
        """Layers whose experts had tokens."""
        return layer_rows(self.loads)

    @cached_property
    def totals(self) -> RunTotals:
        """Numbers of the whole run."""
        times, idle = self.times, defaultdict[str, float](float)
        for one in times:
            for rank in one.ranks.values():
                for cause, length in rank.idle_ms.items():
                    idle[cause] += length / rank.window_ms / len(one.ranks) / len(times)
        mean, window, ideal = (
            statistics.fmean(column)
            for column in zip(*((t.total_ms, t.window_ms, t.ideal_ms) for t in times), strict=True)
        )
        return RunTotals(
            iteration_ms=statistics.median(t.total_ms for t in times),
            mean_ms=mean,
            window_ms=window,
            ideal_ms=ideal,
            ideal_ratio=window / ideal if ideal else 0.0,
            tail_ms=mean - window,
            bubble=statistics.fmean(t.bubble for t in times),
            bubble_by_cause=dict(sorted(idle.items(), key=lambda item: -item[1])),
        )

    @property
    def facts(self) -> dict[str, Any]:
        """Place and layout of the run, with the microbatches of its first iteration."""
        first, layout, work = self.files[0], self.files[0].layout, self.works[0]
        groups = next(filter(None, work.groups.values()), ())
        counts = [len(times) for kinds in work.tasks.values() for times in kinds.values()]
        return {
            "directory": str(first.path.parent),
            "schedule": layout.schedule,
            "data": layout.data_size,
            "pipeline": layout.pipeline_size,
            "tensor": layout.tensor_size,
            "context": layout.context_size,
            "chunks": layout.num_chunks,
            "microbatches": len(groups) or max(counts),
            "sliced": self.sliced,
            "started": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(first.start_unix_ns / 1e9)),
            "device": first.device,
            "hosts": sorted({file.host for file in self.files}),
            "skipped": self.skipped,
            "clock_uncertainty_us": self.alignment.uncertainty_ns / 1000,
            "cut_short": self.cut_short,
        }

    def numbers(self) -> dict[str, Any]:
        """As JSON."""
        name_of = self.shape.name_of
        rows: dict[str, list[Any]] = {
            name: [asdict(row) for row in getattr(self, name)]
            for name in ("experts", "stragglers", "without_effect", "what_if")
        }
        return {
            "run": self.facts,
            "totals": asdict(self.totals) | {"stragglers": len(self.stragglers)},
            "iterations": [
                {"iteration": t.number, "total_ms": t.total_ms, "bubble": t.bubble}
                for t in self.times
            ],
            "ranks": [{"name": name_of(row.rank), **asdict(row)} for row in self.ranks],
            **rows,
            "fidelity": self.fidelity,
        }

    def find_culprits(self, threshold: float = SLOW) -> None:
        """Look for stragglers over all iterations taken."""
        waits = {
            rank: sum(times.ranks[rank].idle_ms.get(IdleCause.MESSAGE, 0.0) for times in self.times)
            for rank in self.shape.pipeline
        }
        search = StragglerSearch(self.shape, self.works, self.links, waits, threshold=threshold)
        self.culprits = search.find()

    def typical(self) -> IterationTimes:
        """The iteration whose duration is the median."""
        ordered = sorted(self.times, key=lambda times: times.total_ms)
        return ordered[(len(ordered) - 1) // 2]


def analyse(files: list[TraceFile], alignment: Alignment, *, threshold: float = SLOW) -> Analysis:
    """Read a run and look for stragglers. The first of three iterations or more, which builds
    kernels and pools, is left out.

    Args:
        files, alignment: of the run.
        threshold: factor above the expected time that makes a rank or stage a straggler.

    Raises:
        DataError: no iteration was finished by every rank.
    """
    iterations = read_iterations(files, alignment)
    first = list(itertools.islice(iterations, 3))
    if not first:
        raise DataError(
            f"{files[0].path.parent}: no iteration that all {len(files)} ranks finished"
        )
    skipped = first[:1] if len(first) > 2 else []
    analysis = Analysis(files, JobShape.of(files), alignment, [each.number for each in skipped])
    for iteration in itertools.chain(first[len(skipped) :], iterations):
        analysis.add(iteration)
    analysis.find_culprits(threshold)
    return analysis

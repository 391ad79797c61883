"""The contents of a report: typed, filled by the analysis, read by sentences and page.

Units are in the names of the fields. Values are means per iteration unless they say otherwise.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megatron.dpp.report.analysis.stragglers import Culprit


@dataclass(frozen=True)
class TracedRun:
    """Facts of a traced run.

    Args:
        schedule: ``dpp`` or ``pp``.
        data, pipeline, tensor, context: sizes of the groups.
        microbatches: of the first iteration.
        sliced: microbatches were slices of sequences in some iteration.
        skipped: iterations that count nowhere.
        cut_short: ranks whose files have no end.
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


@dataclass(frozen=True)
class Totals:
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
    """One rank, by its place (``stage 1, replica 0 (rank 2)``), and its times; ``peaks`` are the
    largest values of its counters.
    """

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


@dataclass(frozen=True)
class LayerRow:
    """Experts of one layer: imbalances are tokens of the fullest over the mean, ``lost_ms`` is per
    forward.
    """

    layer: int
    group_size: int
    imbalance: float
    rank_imbalance: float
    lost_ms: float


@dataclass(frozen=True)
class Finding:
    """A culprit in words, and the share of an iteration that it costs (None: not simulated)."""

    culprit: Culprit
    where: str
    text: str
    effect: float | None

    def numbers(self) -> dict[str, Any]:
        """As JSON."""
        own = {"name": self.where, "text": self.text, "effect": self.effect}
        return asdict(self.culprit) | own


@dataclass(frozen=True)
class Prediction:
    """Time of an iteration as measured, and as simulated with a change."""

    name: str
    now_ms: float
    then_ms: float

    @property
    def gain(self) -> float:
        """Share of the iteration's time that is saved; negative for a loss."""
        return 1.0 - self.then_ms / self.now_ms if self.now_ms else 0.0

    def numbers(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self) | {"gain": self.gain}


@dataclass(frozen=True)
class OtherOrder:
    """The same tasks under the other schedule, ``static`` or ``dynamic``: idle share of the
    pipeline, and its time over the measured one.
    """

    schedule: str
    bubble: float
    stretched: float


@dataclass
class Pipeline:
    """Numbers of a run's traces. ``shown`` is the iteration of the timeline, whose rows are the
    ranks of ``ranks`` in order.
    """

    run: TracedRun
    totals: Totals
    iterations: list[IterationRow]
    ranks: list[RankRow]
    experts: list[LayerRow]
    stragglers: list[Finding] = field(default_factory=list)
    without_effect: list[Finding] = field(default_factory=list)
    what_if: list[Prediction] = field(default_factory=list)
    fidelity: float = 0.0
    other_order: OtherOrder | None = None

    @property
    def name(self) -> str:
        """``dynamic`` or ``static``."""
        return "dynamic" if self.run.schedule == "dpp" else "static"

    def numbers(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self) | {
            name: [each.numbers() for each in getattr(self, name)]
            for name in ("stragglers", "without_effect", "what_if")
        }


@dataclass
class Training:
    """The metrics of a run, and what its directory tells of it.

    Args:
        home: the run's directory.
        metrics: a line per training step, as ``megatron.dpp.metrics`` writes them.
        evaluations: (iteration, validation loss).
        flags: of the command that started it, and their values.
        state: in words; empty where unknown.
        runs: it goes on.
        checkpoint: iteration of the last checkpoint.
    """

    home: Path
    metrics: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[tuple[int, float]] = field(default_factory=list)
    flags: dict[str, str] = field(default_factory=dict)
    state: str = ""
    runs: bool = False
    checkpoint: int | None = None

    @property
    def iteration(self) -> int:
        """The last iteration; 0 before the first."""
        return int(self.metrics[-1]["iteration"]) if self.metrics else 0

    @property
    def total(self) -> int | None:
        """Iterations that the run shall have; None where unknown."""
        return self.metrics[-1].get("train_iters") if self.metrics else None

    @property
    def seconds_left(self) -> float | None:
        """Time to the last iteration, at the median of the last 20; None where it is unknown, and
        for a run that has ended.
        """
        recent = self.series("ms")[1][-20:]
        if not recent or self.total is None or not self.runs:
            return None
        return max(self.total - self.iteration, 0) * statistics.median(recent) / 1e3

    @property
    def progress(self) -> str:
        """``iteration 40 of 100``."""
        total = f" of {self.total}" if self.total else ""
        return f"iteration {self.iteration}{total}" if self.metrics else "no iteration yet"

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """Iterations and values of a metric, without those that are missing; ``tokens/s`` is one,
        too.
        """
        found = []
        for line in self.metrics:
            value = line.get(name)
            if name == "tokens/s" and line.get("ms") and line.get("tokens"):
                value = line["tokens"] / line["ms"] * 1e3
            if isinstance(value, int | float) and math.isfinite(value):
                found.append((line["iteration"], float(value)))
        return [x for x, _ in found], [y for _, y in found]

    def median(self, name: str) -> float | None:
        """The median of a metric, None where there is none."""
        values = self.series(name)[1]
        return statistics.median(values) if values else None

    def last(self, name: str) -> float | None:
        """The last value of a metric, None where there is none."""
        values = self.series(name)[1]
        return values[-1] if values else None

    def numbers(self) -> dict[str, Any]:
        """As JSON, without the series."""
        return {
            "iteration": self.iteration,
            "train_iters": self.total,
            "state": self.state,
            "loss": self.last("loss"),
            "tokens/s": self.median("tokens/s"),
            "flags": self.flags,
        }


@dataclass(frozen=True)
class Difference:
    """Two runs' metrics, step by step.

    Args:
        common: steps that both have.
        equal: metrics that are equal in all of them, bit by bit.
        largest: the others, and their largest difference.
    """

    common: int
    equal: list[str]
    largest: dict[str, float]


@dataclass
class Report:
    """All that is known of a run, and of a baseline to set beside it.

    Args:
        training: its metrics.
        pipeline: its traces, None without any.
        baseline: the other run, without a baseline of its own.
        difference: of the two runs' metrics.
        sentences: the findings in words, most important first.
        timeline: one iteration as a picture, SVG.
    """

    training: Training
    pipeline: Pipeline | None = None
    baseline: Report | None = None
    difference: Difference | None = None
    sentences: list[str] = field(default_factory=list)
    timeline: str = ""

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

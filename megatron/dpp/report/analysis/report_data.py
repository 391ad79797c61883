"""The contents of a report: typed, filled by the analysis, read by sentences, pictures and page.

Units are in the names of the fields. Values are means per iteration unless they say otherwise, so
that a total is the mean times the number of iterations.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megatron.dpp.report.analysis.stragglers import Culprit

Slice = tuple[int, float, float, str, str, str]
"""Track, start and end in us, class (a kind of task, a cause, ``span``), name, detail."""


@dataclass(frozen=True)
class TracedRun:
    """Facts of a traced run. ``schedule`` is ``dpp`` or ``pp``. Data, pipeline, tensor are sizes;
    ``microbatches`` and the ``slices`` into which they are cut (0: none) are those of the first
    iteration, ``sliced`` holds for any; ``skipped`` iterations count nowhere; ranks that are
    ``cut_short`` have no end.
    """

    directory: str
    schedule: str
    data: int
    pipeline: int
    tensor: int
    chunks: int
    microbatches: int
    slices: int
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
    stragglers: int


@dataclass(frozen=True)
class IterationRow:
    """One iteration; ``expert_imbalance`` is that of its worst layer."""

    iteration: int
    total_ms: float
    window_ms: float
    ideal_ms: float
    bubble: float
    expert_imbalance: float | None


@dataclass(frozen=True)
class RankRow:
    """One rank, its place in the job, and its times."""

    rank: int
    data: int
    pipeline: int
    tensor: int
    busy_ms: float
    kinds_ms: dict[str, float]
    other_ms: float
    idle_ms: dict[str, float]
    tail_ms: dict[str, float]
    bubble: float
    compute_ratio: float
    compute_window_ms: float
    sending_ratio: float
    sending_ms: float
    overlap: float
    sent_bytes: float
    peaks: dict[str, float]
    differing_decisions: float


@dataclass(frozen=True)
class LinkRow:
    """One directed pair of ranks."""

    source: int
    destination: int
    kind: str
    messages: float
    bytes: float
    delay_us: float
    p95_us: float
    bandwidth_mb_s: float
    measured_while_waiting: float


@dataclass(frozen=True)
class LayerRow:
    """Experts of one layer: imbalances are tokens of the fullest over the mean, ``lost_ms`` is per
    forward.
    """

    layer: int
    ranks: list[int]
    group_size: int
    imbalance: float
    worst: float
    rank_imbalance: float
    lost_ms: float


@dataclass(frozen=True)
class Finding:
    """A culprit, its place, and the share of an iteration that it costs (None: not simulated)."""

    culprit: Culprit
    where: str
    text: str
    effect: float | None

    def numbers(self) -> dict[str, Any]:
        """As JSON."""
        culprit = asdict(self.culprit) | {"name": self.where}
        return culprit | {"text": self.text, "effect": self.effect}


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


@dataclass(frozen=True)
class SizeClass:
    """Microbatches of up to so many tokens: their count, mean tokens, and microseconds per token of
    each kind of task.
    """

    up_to: int
    microbatches: int
    tokens: float
    F: float | None
    B: float | None
    W: float | None


@dataclass(frozen=True)
class PlanRow:
    """A step as simulated under a schedule and an order. ``ran`` marks the run's own; ``saves`` is
    the share of that one's time, ``gain`` is over the first row.
    """

    schedule: str
    plan: str
    seconds: float
    ran: bool
    saves: float
    gain: float


@dataclass(frozen=True)
class Lengths:
    """Sequences of unlike length: what padding costs, and what other plans would save."""

    iteration: int
    tokens_per_step: float
    padding: float
    longest: int
    costs: dict[str, Any] | None
    size_classes: list[SizeClass]
    gains: list[PlanRow]
    sentence: str
    gains_sentence: str


@dataclass(frozen=True)
class Timeline:
    """One iteration as slices, of the ranks ``ranks`` from top to bottom."""

    iteration: int
    ranks: list[int]
    length_us: float
    slices: list[Slice]


@dataclass
class Pipeline:
    """Numbers of a run's traces."""

    run: TracedRun
    totals: Totals
    iterations: list[IterationRow]
    ranks: list[RankRow]
    links: list[LinkRow]
    experts: list[LayerRow]
    stragglers: list[Finding] = field(default_factory=list)
    without_effect: list[Finding] = field(default_factory=list)
    what_if: list[Prediction] = field(default_factory=list)
    fidelity: float = 0.0
    other_order: OtherOrder | None = None
    timeline: Timeline | None = None
    lengths: Lengths | None = None

    @property
    def name(self) -> str:
        """``dynamic`` or ``static``."""
        return "dynamic" if self.run.schedule == "dpp" else "static"

    def row(self, rank: int) -> RankRow:
        """The row of a global rank."""
        return next(row for row in self.ranks if row.rank == rank)

    def numbers(self) -> dict[str, Any]:
        """As JSON, without the timeline."""
        shallow = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        del shallow["timeline"]
        return {name: _plain(value) for name, value in shallow.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, Finding | Prediction):
        return value.numbers()
    return asdict(value) if dataclasses.is_dataclass(value) else value  # type: ignore[arg-type]


@dataclass
class Training:
    """The metrics and settings of a run.

    Args:
        home: the run's directory.
        metrics: a line per iteration.
        model: its sizes in words; empty where unknown.
        flags: those that were given, and their values.
        total: iterations that the run shall have, None where unknown.
        checkpoints: iterations of its checkpoints.
    """

    home: Path
    metrics: list[dict[str, Any]] = field(default_factory=list)
    model: str = ""
    flags: dict[str, Any] = field(default_factory=dict)
    total: int | None = None
    checkpoints: list[int] = field(default_factory=list)

    @property
    def iteration(self) -> int:
        """The last iteration; 0 before the first."""
        return int(self.metrics[-1]["iteration"]) if self.metrics else 0

    @property
    def seconds_left(self) -> float | None:
        """Time to the last iteration, at the median of the last 20; None where unknown."""
        recent = self.series("seconds")[1][-20:]
        if not recent or self.total is None:
            return None
        return max(self.total - self.iteration, 0) * statistics.median(recent)

    @property
    def progress(self) -> str:
        """``iteration 40 of 100``."""
        total = f" of {self.total}" if self.total else ""
        return f"iteration {self.iteration}{total}" if self.metrics else "no iteration yet"

    def series(self, name: str) -> tuple[list[float], list[float]]:
        """Iterations and values of a metric, without those that are missing or not finite."""
        found = [
            (line["iteration"], line[name])
            for line in self.metrics
            if isinstance(line.get(name), (int, float)) and math.isfinite(line[name])
        ]
        return [x for x, _ in found], [y for _, y in found]

    def median(self, name: str) -> float | None:
        """The median of a metric, None where there is none."""
        values = self.series(name)[1]
        return statistics.median(values) if values else None

    @property
    def loss_name(self) -> str:
        """The first metric that is a loss; ``lm loss`` of GPT."""
        names = [name for line in self.metrics[-1:] for name in line if name.endswith("loss")]
        return names[0] if names else "lm loss"

    @property
    def last_loss(self) -> float | None:
        """The loss of the last iteration that has one."""
        values = self.series(self.loss_name)[1]
        return values[-1] if values else None


@dataclass
class Report:
    """All that is known of a run, and of others to set beside it.

    Args:
        training: its metrics and settings.
        pipeline: its traces, None without any.
        others: further runs, without others of their own.
        sentences: the findings in words, most important first.
    """

    training: Training
    pipeline: Pipeline | None = None
    others: list[Report] = field(default_factory=list)
    sentences: list[str] = field(default_factory=list)

    def numbers(self) -> dict[str, Any]:
        """As JSON, without the series."""
        found = self.pipeline.numbers() if self.pipeline else {}
        found |= {"model": self.training.model, "flags": self.training.flags}
        if self.sentences:
            found["sentences"] = self.sentences
        if self.others:
            found["baseline"] = self.others[0].numbers()
        return found

"""Predictions of a change: a traced run's costs in the simulator, with something changed.

The recorded task times and link delays become the simulator's costs, task by task and message by
message, with the host's time between tasks. The run as it was is replayed in its recorded order;
the ratio of that time to the measured one is taken to stay. A change is simulated with new
decisions. The time after the last task (gradient reduction, optimizer) is taken to stay.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence

from megatron.dpp.errors import ConfigError
from megatron.dpp.report.analysis import work
from megatron.dpp.report.analysis.report_data import Prediction
from megatron.dpp.report.analysis.sentences import EVEN_LAYERS
from megatron.dpp.report.analysis.stragglers import Culprit
from megatron.dpp.report.analysis.work import Cell, JobShape
from megatron.dpp.report.recorded import SECOND, Recorded
from megatron.dpp.schedule import Kind
from megatron.dpp.sim.schedules import ScheduleConfig

_MOST_ITERATIONS = 5
_UNSTEADY = ("jitter", "transient")
_STRIDE = 7919
"""Step through undisturbed times; a prime, so that it reaches all of them."""


Change = Callable[[Recorded], Recorded]


def _tables(change: Callable[[Recorded, int, int, list[float]], list[float]]) -> Change:
    """A change of task times: ``change(run, kind, stage, row)`` gives a stage's new times."""

    def apply(run: Recorded) -> Recorded:
        tables = [
            [change(run, kind, stage, row) for stage, row in enumerate(table)]
            for kind, table in enumerate(run.tasks)
        ]
        first, second, third = tables
        return dataclasses.replace(run, tasks=(first, second, third))

    return apply


def without_rank(place: int, num_ranks: int, factor: float) -> Change:
    """Makes the rank at ``place`` of the pipeline ``factor`` times faster."""
    return _tables(
        lambda _, kind, stage, row: [t / factor for t in row] if stage % num_ranks == place else row
    )


def without_heavy_stage(heavy: int) -> Change:
    """Makes stage ``heavy`` as fast as the typical other stage."""

    def change(run: Recorded, kind: int, stage: int, row: list[float]) -> list[float]:
        others = [statistics.median(r) for s, r in enumerate(run.tasks[kind]) if s != heavy]
        typical, own = statistics.median(others), statistics.median(row)
        return [t * typical / own for t in row] if stage == heavy and own else row

    return _tables(change)


def without_link(places: tuple[int, int]) -> Change:
    """Makes messages between two ranks of the pipeline as fast as on the typical other hop."""

    def apply(run: Recorded) -> Recorded:
        p = run.shape.num_ranks
        mine = {s for s in range(len(run.hops)) if {s % p, (s + 1) % p} == set(places)}
        others = [hop for s, hop in enumerate(run.hops) if s not in mine]
        typical = statistics.median(others) if others else 0.0
        even = [typical] * run.shape.num_microbatches
        return dataclasses.replace(
            run,
            hops=[typical if s in mine else hop for s, hop in enumerate(run.hops)],
            delays=[(even, even) if s in mine else own for s, own in enumerate(run.delays)],
        )

    return apply


def _undisturbed(times: Sequence[float]) -> list[float]:
    """The undisturbed ones of some tasks' times, sorted: those no further above the undisturbed
    time than the fastest is below it.
    """
    ordered = sorted(times)
    middle = ordered[int(len(ordered) * work.UNDISTURBED)]
    return [time for time in ordered if time <= 2 * middle - ordered[0]]


def without_jitter(runs: Sequence[Recorded], places: Collection[int]) -> Change:
    """Gives disturbed tasks of the ranks at ``places`` undisturbed times of their kind and stage,
    over all ``runs``. Some spread is in every run.
    """
    num_ranks = runs[0].shape.num_ranks

    def change(_: Recorded, kind: int, stage: int, row: list[float]) -> list[float]:
        if stage % num_ranks not in places:
            return row
        calm = _undisturbed([t for run in runs for t in run.tasks[kind][stage]])
        return [t if t <= calm[-1] else calm[_STRIDE * i % len(calm)] for i, t in enumerate(row)]

    return _tables(change)


def without_imbalance(ranks: Sequence[int], lost: Mapping[Cell, float]) -> Change:
    """Gives all ranks of an expert-parallel group as many tokens. ``lost`` is the ns that this
    saves in a forward, by (rank, chunk); B and W save as much each, in one task or in two.
    """

    def change(run: Recorded, kind: int, stage: int, row: list[float]) -> list[float]:
        chunk, place = divmod(stage, len(ranks))
        fused = kind == Kind.B and not run.split
        saved = lost.get((ranks[place], chunk), 0.0) * (2 if fused else 1) / SECOND
        return [max(time - saved, 0.0) for time in row]

    return _tables(change)


def balanced(slowness: Sequence[float]) -> Change:
    """Spreads the same work evenly over the stages, as another layout of the layers would.

    ``slowness`` is the factor by which the rank at each place is slower than the others; it stays.
    """

    places = len(slowness)

    def change(run: Recorded, kind: int, stage: int, row: list[float]) -> list[float]:
        means = [statistics.fmean(r) / slowness[s % places] for s, r in enumerate(run.tasks[kind])]
        even, own = statistics.fmean(means), means[stage]
        return [t * even / own for t in row] if own else row

    return _tables(change)


def schedule_of(run: Recorded) -> ScheduleConfig:
    """A run's schedule, by the order of its tasks."""
    return ScheduleConfig(
        policy=run.policy, cap="auto", split_backward=run.split, w_pieces=run.num_pieces
    )


class WhatIf:
    """Predictions for one recorded pipeline.

    Args:
        runs: its costs in some iterations, one at least (a few are enough).
    """

    def __init__(self, runs: Sequence[Recorded]) -> None:
        self.runs, self.config = runs[-_MOST_ITERATIONS:], schedule_of(runs[-1])
        self._base = [run.replayed() for run in self.runs]

    @property
    def fidelity(self) -> float:
        """Replayed over measured time of the unchanged pipeline; near 1 where the costs explain
        it."""
        measured = sum(run.window for run in self.runs)
        return sum(self._base) / measured if measured else 0.0

    def stretched(self, config: ScheduleConfig) -> float:
        """Time of the pipeline under another schedule, over that of the recorded order.

        Raises:
            ConfigError: the schedule is impossible for this shape.
        """
        other = sum(config.run(run.shape, run.costs()).makespan for run in self.runs)
        return other / sum(self._base)

    def in_recorded_order(self, name: str, change: Change) -> Prediction:
        """Iteration time with a change of the costs, and every rank's tasks in the order in which
        they ran.
        """
        return self._outcome(name, lambda run: change(run).replayed())

    def predict(
        self, name: str, change: Change | None = None, config: ScheduleConfig | None = None
    ) -> Prediction:
        """Iteration time with a change of the costs, of the schedule, or of both.

        Raises:
            ConfigError: the schedule is impossible for this shape (its cap is too small).
        """

        def makespan(run: Recorded) -> float:
            changed = change(run) if change else run
            return (config or self.config).run(changed.shape, changed.costs()).makespan

        return self._outcome(name, makespan)

    def _outcome(self, name: str, makespan: Callable[[Recorded], float]) -> Prediction:
        """``makespan``: of a run's pipeline with the change, as simulated."""
        now = then = 0.0
        for run, base in zip(self.runs, self._base, strict=True):
            now += run.window + run.tail
            then += run.window * makespan(run) / base + run.tail
        return Prediction(name, now / len(self.runs) * 1e3, then / len(self.runs) * 1e3)


def removal(culprit: Culprit, runs: Sequence[Recorded], ranks: Sequence[int]) -> Change | None:
    """The change that removes a culprit; None if it is not in the pipeline of ``ranks``."""
    places = {rank: place for place, rank in enumerate(ranks)}
    if culprit.link is not None:
        if not set(culprit.link) <= places.keys():
            return None
        return without_link((places[culprit.link[0]], places[culprit.link[1]]))
    if culprit.rank is None:
        return without_jitter(runs, range(len(ranks)))
    if culprit.rank not in places:
        return None
    place = places[culprit.rank]
    if culprit.kind == "slow-rank":
        return without_rank(place, len(ranks), culprit.factor)
    if culprit.chunk is not None:
        return without_heavy_stage(culprit.chunk * len(ranks) + place)
    return without_jitter(runs, [place])


def effects(
    what_if: WhatIf, culprits: Sequence[Culprit], ranks: Sequence[int]
) -> list[float | None]:
    """Share of an iteration that each culprit costs: the gain of its removal, alone or after all
    others', whichever is more (of two equally slow ranks, one alone gains nothing). None for a
    culprit that is not in the pipeline of ``ranks``.
    """
    changes = [removal(culprit, what_if.runs, ranks) for culprit in culprits]
    order = sorted(range(len(culprits)), key=lambda index: culprits[index].kind not in _UNSTEADY)

    def without(left: Collection[int]) -> Change:
        def apply(run: Recorded) -> Recorded:
            for index in order:
                change = changes[index]
                if change is not None and index not in left:
                    run = change(run)
            return run

        return apply

    all_gone = what_if.predict("", without(())).then_ms
    found: list[float | None] = []
    for index, change in enumerate(changes):
        if change is None:
            found.append(None)
            continue
        alone = what_if.predict("", change).gain
        last = what_if.predict("", without({index}))
        found.append(max(alone, (last.then_ms - all_gone) / last.now_ms if last.now_ms else 0.0))
    return found


def opposite(run: Recorded, config: ScheduleConfig) -> ScheduleConfig:
    """Megatron's static order for a run of the dynamic schedule, and the other way round."""
    policy = "megatron" if run.dynamic else "dynamic"
    return dataclasses.replace(
        config, policy=policy, cap="auto", split_backward=run.split and not run.dynamic
    )


def other_schedules(
    run: Recorded, config: ScheduleConfig, slowness: Sequence[float]
) -> list[tuple[str, Change | None, ScheduleConfig]]:
    """Other policies and caps, split or fused, and even layers."""
    split = run.split

    def like(policy: str, *, split: bool, cap: str = "auto") -> ScheduleConfig:
        """Another schedule, with as many pieces of W."""
        return dataclasses.replace(config, policy=policy, cap=cap, split_backward=split)

    configs = [
        ("dynamic schedule", like("dynamic", split=split)),
        ("Megatron's static order", like("megatron", split=False)),
        ("dynamic, fused backward", like("dynamic", split=False)),
        *(
            (f"dynamic, cap {cap}", like("dynamic", cap=cap, split=split))
            for cap in ("strict", "1.5p", "2p")
        ),
    ]
    changes: list[tuple[str, Change | None, ScheduleConfig]] = [
        (name, None, other) for name, other in configs if other != config
    ]
    changes.append((EVEN_LAYERS, balanced(slowness), config))
    return changes


def predict_all(what_if: WhatIf, culprits: Sequence[Culprit], shape: JobShape) -> list[Prediction]:
    """Predictions for the removal of every culprit and for every other schedule that is
    possible."""
    predictions, ranks = [], shape.pipelines()[0]
    for culprit in culprits:
        change = removal(culprit, what_if.runs, ranks)
        if change is not None:
            name = f"without {culprit.kind} ({culprit.where(shape)})"
            predictions.append(what_if.predict(name, change))
    slow = {culprit.rank: culprit.factor for culprit in culprits if culprit.kind == "slow-rank"}
    slowness = [slow.get(rank, 1.0) for rank in ranks]
    for name, change, other in other_schedules(what_if.runs[-1], what_if.config, slowness):
        try:
            predictions.append(what_if.predict(name, change, other))
        except ConfigError:
            continue
    return predictions

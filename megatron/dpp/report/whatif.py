"""Predictions of a change: a traced run's costs in the simulator, with something changed.

The recorded task times and link delays become the simulator's costs, task by task and message by
message, with the host's time between tasks. The run as it was is replayed in its recorded order;
the ratio of that time to the measured one is taken to stay. A change is simulated with new
decisions. The time after the last task (gradient reduction, optimizer) is taken to stay.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np

from megatron.dpp.errors import ConfigError
from megatron.dpp.report.analysis.places import JobShape
from megatron.dpp.report.analysis.sentences import EVEN_LAYERS
from megatron.dpp.report.analysis.stragglers import Culprit
from megatron.dpp.report.analysis.summary import Prediction
from megatron.dpp.report.analysis.work import UNDISTURBED, Cell
from megatron.dpp.report.recorded import SECOND, Recorded, Times
from megatron.dpp.sim.schedules import ScheduleConfig

_MOST_ITERATIONS = 5
_UNSTEADY = ("jitter", "transient")
_STRIDE = 7919
"""Step through undisturbed times; a prime, so that it reaches all of them."""

Change = Callable[[Recorded], Recorded]


def _retimed(edit: Callable[[Times, Recorded], None]) -> Change:
    """A change of task times, which ``edit`` makes in place."""

    def change(run: Recorded) -> Recorded:
        tasks = run.tasks.copy()
        edit(tasks, run)
        return replace(run, tasks=tasks)

    return change


def _ratio(wanted: Times, present: Times) -> Times:
    """``wanted / present``, 1 where there is nothing present."""
    return np.divide(wanted, present, out=np.ones_like(present), where=present > 0)


def without_rank(place: int, num_ranks: int, factor: float) -> Change:
    """Makes the rank at ``place`` of the pipeline ``factor`` times faster."""

    def edit(tasks: Times, _: Recorded) -> None:
        tasks[:, place::num_ranks] /= factor

    return _retimed(edit)


def without_heavy_stage(heavy: int) -> Change:
    """Makes stage ``heavy`` as fast as the typical other stage."""

    def edit(tasks: Times, _: Recorded) -> None:
        stages = np.median(tasks, axis=2)
        typical = np.median(np.delete(stages, heavy, axis=1), axis=1)
        tasks[:, heavy] *= _ratio(typical, stages[:, heavy])[:, None]

    return _retimed(edit)


def without_link(places: tuple[int, int]) -> Change:
    """Makes messages between two ranks of the pipeline as fast as on the typical other hop."""

    def change(run: Recorded) -> Recorded:
        p, hops, delays = run.shape.num_ranks, run.hops.copy(), run.delays.copy()
        slow = [{s % p, (s + 1) % p} == {*places} for s in range(len(hops))]
        others = np.delete(hops, slow)
        hops[slow] = delays[slow] = np.median(others) if others.size else 0.0
        return replace(run, hops=hops, delays=delays)

    return change


def without_jitter(runs: Sequence[Recorded], places: Collection[int]) -> Change:
    """Gives disturbed tasks of the ranks at ``places`` undisturbed times of their kind and stage,
    over all ``runs``: those no further above the undisturbed time than the fastest is below it.
    """
    num_ranks = runs[0].shape.num_ranks

    def edit(tasks: Times, _: Recorded) -> None:
        for kind, stage in itertools.product(*map(range, tasks.shape[:2])):
            if stage % num_ranks in places:
                seen = np.sort([run.tasks[kind, stage] for run in runs], axis=None)
                calm = seen[seen <= 2 * seen[int(len(seen) * UNDISTURBED)] - seen[0]]
                row = tasks[kind, stage]
                drawn = calm[_STRIDE * np.arange(len(row)) % len(calm)]
                tasks[kind, stage] = np.where(row <= calm[-1], row, drawn)

    return _retimed(edit)


def without_imbalance(ranks: Sequence[int], lost: Mapping[Cell, float]) -> Change:
    """Gives all ranks of an expert-parallel group as many tokens. ``lost`` is the ns that this
    saves in a forward, by (rank, chunk); B and W save as much each, in one task or in two.
    """

    def edit(tasks: Times, run: Recorded) -> None:
        chunks = range(run.shape.num_chunks)
        saved = np.array([lost.get((rank, chunk), 0.0) for chunk in chunks for rank in ranks])
        passes = np.array([1, 1 if run.split else 2, 1])
        tasks -= passes[:, None, None] * saved[None, :, None] / SECOND
        np.maximum(tasks, 0.0, out=tasks)

    return _retimed(edit)


def balanced(slowness: Sequence[float]) -> Change:
    """Spreads the same work evenly over the stages, as another layout of the layers would.

    ``slowness`` is the factor by which the rank at each place is slower than the others; it stays.
    """

    def edit(tasks: Times, run: Recorded) -> None:
        means = tasks.mean(axis=2) / np.tile(slowness, run.shape.num_chunks)
        even = np.broadcast_to(means.mean(axis=1, keepdims=True), means.shape)
        tasks *= _ratio(even, means)[:, :, None]

    return _retimed(edit)


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
        return sum(config.run(run.shape, run.costs()).makespan for run in self.runs) / sum(
            self._base
        )

    def predict(
        self,
        name: str,
        change: Change = lambda run: run,
        config: ScheduleConfig | None = None,
        *,
        in_recorded_order: bool = False,
    ) -> Prediction:
        """Iteration time with a change of the costs, of the schedule, or of both; or with every
        rank's tasks in the order in which they ran.

        Raises:
            ConfigError: the schedule is impossible for this shape (its cap is too small).
        """
        schedule, now, then = config or self.config, 0.0, 0.0
        for run, base in zip(self.runs, self._base, strict=True):
            changed = change(run)
            makespan = (
                changed.replayed()
                if in_recorded_order
                else schedule.run(changed.shape, changed.costs()).makespan
            )
            now += run.window + run.tail
            then += run.window * makespan / base + run.tail
        return Prediction(name, now / len(self.runs) * 1e3, then / len(self.runs) * 1e3)


def removal(culprit: Culprit, runs: Sequence[Recorded], ranks: Sequence[int]) -> Change | None:
    """The change that removes a culprit; None if it is not in the pipeline of ``ranks``."""
    where = culprit.link or [rank for rank in (culprit.rank,) if rank is not None]
    if not {*where} <= {*ranks}:
        return None
    places = [ranks.index(rank) for rank in where]
    if culprit.link is not None:
        return without_link((places[0], places[1]))
    if culprit.kind == "slow-rank":
        return without_rank(places[0], len(ranks), culprit.factor)
    if culprit.chunk is not None:
        return without_heavy_stage(culprit.chunk * len(ranks) + places[0])
    return without_jitter(runs, places or range(len(ranks)))


def effects(
    what_if: WhatIf, culprits: Sequence[Culprit], ranks: Sequence[int]
) -> list[float | None]:
    """Share of an iteration that each culprit costs: the gain of its removal, alone or after all
    others', whichever is more (of two equally slow ranks, one alone gains nothing). None for a
    culprit that is not in the pipeline of ``ranks``.
    """
    changes = [removal(culprit, what_if.runs, ranks) for culprit in culprits]
    order = sorted(range(len(culprits)), key=lambda index: culprits[index].kind not in _UNSTEADY)

    def without_all_but(left: int | None) -> Prediction:
        def apply(run: Recorded) -> Recorded:
            for index in order:
                change = changes[index]
                if change is not None and index != left:
                    run = change(run)
            return run

        return what_if.predict("", apply)

    gone = without_all_but(None).then_ms
    found: list[float | None] = []
    for index, change in enumerate(changes):
        if change is None:
            found.append(None)
            continue
        alone, last = what_if.predict("", change).gain, without_all_but(index)
        found.append(max(alone, (last.then_ms - gone) / last.now_ms if last.now_ms else 0.0))
    return found


def opposite(run: Recorded, config: ScheduleConfig) -> ScheduleConfig:
    """Megatron's static order for a run of the dynamic schedule, and the other way round."""
    policy = "megatron" if run.dynamic else "dynamic"
    split = run.split and not run.dynamic
    return replace(config, policy=policy, cap="auto", split_backward=split)


def predict_all(what_if: WhatIf, culprits: Sequence[Culprit], shape: JobShape) -> list[Prediction]:
    """Predictions for the removal of every culprit, for every other schedule that is possible
    (policies, caps, fused or split backward), and for even layers.
    """
    predictions, ranks = [], shape.pipelines()[0]
    for culprit in culprits:
        change = removal(culprit, what_if.runs, ranks)
        if change is not None:
            name = f"without {culprit.kind} ({culprit.where(shape)})"
            predictions.append(what_if.predict(name, change))
    split = what_if.runs[-1].split
    for name, policy, cap, wanted in (
        ("dynamic schedule", "dynamic", "auto", split),
        ("Megatron's static order", "megatron", "auto", False),
        ("dynamic, fused backward", "dynamic", "auto", False),
        *((f"dynamic, cap {cap}", "dynamic", cap, split) for cap in ("strict", "1.5p", "2p")),
    ):
        config = replace(what_if.config, policy=policy, cap=cap, split_backward=wanted)
        if config != what_if.config:
            try:
                predictions.append(what_if.predict(name, config=config))
            except ConfigError:
                continue
    slow = {culprit.rank: culprit.factor for culprit in culprits if culprit.kind == "slow-rank"}
    change = balanced([slow.get(rank, 1.0) for rank in ranks])
    return [*predictions, what_if.predict(EVEN_LAYERS, change)]

"""Predictions of a change: a traced run's costs in the simulator, with something changed.

The recorded task times and link delays become the simulator's costs, task by task and message by
message, with the host's time between tasks. The run as it was is replayed in its recorded order;
the ratio of that time to the measured one is taken to stay. A change is simulated with new
decisions. The time after the last task (gradient reduction, optimizer) is taken to stay.
"""

from __future__ import annotations

import functools
import itertools
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from megatron.dpp.errors import ConfigError
from megatron.dpp.report.analysis.model import JobShape
from megatron.dpp.report.analysis.sentences import DYNAMIC, EVEN_LAYERS, STATIC
from megatron.dpp.report.analysis.stragglers import Culprit
from megatron.dpp.report.analysis.summary import Analysis, PredictedTime
from megatron.dpp.report.analysis.times import (
    UNDISTURBED,
    Cell,
    IterationTimes,
    LinkDelays,
    TaskTimes,
)
from megatron.dpp.schedule import Action, Geometry, Kind, reference_order
from megatron.dpp.sim.costs import Costs, Hop, Shape
from megatron.dpp.sim.schedules import ScheduleConfig, replay
from megatron.dpp.trace.schema import IdleCause

SECOND = 1e9
"""Nanoseconds."""

TimeTable = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Recorded:
    """One pipeline's costs in one iteration, in seconds.

    Args:
        tasks: by kind (F, B, W), stage and microbatch.
        hops: the typical delay of each hop.
        delays: by hop, direction and microbatch: its own where a rank waited for it.
        orders: each rank's tasks as they ran.
        overhead: the host's time after each task, by rank.
        dynamic: the schedule was dynamic; otherwise Megatron's own.
        window, tail: time of the pipeline, and of what followed it.
    """

    shape: Shape
    tasks: TimeTable
    hops: TimeTable
    delays: TimeTable
    orders: list[list[Action]]
    overhead: list[float]
    dynamic: bool
    window: float
    tail: float

    def costs(self) -> Costs:
        """The simulator's input; the delays include queueing on links."""
        hops = [Hop(1.0, 0.0, tuple(delays)) for delays in self.delays.tolist()]
        forward, backward, weight = self.tasks.tolist()
        return Costs((forward, backward, weight), hops, overhead=dict(enumerate(self.overhead)))

    @property
    def split(self) -> bool:
        """Weight gradients were tasks of their own."""
        return bool(self.tasks[Kind.W].any())

    @property
    def num_pieces(self) -> int:
        """Pieces of a W, in the chunk that has most."""
        return 1 + max((action.piece for order in self.orders for action in order), default=0)

    @functools.cached_property
    def policy(self) -> str:
        """The built-in policy nearest to what ran: ``megatron`` where every rank kept that order,
        as ``auto`` does on two ranks, else ``dynamic``.
        """
        p, v, m = self.shape.num_ranks, self.shape.num_chunks, self.shape.num_microbatches
        kept = all(
            [action for action in order if action.kind is not Kind.W]
            == reference_order(Geometry(p, rank, v, m))
            for rank, order in enumerate(self.orders)
        )
        return "dynamic" if self.dynamic and not kept else "megatron"

    def replayed(self) -> float:
        """Makespan of the recorded order with these costs."""
        return replay(self.orders, self.costs(), self.shape.num_chunks)


def hop_delay(links: LinkDelays, ranks: Sequence[int], stage: int) -> float:
    """Delay of a hop in seconds. Of a link that no rank waited for only a bound is known; the other
    links' median is used if it is smaller.
    """
    a, b = ranks[stage % len(ranks)], ranks[(stage + 1) % len(ranks)]
    own = [links[link] for link in ((a, b), (b, a)) if link in links]
    clean = [samples.delay for samples in own if samples.clean]
    if clean:
        return statistics.fmean(clean) / SECOND
    bounds = [samples.delay for samples in own]
    usual = [samples.delay for samples in links.values() if samples.clean]
    bounds += [round(statistics.median(usual))] if usual else []
    return min(bounds, default=0) / SECOND


def _recorded(
    job: JobShape, ranks: Sequence[int], work: TaskTimes, links: LinkDelays, times: IterationTimes
) -> Recorded | None:
    """Costs of the pipeline of ``ranks`` (in order) in one iteration; None if tasks are missing."""
    p, stages = len(ranks), len(ranks) * job.num_chunks
    cells = [work.tasks.get((ranks[stage % p], stage // p), {}) for stage in range(stages)]
    count = len(cells[0].get("F", {}))
    rows = [[cell.get(kind.name, {}) for cell in cells] for kind in Kind]
    if any(len(row) not in ((count, 0) if kind == Kind.W else (count,))
           for kind in Kind for row in rows[kind]):  # fmt: skip
        return None
    ns = [[[row[i] for i in sorted(row)] or [0] * count for row in table] for table in rows]
    hops = [hop_delay(links, ranks, stage) for stage in range(stages - 1)]

    def delays(source: int, target: int, way: str, usual: float) -> list[float]:
        link = ranks[source % p], ranks[target % p]
        own = links[link].waited_for if link in links else {}
        keys = [(target // p, way, microbatch) for microbatch in range(count)]
        return [own[key] / SECOND if key in own else usual for key in keys]

    hosts = [times.ranks[rank].idle_ms.get(IdleCause.HOST, 0) / 1e3 for rank in ranks]
    return Recorded(
        Shape(p, job.num_chunks, count),
        np.array(ns).reshape(3, stages, count) / SECOND,
        np.array(hops),
        np.array(
            [
                (delays(s, s + 1, "forward", usual), delays(s + 1, s, "backward", usual))
                for s, usual in enumerate(hops)
            ]
        ),
        [[Action(Kind[k], *rest) for k, *rest in work.orders[rank]] for rank in ranks],
        [t / max(len(work.orders[rank]), 1) for t, rank in zip(hosts, ranks, strict=True)],
        dynamic=job.schedule == "dpp",
        window=times.window_ms / 1e3,
        tail=(times.total_ms - times.window_ms) / 1e3,
    )


def recorded_runs(analysis: Analysis) -> list[Recorded]:
    """Costs of the first pipeline in every iteration that is whole; none of a run in slices, whose
    memory a trace does not tell.
    """
    if analysis.sliced:
        return []
    ranks = analysis.shape.pipelines()[0]
    parts = zip(analysis.works, analysis.links, analysis.times, strict=True)
    runs = [_recorded(analysis.shape, ranks, *part) for part in parts]
    return [run for run in runs if run is not None]


_MOST_ITERATIONS = 5
_UNSTEADY = ("jitter", "transient")
_STRIDE = 7919
"""Step through undisturbed times; a prime, so that it reaches all of them."""

CostChange = Callable[[Recorded], None]
"""Changes task times and delays in place."""


def _ratio(wanted: TimeTable, present: TimeTable) -> TimeTable:
    """``wanted / present``, 1 where there is nothing present."""
    return np.divide(wanted, present, out=np.ones_like(present), where=present > 0)


def without_rank(place: int, num_ranks: int, factor: float) -> CostChange:
    """Makes the rank at ``place`` of the pipeline ``factor`` times faster."""

    def change(run: Recorded) -> None:
        run.tasks[:, place::num_ranks] /= factor

    return change


def without_heavy_stage(heavy: int) -> CostChange:
    """Makes stage ``heavy`` as fast as the typical other stage."""

    def change(run: Recorded) -> None:
        stages = np.median(run.tasks, axis=2)
        typical = np.median(np.delete(stages, heavy, axis=1), axis=1)
        run.tasks[:, heavy] *= _ratio(typical, stages[:, heavy])[:, None]

    return change


def without_link(places: tuple[int, int]) -> CostChange:
    """Makes messages between two ranks of the pipeline as fast as on the typical other hop."""

    def change(run: Recorded) -> None:
        p = run.shape.num_ranks
        slow = [{s % p, (s + 1) % p} == {*places} for s in range(len(run.hops))]
        others = np.delete(run.hops, slow)
        run.hops[slow] = run.delays[slow] = np.median(others) if others.size else 0.0

    return change


def without_jitter(runs: Sequence[Recorded], places: Collection[int]) -> CostChange:
    """Gives disturbed tasks of the ranks at ``places`` undisturbed times of their kind and stage,
    over all ``runs``: those no further above the undisturbed time than the fastest is below it.
    """
    num_ranks = runs[0].shape.num_ranks

    def change(run: Recorded) -> None:
        for kind, stage in itertools.product(*map(range, run.tasks.shape[:2])):
            if stage % num_ranks in places:
                seen = np.sort([other.tasks[kind, stage] for other in runs], axis=None)
                calm = seen[seen <= 2 * seen[int(len(seen) * UNDISTURBED)] - seen[0]]
                row = run.tasks[kind, stage]
                drawn = calm[_STRIDE * np.arange(len(row)) % len(calm)]
                run.tasks[kind, stage] = np.where(row <= calm[-1], row, drawn)

    return change


def without_imbalance(ranks: Sequence[int], lost: Mapping[Cell, float]) -> CostChange:
    """Gives all ranks of an expert-parallel group as many tokens. ``lost`` is the ns that this
    saves in a forward, by (rank, chunk); B and W save as much each, in one task or in two.
    """

    def change(run: Recorded) -> None:
        chunks = range(run.shape.num_chunks)
        saved = np.array([lost.get((rank, chunk), 0.0) for chunk in chunks for rank in ranks])
        passes = np.array([1, 1 if run.split else 2, 1])
        less = passes[:, None, None] * saved[None, :, None] / SECOND
        np.maximum(run.tasks - less, 0.0, out=run.tasks)

    return change


def with_even_layers(slowness: Sequence[float]) -> CostChange:
    """Spreads the same work evenly over the stages, as another layout of the layers would.

    ``slowness`` is the factor by which the rank at each place is slower than the others; it stays.
    """

    def change(run: Recorded) -> None:
        means = run.tasks.mean(axis=2) / np.tile(slowness, run.shape.num_chunks)
        even = np.broadcast_to(means.mean(axis=1, keepdims=True), means.shape)
        run.tasks[...] *= _ratio(even, means)[:, :, None]

    return change


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

    def predict(
        self,
        name: str,
        change: CostChange = lambda run: None,
        config: ScheduleConfig | None = None,
        *,
        in_recorded_order: bool = False,
    ) -> PredictedTime:
        """Iteration time with a change of the costs, of the schedule, or of both; or with every
        rank's tasks in the order in which they ran.

        Raises:
            ConfigError: the schedule is impossible for this shape (its cap is too small).
        """
        schedule, now, then = config or self.config, 0.0, 0.0
        for run, base in zip(self.runs, self._base, strict=True):
            times = {name: getattr(run, name).copy() for name in ("tasks", "hops", "delays")}
            changed = replace(run, **times)
            change(changed)
            makespan = (
                changed.replayed()
                if in_recorded_order
                else schedule.run(changed.shape, changed.costs()).makespan
            )
            now += run.window + run.tail
            then += run.window * makespan / base + run.tail
        return PredictedTime(name, now / len(self.runs) * 1e3, then / len(self.runs) * 1e3)


def removal(culprit: Culprit, runs: Sequence[Recorded], ranks: Sequence[int]) -> CostChange | None:
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

    def without_all_but(left: int | None) -> PredictedTime:
        def apply(run: Recorded) -> None:
            for index in order:
                change = changes[index]
                if change is not None and index != left:
                    change(run)

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


def predict_all(
    what_if: WhatIf, culprits: Sequence[Culprit], shape: JobShape
) -> list[PredictedTime]:
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
        (DYNAMIC, "dynamic", "auto", split),
        (STATIC, "megatron", "auto", False),
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
    change = with_even_layers([slow.get(rank, 1.0) for rank in ranks])
    return [*predictions, what_if.predict(EVEN_LAYERS, change)]

"""A traced pipeline's costs in one iteration, as the simulator takes them."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron.dpp.report.analysis.places import JobShape
from megatron.dpp.report.analysis.summary import Analysis
from megatron.dpp.report.analysis.times import IterationTimes
from megatron.dpp.report.analysis.work import Links, Work
from megatron.dpp.schedule import Action, Geometry, Kind, reference_order
from megatron.dpp.sim.costs import Costs, Hop, Shape
from megatron.dpp.sim.schedules import replay
from megatron.dpp.trace.vocabulary import IdleCause

SECOND = 1e9
"""Nanoseconds."""

Times = npt.NDArray[np.float64]


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
    tasks: Times
    hops: Times
    delays: Times
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


def hop_delay(links: Links, ranks: Sequence[int], stage: int) -> float:
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
    job: JobShape, ranks: Sequence[int], work: Work, links: Links, times: IterationTimes
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

    hosts = [times.ranks[rank].idle.get(IdleCause.HOST, 0) / SECOND for rank in ranks]
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
        window=times.window / SECOND,
        tail=(times.total - times.window) / SECOND,
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


def cost_file(runs: Sequence[Recorded]) -> dict[str, object]:
    """All samples as a cost file (``megatron.dpp.sim.measured``); task times include the host's,
    for which the file has no field.
    """
    shape, first = runs[0].shape, runs[0]

    def samples(kind: Kind, stage: int) -> list[float]:
        if kind is Kind.W and not first.split:
            return []
        host = [
            run.overhead[stage % shape.num_ranks] * (run.num_pieces if kind is Kind.W else 1)
            for run in runs
        ]
        added = [run.tasks[kind, stage] + more for run, more in zip(runs, host, strict=True)]
        return [float(time) for times in added for time in times]

    return {
        "format": "dpp-costs",
        "version": 1,
        "num_ranks": shape.num_ranks,
        "num_chunks": shape.num_chunks,
        "stages": [
            {kind.name: samples(kind, stage) for kind in Kind} for stage in range(shape.num_stages)
        ],
        "hops": [[float(run.hops[hop]) for run in runs] for hop in range(len(first.hops))],
        "run": {
            "seconds": [run.window for run in runs],
            "num_microbatches": shape.num_microbatches,
            "dynamic": first.dynamic,
        },
    }

"""A traced pipeline's costs in one iteration, as the simulator takes them."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.dpp.report.analysis import work
from megatron.dpp.report.analysis.link_times import Link, LinkSamples
from megatron.dpp.report.analysis.summary import Analysis
from megatron.dpp.report.analysis.times import IterationTimes
from megatron.dpp.report.analysis.work import Work
from megatron.dpp.schedule import Action, Geometry, Kind, reference_order
from megatron.dpp.sim.costs import Costs, Hop, Shape
from megatron.dpp.sim.schedules import replay
from megatron.dpp.trace.vocabulary import IdleCause

SECOND = 1e9
"""Nanoseconds."""

Table = list[list[float]]
"""Seconds by stage and microbatch."""


@dataclass(frozen=True)
class Recorded:
    """One pipeline's costs in one iteration, in seconds: ``tasks[kind][stage][microbatch]``.

    Args:
        hops: the typical delay of each hop.
        delays: per hop and direction, each microbatch's own where a rank waited for it.
        orders: each rank's tasks as they ran.
        overhead: the host's time after each task, by rank.
        split: weight gradients were tasks of their own.
        dynamic: the schedule was dynamic; otherwise Megatron's own.
        window, tail: time of the pipeline, and of what followed it.
    """

    shape: Shape
    tasks: tuple[Table, Table, Table]
    hops: list[float]
    delays: list[tuple[list[float], list[float]]]
    orders: list[list[Action]]
    overhead: list[float]
    split: bool
    dynamic: bool
    window: float
    tail: float

    def costs(self) -> Costs:
        """The simulator's input; the delays include queueing on links."""
        hops = [Hop(1.0, 0.0, delays) for delays in self.delays]
        return Costs(self.tasks, hops, overhead=dict(enumerate(self.overhead)))

    @property
    def num_pieces(self) -> int:
        """Pieces of a W, in the chunk that has most."""
        return 1 + max((action.piece for order in self.orders for action in order), default=0)

    @functools.cached_property
    def policy(self) -> str:
        """The built-in policy nearest to what ran: ``megatron`` where every rank kept that order,
        as ``auto`` does on two ranks, else ``dynamic``.
        """
        shape = self.shape
        geometries = [
            Geometry(shape.num_ranks, rank, shape.num_chunks, shape.num_microbatches)
            for rank in range(shape.num_ranks)
        ]
        kept = all(
            [action for action in order if action.kind is not Kind.W] == reference_order(geometry)
            for geometry, order in zip(geometries, self.orders, strict=False)
        )
        return "dynamic" if self.dynamic and not kept else "megatron"

    def replayed(self) -> float:
        """Makespan of the recorded order with these costs."""
        return replay(self.orders, self.costs(), self.shape.num_chunks)


def hop_delay(links: dict[Link, LinkSamples], ranks: Sequence[int], stage: int) -> float:
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
    if usual:
        bounds.append(round(statistics.median(usual)))
    return min(bounds, default=0) / SECOND


def message_delays(
    links: dict[Link, LinkSamples], ranks: Sequence[int], stage: int, num_microbatches: int
) -> tuple[list[float], list[float]]:
    """Delays of the messages between ``stage`` and the next, forward and back: their own where the
    receiver waited, else the hop's.
    """
    usual, size = hop_delay(links, ranks, stage), len(ranks)
    found = []
    for way, source, target in (("forward", stage, stage + 1), ("backward", stage + 1, stage)):
        samples = links.get((ranks[source % size], ranks[target % size]))
        own = samples.waited_for if samples else {}
        keys = [(target // size, way, microbatch) for microbatch in range(num_microbatches)]
        found.append([own[key] / SECOND if key in own else usual for key in keys])
    return found[0], found[1]


def recorded(
    job: work.JobShape,
    ranks: Sequence[int],
    work_: Work,
    links: dict[Link, LinkSamples],
    times: IterationTimes,
) -> Recorded | None:
    """Costs of the pipeline of ``ranks`` (in order) in one iteration; None if tasks are missing."""
    num_ranks, num_chunks = len(ranks), job.num_chunks
    tables: tuple[Table, Table, Table] = ([], [], [])
    num_microbatches = 0
    for stage in range(num_ranks * num_chunks):
        rank = ranks[stage % num_ranks]
        kinds = work_.tasks.get((rank, stage // num_ranks), {})
        num_microbatches = num_microbatches or len(kinds.get("F", {}))
        for kind, table in zip("FBW", tables, strict=True):
            found = kinds.get(kind, {})
            if len(found) != num_microbatches and not (kind == "W" and not found):
                return None
            row = [found[i] / SECOND for i in sorted(found)]
            table.append(row or [0.0] * num_microbatches)
    stages = range(num_ranks * num_chunks - 1)
    hosts = [times.ranks[rank].idle.get(IdleCause.HOST, 0) / SECOND for rank in ranks]
    return Recorded(
        Shape(num_ranks, num_chunks, num_microbatches),
        tables,
        [hop_delay(links, ranks, stage) for stage in stages],
        [message_delays(links, ranks, stage, num_microbatches) for stage in stages],
        [[Action(Kind[k], *rest) for k, *rest in work_.orders[rank]] for rank in ranks],
        [t / max(len(work_.orders[rank]), 1) for t, rank in zip(hosts, ranks, strict=True)],
        split=any(any(row) for row in tables[2]),
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
    runs = [recorded(analysis.shape, ranks, *part) for part in parts]
    return [run for run in runs if run is not None]


def cost_file(runs: Sequence[Recorded]) -> dict[str, object]:
    """All samples as a cost file (``megatron.dpp.sim.measured``)."""
    shape = runs[0].shape

    def samples(kind: Kind, stage: int) -> list[float]:
        """Task times with the host's time, for which the file has no field."""
        if kind is Kind.W and not runs[0].split:
            return []
        return [
            time + run.overhead[stage % shape.num_ranks] * (run.num_pieces if kind is Kind.W else 1)
            for run in runs
            for time in run.tasks[kind][stage]
        ]

    stages = [
        {kind.name: samples(kind, stage) for kind in Kind}
        for stage in range(shape.num_ranks * shape.num_chunks)
    ]
    hops = [[run.hops[hop] for run in runs] for hop in range(len(runs[0].hops))]
    return {
        "format": "dpp-costs",
        "version": 1,
        "num_ranks": shape.num_ranks,
        "num_chunks": shape.num_chunks,
        "stages": stages,
        "hops": hops,
        "run": {
            "seconds": [run.window for run in runs],
            "num_microbatches": shape.num_microbatches,
            "dynamic": runs[0].dynamic,
        },
    }

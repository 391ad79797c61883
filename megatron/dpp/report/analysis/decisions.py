"""Distance of a run's order of tasks from Megatron's static order."""

from __future__ import annotations

from megatron.dpp.report.analysis.model import RankIteration
from megatron.dpp.report.analysis.work import JobShape
from megatron.dpp.schedule import Geometry, reference_order


def differing_decisions(rank: RankIteration, shape: JobShape) -> int | None:
    """Forwards and backwards that were not the next of Megatron's order when they ran.

    None for an iteration without backwards, or with microbatches missing or twice.
    """
    order = [f"{t.chunk}{t.kind}{t.microbatch}" for t in rank.tasks if t.kind in "FB"]
    num_microbatches = 1 + max((task.microbatch for task in rank.tasks), default=-1)
    if len(order) != 2 * num_microbatches * shape.num_chunks or not order:
        return None
    place = shape.pipeline[rank.rank]
    geometry = Geometry(
        shape.num_ranks, place, shape.num_chunks, num_microbatches, groups=rank.groups
    )
    left = [str(action) for action in reference_order(geometry)]
    if sorted(left) != sorted(order):
        return None
    differing = 0
    for task in order:
        if left[0] != task:
            differing += 1
        left.remove(task)
    return differing

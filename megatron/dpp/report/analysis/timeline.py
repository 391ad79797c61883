"""One iteration as flat slices, for pictures."""

from __future__ import annotations

from megatron.dpp.report.analysis.model import Iteration, RankIteration
from megatron.dpp.report.analysis.places import slice_names
from megatron.dpp.report.analysis.report_data import Slice, Timeline

MOST_RANKS = 64


def _slices(rank: RankIteration, track: int, origin: int) -> list[Slice]:
    def us(time_ns: int) -> float:
        return (time_ns - origin) / 1000

    found: list[Slice] = [
        (track, us(w.start), us(w.end), w.cause, f"wait: {w.cause}", w.detail) for w in rank.waits
    ]
    found += [(track, us(s.start), us(s.end), "span", s.name, "") for s in rank.spans]
    parts = slice_names(rank.groups)
    for task in rank.tasks:
        piece = f".{task.piece}" if task.piece else ""
        part = parts[task.microbatch] if task.microbatch < len(parts) else ""
        name = f"{task.chunk}{task.kind}{task.microbatch}{piece}{part}"
        what = f"{task.kind} of chunk {task.chunk}, microbatch {task.microbatch}"
        found.append((track, us(task.start), us(task.end), task.kind, name, what))
    return found


def timeline(iteration: Iteration, ranks: list[int]) -> Timeline:
    """Slices of the first ranks of ``ranks``, in that order from top to bottom."""
    chosen = ranks[:MOST_RANKS]
    origin = iteration.start
    slices = [
        one
        for track, rank in enumerate(chosen)
        for one in _slices(iteration.ranks[rank], track, origin)
    ]
    return Timeline(iteration.number, chosen, (iteration.end - origin) / 1000, slices)

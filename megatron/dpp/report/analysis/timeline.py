"""One iteration as flat slices, for pictures: the report's timeline and its PNG."""

from __future__ import annotations

from typing import Any

from megatron.dpp.report.analysis.model import Iteration, RankIteration

MOST_RANKS = 64

Slice = tuple[int, float, float, str, str, str]
"""Track, start and end in us, class (a kind of task, a cause, ``span``), name, detail."""


def _slices(rank: RankIteration, track: int, origin: int) -> list[Slice]:
    def us(time_ns: int) -> float:
        return (time_ns - origin) / 1000

    found: list[Slice] = [
        (track, us(w.start), us(w.end), w.cause, f"wait: {w.cause}", w.detail) for w in rank.waits
    ]
    found += [(track, us(s.start), us(s.end), "span", s.name, "") for s in rank.spans]
    for task in rank.tasks:
        piece = f".{task.piece}" if task.piece else ""
        name = f"{task.chunk}{task.kind}{task.microbatch}{piece}"
        what = f"{task.kind} of chunk {task.chunk}, microbatch {task.microbatch}"
        found.append((track, us(task.start), us(task.end), task.kind, name, what))
    return found


def timeline(iteration: Iteration, ranks: list[int]) -> dict[str, Any]:
    """Slices of the first ranks of ``ranks``, in that order from top to bottom."""
    chosen = ranks[:MOST_RANKS]
    origin = iteration.start
    slices = [
        one
        for track, rank in enumerate(chosen)
        for one in _slices(iteration.ranks[rank], track, origin)
    ]
    return {
        "iteration": iteration.number,
        "ranks": chosen,
        "length_us": (iteration.end - origin) / 1000,
        "slices": slices,
    }

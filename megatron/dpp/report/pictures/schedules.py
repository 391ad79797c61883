"""Schedules as pictures."""

from __future__ import annotations

from collections.abc import Mapping

from megatron.dpp.report.analysis.sentences import percent
from megatron.dpp.report.pictures.picture import Picture, Slice
from megatron.dpp.report.pictures.style import in_order
from megatron.dpp.sim.result import Result


def draw(results: Mapping[str, Result], unit: str = "") -> Picture:
    """One panel per schedule over a common time axis, ranks from top to bottom.

    Args:
        results: schedules by name.
        unit: of the times.
    """
    unit = f" {unit}" if unit else ""
    longest = max(result.makespan for result in results.values())
    picture = Picture(
        _title(results, unit),
        note="the number in a task is its microbatch; later chunks are paler",
    )
    tasks = {name: _slices(result) for name, result in results.items()}
    picture.legend(in_order({task.kind for each in tasks.values() for task in each}))
    for name, result in results.items():
        own = f"{result.ratio:.3f} x the busiest rank's own work"
        panel = f"{name}: {result.makespan:.4g}{unit}, {own}"
        picture.text(0, picture.height + 18, panel, size=13, bold=True)
        ranks = [f"rank {rank}" for rank in range(len(result.slots))]
        picture.timeline(ranks, tasks[name], longest, unit)
    return picture


def _title(results: Mapping[str, Result], unit: str) -> str:
    ordered = sorted(results, key=lambda name: results[name].makespan)
    best = results[ordered[0]].makespan
    if len(ordered) == 1:
        return (
            f"One step takes {best:.4g}{unit}, {results[ordered[0]].ratio:.3f} x the least possible"
        )
    worst = results[ordered[-1]].makespan
    name = ordered[0][0].upper() + ordered[0][1:]
    return f"{name} takes {percent(1 - best / worst)} less time per step than {ordered[-1]}"


def _slices(result: Result) -> list[Slice]:
    return [
        Slice(rank, slot.start, slot.end, slot.action.kind.name, str(slot.action._replace(piece=0)))
        for rank, slots in enumerate(result.slots)
        for slot in slots
    ]

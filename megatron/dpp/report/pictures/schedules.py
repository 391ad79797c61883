"""Schedules as pictures."""

from __future__ import annotations

from collections.abc import Mapping

from megatron.dpp.report.analysis.sentences import percent
from megatron.dpp.report.pictures.picture import Bar, Picture, in_legend_order, label_of
from megatron.dpp.sim.result import Result


def draw(results: Mapping[str, Result], unit: str = "") -> Picture:
    """One panel per schedule over a common time axis, ranks from top to bottom.

    Args:
        results: schedules by name.
        unit: of the times.
    """
    unit = f" {unit}" if unit else ""
    ordered = sorted(results, key=lambda name: results[name].makespan)
    best, longest = results[ordered[0]], results[ordered[-1]].makespan
    if len(ordered) == 1:
        title = f"One step takes {best.makespan:.4g}{unit}, {best.ratio:.3f} x the least possible"
    else:
        less = f"takes {percent(1 - best.makespan / longest)} less time per step than {ordered[-1]}"
        title = f"{ordered[0][0].upper()}{ordered[0][1:]} {less}"
    note = "the number in a task is its microbatch; later chunks are paler"
    picture = Picture(title, note=note)
    tasks = {name: _bars(result) for name, result in results.items()}
    kinds = in_legend_order({bar.kind for bars in tasks.values() for bar in bars})
    picture.legend({kind: label_of(kind) for kind in kinds})
    for name, result in results.items():
        own = f"{result.ratio:.3f} x the busiest rank's own work"
        panel = f"{name}: {result.makespan:.4g}{unit}, {own}"
        picture.text(0, picture.height + 18, panel, size=13, bold=True)
        ranks = [f"rank {rank}" for rank in range(len(result.slots))]
        picture.timeline(ranks, tasks[name], longest, unit)
    return picture


def _bars(result: Result) -> list[Bar]:
    return [
        Bar(rank, slot.start, slot.end, slot.action.kind.name, str(slot.action._replace(piece=0)))
        for rank, slots in enumerate(result.slots)
        for slot in slots
    ]

"""Schedules as text: one line per rank, time to the right.

Used by the command line and by the message of a stuck simulation. ``draw.py`` makes pictures.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron.dpp.sim.clock import Slot


def format_grid(slots: Sequence[Sequence[Slot]], max_columns: int = 400) -> str:
    """The tasks of each rank over time, as in ``0F0 0F1 0B0``; ``.`` is idle and ``-`` is a task
    that goes on.

    A column is the shortest task's time, or more where that would need over ``max_columns``
    columns; a task that is shorter than a column then shares it with its successor and is not
    shown.
    """
    tasks = [slot for lane in slots for slot in lane]
    if not tasks:
        return "(nothing ran)"
    makespan = max(slot.end for slot in tasks)
    shortest = min((s.end - s.start for s in tasks if s.end > s.start), default=makespan or 1.0)
    column = max(shortest, makespan / max_columns) or 1.0
    width = max(len(str(slot.action)) for slot in tasks) + 1
    lines = [
        f"rank {rank:<3d} " + "".join(_row(lane, column, width)).rstrip()
        for rank, lane in enumerate(slots)
    ]
    return "\n".join(lines)


def _row(lane: Sequence[Slot], column: float, width: int) -> list[str]:
    cells: list[str] = []
    for slot in lane:
        start, end = round(slot.start / column), round(slot.end / column)
        cells += [".".ljust(width)] * (start - len(cells))
        length = max(end - len(cells), 0)
        if length:
            cells.append(str(slot.action).ljust(width))
            cells += ["-".ljust(width)] * (length - 1)
    return cells

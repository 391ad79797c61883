"""The result of a simulation, and its text form: one line per rank, time to the right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron.dpp.schedule import Action


class SimulatedTask(NamedTuple):
    """A task that ran on a rank from ``start`` to ``end``."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Result:
    """A simulated iteration. Lists are by rank; times are in the unit of the costs.

    Args:
        slots: the tasks in the order in which they ran.
        peak_held: peak of the chunk activations held.
        own: time of the rank's own tasks alone, without waits, at the speed that it has.
    """

    slots: list[list[SimulatedTask]]
    peak_held: list[float]
    own: list[float]

    @property
    def makespan(self) -> float:
        """End of the last task."""
        return max(slot.end for slots in self.slots for slot in slots)

    @property
    def ratio(self) -> float:
        """Makespan over the busiest rank's own work; 1 is the least possible."""
        return self.makespan / max(self.own)

    @property
    def actions(self) -> list[list[Action]]:
        """The tasks alone."""
        return [[slot.action for slot in slots] for slots in self.slots]


def format_grid(slots: Sequence[Sequence[SimulatedTask]], max_columns: int = 400) -> str:
    """The tasks of each rank over time, as in ``0F0 0F1 0B0``; ``.`` is idle, ``-`` continues a
    task.

    A column is the shortest task's time, or more where ``max_columns`` would not suffice; a task
    that is shorter than a column is then left out.
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


def _row(lane: Sequence[SimulatedTask], column: float, width: int) -> list[str]:
    cells: list[str] = []
    for slot in lane:
        start, end = round(slot.start / column), round(slot.end / column)
        cells += [".".ljust(width)] * (start - len(cells))
        length = max(end - len(cells), 0)
        if length:
            cells.append(str(slot.action).ljust(width))
            cells += ["-".ljust(width)] * (length - 1)
    return cells

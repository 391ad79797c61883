"""Rows of tasks and waits over a time axis."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from megatron.dpp.report.pictures.axes import Format, nice_step
from megatron.dpp.report.pictures.picture import Line, Picture, Rect, Text, text_width
from megatron.dpp.report.pictures.style import CHUNK_ALPHA

_ROW = 30.0


class Slice(NamedTuple):
    """A task or a wait in a row, counted from the top.

    Args:
        kind: F, B or W of a task, whose name is CHUNK, kind and MICROBATCH; a cause of a wait.
    """

    row: int
    start: float
    end: float
    kind: str
    name: str


def draw_timeline(
    picture: Picture,
    rows: Sequence[str],
    slices: Iterable[Slice],
    length: float,
    top: float = 0.0,
    *,
    tick: Format,
) -> None:
    """Draw ``slices`` beside the names of their rows, the later ones above the earlier ones.

    Args:
        length: of the axis, from 0, in the unit of the slices' times.
        tick: text of a time at the axis.
    """
    left = max(map(text_width, rows)) + 8
    scale = (picture.width - left) / length
    bottom = top + _ROW * len(rows)
    step = nice_step(length, 8)
    for index in range(int(length / step) + 1):
        x = left + index * step * scale
        picture.add(Line(((x, top - 2), (x, bottom)), "line"))
        if x < picture.width - 20:
            picture.add(Text(x, bottom + 10, tick(index * step), "dim", 11, "middle"))
    for row, name in enumerate(rows):
        picture.add(Text(left - 8, top + _ROW * (row + 0.5) - 1, name, anchor="end"))
    for one in slices:
        x, wide = left + one.start * scale, (one.end - one.start) * scale
        _draw_slice(picture, one, x, wide, top + _ROW * one.row)


def _draw_slice(picture: Picture, one: Slice, x: float, wide: float, y: float) -> None:
    if one.kind not in ("F", "B", "W"):
        picture.add(Rect(x, y + 9, wide, 10, one.kind, hint=one.name))
        return
    chunk, _, microbatch = one.name.partition(one.kind)
    alpha = CHUNK_ALPHA[min(int(chunk), len(CHUNK_ALPHA) - 1)]
    task = Rect(x, y + 2, max(wide - 0.6, 0.4), 24, one.kind, alpha, one.name)
    if task.alpha < 1:  # waits and lines must not shine through
        picture.add(task._replace(colour="card", alpha=1.0, hint=""))
    picture.add(task)
    if wide > text_width(microbatch, 10) + 3:
        on = "ink" if int(chunk) else "on"
        picture.add(Text(x + wide / 2, y + 14, microbatch, on, 10, "middle"))

"""Schedules as pictures."""

from __future__ import annotations

from collections.abc import Mapping

from megatron.dpp.pictures.axes import draw_legend, nice_step
from megatron.dpp.pictures.picture import Line, Picture, Rect, Text, text_width
from megatron.dpp.pictures.style import chunk_alpha, percent
from megatron.dpp.sim.result import Result

_WIDTH, _ROW = 1200.0, 32.0


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
        _WIDTH,
        "the number in a task is its microbatch; later chunks are paler",
    )
    picture.height = draw_legend(picture, _kinds(results)) - 8
    for name, result in results.items():
        panel = Picture(
            f"{name}: {result.makespan:.4g}{unit}, "
            f"{result.ratio:.3f} x the busiest rank's own work",
            _WIDTH,
        )
        _draw_panel(panel, result, longest)
        picture.stack(panel, gap=16)
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


def _kinds(results: Mapping[str, Result]) -> list[str]:
    present = {
        slot.action.kind.name
        for result in results.values()
        for slots in result.slots
        for slot in slots
    }
    return [kind for kind in "FBW" if kind in present]


def _draw_panel(panel: Picture, result: Result, longest: float) -> None:
    left = text_width(f"rank {len(result.slots) - 1}") + 8
    scale = (panel.width - left) / longest
    bottom = _ROW * len(result.slots)
    step = nice_step(longest, 10)
    for index in range(int(longest / step) + 1):
        x = left + index * step * scale
        panel.add(Line(((x, 0), (x, bottom)), "line"))
        if x < panel.width - 12:
            panel.add(Text(x, bottom + 9, f"{index * step:g}", "dim", 11, "middle"))
    for rank, slots in enumerate(result.slots):
        y = _ROW * rank
        panel.add(Text(left - 8, y + _ROW / 2, f"rank {rank}", anchor="end"))
        for slot in slots:
            kind, chunk = slot.action.kind.name, slot.action.chunk
            x, wide = left + slot.start * scale, (slot.end - slot.start) * scale
            task = Rect(
                x,
                y + 2,
                max(wide - 0.8, 0.3),
                _ROW - 4,
                kind,
                1.0,
                f"{chunk}{kind}{slot.action.microbatch}",
            )
            panel.add(task._replace(colour="card", hint=""))
            panel.add(task._replace(alpha=chunk_alpha(chunk)))
            text = str(slot.action.microbatch)
            if wide > text_width(text, 11) + 3:
                on = "ink" if chunk else "on"
                panel.add(Text(x + wide / 2, y + _ROW / 2, text, on, 11, "middle"))

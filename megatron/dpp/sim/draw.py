"""Schedules as pictures (PNG). Needs matplotlib, which is imported on the first drawing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.dpp.errors import ConfigError
from megatron.dpp.schedule import Kind
from megatron.dpp.sim.result import Result

NO_MATPLOTLIB = "--png needs matplotlib: pip install matplotlib"
_COLOURS = {
    Kind.F: ("#1f5fa8", "#6fa8dc", "#a9cdf0", "#d3e6f8"),
    Kind.B: ("#2c7a3f", "#7bbf86", "#aedbb5", "#d6efd9"),
    Kind.W: ("#b5651d", "#e0a365", "#f0cba3", "#f8e4d0"),
}
"""One hue per kind; later chunks are lighter."""


def draw(results: Mapping[str, Result], path: str | Path, unit: str = "") -> None:
    """One panel per schedule over a common time axis, ranks from top to bottom.

    Args:
        results: schedules by title.
        path: of the PNG.
        unit: of the times, for the axis.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(NO_MATPLOTLIB) from error
    ranks = max(len(result.slots) for result in results.values())
    figure = Figure(figsize=(14, (0.8 + 0.32 * ranks) * len(results) + 0.6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(results), 1, sharex=True, squeeze=False)[:, 0]
    for panel, (title, result) in zip(panels, results.items(), strict=True):
        _draw_panel(panel, result)
        panel.set_title(
            f"{title}: {result.makespan:.4g}{unit and ' ' + unit}, "
            f"{result.ratio:.3f} x the busiest rank's own work",
            fontsize=9,
            loc="left",
        )
    panels[-1].set_xlim(0, max(result.makespan for result in results.values()))
    panels[-1].set_xlabel(
        f"time{unit and f' ({unit})'}; F blue, B green, W orange, later chunks lighter, numbers "
        "are microbatches"
    )
    figure.savefig(path, dpi=110, format="png")


def _draw_panel(panel: Any, result: Result) -> None:
    narrowest = result.makespan / 150
    for rank, slots in enumerate(result.slots):
        bars = [(slot.start, slot.end - slot.start) for slot in slots]
        colours = [_colour(slot.action.kind, slot.action.chunk) for slot in slots]
        panel.broken_barh(
            bars, (rank - 0.45, 0.9), facecolors=colours, edgecolor="white", linewidth=0.2
        )
        for slot in slots:
            if slot.end - slot.start > narrowest:
                middle = (slot.start + slot.end) / 2
                number = str(slot.action.microbatch)
                panel.text(middle, rank, number, fontsize=5, ha="center", va="center")
    panel.set_ylim(len(result.slots) - 0.5, -0.5)
    panel.set_yticks(
        range(len(result.slots)), [f"rank {r}" for r in range(len(result.slots))], fontsize=7
    )


def _colour(kind: Kind, chunk: int) -> str:
    shades = _COLOURS[kind]
    return shades[min(chunk, len(shades) - 1)]

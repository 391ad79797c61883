"""A picture as SVG that scales to the width it is shown at."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from megatron.dpp.files.safe_files import open_text_to_write
from megatron.dpp.report.pictures.style import CHUNK_ALPHA, FONT, colour, label_of, style_sheet

WIDTH = 1000.0
"""Units of a picture's width; texts have 12."""
_LETTER = 0.6
"""Width of a character, in font sizes: of a wide font, so that a label is left out, not cut."""
_ROW, _MARGIN = 30.0, 14.0


class Slice(NamedTuple):
    """A task or a wait in a row of a timeline, counted from the top.

    Args:
        kind: F, B or W of a task, whose name is CHUNK, kind and MICROBATCH; a cause of a wait.
    """

    row: int
    start: float
    end: float
    kind: str
    name: str
    hint: str = ""


def text_width(text: str, size: float = 12.0) -> float:
    """Width of a text, estimated."""
    return len(text) * size * _LETTER


def nice_step(span: float, count: int) -> float:
    """The round step that divides ``span`` into at most ``count`` parts."""
    wish = span / count
    power = 10.0 ** math.floor(math.log10(wish))
    return next((k * power for k in (1, 2, 5) if k * power >= wish * 0.999), 10 * power)


class Picture:
    """Shapes, y downwards, below a title that says the finding.

    Args:
        title: the finding, one sentence without a full stop.
        width: of everything.
        note: a line in small print below the title.
    """

    def __init__(self, title: str, width: float = WIDTH, note: str = "") -> None:
        self.title, self.width, self.note = title, width, note
        self.height = 0.0
        self._shapes: list[str] = []

    def rect(
        self, x: float, y: float, width: float, height: float, name: str,
        *, alpha: float = 1.0, hint: str = "",
    ) -> None:  # fmt: skip
        """A filled rectangle with a text to hover over."""
        self.height = max(self.height, y + height)
        title = f"<title>{escape(hint)}</title>" if hint else ""
        self._shapes.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0):.1f}" height="{height:.1f}" '
            f'class="f-{name}" fill="{colour(name)}"{_opacity(alpha)}>{title}</rect>'
        )

    def line(
        self, points: Iterable[tuple[float, float]], name: str,
        *, width: float = 1.0, alpha: float = 1.0,
    ) -> None:  # fmt: skip
        """A line through points."""
        places = list(points)
        self.height = max([self.height, *(y for _, y in places)])
        text = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        self._shapes.append(
            f'<polyline points="{text}" fill="none" stroke-width="{width:g}" '
            f'class="s-{name}" stroke="{colour(name)}"{_opacity(alpha)}/>'
        )

    def text(
        self, x: float, y: float, text: str, name: str = "ink",
        *, size: float = 12.0, anchor: str = "start", bold: bool = False,
    ) -> None:  # fmt: skip
        """A text whose vertical middle is ``y``; ``anchor`` is start, middle or end."""
        self.height = max(self.height, y + size * 0.7)
        self._shapes.append(
            f'<text x="{x:.1f}" y="{y + size * 0.35:.1f}" font-size="{size:g}" '
            f'text-anchor="{anchor}" font-weight="{600 if bold else 400}" '
            f'class="f-{name}" fill="{colour(name)}">{escape(text)}</text>'
        )

    def legend(self, names: Sequence[str]) -> float:
        """Squares with the meaning of each class, in as many lines as needed; returns the
        bottom.
        """
        x, y = 0.0, self.height + 8
        for name in names:
            wide = 22 + text_width(label_of(name)) + 8
            if x and x + wide > self.width:
                x, y = 0.0, y + 18
            self.rect(x, y - 6, 12, 12, name)
            self.text(x + 17, y, label_of(name))
            x += wide
        return y + 14

    def timeline(
        self, rows: Sequence[str], slices: Iterable[Slice], length: float, unit: str = ""
    ) -> None:
        """Rows of tasks and waits over a time axis, the later slices above the earlier ones.

        Args:
            length: of the axis, from 0, in the unit of the slices' times.
            unit: its name.
        """
        top, left = self.height + 6, max(map(text_width, rows)) + 8
        scale, bottom = (self.width - left) / length, top + _ROW * len(rows)
        step = nice_step(length, 8)
        for index in range(int(length / step) + 1):
            x = left + index * step * scale
            self.line(((x, top - 2), (x, bottom)), "line")
            if x < self.width - 40:
                self.text(x, bottom + 10, f"{index * step:g}", "dim", size=11, anchor="middle")
        self.text(self.width, bottom + 10, unit, "dim", size=11, anchor="end")
        for row, name in enumerate(rows):
            self.text(left - 8, top + _ROW * (row + 0.5) - 1, name, anchor="end")
        for one in slices:
            x, wide = left + one.start * scale, (one.end - one.start) * scale
            self._slice(one, x, wide, top + _ROW * one.row)

    def _slice(self, one: Slice, x: float, wide: float, y: float) -> None:
        hint = one.hint or one.name
        if one.kind not in ("F", "B", "W"):
            self.rect(x, y + 9, wide, 10, one.kind, hint=hint)
            return
        chunk, _, microbatch = one.name.partition(one.kind)
        alpha = CHUNK_ALPHA[min(int(chunk), len(CHUNK_ALPHA) - 1)]
        wide = max(wide - 0.6, 0.4)
        if alpha < 1:  # waits and lines must not shine through
            self.rect(x, y + 2, wide, 24, "card")
        self.rect(x, y + 2, wide, 24, one.kind, alpha=alpha, hint=hint)
        if wide > text_width(microbatch, 10) + 3:
            on = "ink" if int(chunk) else "on"
            self.text(x + wide / 2, y + 14, microbatch, on, size=10, anchor="middle")

    def inline(self) -> str:
        """SVG for a page that has the style sheet; the page shows title and note itself."""
        return (
            f'<svg viewBox="0 0 {self.width:g} {self.height + 2:g}" role="img" '
            f'aria-label="{escape(self.title)}" font-family="{FONT}">{"".join(self._shapes)}</svg>'
        )

    def svg(self) -> str:
        """A whole SVG file with title, note and margins; it follows the reader's choice of light or
        dark.
        """
        width, top = self.width + 2 * _MARGIN, 70.0 if self.note else 52.0
        height = top + self.height + _MARGIN
        head = Picture(self.title, width)
        head.rect(0, 0, width, height, "card")
        head.text(_MARGIN, 26, self.title, size=16, bold=True)
        if self.note:
            head.text(_MARGIN, 50, self.note, "dim", size=11)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
            f'font-family="{FONT}"><title>{escape(self.title)}</title><style>{style_sheet()}'
            f"</style>{''.join(head._shapes)}"
            f'<g transform="translate({_MARGIN},{top:g})">{"".join(self._shapes)}</g></svg>\n'
        )

    def write(self, path: Path) -> None:
        """Write the SVG file."""
        with open_text_to_write(path) as file:
            file.write(self.svg())


def _opacity(alpha: float) -> str:
    return f' opacity="{alpha:g}"' if alpha < 1 else ""

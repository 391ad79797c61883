"""Pictures as SVG that scale to the width they are shown at; colours and labels of all pages."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from megatron.dpp.files.safe_files import open_text_to_write
from megatron.dpp.trace.schema import IdleCause

THEMES = ("light", "dark")

_IDLE: dict[IdleCause, tuple[str, str]] = {
    IdleCause.WARM_UP: ("#dde1e6", "#3a414a"),
    IdleCause.DRAIN: ("#ccd2d9", "#474f59"),
    IdleCause.MESSAGE: ("#eeb4b0", "#8d4c4a"),
    IdleCause.MEMORY_CAP: ("#e3cf7c", "#85742f"),
    IdleCause.LATE_MEMBER: ("#d9a9cf", "#7d4a73"),
    IdleCause.LATE_LEADER: ("#c391d6", "#6d4486"),
    IdleCause.LOOKAHEAD: ("#a6d2cd", "#3d716c"),
    IdleCause.HOST: ("#b9a28f", "#6d5947"),
    IdleCause.SEND: ("#e0b8d6", "#7a5571"),
}
COLOURS = {
    "bg": ("#f6f7f9", "#14171b"),
    "card": ("#ffffff", "#1c2026"),
    "ink": ("#1b1f24", "#e7eaee"),
    "dim": ("#5d6670", "#9da6b1"),
    "line": ("#dfe3e8", "#343b45"),
    "on": ("#ffffff", "#ffffff"),
    "this": ("#6a3fb5", "#b49af0"),
    "other": ("#7d8792", "#8d97a3"),
    "good": ("#1f7a46", "#5fc78a"),
    "bad": ("#b3403a", "#ee8a80"),
    "F": ("#2b6cb8", "#3f83d1"),
    "B": ("#2c8450", "#3b9c63"),
    "W": ("#d07a1c", "#d98a35"),
    "span": ("#a99fc4", "#6f648f"),
    "tail": ("#a99fc4", "#6f648f"),
    **{str(cause): _IDLE[cause] for cause in IdleCause},
}
"""Name -> colour on a light and on a dark page. F, B and W mean forward, backward and weight
gradient; ``this`` and ``other`` are runs; the last rows are causes of idle time."""

CHUNK_ALPHA = (1.0, 0.68, 0.46, 0.32)
"""Opacity of a task by its chunk: later chunks are paler."""

LABELS = {
    "F": "F: forward",
    "B": "B: backward",
    "W": "W: weight gradient",
    "span": "other work",
    "tail": "after the pipeline",
    **{str(cause): cause.label for cause in IdleCause},
}
"""Class of a bar -> its label in a legend."""

FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"


_LETTER = 0.6
"""Width of a character, in font sizes: of a wide font, so that a label is left out, not cut."""


def text_width(text: str, size: float = 12.0) -> float:
    """Width of a text, estimated."""
    return len(text) * size * _LETTER


def colour(name: str, theme: str = "light") -> str:
    """The hexadecimal colour of a name; that of ``other`` for one without a colour."""
    return COLOURS.get(name, COLOURS["other"])[THEMES.index(theme)]


def label_of(name: str) -> str:
    """The label of a class; its name if it has none."""
    return LABELS.get(name, name)


def in_legend_order(names: Collection[str]) -> list[str]:
    """Classes in the order of ``LABELS``, then those without a label."""
    return [name for name in LABELS if name in names] + sorted(set(names) - LABELS.keys())


def style_sheet() -> str:
    """CSS of a page with inline pictures: a variable per colour, light or dark as the reader has
    it, and the classes ``f-NAME`` (fill) and ``s-NAME`` (stroke) of the shapes."""
    light, dark = (
        "".join(f"--{name}:{colour(name, theme)};" for name in COLOURS) for theme in THEMES
    )
    classes = "\n".join(
        f".f-{name}{{fill:var(--{name})}}.s-{name}{{stroke:var(--{name})}}" for name in COLOURS
    )
    return (
        f":root{{color-scheme:light dark;{light}}}\n"
        f"@media (prefers-color-scheme:dark){{:root{{{dark}}}}}\n{classes}\n"
    )


WIDTH = 1000.0
"""Units of a picture's width; texts have 12."""
_ROW, _MARGIN = 30.0, 14.0


class Bar(NamedTuple):
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


def ticks(low: float, high: float, count: int) -> list[float]:
    """Round numbers from ``low`` to ``high``, at most about ``count``."""
    wish = (high - low) / count
    power = 10.0 ** math.floor(math.log10(wish))
    step = next((k * power for k in (1, 2, 5) if k * power >= wish * 0.999), 10 * power)
    return [k * step for k in range(math.ceil(low / step), math.floor(high / step) + 1)]


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
        """A filled rectangle with a text to hover over; none without a width."""
        if width > 0:
            self.height = max(self.height, y + height)
            title = f"<title>{escape(hint)}</title>" if hint else ""
            opacity = f' opacity="{alpha:g}"' if alpha < 1 else ""
            self._shapes.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" '
                f'class="f-{name}" fill="{colour(name)}"{opacity}>{title}</rect>'
            )

    def line(self, points: Sequence[tuple[float, float]], name: str, *, width: float = 1) -> None:
        """A line through points."""
        self.height = max(self.height, *(y for _, y in points))
        text = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self._shapes.append(
            f'<polyline points="{text}" fill="none" stroke-width="{width:g}" '
            f'class="s-{name}" stroke="{colour(name)}"/>'
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

    def legend(self, labels: Mapping[str, str]) -> float:
        """Squares with the meaning of each class, in as many lines as needed; returns the
        bottom.
        """
        x, y = 0.0, self.height + 8
        for name, label in labels.items():
            wide = 22 + text_width(label) + 8
            if x and x + wide > self.width:
                x, y = 0.0, y + 18
            self.rect(x, y - 6, 12, 12, name)
            self.text(x + 17, y, label)
            x += wide
        return y + 14

    def timeline(
        self, rows: Sequence[str], bars: Iterable[Bar], length: float, unit: str = ""
    ) -> None:
        """Rows of tasks and waits over a time axis, the later bars above the earlier ones.

        Args:
            length: of the axis, from 0, in the unit of the bars' times.
            unit: its name.
        """
        top, left = self.height + 6, max(map(text_width, rows)) + 8
        scale, bottom = (self.width - left) / length, top + _ROW * len(rows)
        for time in ticks(0.0, length, 8):
            x = left + time * scale
            self.line(((x, top - 2), (x, bottom)), "line")
            if x < self.width - 40:
                self.text(x, bottom + 10, f"{time:g}", "dim", size=11, anchor="middle")
        self.text(self.width, bottom + 10, unit, "dim", size=11, anchor="end")
        for row, name in enumerate(rows):
            self.text(left - 8, top + _ROW * (row + 0.5) - 1, name, anchor="end")
        for bar in bars:
            wide = (bar.end - bar.start) * scale
            self._bar(bar, left + bar.start * scale, wide, top + _ROW * bar.row)

    def _bar(self, bar: Bar, x: float, wide: float, y: float) -> None:
        hint = bar.hint or bar.name
        if bar.kind not in ("F", "B", "W"):
            self.rect(x, y + 9, wide, 10, bar.kind, hint=hint)
            return
        chunk, _, microbatch = bar.name.partition(bar.kind)
        alpha = CHUNK_ALPHA[min(int(chunk), len(CHUNK_ALPHA) - 1)]
        wide = max(wide - 0.6, 0.4)
        if alpha < 1:  # waits and lines must not shine through
            self.rect(x, y + 2, wide, 24, "card")
        self.rect(x, y + 2, wide, 24, bar.kind, alpha=alpha, hint=hint)
        if wide > text_width(microbatch, 10) + 3:
            on = "ink" if int(chunk) else "on"
            self.text(x + wide / 2, y + 14, microbatch, on, size=10, anchor="middle")

    def inline(self) -> str:
        """SVG for a page that has the style sheet; the page shows title and note itself."""
        return (
            f'<svg viewBox="0 0 {self.width:g} {self.height + 2:g}" role="img" '
            f'aria-label="{escape(self.title)}" font-family="{FONT}">{"".join(self._shapes)}</svg>'
        )

    def write(self, path: Path) -> None:
        """Write an SVG file with title, note and margins; it follows the reader's choice of light
        or dark.
        """
        width, top = self.width + 2 * _MARGIN, 70.0 if self.note else 52.0
        height = top + self.height + _MARGIN
        head = Picture(self.title, width)
        head.rect(0, 0, width, height, "card")
        head.text(_MARGIN, 26, self.title, size=16, bold=True)
        head.text(_MARGIN, 50, self.note, "dim", size=11)
        with open_text_to_write(path) as file:
            file.write(
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
                f'font-family="{FONT}"><title>{escape(self.title)}</title><style>{style_sheet()}'
                f"</style>{''.join(head._shapes)}"
                f'<g transform="translate({_MARGIN},{top:g})">{"".join(self._shapes)}</g></svg>\n'
            )

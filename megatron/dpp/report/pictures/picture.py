"""A picture as a list of shapes, written as SVG."""

from __future__ import annotations

import textwrap
from html import escape
from pathlib import Path
from typing import NamedTuple

from megatron.dpp.files.safe_files import open_text_to_write
from megatron.dpp.report.pictures.style import COLOURS, FONT, colour

_TITLE, _NOTE, _MARGIN = 16, 11, 14
_WIDTHS = {0.34: " iljI.,:;'|!", 0.42: "ftr()-/", 0.97: "mwMW%"}
_LETTER = 0.64
"""Widths of some characters, and of the others, in font sizes: those of a wide font, so that a
label is rather left out than cut."""


class Rect(NamedTuple):
    """A filled rectangle with a text to hover over."""

    x: float
    y: float
    width: float
    height: float
    colour: str
    alpha: float = 1.0
    hint: str = ""


class Line(NamedTuple):
    """A line through points."""

    points: tuple[tuple[float, float], ...]
    colour: str
    width: float = 1.0
    alpha: float = 1.0


class Text(NamedTuple):
    """A text whose vertical middle is ``y``; ``anchor`` is start, middle or end."""

    x: float
    y: float
    text: str
    colour: str = "ink"
    size: float = 12.0
    anchor: str = "start"
    bold: bool = False


Shape = Rect | Line | Text


def text_width(text: str, size: float = 12.0, *, bold: bool = False) -> float:
    """Width of a text in pixels, estimated."""
    widths = {letter: width for width, letters in _WIDTHS.items() for letter in letters}
    return sum(widths.get(letter, _LETTER) for letter in text) * size * (1.1 if bold else 1.0)


class Picture:
    """Shapes in pixels, y downwards, below a title that says the finding.

    Args:
        title: the finding, one sentence without a full stop.
        width: of everything.
        note: a line in small print below the title.
    """

    def __init__(self, title: str, width: float, note: str = "") -> None:
        self.title, self.width, self.note = title, width, note
        self.height = 0.0
        self.shapes: list[Shape] = []

    def add(self, shape: Shape) -> None:
        """Put a shape above the earlier ones; the picture grows downwards as needed."""
        self.shapes.append(shape)
        if isinstance(shape, Rect):
            low = shape.y + shape.height
        elif isinstance(shape, Line):
            low = max(y for _, y in shape.points)
        else:
            low = shape.y + shape.size * 0.7
        self.height = max(self.height, low)

    def stack(self, other: Picture, gap: float = 18) -> None:
        """Put another picture below this one, its title as a heading."""
        top = self.height + gap
        self.add(Text(0, top, other.title, size=13, bold=True))
        for shape in other.shapes:
            self.add(_moved(shape, 0, top + 14))

    def inline_svg(self) -> str:
        """SVG for a page that has the style sheet; the page shows title and note itself."""
        shapes = "".join(_svg(shape) for shape in self.shapes)
        return (
            f'<svg viewBox="0 0 {self.width:g} {self.height + 2:g}" role="img" '
            f'aria-label="{escape(self.title)}" font-family="{FONT}">{shapes}</svg>'
        )

    def svg(self) -> str:
        """A whole SVG file; it follows the reader's choice of light or dark."""
        framed = self._framed()
        dark = "".join(
            f".f-{name}{{fill:{colour(name, 'dark')}}}.s-{name}{{stroke:{colour(name, 'dark')}}}"
            for name in COLOURS
        )
        shapes = "\n".join(_svg(shape) for shape in framed.shapes)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{framed.width:g}" '
            f'height="{framed.height:g}" viewBox="0 0 {framed.width:g} {framed.height:g}" '
            f'font-family="{FONT}">\n<title>{escape(self.title)}</title>\n'
            f"<style>@media (prefers-color-scheme:dark){{{dark}}}</style>\n{shapes}\n</svg>\n"
        )

    def write(self, path: Path) -> None:
        """Write the SVG file."""
        with open_text_to_write(path) as file:
            file.write(self.svg())

    def _framed(self) -> Picture:
        """A copy with background, margins, title and note."""
        whole = Picture(self.title, self.width + 2 * _MARGIN)
        letters = int(self.width / (_TITLE * 0.62))
        title, notes = textwrap.wrap(self.title, letters), []
        if self.note:
            notes = textwrap.wrap(self.note, int(self.width / (_NOTE * 0.55)))
        top = _MARGIN + 22.0 * len(title) + 16 * len(notes) + 8
        whole.add(Rect(0, 0, whole.width, top + self.height + _MARGIN, "card"))
        for index, text in enumerate(title):
            whole.add(Text(_MARGIN, _MARGIN + 10 + 22 * index, text, size=_TITLE, bold=True))
        for index, text in enumerate(notes):
            y = _MARGIN + 22 * len(title) + 8 + 16 * index
            whole.add(Text(_MARGIN, y, text, "dim", _NOTE))
        for shape in self.shapes:
            whole.add(_moved(shape, _MARGIN, top))
        return whole


def _moved(shape: Shape, right: float, down: float) -> Shape:
    if isinstance(shape, Line):
        return shape._replace(points=tuple((x + right, y + down) for x, y in shape.points))
    return shape._replace(x=shape.x + right, y=shape.y + down)


def _svg(shape: Shape) -> str:
    light = colour(shape.colour)
    if isinstance(shape, Text):
        weight = ' font-weight="600"' if shape.bold else ""
        return (
            f'<text x="{shape.x:.1f}" y="{shape.y + shape.size * 0.35:.1f}" '
            f'font-size="{shape.size:g}" text-anchor="{shape.anchor}"{weight} '
            f'class="f-{shape.colour}" fill="{light}">{escape(shape.text)}</text>'
        )
    opacity = f' opacity="{shape.alpha:g}"' if shape.alpha < 1 else ""
    if isinstance(shape, Line):
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in shape.points)
        return (
            f'<polyline points="{points}" fill="none" stroke-width="{shape.width:g}" '
            f'stroke-linejoin="round" class="s-{shape.colour}" stroke="{light}"{opacity}/>'
        )
    head = (
        f'<rect x="{shape.x:.2f}" y="{shape.y:.2f}" width="{max(shape.width, 0):.2f}" '
        f'height="{shape.height:.2f}" class="f-{shape.colour}" fill="{light}"{opacity}'
    )
    return f"{head}><title>{escape(shape.hint)}</title></rect>" if shape.hint else f"{head}/>"

"""A picture as a list of shapes, written as SVG (no library) or PNG (matplotlib)."""

from __future__ import annotations

import importlib.util
import itertools
import textwrap
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from megatron.dpp.errors import ConfigError
from megatron.dpp.report.pictures.style import COLOURS, FONT, colour
from megatron.dpp.safe_files import open_text_to_write, open_to_write

FORMATS = ("png", "svg")
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
    dashed: bool = False


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


def check_png(flag: str) -> None:
    """Refuse PNG files, for which ``flag`` asks, without matplotlib (ConfigError)."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(f"{flag} needs matplotlib: pip install matplotlib")


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

    def write(self, path: Path, theme: str = "light") -> None:
        """Write an SVG where the name ends so, else a PNG."""
        if path.suffix == ".svg":
            with open_text_to_write(path) as file:
                file.write(self.svg())
        else:
            _write_png(self._framed(), path, theme)

    def _framed(self) -> Picture:
        """The same with background, margins, title and note."""
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
        dashes = ' stroke-dasharray="4 3"' if shape.dashed else ""
        return (
            f'<polyline points="{points}" fill="none" stroke-width="{shape.width:g}" '
            f'stroke-linejoin="round" class="s-{shape.colour}" stroke="{light}"{opacity}{dashes}/>'
        )
    head = (
        f'<rect x="{shape.x:.2f}" y="{shape.y:.2f}" width="{max(shape.width, 0):.2f}" '
        f'height="{shape.height:.2f}" class="f-{shape.colour}" fill="{light}"{opacity}'
    )
    return f"{head}><title>{escape(shape.hint)}</title></rect>" if shape.hint else f"{head}/>"


def _write_png(picture: Picture, path: Path, theme: str) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(picture.width / 100, picture.height / 100), dpi=200)
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, picture.width), ylim=(picture.height, 0))
    axes.axis("off")
    for layer, (kind, group) in enumerate(_groups(picture.shapes)):
        for artist in _artists(kind, group, theme):
            artist.set_zorder(layer + 1)
            axes.add_artist(artist)
    with open_to_write(path) as file:
        figure.savefig(file, dpi=200, format=path.suffix.removeprefix("."))


def _groups(shapes: Sequence[Shape]) -> Iterator[tuple[type, list[Any]]]:
    """Neighbours of one type, which matplotlib draws at once."""
    for kind, group in itertools.groupby(shapes, type):
        yield kind, list(group)


def _artists(kind: type, shapes: list[Any], theme: str) -> Iterator[Any]:
    """matplotlib's objects for shapes of one type; a pixel is 0.72 points at 100 per inch."""
    from matplotlib.collections import LineCollection, PolyCollection
    from matplotlib.colors import to_rgba
    from matplotlib.text import Text as Label

    if kind is Text:
        for one in shapes:
            yield Label(
                *(one.x, one.y, one.text),
                color=colour(one.colour, theme),
                fontsize=one.size * 0.72,
                fontweight="bold" if one.bold else "normal",
                ha={"start": "left", "middle": "center", "end": "right"}[one.anchor],
                va="center_baseline",
            )
        return
    colours = [to_rgba(colour(one.colour, theme), one.alpha) for one in shapes]
    if kind is Rect:
        corners = [
            [
                (r.x, r.y),
                (r.x + r.width, r.y),
                (r.x + r.width, r.y + r.height),
                (r.x, r.y + r.height),
            ]
            for r in shapes
        ]
        yield PolyCollection(corners, facecolors=colours, edgecolors="none")
        return
    yield LineCollection(
        [one.points for one in shapes],
        colors=colours,
        linewidths=[one.width * 0.72 for one in shapes],
        linestyles=["--" if one.dashed else "-" for one in shapes],
    )

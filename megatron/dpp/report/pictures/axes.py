"""Axes: lines over iterations, and bars with labels."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron.dpp.report.analysis.formats import number
from megatron.dpp.report.pictures.picture import Line, Picture, Rect, Text, text_width
from megatron.dpp.report.pictures.style import label_of

Format = Callable[[float], str]

_MOST_POINTS = 400
_LINE_HEIGHT = 15.0


@dataclass(frozen=True)
class Curve:
    """Values over iterations; its name, if it has one, and its last value stand at its end."""

    name: str
    colour: str
    x: Sequence[float]
    y: Sequence[float]


@dataclass(frozen=True)
class Bar:
    """A row of bars: its name, its parts as (colour, value, text to hover over), and a label."""

    name: str
    parts: Sequence[tuple[str, float, str]]
    label: str

    @property
    def length(self) -> float:
        """Sum of the parts."""
        return sum(value for _, value, _ in self.parts)


def nice_step(span: float, count: int) -> float:
    """The round step that divides ``span`` into at most ``count`` parts."""
    wish = span / count
    power = 10.0 ** math.floor(math.log10(wish))
    return next((k * power for k in (1, 2, 5) if k * power >= wish * 0.999), 10 * power)


def smoothed(values: Sequence[float]) -> list[float]:
    """The mean of each value and its neighbours, together about a tenth of all values; with fewer
    than 20 the values themselves."""
    most = len(values) // 20
    sums = [0.0, *itertools.accumulate(values)]
    result = []
    for i in range(len(values)):
        reach = min(most, i, len(values) - 1 - i)
        result.append((sums[i + reach + 1] - sums[i - reach]) / (2 * reach + 1))
    return result


def _thinned(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most a few hundred points, each the mean of its neighbours."""
    size = -(-len(points) // _MOST_POINTS)
    groups = [points[i : i + size] for i in range(0, len(points), size)]
    return [(sum(x for x, _ in g) / len(g), sum(y for _, y in g) / len(g)) for g in groups]


def _ticks(low: float, high: float, *, log: bool) -> list[float]:
    if not log:
        step = nice_step(high - low, 5)
        return [step * k for k in range(math.ceil(low / step), math.floor(high / step + 1e-9) + 1)]
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1,) if high / low > 1000 else (1, 3)
    return [k * 10.0**p for p in powers for k in steps if low <= k * 10.0**p <= high]


def draw_curves(
    picture: Picture,
    curves: Sequence[Curve],
    form: Format = number,
    *,
    tick: Format = number,
    zero: bool = False,
    log: bool = False,
    smooth: bool = True,
) -> None:
    """Lines over iterations: values thin and pale, their running mean strong.

    Args:
        form: of the last values.
        tick: of the axis' numbers.
        zero: let the axis begin at 0.
        log: logarithmic axis; values at or below 0 are left out.
        smooth: draw the running mean; else the values, strong.
    """
    curves = [c for c in (_positive(c) if log else c for c in curves) if len(c.x)]
    if not curves:
        return
    low, high = _range(curves, zero=zero, log=log)
    first, last = min(c.x[0] for c in curves), max(c.x[-1] for c in curves)
    last = max(last, first + 1)
    ticks = _ticks(low, high, log=log)
    labels = [f"{c.name} {form(c.y[-1])}".strip() for c in curves]
    left = max((text_width(tick(t)) for t in ticks), default=20) + 8
    right = picture.width - max(text_width(label, bold=True) for label in labels) - 8
    scale: Callable[[float], float] = math.log10 if log else float
    height = max(picture.width * 0.42, 160.0)

    def place(x: float, y: float) -> tuple[float, float]:
        up = (scale(y) - scale(low)) / (scale(high) - scale(low))
        return left + (right - left) * (x - first) / (last - first), height * (1 - up) + 6

    for value in ticks:
        y = place(first, value)[1]
        picture.add(Line(((left, y), (right, y)), "line"))
        picture.add(Text(left - 6, y, tick(value), "dim", anchor="end"))
    _draw_iterations(picture, (first, last), place, place(first, low)[1])
    ends = []
    for curve, label in reversed(list(zip(curves, labels, strict=True))):
        means = [scale(y) for y in curve.y]
        means = smoothed(means) if smooth else means
        end = _draw_curve(picture, curve, [10**y for y in means] if log else means, place)
        ends.append((end, label, curve.colour))
    _draw_labels(picture, ends, right + 6, place(first, low)[1])


def _draw_curve(
    picture: Picture,
    curve: Curve,
    means: Sequence[float],
    place: Callable[[float, float], tuple[float, float]],
) -> float:
    """Values pale and ``means`` strong; returns the height of the last mean."""
    raw, mean = (
        tuple(place(x, y) for x, y in _thinned(list(zip(curve.x, ys, strict=True))))
        for ys in (curve.y, means)
    )
    if raw != mean:
        picture.add(Line(raw, curve.colour, 1, 0.35))
    picture.add(Line(mean, curve.colour, 2.2))
    return mean[-1][1]


def _range(curves: Sequence[Curve], *, zero: bool, log: bool) -> tuple[float, float]:
    """The ends of an axis that has room for all values."""
    low, high = min(min(c.y) for c in curves), max(max(c.y) for c in curves)
    low = 0.0 if zero else low
    if high <= low:
        low, high = low - abs(low) * 0.05 - 1e-9, high + abs(high) * 0.05 + 1e-9
    pad = 1.08 if log else (high - low) * 0.06
    return (low / pad, high * pad) if log else (low if zero else low - pad, high + pad)


def _positive(curve: Curve) -> Curve:
    kept = [(x, y) for x, y in zip(curve.x, curve.y, strict=True) if y > 0]
    return dataclasses.replace(curve, x=[x for x, _ in kept], y=[y for _, y in kept])


def _draw_iterations(
    picture: Picture,
    ends: tuple[float, float],
    place: Callable[[float, float], tuple[float, float]],
    bottom: float,
) -> None:
    first, last = ends
    step = max(1.0, nice_step(last - first, 6))
    at = math.ceil(first / step) * step
    while at <= last:
        x = place(at, 1.0)[0]
        picture.add(Text(x, bottom + 14, f"{at:g}", "dim", anchor="middle"))
        at += step
    x = (place(first, 1.0)[0] + place(last, 1.0)[0]) / 2
    picture.add(Text(x, bottom + 31, "iteration", "dim", anchor="middle"))


def _draw_labels(
    picture: Picture, ends: list[tuple[float, str, str]], x: float, bottom: float
) -> None:
    """Labels (height, text, colour), moved apart where they would overlap, all above ``bottom``."""
    places = [-math.inf]
    for y, _, _ in sorted(ends):
        places.append(max(y, places[-1] + _LINE_HEIGHT))
    up = max(0.0, places[-1] - bottom)
    for y, (_, text, colour) in zip(places[1:], sorted(ends), strict=True):
        picture.add(Text(x, y - up, text, colour, bold=True))


def draw_legend(picture: Picture, names: Sequence[str]) -> float:
    """Squares with the meaning of each class, in as many lines as needed; returns their bottom."""
    x, y = 0.0, 8.0
    for name in names:
        wide = 22 + text_width(label_of(name)) + 8
        if x and x + wide > picture.width:
            x, y = 0.0, y + 18
        picture.add(Rect(x, y - 6, 12, 12, name))
        picture.add(Text(x + 17, y, label_of(name)))
        x += wide
    return y + 14


def draw_bars(
    picture: Picture, bars: Sequence[Bar], top: float = 4, *, form: Format
) -> list[float]:
    """Rows of stacked bars from one zero; names to the left, labels to the right.

    Returns:
        The right end of each bar.
    """
    left = max(text_width(bar.name) for bar in bars) + 8
    room = picture.width - left - max(text_width(bar.label, bold=True) for bar in bars) - 8
    scale = room / (max(bar.length for bar in bars) or 1.0)
    tall = 22.0 if len(bars) <= 16 else 12.0
    ends = []
    for row, bar in enumerate(bars):
        x, y = left, top + row * (tall + 6)
        middle = y + tall / 2
        picture.add(Text(left - 8, middle, bar.name, anchor="end"))
        for colour, value, hint in bar.parts:
            wide = value * scale
            picture.add(Rect(x, y, wide, tall, colour, hint=hint))
            text = form(value)
            if len(bar.parts) > 1 and tall > 16 and wide > text_width(text, 11) + 6:
                on = "on" if colour in ("F", "B", "W") else "ink"
                picture.add(Text(x + wide / 2, middle, text, on, 11, "middle"))
            x += wide
        picture.add(Text(x + 6, middle, bar.label, bold=True))
        ends.append(x)
    return ends

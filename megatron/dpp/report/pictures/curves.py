"""Curves over iterations: loss, gradient norm, tokens/s, memory, time, of one run or several."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence

from megatron.dpp.report.analysis.formats import duration, mebibytes, number, percent
from megatron.dpp.report.analysis.report_data import Report
from megatron.dpp.report.pictures.axes import Curve, draw_curves
from megatron.dpp.report.pictures.picture import Picture
from megatron.dpp.report.pictures.runs import runs_of

_NOTE = "thin: each iteration; thick: mean of neighbours"


def _metric_curves(report: Report, metric: str | None) -> list[Curve]:
    """A metric of each run that has it; ``None`` is the loss. Two equal ones are one curve."""
    curves = []
    for name, colour, run in runs_of(report):
        x, y = run.training.series(metric or run.training.loss_name)
        if x:
            curves.append(Curve(name if report.others else "", colour, x, y))
    if len(curves) == 2 and (curves[0].x, curves[0].y) == (curves[1].x, curves[1].y):
        return [dataclasses.replace(curves[0], name="both")]
    return curves


def plot_loss(report: Report, width: float) -> Picture | None:
    """Training loss, and the difference of two runs."""
    curves = _metric_curves(report, None)
    if not curves:
        return None
    first, last = curves[0].y[0], curves[0].y[-1]
    verb = "falls" if last < first else "rises"
    title = f"Loss {verb} from {number(first)} to {number(last)} in {len(curves[0].x)} iterations"
    if len(curves) > 2:
        title = f"Loss: {_ends(curves)} at the end"
    elif len(curves) == 2:
        one, two = (dict(zip(c.x, c.y, strict=True)) for c in curves)
        common = one.keys() & two.keys()
        apart = max((abs(one[i] - two[i]) for i in common), default=math.nan)
        same = "; the same in both runs as far as both go, bit by bit"
        title += same if apart == 0 else ""
        title += f"; the runs differ by at most {number(apart)}" if apart > 0 else ""
    elif curves[0].name == "both":
        title += "; the same in both runs, bit by bit"
    picture = Picture(title, width, _NOTE)
    draw_curves(picture, curves)
    return picture


def _ends(curves: Sequence[Curve]) -> str:
    return ", ".join(f"{curve.name} {number(curve.y[-1])}" for curve in curves)


def plot_grad_norm(report: Report, width: float) -> Picture | None:
    """Norm of the gradients; logarithmic where it has spikes."""
    curves = _metric_curves(report, "grad norm")
    if not curves:
        return None
    highest = max(curves[0].y)
    at = curves[0].x[curves[0].y.index(highest)]
    middle = statistics.median(curves[0].y)
    title = f"Gradient norm: {number(middle)} in the median, {number(highest)} at iteration {at}"
    log = highest > 10 * middle and middle > 0
    picture = Picture(title, width, _NOTE + ("; logarithmic axis" if log else ""))
    draw_curves(picture, curves, log=log)
    return picture


def plot_speed(report: Report, width: float) -> Picture | None:
    """Tokens per second."""
    curves = _metric_curves(report, "tokens/s")
    if not curves:
        return None
    middle = [statistics.median(c.y) for c in curves]
    title = f"{number(middle[0])} tokens/s in the median"
    if len(curves) == 2:
        title = (
            f"{curves[0].name.capitalize()}: {title}, {more_or_less(middle[0] / middle[1] - 1)} "
            f"than {curves[1].name}"
        )
    elif len(curves) > 2:
        each = zip(curves, middle, strict=True)
        title = f"Tokens/s: {', '.join(f'{c.name} {number(m)}' for c, m in each)} in the median"
    picture = Picture(title, width, _NOTE)
    draw_curves(picture, curves, zero=True)
    return picture


def more_or_less(change: float) -> str:
    """``5.0 % more`` or ``5.0 % less``."""
    return f"{percent(abs(change))} {'more' if change >= 0 else 'less'}"


def plot_memory(report: Report, width: float) -> Picture | None:
    """Most memory so far of the rank that writes the metrics."""
    curves = _metric_curves(report, "peak memory")
    if not curves:
        return None
    title = f"Peak memory of the last rank: {mebibytes(curves[0].y[-1])}"
    picture = Picture(title, width, "most in use since the start, by iteration")
    large = max(max(curve.y) for curve in curves) >= 10_000 * 2**20
    unit, size = ("GiB", 2**30) if large else ("MiB", 2**20)
    scaled = [dataclasses.replace(curve, y=[y / size for y in curve.y]) for curve in curves]

    def tick(y: float) -> str:
        return f"{y:g} {unit}"

    draw_curves(picture, scaled, lambda y: mebibytes(y * size), tick=tick, zero=True, smooth=False)
    return picture


def plot_iterations(report: Report, width: float) -> Picture | None:
    """Time of every traced iteration; of a run without traces, of every iteration."""
    curves = []
    for name, colour, run in runs_of(report):
        if run.pipeline is not None:
            rows = run.pipeline.iterations
            x, y = [float(row.iteration) for row in rows], [row.total_ms for row in rows]
        else:
            x, seconds = run.training.series("seconds")
            y = [each * 1e3 for each in seconds]
        if x:
            curves.append(Curve(name if report.others else "", colour, x, y))
    if not curves:
        return None
    times = curves[0].y
    title = (
        f"An iteration takes {duration(statistics.median(times))} in the median, "
        f"{duration(min(times))} to {duration(max(times))}"
    )
    which = "traced iteration" if report.pipeline else "iteration"
    picture = Picture(title, width, f"thin: each {which}; thick: mean of neighbours")
    long = max(max(c.y) for c in curves) >= 1000

    def tick(ms: float) -> str:
        return f"{ms / 1e3:g} s" if long else f"{ms:g} ms"

    draw_curves(picture, curves, duration, tick=tick, zero=True)
    return picture

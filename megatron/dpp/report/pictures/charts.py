"""Pictures of a traced pipeline: each takes a report and says its finding in the title."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

from megatron.dpp.report.analysis.formats import duration, number, percent
from megatron.dpp.report.analysis.report_data import Pipeline, RankRow, Report
from megatron.dpp.report.pictures.axes import Bar, draw_bars, draw_legend
from megatron.dpp.report.pictures.curves import more_or_less
from megatron.dpp.report.pictures.picture import Line, Picture, Text
from megatron.dpp.report.pictures.runs import (
    Traced,
    by_stage,
    long_name,
    places_note,
    short_name,
    traced_runs_of,
)
from megatron.dpp.report.pictures.style import in_order, label_of
from megatron.dpp.report.pictures.time_axis import Slice, draw_timeline

MOST_ROWS = 64
"""Ranks that a picture of all ranks shows."""


def plot_timeline(report: Report, width: float) -> Picture | None:
    """All tasks and waits of one iteration."""
    found = report.pipeline
    if found is None or found.timeline is None:
        return None
    line = found.timeline
    bubble = next(
        (row.bubble for row in found.iterations if row.iteration == line.iteration),
        found.totals.bubble,
    )
    title = f"One step takes {duration(line.length_us / 1e3)}; its ranks idle {percent(bubble)}"
    note = (
        f"iteration {line.iteration}, {found.name} schedule; the number in a task is its "
        "microbatch; later chunks are paler"
    )
    picture = Picture(title, width, _noted(note, found))
    top = draw_legend(picture, in_order({one[3] for one in line.slices})) + 4
    rows = [short_name(found.row(rank), found) for rank in line.ranks]
    waits_first = sorted(line.slices, key=lambda one: len(one[3]) == 1)
    slices = [Slice(*one[:5]) for one in waits_first]
    draw_timeline(picture, rows, slices, line.length_us, top, tick=lambda us: f"{us / 1e3:g}")
    picture.add(Text(width, picture.height + 9, "ms since the start", "dim", 11, "end"))
    return picture


def _noted(note: str, pipeline: Pipeline) -> str:
    """A note, with the meaning of the letters of places."""
    return "; ".join(filter(None, (note, places_note(pipeline))))


def parts_of(row: RankRow) -> list[tuple[str, float]]:
    """Parts of a rank's pipeline time as (class, ms) in the order of ``LABELS``."""
    times = {**row.kinds_ms, "span": row.other_ms, **row.idle_ms}
    return [(name, times[name]) for name in in_order(times) if times[name]]


def _mean_parts(pipeline: Pipeline) -> list[tuple[str, float]]:
    each = [{**dict(parts_of(row)), "tail": sum(row.tail_ms.values())} for row in pipeline.ranks]
    names = in_order({name for parts in each for name in parts})
    means = {name: sum(parts.get(name, 0.0) for parts in each) / len(each) for name in names}
    return [(name, value) for name, value in means.items() if value > 0]


def _hinted(parts: list[tuple[str, float]]) -> list[tuple[str, float, str]]:
    return [(name, value, f"{label_of(name)}: {duration(value)}") for name, value in parts]


def _classes(rows: list[list[tuple[str, float]]]) -> list[str]:
    present = {name for row in rows for name, value in row if value > 0}
    return in_order(present)


def plot_time_per_rank(report: Report, width: float) -> Picture | None:
    """Parts of the pipeline's time, per rank."""
    found = report.pipeline
    if found is None:
        return None
    busiest = max(found.ranks, key=lambda row: row.busy_ms)
    idlest = max(found.ranks, key=lambda row: row.bubble)
    title = (
        f"{long_name(busiest, found).capitalize()} works most, {duration(busiest.busy_ms)} of "
        f"{duration(found.totals.window_ms)}; {long_name(idlest, found)} idles most, "
        f"{percent(idlest.bubble)}"
    )
    picture = Picture(title, width, _noted("mean time per iteration", found))
    rows = by_stage(found)[:MOST_ROWS]
    top = draw_legend(picture, _classes([parts_of(row) for row in rows]))
    bars = [
        Bar(short_name(row, found), _hinted(parts_of(row)), f"{percent(row.bubble)} idle")
        for row in rows
    ]
    draw_bars(picture, bars, top, form=duration)
    return picture


def plot_bubble(report: Report, width: float) -> Picture | None:
    """Measured idle share against that of the other schedule with the same tasks."""
    found = report.pipeline
    if found is None or found.other_order is None:
        return None
    other, measured = found.other_order, found.totals.bubble
    title = f"Idle: {percent(measured)}; replayed {other.schedule}, {percent(other.bubble)}"
    note = (
        f"replayed: the {other.schedule} schedule simulated with the times of this run's tasks and "
        "messages; the shorter bar is the better schedule"
    )
    picture = Picture(title, width, note)
    rows = [(name, colour, one.totals.bubble) for name, colour, one in traced_runs_of(report)]
    rows.append((f"{other.schedule}, replayed", "drain", other.bubble))
    bars = [Bar(name, [(colour, value, name)], percent(value)) for name, colour, value in rows]
    draw_bars(picture, bars, form=percent)
    return picture


def difference(one: Pipeline, two: Pipeline) -> tuple[float, bool]:
    """Mean time of an iteration over the other run's less 1, and True where that is more than twice
    its standard error."""
    means, errors = [], []
    for run in (one, two):
        times = [row.total_ms for row in run.iterations]
        means.append(statistics.fmean(times))
        spread = statistics.stdev(times) if len(times) > 1 else math.inf
        errors.append(spread / math.sqrt(len(times)))
    clear = abs(means[0] - means[1]) > 2 * math.hypot(*errors)
    return means[0] / means[1] - 1, clear


def plot_comparison(report: Report, width: float) -> Picture | None:
    """An iteration of the traced runs, and the difference of two."""
    runs = traced_runs_of(report)
    if len(runs) < 2:
        return None
    means = [run.totals.mean_ms for _, _, run in runs]
    best = min(runs, key=lambda each: each.pipeline.totals.mean_ms)
    title = f"{best.name} takes the least time per iteration, {duration(min(means))}"
    if len(runs) == 2:
        title = _pair_title(runs)
    picture = Picture(title, width, "mean over ranks and iterations")
    parts = [_mean_parts(run) for _, _, run in runs]
    top = draw_legend(picture, _classes(parts))
    bars = [
        Bar(name, _hinted(part), duration(mean))
        for (name, _, _), part, mean in zip(runs, parts, means, strict=True)
    ]
    ends = draw_bars(picture, bars, top, form=duration)
    if len(runs) == 2:
        _draw_difference(picture, runs, ends)
    return picture


def _pair_title(runs: list[Traced]) -> str:
    change, clear = difference(runs[0].pipeline, runs[1].pipeline)
    names = (runs[0].name.capitalize(), runs[1].name)
    title = f"{names[0]} takes {more_or_less(change)} time per iteration than {names[1]}"
    if not clear:
        title = f"{names[0]} and {names[1]} differ by less than the noise"
    one, two = (run.pipeline.totals.mean_ms for run in runs)
    return f"{title} ({duration(one)} against {duration(two)})"


def _draw_difference(picture: Picture, runs: list[Traced], ends: list[float]) -> None:
    """A line between the ends of two bars, and their difference."""
    change, clear = difference(runs[0].pipeline, runs[1].pipeline)
    one, two = (run.pipeline.totals.mean_ms for run in runs)
    y = picture.height + 14
    for x in ends:
        picture.add(Line(((x, y - 6), (x, y + 6)), "ink", 1.5))
    picture.add(Line(((ends[0], y), (ends[1], y)), "ink", 1.5))
    text = f"{'+' if change > 0 else '-'}{duration(abs(one - two))} ({change * 100:+.1f} %)"
    text = text.replace("-", "\N{MINUS SIGN}")
    colour = ("bad" if change > 0 else "good") if clear else "dim"
    picture.add(Text(min(ends) - 8, y, text, colour, anchor="end", bold=True))


def plot_time_per_token(report: Report, width: float) -> Picture | None:
    """Time of a rank's tasks per token, for each class of sizes of microbatches."""
    found = report.pipeline.lengths if report.pipeline else None
    rows = found.size_classes if found else []
    times = [[("F", row.F or 0.0), ("B", row.B or 0.0), ("W", row.W or 0.0)] for row in rows]
    totals = [sum(value for _, value in each) for each in times]
    if len(rows) < 2 or not min(totals):
        return None
    ratio = totals[0] / totals[-1]
    title = (
        f"A token of the shortest microbatches takes {number(ratio)} times as long as one of the "
        "longest"
        if ratio >= 1
        else f"A token of the longest microbatches takes {number(1 / ratio)} times as long as one "
        "of the shortest"
    )
    picture = Picture(title, width, "mean over a rank's chunks, microseconds per token")
    top = draw_legend(picture, _classes(times))
    bars = [
        Bar(
            f"up to {row.up_to:,}",
            [(k, t, f"{label_of(k)}: {_us(t)}") for k, t in each],
            _us(sum_),
        )
        for row, each, sum_ in zip(rows, times, totals, strict=True)
    ]
    draw_bars(picture, bars, top, form=_us)
    return picture


def _us(value: float) -> str:
    return f"{number(value)} us"


def per_rank(
    value: Callable[[RankRow], float | None], form: Callable[[float], str], finding: str
) -> Callable[[Report, float], Picture | None]:
    """A picture of one value per rank; ``finding`` takes the largest value's rank and text."""

    def draw(report: Report, width: float) -> Picture | None:
        bars: list[tuple[tuple[int, ...], Bar]] = []
        most: tuple[float, str] | None = None
        for order, (name, colour, run) in enumerate(traced_runs_of(report)):
            for row in by_stage(run)[:MOST_ROWS]:
                size = value(row)
                if size is None:
                    continue
                label = short_name(row, run) + (f", {name}" if report.others else "")
                bar = Bar(label, [(colour, size, long_name(row, run))], form(size))
                bars.append(((row.pipeline, row.data, row.tensor, order), bar))
                if run is report.pipeline and (most is None or size > most[0]):
                    most = size, long_name(row, run).capitalize()
        if most is None or report.pipeline is None:
            return None
        title = finding.format(rank=most[1], value=form(most[0]))
        picture = Picture(title, width, places_note(report.pipeline))
        draw_bars(picture, [bar for _, bar in sorted(bars, key=lambda b: b[0])], form=form)
        return picture

    return draw


def plot_experts(report: Report, width: float) -> Picture | None:
    """Tokens of each layer's fullest expert over the mean."""
    rows = report.pipeline.experts[:MOST_ROWS] if report.pipeline else []
    if not rows:
        return None

    def times(value: float) -> str:
        return f"{value:.2f}"

    worst = max(rows, key=lambda row: row.imbalance)
    title = (
        f"The fullest expert of layer {worst.layer} gets {times(worst.imbalance)} times the "
        "mean number of tokens"
    )
    picture = Picture(title, width, "tokens of the fullest expert over the mean, by layer")
    labels = [(f"layer {row.layer}", row.imbalance) for row in rows]
    bars = [Bar(name, [("this", value, name)], times(value)) for name, value in labels]
    draw_bars(picture, bars, form=times)
    return picture

"""The pictures of a report: loss, one step's timeline, and where each rank's time went."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from megatron.dpp.report.analysis.model import Iteration, RankIteration
from megatron.dpp.report.analysis.places import JobShape, slice_names
from megatron.dpp.report.analysis.sentences import duration, number, percent
from megatron.dpp.report.analysis.summary import Pipeline, RankRow
from megatron.dpp.report.pictures.picture import Picture, Slice, nice_step, text_width
from megatron.dpp.report.pictures.style import in_order, label_of
from megatron.dpp.report.run_files import Training

MOST_ROWS = 32
"""Ranks that a picture shows."""
_MOST_POINTS = 400
_HEIGHT = 260.0

Points = Sequence[tuple[float, float]]


def plot_loss(runs: Sequence[Training]) -> Picture | None:
    """Loss of the training steps and of evaluations, of a run and its baseline; None without."""
    curves: list[tuple[str, Points, str, bool]] = []
    for run, (line, dots) in zip(runs, (("this", "good"), ("other", "bad")), strict=False):
        label = f"{run.home.name}, " if len(runs) > 1 else ""
        points = list(zip(*run.series("loss"), strict=True))
        curves += [(f"{label}training", points, line, True)]
        curves += [(f"{label}validation", run.evaluations, dots, False)]
    curves = [curve for curve in curves if curve[1]]
    if not curves:
        return None
    first, last = curves[0][1][0][1], curves[0][1][-1][1]
    verb = "falls" if last < first else "rises"
    picture = Picture(
        f"Loss {verb} from {number(first)} to {number(last)} in {len(curves[0][1])} iterations",
        note="thin: each iteration; thick: mean of neighbours; points: evaluations",
    )
    _draw_curves(picture, curves)
    return picture


def _draw_curves(picture: Picture, curves: Sequence[tuple[str, Points, str, bool]]) -> None:
    points = [point for _, own, _, _ in curves for point in own]
    low, high = min(y for _, y in points), max(y for _, y in points)
    pad = (high - low) * 0.06 or abs(high) * 0.05 or 1.0
    low, high = low - pad, high + pad
    first, last = min(x for x, _ in points), max(x for x, _ in points)
    last = max(last, first + 1)
    left = 50.0
    right = picture.width - max(
        text_width(f"{name} {number(own[-1][1])}") for name, own, *_ in curves
    )

    def place(point: tuple[float, float]) -> tuple[float, float]:
        x, y = point
        return (
            left + (right - 12 - left) * (x - first) / (last - first),
            _HEIGHT * (1 - (y - low) / (high - low)) + 6,
        )

    for value in _ticks(low, high, 5):
        y = place((first, value))[1]
        picture.line(((left, y), (right - 12, y)), "line")
        picture.text(left - 6, y, number(value), "dim", anchor="end")
    for value in _ticks(first, last, 8):
        picture.text(place((value, low))[0], _HEIGHT + 20, f"{value:g}", "dim", anchor="middle")
    picture.text((left + right) / 2, _HEIGHT + 38, "iteration", "dim", anchor="middle")
    ends = []
    for name, own, colour, is_curve in curves:
        places = [place(point) for point in own]
        if is_curve:
            picture.line(_thinned(places), colour, alpha=0.4)
            smooth = list(zip((x for x, _ in places), _means([y for _, y in places]), strict=True))
            picture.line(_thinned(smooth), colour, width=2.2)
        for x, y in () if is_curve else places[-_MOST_POINTS:]:
            picture.rect(x - 3, y - 3, 6, 6, colour, hint=f"{name}")
        ends.append((places[-1][1], f"{name} {number(own[-1][1])}", colour))
    y = -20.0
    for height, text, colour in sorted(ends):  # moved apart where they would overlap
        y = max(height, y + 15)
        picture.text(right - 6, y, text, colour, bold=True)


def _ticks(low: float, high: float, count: int) -> list[float]:
    step = nice_step(high - low, count)
    return [k * step for k in range(int(low // step), int(high // step) + 1) if k * step >= low]


def _means(values: Sequence[float]) -> list[float]:
    """The mean of each value and its neighbours, together about a tenth of all values."""
    most = len(values) // 20
    sums = [0.0, *itertools.accumulate(values)]
    result = []
    for i in range(len(values)):
        reach = min(most, i, len(values) - 1 - i)
        result.append((sums[i + reach + 1] - sums[i - reach]) / (2 * reach + 1))
    return result


def _thinned(points: Points) -> Points:
    """At most a few hundred points, each the mean of its neighbours."""
    size = -(-len(points) // _MOST_POINTS)
    groups = [points[i : i + size] for i in range(0, len(points), size)]
    return [(sum(x for x, _ in g) / len(g), sum(y for _, y in g) / len(g)) for g in groups]


def plot_timeline(iteration: Iteration, shape: JobShape, schedule: str) -> Picture:
    """All tasks and waits of one iteration."""
    order = [rank for ranks in shape.pipelines() for rank in ranks][:MOST_ROWS]
    length = (iteration.end - iteration.start) / 1e6
    picture = Picture(
        f"Iteration {iteration.number} takes {duration(length)}",
        note=f"{schedule} schedule; the number in a task is its microbatch; later chunks are paler",
    )
    slices = [
        one
        for row, rank in enumerate(order)
        for one in _slices(iteration.ranks[rank], row, iteration.start)
    ]
    picture.legend(in_order({one.kind for one in slices}))
    picture.timeline(
        [f"stage {shape.pipeline[rank]}, rank {rank}" for rank in order], slices, length, "ms"
    )
    return picture


def _slices(rank: RankIteration, row: int, origin: int) -> list[Slice]:
    """Waits and other work, then tasks."""
    found = []

    def add(start: int, end: int, kind: str, name: str, detail: str = "") -> None:
        begin, stop = (start - origin) / 1e6, (end - origin) / 1e6
        words = f"{name}: {duration(begin)} to {duration(stop)}, {duration(stop - begin)}"
        found.append(Slice(row, begin, stop, kind, name, words + f"; {detail}" * bool(detail)))

    for wait in rank.waits:
        add(wait.start, wait.end, wait.cause, f"wait: {wait.cause}", wait.detail)
    for span in rank.spans:
        add(span.start, span.end, "span", span.name)
    parts = slice_names(rank.groups)
    for task in rank.tasks:
        part = parts[task.microbatch].strip() if task.microbatch < len(parts) else ""
        piece = f"piece {task.piece}" if task.piece else ""
        name = f"{task.chunk}{task.kind}{task.microbatch}"
        add(task.start, task.end, task.kind, name, " ".join(filter(None, (part, piece))))
    return found


def _parts(row: RankRow) -> dict[str, float]:
    """Parts of a rank's iteration in ms."""
    times = {**row.kinds_ms, "span": row.other_ms, **row.idle_ms}
    return {**times, "tail": sum(row.tail_ms.values())}


def mean_parts(pipeline: Pipeline) -> dict[str, float]:
    """Parts of the mean rank's iteration in ms, by their class."""
    each = [_parts(row) for row in pipeline.ranks]
    names = in_order({name for parts in each for name in parts})
    return {name: sum(parts.get(name, 0.0) for parts in each) / len(each) for name in names}


def plot_time(found: Pipeline, other: Pipeline | None) -> Picture:
    """Draws the parts of an iteration's time: the mean rank's, the baseline's, each rank's."""
    idlest = max(found.ranks, key=lambda row: row.bubble)
    picture = Picture(
        f"The ranks idle {percent(found.totals.bubble)} of the pipeline's time; {idlest.name} "
        f"most, {percent(idlest.bubble)}",
        note="mean time per iteration",
    )
    rows = [(f"{found.name}, mean", mean_parts(found), percent(found.totals.bubble))]
    if other is not None:
        rows.append((f"baseline, {other.name}", mean_parts(other), percent(other.totals.bubble)))
    rows += [(row.name, _parts(row), percent(row.bubble)) for row in found.ranks[:MOST_ROWS]]
    _draw_bars(picture, rows)
    return picture


def _draw_bars(picture: Picture, rows: Sequence[tuple[str, dict[str, float], str]]) -> None:
    """Stacked bars from one zero; names to the left, idle shares to the right."""
    present = {name for _, parts, _ in rows for name, value in parts.items() if value > 0}
    top, left = picture.legend(in_order(present)), max(text_width(name) for name, _, _ in rows) + 8
    room = picture.width - left - 90
    scale = room / (max(sum(parts.values()) for _, parts, _ in rows) or 1.0)
    for index, (name, parts, idle) in enumerate(rows):
        x, y = left, top + index * 28
        picture.text(left - 8, y + 11, name, anchor="end")
        for kind in in_order(parts):
            wide, text = parts[kind] * scale, duration(parts[kind])
            if wide > 0:
                picture.rect(x, y, wide, 22, kind, hint=f"{label_of(kind)}: {text}")
            if wide > text_width(text, 11) + 6:
                on = "on" if kind in ("F", "B", "W") else "ink"
                picture.text(x + wide / 2, y + 11, text, on, size=11, anchor="middle")
            x += wide
        picture.text(x + 6, y + 11, f"{idle} idle", bold=True)

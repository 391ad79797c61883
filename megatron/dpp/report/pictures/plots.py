"""Pictures of a report (loss, a step's timeline, where time went) and of simulated schedules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron.dpp.report.analysis.model import JobShape, RankIteration, TracedIteration
from megatron.dpp.report.analysis.sentences import duration, number, percent
from megatron.dpp.report.analysis.summary import Analysis
from megatron.dpp.report.analysis.times import RankTimes
from megatron.dpp.report.pictures.picture import (
    Bar,
    Picture,
    in_legend_order,
    label_of,
    text_width,
    ticks,
)
from megatron.dpp.report.run_files import Training
from megatron.dpp.sim.result import Result

_MOST_ROWS = 32
"""Ranks that a picture shows."""
_MOST_POINTS = 400
_LEFT, _HEIGHT = 50.0, 260.0

Points = Sequence[tuple[float, float]]


def plot_loss(runs: Sequence[Training]) -> Picture | None:
    """Loss of the training steps and of evaluations, of a run and perhaps its baseline; None
    without steps of any.
    """
    lines: dict[str, Points] = {}
    dots: dict[str, Points] = {}
    labels: dict[str, str] = {}
    for run, line, dot in zip(runs, ("this", "other"), ("good", "bad"), strict=False):
        name = f"{run.home.name}, " if len(runs) > 1 else ""
        lines[line], dots[dot] = list(zip(*run.series("loss"), strict=True)), run.evaluations
        labels |= {line: f"{name}training", dot: f"{name}validation"}
    curves = {colour: points for colour, points in (lines | dots).items() if points}
    if not any(lines.values()):
        return None
    shown = next(points for points in lines.values() if points)
    first, last = shown[0][1], shown[-1][1]
    picture = Picture(
        f"Loss {'falls' if last < first else 'rises'} from {number(first)} to {number(last)} in "
        f"{len(shown)} iterations"
    )
    legend = {c: f"{labels[c]} {number(points[-1][1])}" for c, points in curves.items()}
    _draw_curves(picture, picture.legend(legend) + 8, curves, [*dots])
    return picture


def _draw_curves(
    picture: Picture, top: float, curves: dict[str, Points], dots: Sequence[str]
) -> None:
    """Axes below ``top``, a line for each curve, and squares for those of ``dots``."""
    xs, ys = zip(*(point for points in curves.values() for point in points), strict=True)
    pad = (max(ys) - min(ys)) * 0.06 or abs(max(ys)) * 0.05 or 1.0
    low, high, begin = min(ys) - pad, max(ys) + pad, min(xs)
    end = max(*xs, begin + 1)

    def place(x: float, y: float) -> tuple[float, float]:
        right = _LEFT + (picture.width - 20 - _LEFT) * (x - begin) / (end - begin)
        return right, top + _HEIGHT * (high - y) / (high - low)

    for value in ticks(low, high, 5):
        _, y = place(begin, value)
        picture.line((place(begin, value), place(end, value)), "line")
        picture.text(_LEFT - 6, y, number(value), "dim", anchor="end")
    for value in ticks(begin, end, 8):
        picture.text(place(value, low)[0], top + _HEIGHT + 14, f"{value:g}", "dim", anchor="middle")
    picture.text(picture.width / 2, top + _HEIGHT + 32, "iteration", "dim", anchor="middle")
    for colour, points in curves.items():
        if colour not in dots:
            picture.line([place(*point) for point in _thinned(points)], colour, width=2)
            continue
        for x, y in (place(*point) for point in points[-_MOST_POINTS:]):
            picture.rect(x - 3, y - 3, 6, 6, colour)


def _thinned(points: Points) -> Points:
    """At most a few hundred points, each the mean of its neighbours."""
    size = -(-len(points) // _MOST_POINTS)
    groups = [points[i : i + size] for i in range(0, len(points), size)]
    return [(sum(x for x, _ in g) / len(g), sum(y for _, y in g) / len(g)) for g in groups]


def plot_timeline(iteration: TracedIteration, shape: JobShape, schedule: str) -> Picture:
    """All tasks and waits of one iteration."""
    order = [rank for ranks in shape.pipelines() for rank in ranks][:_MOST_ROWS]
    length = (iteration.end - iteration.start) / 1e6
    picture = Picture(
        f"Iteration {iteration.number} takes {duration(length)}",
        note=f"{schedule} schedule; the number in a task is its microbatch; later chunks are paler",
    )
    bars = [
        bar
        for row, rank in enumerate(order)
        for bar in _bars(iteration.ranks[rank], row, iteration.start)
    ]
    picture.legend({kind: label_of(kind) for kind in in_legend_order({bar.kind for bar in bars})})
    names = [f"stage {shape.pipeline[rank]}, rank {rank}" for rank in order]
    picture.timeline(names, bars, length, "ms")
    return picture


def _bars(rank: RankIteration, row: int, origin: int) -> list[Bar]:
    """Waits and other work, then tasks."""
    found = []

    def add(start: int, end: int, kind: str, name: str, detail: str = "") -> None:
        begin, stop = (start - origin) / 1e6, (end - origin) / 1e6
        words = f"{name}: {duration(begin)} to {duration(stop)}, {duration(stop - begin)}"
        found.append(Bar(row, begin, stop, kind, name, words + f"; {detail}" * bool(detail)))

    for wait in rank.waits:
        add(wait.start, wait.end, wait.cause, f"wait: {wait.cause}", wait.detail)
    for span in rank.spans:
        add(span.start, span.end, "span", span.name)
    for task in rank.tasks:
        piece = f"piece {task.piece}" if task.piece else ""
        name = f"{task.chunk}{task.kind}{task.microbatch}"
        add(task.start, task.end, task.kind, name, piece)
    return found


def _parts(row: RankTimes) -> dict[str, float]:
    """Parts of a rank's iteration in ms."""
    times = {**row.kinds_ms, "span": row.other_ms, **row.idle_ms}
    return {**times, "tail": sum(row.tail_ms.values())}


def plot_time(found: Analysis, other: Analysis | None) -> Picture:
    """Draws the parts of an iteration's time: the mean rank's, the baseline's, each rank's."""
    idlest = max(found.ranks, key=lambda row: row.bubble)
    picture = Picture(
        f"The ranks idle {percent(found.totals.bubble)} of the pipeline's time; "
        f"{found.shape.name_of(idlest.rank)} most, {percent(idlest.bubble)}",
        note="mean time per iteration",
    )
    runs = {f"{found.name}, mean": found} | ({f"baseline, {other.name}": other} if other else {})
    rows = [
        (name, _parts(RankTimes.mean_of(run.ranks)), run.totals.bubble)
        for name, run in runs.items()
    ]
    name_of = found.shape.name_of
    rows += [(name_of(row.rank), _parts(row), row.bubble) for row in found.ranks[:_MOST_ROWS]]
    present = {name for _, parts, _ in rows for name, value in parts.items() if value > 0}
    top = picture.legend({name: label_of(name) for name in in_legend_order(present)})
    left = max(text_width(name) for name, _, _ in rows) + 8
    scale = (picture.width - left - 90) / (max(sum(p.values()) for _, p, _ in rows) or 1.0)
    for index, (name, parts, bubble) in enumerate(rows):
        x, y = left, top + index * 28
        picture.text(left - 8, y + 11, name, anchor="end")
        for kind in in_legend_order(parts):
            wide, text = parts[kind] * scale, duration(parts[kind])
            picture.rect(x, y, wide, 22, kind, hint=f"{label_of(kind)}: {text}")
            if wide > text_width(text, 11) + 6:
                on = "on" if kind in ("F", "B", "W") else "ink"
                picture.text(x + wide / 2, y + 11, text, on, size=11, anchor="middle")
            x += wide
        picture.text(x + 6, y + 11, f"{percent(bubble)} idle", bold=True)
    return picture


def draw(results: Mapping[str, Result]) -> Picture:
    """One panel per schedule, by name, over a common time axis, ranks from top to bottom."""
    ordered = sorted(results, key=lambda name: results[name].makespan)
    best, longest = results[ordered[0]], results[ordered[-1]].makespan
    if len(ordered) == 1:
        title = f"One step takes {best.makespan:.4g}, {best.ratio:.3f} x the least possible"
    else:
        less = f"takes {percent(1 - best.makespan / longest)} less time per step than {ordered[-1]}"
        title = f"{ordered[0][0].upper()}{ordered[0][1:]} {less}"
    note = "the number in a task is its microbatch; later chunks are paler"
    picture = Picture(title, note=note)
    tasks = {name: _task_bars(result) for name, result in results.items()}
    kinds = in_legend_order({bar.kind for bars in tasks.values() for bar in bars})
    picture.legend({kind: label_of(kind) for kind in kinds})
    for name, result in results.items():
        own = f"{result.ratio:.3f} x the busiest rank's own work"
        panel = f"{name}: {result.makespan:.4g}, {own}"
        picture.text(0, picture.height + 18, panel, size=13, bold=True)
        ranks = [f"rank {rank}" for rank in range(len(result.slots))]
        picture.timeline(ranks, tasks[name], longest)
    return picture


def _task_bars(result: Result) -> list[Bar]:
    return [
        Bar(rank, slot.start, slot.end, slot.action.kind.name, str(slot.action._replace(piece=0)))
        for rank, slots in enumerate(result.slots)
        for slot in slots
    ]

"""The pictures of a report: each takes the report's numbers and says its finding in the title."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron.dpp.report.analysis.formats import duration, number, percent
from megatron.dpp.report.pictures.axes import Bar, Curve, draw_bars, draw_curves, draw_legend
from megatron.dpp.report.pictures.picture import Line, Picture, Text, check_png
from megatron.dpp.report.pictures.style import in_order, label_of
from megatron.dpp.report.pictures.time_axis import Slice, draw_timeline

Report = dict[str, Any]

MOST_ROWS = 64
"""Ranks that a picture of all ranks shows."""
_KINDS = ("F", "B", "W")


def name_of(run: Report) -> str:
    """``dynamic`` or ``static``."""
    return "dynamic" if run["run"]["schedule"] == "dpp" else "static"


def runs_of(report: Report) -> list[tuple[str, str, Report]]:
    """Name, colour and numbers of this run, and of the one beside it if there is one."""
    other = report.get("baseline")
    if not other:
        return [(name_of(report), "this", report)]
    names = [name_of(report), name_of(other)]
    if names[0] == names[1]:
        names = ["this run", "other run"]
    return [(names[0], "this", report), (names[1], "other", other)]


def series(run: Report, name: str) -> tuple[list[float], list[float]]:
    """Iterations and values of a metric, without those that are missing or not finite."""
    found = [
        (line["iteration"], line[name])
        for line in run.get("metrics") or []
        if isinstance(line.get(name), (int, float)) and math.isfinite(line[name])
    ]
    return [x for x, _ in found], [y for _, y in found]


def loss_name(run: Report) -> str:
    """The first metric that is a loss; ``lm loss`` of GPT."""
    lines = run.get("metrics") or []
    names = [name for line in lines[-1:] for name in line if name.endswith("loss")]
    return names[0] if names else "lm loss"


def _metric_curves(report: Report, metric: str | None) -> list[Curve]:
    curves = []
    for name, colour, run in runs_of(report):
        x, y = series(run, metric or loss_name(run))
        if x:
            curves.append(Curve(name if report.get("baseline") else "", colour, x, y))
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
    if len(curves) > 1:
        one, two = (dict(zip(c.x, c.y, strict=True)) for c in curves)
        common = one.keys() & two.keys()
        apart = max((abs(one[i] - two[i]) for i in common), default=math.nan)
        same = "; the same in both runs as far as both go, bit by bit"
        title += same if apart == 0 else ""
        title += f"; the runs differ by at most {number(apart)}" if apart > 0 else ""
    elif curves[0].name == "both":
        title += "; the same in both runs, bit by bit"
    picture = Picture(title, width, "thin: each iteration; thick: mean of neighbours")
    draw_curves(picture, curves)
    return picture


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
    note = "thin: each iteration; thick: mean of neighbours" + ("; logarithmic axis" if log else "")
    picture = Picture(title, width, note)
    draw_curves(picture, curves, log=log)
    return picture


def plot_speed(report: Report, width: float) -> Picture | None:
    """Tokens per second."""
    curves = _metric_curves(report, "tokens/s")
    if not curves:
        return None
    middle = [statistics.median(c.y) for c in curves]
    title = f"{number(middle[0])} tokens/s in the median"
    if len(curves) > 1:
        title = (
            f"{curves[0].name.capitalize()}: {title}, {_more(middle[0] / middle[1] - 1)} "
            f"than {curves[1].name}"
        )
    picture = Picture(title, width, "thin: each iteration; thick: mean of neighbours")
    draw_curves(picture, curves, zero=True)
    return picture


def _more(change: float) -> str:
    return f"{percent(abs(change))} {'more' if change >= 0 else 'less'}"


def plot_iterations(report: Report, width: float) -> Picture:
    """Time of every traced iteration."""
    curves = []
    for name, colour, run in runs_of(report):
        rows = run["iterations"]
        x, y = [row["iteration"] for row in rows], [row["total_ms"] for row in rows]
        curves.append(Curve(name if report.get("baseline") else "", colour, x, y))
    times = curves[0].y
    title = (
        f"An iteration takes {duration(report['totals']['iteration_ms'])} in the median, "
        f"{duration(min(times))} to {duration(max(times))}"
    )
    picture = Picture(title, width, "thin: each traced iteration; thick: mean of neighbours")
    long = max(max(c.y) for c in curves) >= 1000

    def tick(ms: float) -> str:
        return f"{ms / 1e3:g} s" if long else f"{ms:g} ms"

    draw_curves(picture, curves, duration, tick=tick, zero=True)
    return picture


def plot_timeline(report: Report, width: float) -> Picture:
    """All tasks and waits of one iteration."""
    line = report["timeline"]
    bubble = next(
        (row["bubble"] for row in report["iterations"] if row["iteration"] == line["iteration"]),
        report["totals"]["bubble"],
    )
    title = f"One step takes {duration(line['length_us'] / 1e3)}; its ranks idle {percent(bubble)}"
    note = (
        f"iteration {line['iteration']}, {name_of(report)} schedule; the number in a task is its "
        "microbatch; later chunks are paler"
    )
    picture = Picture(title, width, note)
    present = {one[3] for one in line["slices"]}
    top = draw_legend(picture, in_order(present)) + 4
    rows = [f"rank {rank}" for rank in line["ranks"]]
    waits_first = sorted(line["slices"], key=lambda one: len(one[3]) == 1)
    slices = [Slice(*one[:5]) for one in waits_first]
    draw_timeline(picture, rows, slices, line["length_us"], top, tick=lambda us: f"{us / 1e3:g}")
    picture.add(Text(width, picture.height + 9, "ms since the start", "dim", 11, "end"))
    return picture


def parts_of(row: Report) -> list[tuple[str, float]]:
    """Parts of a rank's pipeline time as (class, ms) in the order of ``LABELS``."""
    times = {**row["kinds_ms"], "span": row["other_ms"], **row["idle_ms"]}
    return [(name, times[name]) for name in in_order(times) if times[name]]


def _mean_parts(run: Report) -> list[tuple[str, float]]:
    rows = run["ranks"]
    each = [dict(parts_of(row)) for row in rows]
    each = [
        {**parts, "tail": sum(r["tail_ms"].values())} for parts, r in zip(each, rows, strict=True)
    ]
    names = in_order({name for parts in each for name in parts})
    means = {name: sum(parts.get(name, 0.0) for parts in each) / len(each) for name in names}
    return [(name, value) for name, value in means.items() if value > 0]


def _hinted(parts: list[tuple[str, float]]) -> list[tuple[str, float, str]]:
    return [(name, value, f"{label_of(name)}: {duration(value)}") for name, value in parts]


def _classes(rows: list[list[tuple[str, float]]]) -> list[str]:
    present = {name for row in rows for name, value in row if value > 0}
    return in_order(present)


def plot_time_per_rank(report: Report, width: float) -> Picture:
    """Parts of the pipeline's time, per rank."""
    rows = report["ranks"][:MOST_ROWS]
    busiest = max(report["ranks"], key=lambda row: row["busy_ms"])
    idlest = max(report["ranks"], key=lambda row: row["bubble"])
    title = (
        f"Rank {busiest['rank']} works most, {duration(busiest['busy_ms'])} of "
        f"{duration(report['totals']['window_ms'])}; rank {idlest['rank']} idles most, "
        f"{percent(idlest['bubble'])}"
    )
    picture = Picture(title, width, "mean time per iteration")
    top = draw_legend(picture, _classes([parts_of(row) for row in rows]))
    bars = [
        Bar(f"rank {row['rank']}", _hinted(parts_of(row)), f"{percent(row['bubble'])} idle")
        for row in rows
    ]
    draw_bars(picture, bars, top, form=duration)
    return picture


def plot_bubble(report: Report, width: float) -> Picture | None:
    """Measured idle share against the formula of the interleaved schedule."""
    run = report["run"]
    ranks, chunks, count = run["pipeline"], run["chunks"], run["microbatches"]
    if ranks < 2:
        return None
    formula = (ranks - 1) / (chunks * count + ranks - 1)
    measured = report["totals"]["bubble"]
    side = "above" if measured >= formula else "below"
    title = (
        f"Idle: {percent(measured)}, {abs(measured - formula) * 100:.1f} points {side} the "
        f"formula of the static schedule"
    )
    plural = "es" if count > 1 else ""
    note = (
        f"formula: (p - 1) / (v m + p - 1) = {percent(formula)} with p = {ranks} ranks, "
        f"v = {chunks} chunks, m = {count} microbatch{plural}; equal stages, no messages"
    )
    picture = Picture(title, width, note)
    rows = [("formula", "drain", formula)]
    rows += [(name, colour, one["totals"]["bubble"]) for name, colour, one in runs_of(report)]
    bars = [Bar(name, [(colour, value, name)], percent(value)) for name, colour, value in rows]
    draw_bars(picture, bars, form=percent)
    return picture


def difference(report: Report) -> tuple[float, bool]:
    """Mean time of an iteration over the other run's less 1, and True where that is more than twice
    its standard error."""
    means, errors = [], []
    for _, _, run in runs_of(report):
        times = [row["total_ms"] for row in run["iterations"]]
        means.append(statistics.fmean(times))
        spread = statistics.stdev(times) if len(times) > 1 else math.inf
        errors.append(spread / math.sqrt(len(times)))
    clear = abs(means[0] - means[1]) > 2 * math.hypot(*errors)
    return means[0] / means[1] - 1, clear


def plot_comparison(report: Report, width: float) -> Picture | None:
    """An iteration of two runs, and their difference."""
    if not report.get("baseline"):
        return None
    runs = runs_of(report)
    change, clear = difference(report)
    names = (runs[0][0].capitalize(), runs[1][0])
    means = [run["totals"]["mean_ms"] for _, _, run in runs]
    title = f"{names[0]} takes {_more(change)} time per iteration than {names[1]}"
    if not clear:
        title = f"{names[0]} and {names[1]} differ by less than the noise"
    title += f" ({duration(means[0])} against {duration(means[1])})"
    picture = Picture(title, width, "mean over ranks and iterations")
    parts = [_mean_parts(run) for _, _, run in runs]
    top = draw_legend(picture, _classes(parts))
    bars = [
        Bar(name, _hinted(part), duration(mean))
        for (name, _, _), part, mean in zip(runs, parts, means, strict=True)
    ]
    ends = draw_bars(picture, bars, top, form=duration)
    y = picture.height + 14
    for x in ends:
        picture.add(Line(((x, y - 6), (x, y + 6)), "ink", 1.5))
    picture.add(Line(((ends[0], y), (ends[1], y)), "ink", 1.5))
    text = (
        f"{'+' if change > 0 else '-'}{duration(abs(means[0] - means[1]))} ({change * 100:+.1f} %)"
    )
    text = text.replace("-", "\N{MINUS SIGN}")
    colour = ("bad" if change > 0 else "good") if clear else "dim"
    picture.add(Text(min(ends) - 8, y, text, colour, anchor="end", bold=True))
    return picture


def plot_time_per_token(report: Report, width: float) -> Picture | None:
    """Time of a rank's tasks per token, for each class of sizes of microbatches."""
    rows = (report.get("lengths") or {}).get("size_classes") or []
    times = [[(kind, row[kind] or 0.0) for kind in _KINDS] for row in rows]
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
            f"up to {row['up_to']:,}",
            [(k, t, f"{label_of(k)}: {_us(t)}") for k, t in each],
            _us(sum_),
        )
        for row, each, sum_ in zip(rows, times, totals, strict=True)
    ]
    draw_bars(picture, bars, top, form=_us)
    return picture


def _us(value: float) -> str:
    return f"{number(value)} us"


def _per_rank(
    value: Callable[[Report], float | None], form: Callable[[float], str], finding: str
) -> Callable[[Report, float], Picture | None]:
    """A picture of one value per rank; ``finding`` takes the largest value's rank and text."""

    def draw(report: Report, width: float) -> Picture | None:
        bars: list[tuple[int, int, Bar]] = []
        own: list[tuple[float, int]] = []
        for name, colour, run in runs_of(report):
            for row in run["ranks"][:MOST_ROWS]:
                number_of = value(row)
                if number_of is None:
                    continue
                label = f"rank {row['rank']}" + (f", {name}" if report.get("baseline") else "")
                bar = Bar(label, [(colour, number_of, label)], form(number_of))
                bars.append((row["rank"], len(bars), bar))
                own += [(number_of, row["rank"])] if run is report else []
        if not own:
            return None
        most, rank = max(own, key=lambda pair: pair[0])
        picture = Picture(finding.format(rank=rank, value=form(most)), width)
        draw_bars(picture, [bar for _, _, bar in sorted(bars, key=lambda b: b[:2])], form=form)
        return picture

    return draw


def plot_experts(report: Report, width: float) -> Picture | None:
    """Tokens of each layer's fullest expert over the mean."""
    rows = report.get("experts", [])[:MOST_ROWS]
    if not rows:
        return None

    def times(value: float) -> str:
        return f"{value:.2f}"

    worst = max(rows, key=lambda row: row["imbalance"])
    title = (
        f"The fullest expert of layer {worst['layer']} gets {times(worst['imbalance'])} times the "
        "mean number of tokens"
    )
    picture = Picture(title, width, "tokens of the fullest expert over the mean, by layer")
    labels = [(f"layer {row['layer']}", row["imbalance"]) for row in rows]
    bars = [Bar(name, [("this", value, name)], times(value)) for name, value in labels]
    draw_bars(picture, bars, form=times)
    return picture


def _mib(value: float) -> str:
    mib = value / 2**20
    return f"{mib / 1024:.1f} GiB" if mib >= 10_000 else f"{mib:,.0f} MiB"


PLOTS: dict[str, Callable[[Report, float], Picture | None]] = {
    "comparison": plot_comparison,
    "loss": plot_loss,
    "grad-norm": plot_grad_norm,
    "tokens-per-second": plot_speed,
    "iteration-time": plot_iterations,
    "timeline": plot_timeline,
    "time-per-rank": plot_time_per_rank,
    "bubble": plot_bubble,
    "time-per-token": plot_time_per_token,
    "experts": plot_experts,
    "peak-memory": _per_rank(
        lambda row: row["peaks"].get("memory"), _mib, "Rank {rank} needs the most memory: {value}"
    ),
    "held-activations": _per_rank(
        lambda row: row["peaks"].get("held"), number,
        "Rank {rank} holds the most activations: {value}",
    ),
    "compute-ratio": _per_rank(
        lambda row: row["compute_ratio"], percent,
        "Rank {rank} computes for {value} of the pipeline",
    ),
    "compute-window": _per_rank(
        lambda row: row["compute_window_ms"], duration,
        "Rank {rank} takes the longest from its first to its last task: {value}",
    ),
    "sending-ratio": _per_rank(
        lambda row: row["sending_ratio"], percent,
        "Messages of rank {rank} are on their way for {value} of the pipeline",
    ),
    "sending-window": _per_rank(
        lambda row: row["sending_ms"], duration,
        "Messages of rank {rank} are on their way the longest: {value}",
    ),
}  # fmt: skip
"""Name of a file -> its picture; None where the run has no such numbers."""

_WIDTHS = {"timeline": 1200.0, "comparison": 860.0}


def write_plots(
    report: Report,
    directory: Path,
    *,
    kind: str = "png",
    theme: str = "light",
    flag: str = "--plots",
) -> list[Path]:
    """Write every picture as ``NAME.png`` or ``NAME.svg``; returns their paths. ``flag`` names
    in an error what asked for them.

    Raises:
        ConfigError: PNG files without matplotlib.
    """
    if kind == "png":
        check_png(flag)
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, plot in PLOTS.items():
        picture = plot(report, _WIDTHS.get(name, 700.0))
        if picture is None:
            continue
        paths.append(directory / f"{name}.{kind}")
        picture.write(paths[-1], theme)
    return paths

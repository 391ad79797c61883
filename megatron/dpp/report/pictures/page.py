"""The report as one HTML file: no network, pictures as inline SVG."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

from megatron.dpp.report.analysis.formats import duration, mebibytes, number, percent, time_left
from megatron.dpp.report.analysis.report_data import Pipeline, Report, Training
from megatron.dpp.report.pictures import tables
from megatron.dpp.report.pictures.charts import difference
from megatron.dpp.report.pictures.gallery import PLOTS
from megatron.dpp.report.pictures.runs import Shown, long_name, runs_of, short_name, traced_runs_of
from megatron.dpp.report.pictures.style import CHUNK_ALPHA, LABELS, style_sheet
from megatron.dpp.report.pictures.tables import Column, section, table

_TEMPLATE = Path(__file__).with_name("page.html")
_NARROW, _WIDE, _WHOLE = 350.0, 620.0, 1180.0
"""Widths that a picture is drawn for: on a telephone or in a third of a row, in half of a row, and
in a whole one."""

_TASKS = """<p class="small"><b>F</b> is the forward of one microbatch through one chunk of
layers. <b>B</b> is its backward. Where there is a <b>W</b>, B computes the gradient of the input
only, and W the gradient of the weights, which can wait. <code>1F3</code> is chunk 1, forward,
microbatch 3.</p>"""
_HOW_TO_TRACE = """<p>A timeline of the ranks' tasks needs a trace: train with <code>--trace</code>,
or with <code>TRACE=1</code> in a launch script. It costs about a microsecond per task;
<code>--trace-interval 10</code> records every tenth iteration only.</p>"""


def page(report: Report, *, live_s: float = 0.0, status: str = "") -> str:
    """The whole page.

    Args:
        report: as ``megatron-dpp report`` builds it.
        live_s: seconds after which the page fetches itself again; 0: never.
        status: of a live page, in its corner.
    """
    found, training = report.pipeline, report.training
    parts = [_head(report), _tiles(report), _figures(report, ("loss", "tokens-per-second"))]
    parts += [_comparison(report), _words(report)]
    parts += [_figures(report, ("grad-norm", "memory", "iteration-time"))]
    if found is None:
        parts += [section("Timeline", _HOW_TO_TRACE)]
    else:
        parts += [_timeline(found)]
        names = ("time-per-rank", "bubble", "peak-memory", "held-activations")
        parts += [_figures(report, names, columns=True), _figures(report, ("experts",))]
        if found.lengths:
            parts += [tables.lengths(found.lengths, _pictures(report, "time-per-token", 1))]
        parts += [tables.findings(found), tables.ranks(found), tables.iterations(found)]
    parts += [_facts(report), tables.flags(training)]
    return fill(_title(report), "\n".join(filter(None, parts)), live_s, status)


def _title(report: Report) -> str:
    if report.others:
        return f"{len(report.others) + 1} runs compared"
    if report.pipeline is None:
        return f"{report.training.home.name}: report"
    return f"{report.pipeline.name} pipeline report"


def fill(title: str, main: str, live_s: float = 0.0, status: str = "") -> str:
    """The template with a title and contents."""
    state = status.partition(",")[0].partition(":")[0]
    badge = f'<div id="live" class="{escape(state)}">{escape(status)}</div>' if live_s else ""
    text = _TEMPLATE.read_text(encoding="utf-8")
    for mark, value in (
        ("TITLE", escape(title)), ("STYLE", style_sheet()), ("LIVE", f"{live_s:g}"),
        ("BADGE", badge), ("MAIN", main),
    ):  # fmt: skip
        text = text.replace(f"/*{mark}*/", value, 1)
    return text


def _pictures(report: Report, name: str, in_row: int) -> str:
    """A picture, drawn once for each width that a card in a row of ``in_row`` can have."""
    widths = {"narrow": _NARROW, "wide": _WIDE} | ({"whole": _WHOLE} if in_row == 1 else {})
    drawn = [(cls, PLOTS[name](report, width)) for cls, width in widths.items()]
    found = [(cls, picture) for cls, picture in drawn if picture is not None]
    if not found:
        return ""
    title, note = found[0][1].title, found[0][1].note
    small = f'<div class="dim small">{escape(note)}</div>' if note else ""
    shapes = "".join(f'<div class="{cls}">{picture.inline_svg()}</div>' for cls, picture in found)
    return f'<figure class="{name} row{in_row}"><h3>{escape(title)}</h3>{small}{shapes}</figure>'


def _figures(report: Report, names: Sequence[str], *, columns: bool = False) -> str:
    """Cards that fill their row; in ``columns`` each is as high as its picture."""
    names = [name for name in names if PLOTS[name](report, _WIDE) is not None]
    if not names:
        return ""
    in_row = 2 if columns and len(names) > 1 else min(len(names), 3)
    cls = "columns" if columns and len(names) > 1 else f"grid grid{in_row}"
    return f'<div class="{cls}">{"".join(_pictures(report, name, in_row) for name in names)}</div>'


def _layout(found: Pipeline) -> str:
    run = found.run
    return (
        f"data {run.data}, pipeline {run.pipeline} × {run.chunks} "
        f"chunk{'s' if run.chunks > 1 else ''}, tensor {run.tensor}, "
        f"{run.microbatches} microbatch{'es' if run.microbatches > 1 else ''}"
        f"{f' in {run.slices} slices' if run.slices else ''}"
    )


def _head(report: Report) -> str:
    found, training = report.pipeline, report.training
    if report.others:
        title = f"{', '.join(shown.name for shown in runs_of(report))} compared"
        title = title[0].upper() + title[1:]
    elif found is not None:
        title = (
            f"{found.name.capitalize()} pipeline: {duration(found.totals.iteration_ms)} per "
            f"iteration, {percent(found.totals.bubble)} idle"
        )
    else:
        title = f"{training.home.name}: {training.progress}"
    about = [training.model, _layout(found) if found else ""]
    words = f'<p class="about dim">{escape(" · ".join(filter(None, about)))}</p>'
    return f"<h1>{escape(title)}</h1>{words if any(about) else ''}"


def _facts(report: Report) -> str:
    """Place and time of the run."""
    found, training = report.pipeline, report.training
    facts = {"model": training.model, "directory": str(training.home)}
    if training.checkpoints:
        facts["checkpoints"] = f"iterations {', '.join(map(str, training.checkpoints[-10:]))}"
    if found is not None:
        run = found.run
        skipped = f", without iteration {', '.join(map(str, run.skipped))}" if run.skipped else ""
        facts |= {
            "started": run.started,
            "hosts": f"{', '.join(run.hosts)} ({len(found.ranks)} ranks, {run.device})",
            "layout": _layout(found),
            "traced": f"{len(found.iterations)} iterations{skipped}",
            "clocks": f"within {run.clock_uncertainty_us:.1f} µs"
            if run.clock_uncertainty_us
            else "",
            "traces": run.directory,
        }
    rows = "".join(f"<dt>{k}</dt><dd>{escape(v)}</dd>" for k, v in facts.items() if v)
    return section("The run", f'<dl class="facts">{rows}</dl>')


Value = Callable[[Report], float | None]


def _of_totals(name: str) -> Value:
    return lambda report: getattr(report.pipeline.totals, name) if report.pipeline else None


_COMPARED: tuple[tuple[str, Value, Callable[[float], str]], ...] = (
    ("iteration, mean", _of_totals("mean_ms"), duration),
    ("iteration, median", _of_totals("iteration_ms"), duration),
    ("pipeline", _of_totals("window_ms"), duration),
    ("busiest rank's own work", _of_totals("ideal_ms"), duration),
    ("idle", _of_totals("bubble"), percent),
    ("iterations", lambda r: float(r.training.iteration) or None, number),
    ("tokens/s, median", lambda r: r.training.median("tokens/s"), number),
    ("last loss", lambda r: r.training.last_loss, lambda x: f"{x:.6g}"),
    ("most memory of a rank", lambda r: _memory(r), mebibytes),
)


def _memory(report: Report) -> float | None:
    rows = report.pipeline.ranks if report.pipeline else []
    peaks = report.training.series("peak memory")[1]
    return max((*(row.peaks.get("memory", 0.0) for row in rows), *peaks[-1:]), default=0.0) or None


def _comparison(report: Report) -> str:
    if not report.others:
        return ""
    shown, traced = runs_of(report), traced_runs_of(report)
    both = len(shown) == len(traced) == 2
    clear = not both or difference(traced[0].pipeline, traced[1].pipeline)[1]
    rows = []
    for text, value, form in _COMPARED:
        values = [value(each.report) for each in shown]
        if any(each is not None for each in values):
            cells = ["-" if each is None else form(each) for each in values]
            apart = _difference(values, text, clear=clear) if len(values) == 2 else ("", "")
            rows.append((text, cells, apart))
    columns: list[Column] = [("", lambda r: r[0], "text")]
    columns += [(each.name, _cell(place), "") for place, each in enumerate(shown)]
    columns += [("difference", lambda r: r[2], "")] if len(shown) == 2 else []
    note = "" if clear else "The times differ by less than twice their standard error. "
    facts = f'<p class="dim small">{escape(note + _where(shown))}</p>'
    title = "Two runs compared" if len(shown) == 2 else f"{len(shown)} runs compared"
    figure = _pictures(report, "comparison", 1)
    return f'<section id="baseline"><h2>{title}</h2>{figure}{table(columns, rows)}{facts}</section>'


def _cell(place: int) -> Callable[[tuple[str, list[str], object]], str]:
    return lambda row: row[1][place]


def _where(shown: Sequence[Shown]) -> str:
    parts = []
    for name, _, report in shown:
        found = report.pipeline
        since = f", started {found.run.started}" if found else ""
        parts.append(f"{name}: {report.training.home}{since}")
    return "; ".join(parts)


def _difference(values: Sequence[float | None], what: str, *, clear: bool) -> tuple[str, str]:
    a, b = values
    if a is None or b is None:
        return "", ""
    if a == b:
        return "equal", ""
    if what == "idle":
        text, change = f"{(a - b) * 100:+.1f} points", a - b
    else:
        change = a / b - 1 if b else 0.0
        text = f"{change * 100:+.1f} %" if abs(change) >= 5e-4 else f"{a - b:+.2g}"
    mood = ""
    if abs(change) >= 0.005 and clear and what != "iterations":
        mood = "good" if (change < 0) != ("/s" in what) else "bad"
    return text.replace("-", "\N{MINUS SIGN}"), mood


def _tiles(report: Report) -> str:
    training = report.training
    speed, loss = training.median("tokens/s"), training.last_loss
    tiles: dict[str, str | None] = {
        "last loss": None if loss is None else f"{loss:.4g}",
        "tokens/s (median)": None if speed is None else number(speed),
        **_times(report),
        **_progress(training),
    }
    shown = "".join(
        f'<div class="tile"><b>{escape(value)}</b><span class="dim small">{escape(name)}</span>'
        "</div>"
        for name, value in tiles.items()
        if value is not None
    )
    return f'<div class="tiles">{shown}</div>' if shown else ""


def _times(report: Report) -> dict[str, str | None]:
    if report.pipeline is None:
        seconds = report.training.series("seconds")[1]
        each = statistics.median(seconds) * 1e3 if seconds else None
        return {"iteration (median)": None if each is None else duration(each)}
    totals = report.pipeline.totals
    return {
        "iteration (median)": duration(totals.iteration_ms),
        "idle (bubble)": percent(totals.bubble),
        "stragglers": str(totals.stragglers),
    }


def _progress(training: Training) -> dict[str, str | None]:
    left, memory = training.seconds_left, training.series("peak memory")[1]
    total = f" of {training.total:,}" if training.total else ""
    name = f"iteration, {time_left(left)} left" if left else "iteration"
    return {
        name: f"{training.iteration:,}{total}" if training.iteration else None,
        "memory (last rank)": mebibytes(memory[-1]) if memory else None,
        "last checkpoint": str(training.checkpoints[-1]) if training.checkpoints else None,
    }


def _words(report: Report) -> str:
    lines = [f"<p>{escape(line)}</p>" for line in report.sentences]
    if not report.training.metrics:
        lines.append(
            '<p class="dim">No metrics beside the traces; --metrics-file names the file with loss '
            "and tokens/s.</p>"
        )
    return section("In words", f'<div class="words">{"".join(lines)}</div>') if lines else ""


def _timeline(found: Pipeline) -> str:
    line = found.timeline
    if line is None:
        return ""
    rows = [found.row(rank) for rank in line.ranks]
    data = json.dumps(
        {
            **dataclasses.asdict(line),
            "names": [short_name(row, found) for row in rows],
            "places": [long_name(row, found) for row in rows],
            "labels": LABELS,
            "alpha": CHUNK_ALPHA,
        },
        separators=(",", ":"),
    )
    data = data.replace("<", "\\u003c").replace("&", "\\u0026")  # no text can end the script
    first = "" if len(line.ranks) == len(found.ranks) else f", first {len(line.ranks)} ranks"
    return section(
        f"Timeline of iteration {line.iteration}{first}",
        _TASKS,
        '<div class="controls" id="filters"></div><canvas id="timeline"></canvas>',
        '<div class="dim small for-mouse">Wheel: zoom. Drag: move. Double click: all. Point at a '
        "slice: name and time. Later chunks are paler.</div>",
        '<div class="dim small for-touch">Two fingers: zoom. Drag sideways: move. Tap a slice: '
        "name and time. Tap twice: all. Later chunks are paler.</div>",
        f'<script id="data" type="application/json">{data}</script>',
    )

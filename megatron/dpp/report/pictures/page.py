"""The report as one HTML file: no network, pictures as inline SVG."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from megatron.dpp.report.analysis.sentences import (
    HOW_TO_TRACE,
    NOT_OF_SLICES,
    duration,
    number,
    percent,
    time_left,
)
from megatron.dpp.report.analysis.summary import Pipeline
from megatron.dpp.report.building import Report
from megatron.dpp.report.pictures.picture import Picture
from megatron.dpp.report.pictures.plots import plot_loss, plot_time
from megatron.dpp.report.pictures.style import style_sheet

_TEMPLATE = Path(__file__).with_name("page.html")


def page(report: Report, *, live_s: float = 0.0, status: str = "") -> str:
    """The whole page.

    Args:
        report: as ``megatron-dpp report`` builds it.
        live_s: seconds after which the page fetches itself again; 0: never.
        status: of a live page, in its corner.
    """
    found = report.pipeline
    beside = [report.baseline] if report.baseline else []
    loss = plot_loss([report.training, *(other.training for other in beside)])
    parts = [_head(report), _words(report), _figure(loss), _comparison(report)]
    if found:
        times = plot_time(found, next((other.pipeline for other in beside), None))
        parts += [_timeline(report), _figure(times), _what_if(found)]
    else:
        parts.append(_section("Timeline", f"<p>{HOW_TO_TRACE}</p>"))
    parts.append(_facts(report))
    title = f"{report.training.home.name}: report"
    return fill(title, "\n".join(filter(None, parts)), live_s, status)


def fill(title: str, main: str, live_s: float = 0.0, status: str = "") -> str:
    """The template with a title and contents."""
    state = status.partition(",")[0].partition(" ")[0]
    badge = f'<div id="live" class="{escape(state)}">{escape(status)}</div>' if live_s else ""
    text = _TEMPLATE.read_text(encoding="utf-8")
    for mark, value in (
        ("TITLE", escape(title)), ("STYLE", style_sheet()), ("LIVE", f"{live_s:g}"),
        ("BADGE", badge), ("MAIN", main),
    ):  # fmt: skip
        text = text.replace(f"/*{mark}*/", value, 1)
    return text


def _section(title: str, *contents: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{''.join(contents)}</section>"


def _figure(picture: Picture | None) -> str:
    if picture is None:
        return ""
    note = f'<div class="dim small">{escape(picture.note)}</div>' if picture.note else ""
    return _section(picture.title, f'{note}<div class="wide">{picture.inline()}</div>')


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; a cell of ``(text, class)`` has a class."""
    head = "".join(f"<th>{escape(text)}</th>" for text in heads)
    lines = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows
    )
    return (
        f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>'
        "</div>"
    )


def _head(report: Report) -> str:
    """The name of the run and its numbers in large."""
    found, training = report.pipeline, report.training
    loss, speed, ms = training.last("loss"), training.median("tokens/s"), training.median("ms")
    left, total = training.seconds_left, f" of {training.total:,}" if training.total else ""
    step = found.totals.iteration_ms if found else ms
    tiles = {
        "state": training.state if training.metrics else None,
        f"iteration{f', {time_left(left)} left' if left else ''}": (
            f"{training.iteration:,}{total}" if training.iteration else None
        ),
        "loss": None if loss is None else f"{loss:.4g}",
        "tokens/s (median)": None if speed is None else number(speed),
        "step (median)": None if step is None else duration(step),
        "idle": percent(found.totals.bubble) if found else None,
        "stragglers": str(found.totals.stragglers) if found else None,
    }
    shown = "".join(
        f'<div class="tile"><b>{escape(value)}</b><span class="dim small">{escape(name)}</span>'
        "</div>"
        for name, value in tiles.items()
        if value is not None
    )
    name = training.home.name + (
        f" and {report.baseline.training.home.name}" if report.baseline else ""
    )
    return f'<h1>{escape(name)}</h1><div class="tiles">{shown}</div>'


def _words(report: Report) -> str:
    lines = "".join(f"<li>{escape(line)}</li>" for line in report.sentences)
    return _section("Findings", f"<ul>{lines}</ul>") if lines else ""


def _comparison(report: Report) -> str:
    """The differences from the baseline, number by number."""
    if report.baseline is None:
        return ""
    rows: list[tuple[str, ...]] = []
    times = [_times(each) for each in (report, report.baseline)]
    for name in times[0]:
        one, two = (own[name] for own in times)
        if one and two:
            rows.append((name, duration(one), duration(two), f"{(one / two - 1) * 100:+.1f} %"))
    if rows and not _is_clear(report, report.baseline):
        rows.append(("the steps' times differ by less than twice their standard error", *[""] * 3))
    found = report.difference
    if found:
        steps = f"{found.common} common steps"
        rows += [(f"{name}, {steps}", "", "", "equal bit by bit") for name in found.equal]
        rows += [
            (f"{name}, {steps}", "", "", f"differs by at most {size:.3g}")
            for name, size in found.largest.items()
        ]
    names = (report.training.home.name, report.baseline.training.home.name)
    return _section("Beside the baseline", _table(("", *names, "difference"), rows))


def _is_clear(one: Report, two: Report) -> bool:
    """True where the mean times of two runs' traced steps differ by twice their standard error."""
    means, squares = [], 0.0
    for pipeline in (one.pipeline, two.pipeline):
        times = [row.total_ms for row in pipeline.iterations] if pipeline else []
        if len(times) < 2:
            return False
        means.append(statistics.fmean(times))
        squares += statistics.variance(times) / len(times)
    return abs(means[0] - means[1]) > 2 * math.sqrt(squares)


def _times(report: Report) -> dict[str, float | None]:
    """Times in ms that two runs are compared by."""
    totals = report.pipeline.totals if report.pipeline else None
    return {
        "step, traced, median": totals.iteration_ms if totals else None,
        "pipeline of a step, mean": totals.window_ms if totals else None,
        "busiest rank's own work": totals.ideal_ms if totals else None,
        "step, median": report.training.median("ms"),
    }


def _timeline(report: Report) -> str:
    return report.timeline and f"<section>{report.timeline}</section>"


def _what_if(found: Pipeline) -> str:
    rows = [
        (row.name, duration(row.now_ms), duration(row.then_ms), f"{row.gain * 100:+.1f} %")
        for row in found.what_if
    ]
    if not rows:
        why = NOT_OF_SLICES if found.run.sliced else "no iteration was recorded in full"
        return _section("What if", f"<p>No prediction: {escape(why)}.</p>")
    note = (
        f"Simulated with the recorded times. Replayed in its own order, the run takes "
        f"{found.fidelity:.3f} of the measured time: far from 1, do not trust the rows."
    )
    table = _table(("change", "now", "then", "time saved"), rows)
    return _section("What if", table, f'<p class="dim small">{note}</p>')


def _facts(report: Report) -> str:
    """Place, layout and flags of the run."""
    found, training = report.pipeline, report.training
    facts = {"directory": str(training.home)}
    if training.checkpoint is not None:
        facts["last checkpoint"] = f"iteration {training.checkpoint}"
    if found is not None:
        run = found.run
        facts |= {
            "layout": f"data {run.data}, pipeline {run.pipeline} x {run.chunks} chunks, tensor "
            f"{run.tensor}, context {run.context}, {run.microbatches} microbatches",
            "ranks": f"{len(found.ranks)} on {', '.join(run.hosts)} ({run.device})",
            "traces": f"{run.directory}, since {run.started}, {len(found.iterations)} iterations",
        }
        if run.clock_uncertainty_us:
            facts["clocks"] = f"aligned within {run.clock_uncertainty_us:.1f} us"
    rows = "".join(f"<dt>{k}</dt><dd>{escape(v)}</dd>" for k, v in facts.items())
    flags = _table(("flag", "value"), training.flags.items())
    folded = f"<details><summary>{len(training.flags)} flags</summary>{flags}</details>"
    return _section("The run", f"<dl>{rows}</dl>", folded if training.flags else "")

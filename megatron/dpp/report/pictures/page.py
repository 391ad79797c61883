"""The report as one HTML file: no network, pictures as inline SVG."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from megatron.dpp.report.analysis.sentences import (
    HOW_TO_TRACE,
    NOT_OF_SLICES,
    duration,
    number,
    percent,
    time_left,
)
from megatron.dpp.report.analysis.summary import Analysis
from megatron.dpp.report.pictures.picture import Picture, style_sheet
from megatron.dpp.report.pictures.plots import plot_loss, plot_time
from megatron.dpp.report.run_files import Training

_TEMPLATE = Path(__file__).with_name("page.html")


@dataclass(frozen=True)
class Difference:
    """Two runs' metrics in the steps that both have: names of those that are equal bit by bit, and
    the largest difference of each other one.
    """

    common: int
    equal: list[str]
    largest: dict[str, float]

    @classmethod
    def of(cls, *runs: Training) -> Difference:
        """Compare losses, norms and learning rates of two runs."""
        one, two = ({line["iteration"]: line for line in run.metrics} for run in runs)
        steps, largest = sorted(one.keys() & two.keys()), {}
        for name in ("loss", "grad_norm", "lr") if steps else ():
            pairs = [(one[step].get(name), two[step].get(name)) for step in steps]
            apart = [(a, b) for a, b in pairs if a != b]
            numbers = [abs(a - b) for a, b in apart if a is not None and b is not None]
            largest[name] = max(numbers, default=math.nan) if apart else 0.0
        equal = [name for name, size in largest.items() if size == 0.0]
        return cls(len(steps), equal, {n: size for n, size in largest.items() if n not in equal})

    def sentences(self) -> list[str]:
        """The findings in words."""
        if not self.common:
            return ["The two runs have no step in common."]
        equal = f"Equal bit by bit in all {self.common} common steps: {', '.join(self.equal)}."
        sizes = ", ".join(f"{name} by at most {size:.3g}" for name, size in self.largest.items())
        unlike = f"Different in the {self.common} common steps: {sizes}."
        return [equal] * bool(self.equal) + [unlike] * bool(self.largest)


@dataclass
class Report:
    """All that is known of a run, and of a baseline to set beside it.

    Args:
        training: its metrics.
        pipeline: its traces, None without any.
        baseline: the other run, without a baseline of its own.
        difference: of the two runs' metrics.
        sentences: the findings in words, most important first.
        timeline: one iteration.
    """

    training: Training
    pipeline: Analysis | None = None
    baseline: Report | None = None
    difference: Difference | None = None
    sentences: list[str] = field(default_factory=list)
    timeline: Picture | None = None

    def numbers(self) -> dict[str, Any]:
        """As JSON, without series and timeline."""
        found = self.pipeline.numbers() if self.pipeline else {}
        found["training"] = self.training.numbers()
        if self.sentences:
            found["sentences"] = self.sentences
        if self.baseline:
            found["baseline"] = self.baseline.numbers()
        if self.difference:
            found["difference"] = asdict(self.difference)
        return found


def page(report: Report, *, live_s: float = 0.0, status: str = "") -> str:
    """The whole page.

    Args:
        report: as ``megatron-dpp report`` builds it.
        live_s: seconds after which the page fetches itself again; 0: never.
        status: of a live page, in its corner.
    """
    found, other = report.pipeline, report.baseline
    names = [report.training.home.name] + ([other.training.home.name] if other else [])
    loss = plot_loss([report.training, *([other.training] if other else [])])
    lines = "".join(f"<li>{escape(line)}</li>" for line in report.sentences)
    parts = [
        f"<h1>{escape(' and '.join(names))}</h1>",
        _tiles(report),
        _section("Findings", f"<ul>{lines}</ul>"),
        _figure(loss) if loss else "",
        _comparison(report, other, names) if other else "",
    ]
    if found:
        times = plot_time(found, other.pipeline if other else None)
        parts += [_figure(report.timeline) if report.timeline else "", _figure(times)]
        parts.append(_what_if(found))
    else:
        parts.append(_section("Timeline", f"<p>{HOW_TO_TRACE}</p>"))
    main = "\n".join(filter(None, [*parts, _facts(report)]))
    return fill(f"{names[0]}: report", main, live_s, status)


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


def _figure(picture: Picture) -> str:
    note = f'<div class="dim small">{escape(picture.note)}</div>' if picture.note else ""
    return _section(picture.title, f'{note}<div class="wide">{picture.inline()}</div>')


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(text)}</th>" for text in heads)
    cells = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows)
    lines = "".join(f"<tr>{line}</tr>" for line in cells)
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>"
    return f'<div class="wide">{table}</div>'


def _tiles(report: Report) -> str:
    """The numbers of the run in large."""
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
        "stragglers": str(len(found.stragglers)) if found else None,
    }
    shown = "".join(
        f'<div class="tile"><b>{escape(value)}</b><span class="dim small">{escape(name)}</span>'
        "</div>"
        for name, value in tiles.items()
        if value is not None
    )
    return f'<div class="tiles">{shown}</div>'


def _comparison(report: Report, other: Report, names: Sequence[str]) -> str:
    """The times of the baseline, number by number; its metrics are among the findings."""
    rows: list[tuple[str, ...]] = []
    times, others = _times(report), _times(other)
    for name in times:
        one, two = times[name], others[name]
        if one and two:
            rows.append((name, duration(one), duration(two), f"{(one / two - 1) * 100:+.1f} %"))
    if report.pipeline and other.pipeline and not _is_clear(report.pipeline, other.pipeline):
        rows.append(("the steps' times differ by less than twice their standard error", *[""] * 3))
    return _section("Beside the baseline", _table(("", *names, "difference"), rows)) if rows else ""


def _is_clear(*pipelines: Analysis) -> bool:
    """True where the mean times of two runs' traced steps differ by twice their standard error."""
    times = [[row.total_ms for row in pipeline.times] for pipeline in pipelines]
    if min(map(len, times)) < 2:
        return False
    one, two = map(statistics.fmean, times)
    return abs(one - two) > 2 * math.sqrt(sum(statistics.variance(ms) / len(ms) for ms in times))


def _times(report: Report) -> dict[str, float | None]:
    """Times in ms that two runs are compared by."""
    totals = report.pipeline.totals if report.pipeline else None
    return {
        "step, traced, median": totals.iteration_ms if totals else None,
        "pipeline of a step, mean": totals.window_ms if totals else None,
        "busiest rank's own work": totals.ideal_ms if totals else None,
        "step, median": report.training.median("ms"),
    }


def _what_if(found: Analysis) -> str:
    rows = [
        (row.name, duration(row.now_ms), duration(row.then_ms), f"{row.gain * 100:+.1f} %")
        for row in found.what_if
    ]
    if not rows:
        why = NOT_OF_SLICES if found.sliced else "no iteration was recorded in full"
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
        run = found.facts
        facts |= {
            "layout": "data {data}, pipeline {pipeline} x {chunks} chunks, tensor {tensor}, "
            "context {context}, {microbatches} microbatches".format_map(run),
            "ranks": f"{len(found.ranks)} on {', '.join(run['hosts'])} ({run['device']})",
            "traces": f"{run['directory']}, since {run['started']}, {len(found.times)} iterations",
        }
        if run["clock_uncertainty_us"]:
            facts["clocks"] = f"aligned within {run['clock_uncertainty_us']:.1f} us"
    rows = "".join(f"<dt>{k}</dt><dd>{escape(v)}</dd>" for k, v in facts.items())
    flags = _table(("flag", "value"), training.flags.items())
    folded = f"<details><summary>{len(training.flags)} flags</summary>{flags}</details>"
    return _section("The run", f"<dl>{rows}</dl>", folded if training.flags else "")

"""Sections and tables of the report's page."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import Any

from megatron.dpp.report.analysis.formats import duration, number, percent
from megatron.dpp.report.analysis.report_data import Lengths, Pipeline, RankRow, Training
from megatron.dpp.report.analysis.sentences import NOT_OF_SLICES
from megatron.dpp.report.pictures.runs import by_stage

_FEW_COLUMNS = 3
"""Columns that fit beside each other on a telephone."""

Column = tuple[str, Callable[[Any], Any], str]
"""A heading, the value of a row, and classes of CSS."""


def section(title: str, *contents: str) -> str:
    """A card with a heading."""
    return f"<section><h2>{escape(title)}</h2>{''.join(contents)}</section>"


def table(columns: Sequence[Column], rows: Iterable[Any], empty: str = "none") -> str:
    """A table; with many columns each row becomes a list on a narrow screen."""
    lines = []
    for row in rows:
        cells = []
        for title, value, cls in columns:
            shown = value(row)
            text, mood = shown if isinstance(shown, tuple) else (shown, "")
            classes = f' class="{" ".join(filter(None, (cls, mood)))}"' if cls or mood else ""
            cells.append(f'<td data-label="{escape(title)}"{classes}>{escape(str(text))}</td>')
        lines.append(f"<tr>{''.join(cells)}</tr>")
    if not lines:
        return f'<div class="dim">{escape(empty)}</div>'
    heads = "".join(
        f'<th class="{cls}">{escape(title)}</th>' if cls else f"<th>{escape(title)}</th>"
        for title, _, cls in columns
    )
    many = ' class="many"' if len(columns) > _FEW_COLUMNS else ""
    return (
        f'<div class="scroll"><table{many}><thead><tr>{heads}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def details(title: str, *contents: str) -> str:
    """A card that is folded until it is opened."""
    inner = f"<summary>{escape(title)}</summary>{''.join(contents)}"
    return f"<section><details>{inner}</details></section>"


def findings(found: Pipeline) -> str:
    """Stragglers, and the predicted gains of changes."""
    stragglers: list[Column] = [
        ("finding", lambda f: f.culprit.kind, "text"), ("at", lambda f: f.where, "text"),
        ("times slower", lambda f: f"{f.culprit.factor:.2f}", ""),
        ("in iterations", lambda f: percent(f.culprit.share), ""),
        ("since", lambda f: f.culprit.since, ""), ("in words", lambda f: f.text, "text"),
    ]  # fmt: skip
    changes: list[Column] = [
        ("change", lambda p: p.name, "text"), ("now", lambda p: duration(p.now_ms), ""),
        ("then", lambda p: duration(p.then_ms), ""),
        ("time saved", lambda p: _gain(p.gain), ""),
    ]  # fmt: skip
    harmless = " ".join(
        f"Without effect on the time of an iteration: {each.text}." for each in found.without_effect
    )
    fidelity = (
        f"Replayed in its recorded order, the run takes {found.fidelity:.3f} times the "
        "measured time. Changes are simulated with decisions made anew."
    )
    why = NOT_OF_SLICES if found.run.sliced else "no iteration was recorded in full"
    small = '<div class="dim small">{}</div>'.format
    return section(
        "Stragglers",
        table(stragglers, found.stragglers, "No straggler."),
        small(escape(harmless)) if harmless else "",
    ) + section(
        "Predicted gain of a change",
        table(changes, found.what_if, f"No prediction: {why}."),
        small(fidelity) if found.what_if else "",
    )


def _gain(gain: float) -> tuple[str, str]:
    text = f"{gain * 100:+.1f} %".replace("-", "\N{MINUS SIGN}")
    return text, "good" if gain > 0.005 else "bad" if gain < -0.005 else ""


def lengths(found: Lengths, figure: str) -> str:
    """Padding, time per token by size, and what other orders, packing and schedules gain.

    Args:
        figure: time per token, as HTML.
    """
    classes: list[Column] = [
        ("tokens up to", lambda r: f"{r.up_to:,}", ""),
        ("microbatches", lambda r: r.microbatches, ""),
        ("mean tokens", lambda r: f"{r.tokens:,.0f}", ""),
        *((f"{kind}, \N{MICRO SIGN}s per token", _token_time(kind), "") for kind in "FBW"),
    ]
    plans: list[Column] = [
        ("schedule", lambda r: r.schedule, "text"),
        ("order", lambda r: r.plan + (" (ran)" if r.ran else ""), "text"),
        ("simulated", lambda r: duration(r.seconds * 1e3), ""),
        ("gain", lambda r: f"{r.gain:.2f}", ""),
        ("saves of what ran", lambda r: ("", "") if r.ran else _gain(r.saves), ""),
    ]
    gains, words = "", [found.sentence]
    if found.gains:
        words.append(found.gains_sentence)
        note = (
            f"Simulated for iteration {found.iteration} with the times of this run's own tasks. "
            "Gain: time of the first row over that of the row. Orders are drawn, or the best of "
            "those that --order planned weighs; packed ones have even costs (--packing even). The "
            "dynamic schedule has policy auto, the default cap and split backwards."
        )
        gains = table(plans, found.gains) + f'<div class="dim small">{escape(note)}</div>'
    return section(
        "Sequences of unlike length",
        *(f"<p>{escape(line)}</p>" for line in words),
        gains,
        figure,
        "<details><summary>Time per token by size</summary>",
        table(classes, found.size_classes),
        "</details>",
    )


def _token_time(kind: str) -> Callable[[Any], str]:
    return lambda row: "-" if getattr(row, kind) is None else number(getattr(row, kind))


def ranks(found: Pipeline) -> str:
    """Tables of ranks, links and experts."""
    places: list[Column] = [
        ("stage", lambda r: r.pipeline, ""),
        *([("replica", _data, "")] if found.run.data > 1 else []),
        *([("tensor", _tensor, "")] if found.run.tensor > 1 else []),
        ("rank", lambda r: r.rank, ""),
    ]
    times: list[Column] = [
        *places,
        ("work", lambda r: duration(r.busy_ms), ""),
        *((kind, _kind_time(kind), "") for kind in "FBW"),
        ("idle", lambda r: percent(r.bubble), ""),
        ("compute ratio", lambda r: percent(r.compute_ratio), ""),
        ("first to last task", lambda r: duration(r.compute_window_ms), ""),
    ]  # fmt: skip
    others: list[Column] = [
        *places,
        ("sending ratio", lambda r: percent(r.sending_ratio), ""),
        ("overlapped", lambda r: percent(r.overlap), ""),
        ("sent", lambda r: f"{r.sent_bytes / 2**20:.2f} MiB", ""),
        ("peak held", lambda r: number(r.peaks.get("held", 0.0)), ""),
        ("peak memory", lambda r: f"{r.peaks.get('memory', 0.0) / 2**20:,.0f} MiB", ""),
        *([("peak keys", _keys, "")] if found.run.sliced else []),
        ("host per task", lambda r: f"{r.peaks.get('host', 0.0):.0f} us", ""),
        ("launching", lambda r: percent(r.peaks.get("launching", 0.0)), ""),
        ("tasks not in static order", lambda r: f"{r.differing_decisions:.1f}", ""),
    ]  # fmt: skip
    links: list[Column] = [
        ("ranks", lambda x: f"{x.source} → {x.destination}", ""),
        ("kind", lambda x: x.kind, ""),
        ("messages", lambda x: f"{x.messages:.0f}", ""),
        ("MiB", lambda x: f"{x.bytes / 2**20:.2f}", ""),
        ("typical delay", lambda x: duration(x.delay_us / 1e3), ""),
        ("95 %", lambda x: duration(x.p95_us / 1e3), ""),
        ("MB/s", lambda x: f"{x.bandwidth_mb_s:.0f}", ""),
        ("seen while waiting", lambda x: percent(x.measured_while_waiting), ""),
    ]  # fmt: skip
    experts: list[Column] = [
        ("layer", lambda e: e.layer, ""),
        ("ranks", lambda e: ", ".join(map(str, e.ranks)), "text"),
        ("fullest expert", lambda e: f"{e.imbalance:.2f} x mean", ""),
        ("worst iteration", lambda e: f"{e.worst:.2f} x mean", ""),
        ("fullest rank", lambda e: f"{e.rank_imbalance:.2f} x mean", ""),
        ("lost in a forward", lambda e: duration(e.lost_ms), ""),
    ]  # fmt: skip
    rows, layers = by_stage(found), found.experts
    return (
        section("Ranks: time per iteration", table(times, rows))
        + section("Ranks: messages and memory", table(others, rows))
        + section("Links", table(links, found.links, "no messages"))
        + (section("Experts: tokens per layer", table(experts, layers)) if layers else "")
    )


def _kind_time(kind: str) -> Callable[[Any], str]:
    return lambda row: duration(row.kinds_ms.get(kind, 0.0))


def _keys(row: RankRow) -> str:
    return f"{row.peaks.get('keys', 0.0) / 2**20:,.1f} MiB"


def _data(row: RankRow) -> int:
    return row.data


def _tensor(row: RankRow) -> int:
    return row.tensor


def iterations(found: Pipeline) -> str:
    """Every iteration, folded."""
    columns: list[Column] = [
        ("iteration", lambda i: i.iteration, ""),
        ("total", lambda i: duration(i.total_ms), ""),
        ("pipeline", lambda i: duration(i.window_ms), ""),
        ("busiest rank", lambda i: duration(i.ideal_ms), ""),
        ("idle", lambda i: percent(i.bubble), ""),
    ]  # fmt: skip
    rows = found.iterations
    most = 1000
    text = f"All {len(rows)} iterations" if len(rows) <= most else f"The last {most} iterations"
    return details(text, table(columns, rows[-most:]))


def flags(training: Training) -> str:
    """The flags that the run was given, folded."""
    if not training.flags:
        return ""
    columns: list[Column] = [
        ("flag", lambda f: f[0], "text"),
        ("value", lambda f: f[1], "text path"),
    ]
    return details(
        f"{len(training.flags)} flags of the run", table(columns, list(training.flags.items()))
    )

"""The report as one HTML file: no network, no matplotlib, pictures as inline SVG."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from megatron.dpp.report.analysis.formats import duration, number, percent
from megatron.dpp.report.pictures.charts import (
    PLOTS,
    Report,
    difference,
    loss_name,
    name_of,
    runs_of,
    series,
)
from megatron.dpp.report.pictures.style import CHUNK_ALPHA, LABELS, style_sheet

_TEMPLATE = Path(__file__).with_name("page.html")
_WIDTH = 460.0
_FEW_COLUMNS = 5
"""Columns that fit beside each other on a telephone."""

Column = tuple[str, Callable[[Any], Any], str]

_TASKS = """<p class="small"><b>F</b> is the forward of one microbatch through one chunk of
layers. <b>B</b> is its backward. Where there is a <b>W</b>, B computes the gradient of the input
only, and W the gradient of the weights, which can wait. <code>1F3</code> is chunk 1, forward,
microbatch 3.</p>"""


def page(report: Report, *, live_s: float = 0.0, status: str = "") -> str:
    """The whole page.

    Args:
        report: as ``megatron-dpp report`` builds it.
        live_s: seconds after which the page fetches itself again; 0: never.
        status: of a live page, in its corner.
    """
    parts = [_head(report), _comparison(report), _tiles(report), _words(report)]
    parts += [_figures(report, ("loss", "grad-norm", "tokens-per-second", "iteration-time"))]
    parts += [_timeline(report)]
    parts += [_figures(report, ("time-per-rank", "bubble", "peak-memory", "held-activations"))]
    parts += [_figures(report, ("experts",))] if report.get("experts") else []
    parts += [
        _lengths(report),
        _findings(report),
        _ranks(report),
        _iterations(report),
        _flags(report),
    ]
    return fill(f"{name_of(report)} pipeline report", "\n".join(parts), live_s, status)


def fill(title: str, main: str, live_s: float = 0.0, status: str = "") -> str:
    """The template with a title and contents."""
    ended = ' class="ended"' if status.startswith("ended") else ""
    badge = f'<div id="live"{ended}>{escape(status)}</div>' if live_s else ""
    text = _TEMPLATE.read_text(encoding="utf-8")
    for mark, value in (
        ("TITLE", escape(title)), ("STYLE", style_sheet()), ("LIVE", f"{live_s:g}"),
        ("BADGE", badge), ("MAIN", main),
    ):  # fmt: skip
        text = text.replace(f"/*{mark}*/", value, 1)
    return text


def _section(title: str, *contents: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{''.join(contents)}</section>"


def _table(columns: Sequence[Column], rows: Iterable[Any], empty: str = "none") -> str:
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


def _details(title: str, *contents: str) -> str:
    inner = f"<summary>{escape(title)}</summary>{''.join(contents)}"
    return f"<section><details>{inner}</details></section>"


def _figure(report: Report, name: str, cls: str = "", width: float = _WIDTH) -> str:
    picture = PLOTS[name](report, width)
    if picture is None:
        return ""
    note = f'<div class="dim small">{escape(picture.note)}</div>' if picture.note else ""
    return (
        f'<figure class="{cls} {name}"><h3>{escape(picture.title)}</h3>{note}'
        f"{picture.inline_svg()}</figure>"
    )


def _figures(report: Report, names: Sequence[str]) -> str:
    return f'<div class="grid">{"".join(_figure(report, name) for name in names)}</div>'


def _layout(run: dict[str, Any]) -> str:
    return (
        f"data {run['data']}, pipeline {run['pipeline']} × {run['chunks']} "
        f"chunk{'s' if run['chunks'] > 1 else ''}, tensor {run['tensor']}, "
        f"{run['microbatches']} microbatch{'es' if run['microbatches'] > 1 else ''}"
    )


def _head(report: Report) -> str:
    run, totals = report["run"], report["totals"]
    skipped = f", without iteration {', '.join(map(str, run['skipped']))}" if run["skipped"] else ""
    clocks = run["clock_uncertainty_us"]
    facts = {
        "model": report.get("model") or "",
        "started": run["started"],
        "hosts": ", ".join(run["hosts"]) + f" ({len(report['ranks'])} ranks, {run['device']})",
        "layout": _layout(run),
        "traced": f"{len(report['iterations'])} iterations{skipped}",
        "clocks": f"within {clocks:.1f} µs" if clocks else "",
        "directory": run["directory"],
    }
    rows = "".join(f"<dt>{k}</dt><dd>{escape(v)}</dd>" for k, v in facts.items() if v)
    name = name_of(report).capitalize()
    return (
        f"<h1>{name} pipeline: {duration(totals['iteration_ms'])} per iteration, "
        f'{percent(totals["bubble"])} idle</h1><dl class="facts">{rows}</dl>'
    )


def _comparison(report: Report) -> str:
    if not report.get("baseline"):
        return ""
    (name, _, one), (other_name, _, two) = runs_of(report)
    _, clear = difference(report)
    rows = []
    for text, value, form in (
        ("iteration, mean", lambda r: r["totals"]["mean_ms"], duration),
        ("iteration, median", lambda r: r["totals"]["iteration_ms"], duration),
        ("pipeline", lambda r: r["totals"]["window_ms"], duration),
        ("busiest rank's own work", lambda r: r["totals"]["ideal_ms"], duration),
        ("idle", lambda r: r["totals"]["bubble"], percent),
        ("tokens/s, median", _speed, number),
        ("last loss", _last_loss, lambda x: f"{x:.6g}"),
        ("most memory of a rank", _memory, lambda x: f"{x / 2**20:,.0f} MiB"),
    ):
        a, b = value(one), value(two)
        if a is not None and b is not None:
            rows.append((text, form(a), form(b), _difference(a, b, text, clear=clear)))
    columns: list[Column] = [
        ("", lambda r: r[0], "text"), (name, lambda r: r[1], ""), (other_name, lambda r: r[2], ""),
        ("difference", lambda r: r[3], ""),
    ]  # fmt: skip
    note = "" if clear else "The times differ by less than twice their standard error. "
    note += f"The other run: {two['run']['directory']}, started {two['run']['started']}."
    facts = f'<p class="dim small">{escape(note)}</p>'
    figure = _figure(report, "comparison", "narrow") + _figure(report, "comparison", "wide", 800.0)
    table = _table(columns, rows)
    return f'<section id="baseline"><h2>Two runs compared</h2>{figure}{table}{facts}</section>'


def _difference(a: float, b: float, what: str, *, clear: bool) -> tuple[str, str]:
    if a == b:
        return "equal", ""
    if what == "idle":
        text, change = f"{(a - b) * 100:+.1f} points", a - b
    else:
        change = a / b - 1 if b else 0.0
        text = f"{change * 100:+.1f} %" if abs(change) >= 5e-4 else f"{a - b:+.2g}"
    mood = (
        ""
        if abs(change) < 0.005 or not clear
        else "good"
        if (change < 0) != ("/s" in what)
        else "bad"
    )
    return text.replace("-", "\N{MINUS SIGN}"), mood


def _speed(run: Report) -> float | None:
    values = series(run, "tokens/s")[1]
    return statistics.median(values) if values else None


def _last_loss(run: Report) -> float | None:
    values = series(run, loss_name(run))[1]
    return values[-1] if values else None


def _memory(run: Report) -> float | None:
    return max((row["peaks"].get("memory", 0.0) for row in run["ranks"]), default=0.0) or None


def _tiles(report: Report) -> str:
    totals, speed, loss = report["totals"], _speed(report), _last_loss(report)
    tiles = {
        "iteration (median)": duration(totals["iteration_ms"]),
        "tokens/s (median)": None if speed is None else number(speed),
        "last loss": None if loss is None else f"{loss:.4g}",
        "idle (bubble)": percent(totals["bubble"]),
        "busiest rank's own work": duration(totals["ideal_ms"]),
        "pipeline / least possible": f"{totals['ideal_ratio']:.3f}",
        "stragglers": str(totals["stragglers"]),
    }
    shown = "".join(
        f'<div class="tile"><b>{value}</b><span class="dim small">{escape(name)}</span></div>'
        for name, value in tiles.items()
        if value is not None
    )
    return f'<div class="tiles">{shown}</div>'


def _words(report: Report) -> str:
    lines = [f"<p>{escape(line)}</p>" for line in report["sentences"]]
    if not report.get("metrics"):
        lines.append(
            '<p class="dim">No metrics beside the traces; --metrics-file names the file with loss '
            "and tokens/s.</p>"
        )
    return _section("In words", *lines)


def _timeline(report: Report) -> str:
    line = report["timeline"]
    data = json.dumps({**line, "labels": LABELS, "alpha": CHUNK_ALPHA}, separators=(",", ":"))
    data = data.replace("<", "\\u003c").replace("&", "\\u0026")  # no text can end the script
    first = (
        "" if len(line["ranks"]) == len(report["ranks"]) else f", first {len(line['ranks'])} ranks"
    )
    return _section(
        f"Timeline of iteration {line['iteration']}{first}",
        _TASKS,
        '<div class="controls" id="filters"></div><canvas id="timeline"></canvas>',
        '<div class="dim small">Wheel: zoom. Drag: move. Double click: all. Point at a slice: '
        "name and time. Later chunks are paler.</div>",
        f'<script id="data" type="application/json">{data}</script>',
    )


def _findings(report: Report) -> str:
    stragglers: list[Column] = [
        ("finding", lambda s: s["kind"], "text"), ("at", lambda s: s["name"], "text"),
        ("times slower", lambda s: f"{s['factor']:.2f}", ""),
        ("in iterations", lambda s: percent(s["share"]), ""), ("since", lambda s: s["since"], ""),
        ("in words", lambda s: s["text"], "text"),
    ]  # fmt: skip
    changes: list[Column] = [
        ("change", lambda p: p["name"], "text"), ("now", lambda p: duration(p["now_ms"]), ""),
        ("then", lambda p: duration(p["then_ms"]), ""),
        ("time saved", lambda p: _gain(p["gain"]), ""),
    ]  # fmt: skip
    harmless = " ".join(
        f"Without effect on the time of an iteration: {s['text']}."
        for s in report.get("without_effect", [])
    )
    fidelity = (
        f"Replayed in its recorded order, the run takes {report['fidelity']:.3f} times the "
        "measured time. Changes are simulated with decisions made anew."
    )
    small = '<div class="dim small">{}</div>'.format
    return _section(
        "Stragglers",
        _table(stragglers, report["stragglers"], "No straggler."),
        small(escape(harmless)),
    ) + _section(
        "Predicted gain of a change",
        _table(changes, report["what_if"], "No prediction: no iteration was recorded in full."),
        small(fidelity) if report["what_if"] else "",
    )


def _gain(gain: float) -> tuple[str, str]:
    text = f"{gain * 100:+.1f} %".replace("-", "\N{MINUS SIGN}")
    return text, "good" if gain > 0.005 else "bad" if gain < -0.005 else ""


def _lengths(report: Report) -> str:
    """Padding, time per token by size, and what other orders, packing and schedules gain."""
    found = report.get("lengths")
    if not found:
        return ""
    classes: list[Column] = [
        ("tokens up to", lambda r: f"{r['up_to']:,}", ""),
        ("microbatches", lambda r: r["microbatches"], ""),
        ("mean tokens", lambda r: f"{r['tokens']:,.0f}", ""),
        *((f"{kind}, \N{MICRO SIGN}s per token", _token_time(kind), "") for kind in "FBW"),
    ]
    plans: list[Column] = [
        ("schedule", lambda r: r["schedule"], "text"),
        ("order", lambda r: r["plan"] + (" (ran)" if r["ran"] else ""), "text"),
        ("simulated", lambda r: duration(r["seconds"] * 1e3), ""),
        ("gain", lambda r: f"{r['gain']:.2f}", ""),
        ("saves of what ran", lambda r: ("", "") if r["ran"] else _gain(r["saves"]), ""),
    ]
    gains, words = "", [found["sentence"]]
    if found["gains"]:
        words.append(found["gains_sentence"])
        note = (
            f"Simulated for iteration {found['iteration']} with the times of this run's own tasks. "
            "Gain: time of the first row over that of the row. Orders are drawn, or the best of "
            "those that --order planned weighs; packed ones have even costs (--packing even). The "
            "dynamic schedule has policy dynamic, the default cap and split backwards."
        )
        gains = _table(plans, found["gains"]) + f'<div class="dim small">{escape(note)}</div>'
    return _section(
        "Sequences of unlike length",
        *(f"<p>{escape(line)}</p>" for line in words),
        gains,
        _figure(report, "time-per-token", "narrow"),
        _figure(report, "time-per-token", "wide", 800.0),
        "<details><summary>Time per token by size</summary>",
        _table(classes, found["size_classes"]),
        "</details>",
    )


def _token_time(kind: str) -> Callable[[Any], str]:
    return lambda row: "-" if row[kind] is None else number(row[kind])


def _ranks(report: Report) -> str:
    times: list[Column] = [
        ("rank", lambda r: r["rank"], ""), ("stage", lambda r: r["pipeline"], ""),
        ("work", lambda r: duration(r["busy_ms"]), ""),
        *((kind, _kind_time(kind), "") for kind in "FBW"),
        ("idle", lambda r: percent(r["bubble"]), ""),
        ("compute ratio", lambda r: percent(r["compute_ratio"]), ""),
        ("first to last task", lambda r: duration(r["compute_window_ms"]), ""),
    ]  # fmt: skip
    others: list[Column] = [
        ("rank", lambda r: r["rank"], ""),
        ("sending ratio", lambda r: percent(r["sending_ratio"]), ""),
        ("overlapped", lambda r: percent(r["overlap"]), ""),
        ("sent", lambda r: f"{r['sent_bytes'] / 2**20:.2f} MiB", ""),
        ("peak held", lambda r: number(r["peaks"].get("held", 0.0)), ""),
        ("peak memory", lambda r: f"{r['peaks'].get('memory', 0.0) / 2**20:,.0f} MiB", ""),
        ("tasks not in static order", lambda r: f"{r['differing_decisions']:.1f}", ""),
    ]  # fmt: skip
    links: list[Column] = [
        ("link", lambda x: f"{x['source']} → {x['destination']}", ""),
        ("kind", lambda x: x["kind"], ""),
        ("messages", lambda x: f"{x['messages']:.0f}", ""),
        ("MiB", lambda x: f"{x['bytes'] / 2**20:.2f}", ""),
        ("typical delay", lambda x: duration(x["delay_us"] / 1e3), ""),
        ("95 %", lambda x: duration(x["p95_us"] / 1e3), ""),
        ("MB/s", lambda x: f"{x['bandwidth_mb_s']:.0f}", ""),
        ("seen while waiting", lambda x: percent(x["measured_while_waiting"]), ""),
    ]  # fmt: skip
    experts: list[Column] = [
        ("layer", lambda e: e["layer"], ""),
        ("ranks", lambda e: ", ".join(map(str, e["ranks"])), "text"),
        ("fullest expert", lambda e: f"{e['imbalance']:.2f} x mean", ""),
        ("worst iteration", lambda e: f"{e['worst']:.2f} x mean", ""),
        ("fullest rank", lambda e: f"{e['rank_imbalance']:.2f} x mean", ""),
        ("lost in a forward", lambda e: duration(e["lost_ms"]), ""),
    ]  # fmt: skip
    rows, layers = report["ranks"], report.get("experts")
    return (
        _section("Ranks: time per iteration", _table(times, rows))
        + _section("Ranks: messages and memory", _table(others, rows))
        + _section("Links", _table(links, report["links"], "no messages"))
        + (_section("Experts: tokens per layer", _table(experts, layers)) if layers else "")
    )


def _kind_time(kind: str) -> Callable[[Any], str]:
    return lambda row: duration(row["kinds_ms"].get(kind, 0.0))


def _iterations(report: Report) -> str:
    columns: list[Column] = [
        ("iteration", lambda i: i["iteration"], ""),
        ("total", lambda i: duration(i["total_ms"]), ""),
        ("pipeline", lambda i: duration(i["window_ms"]), ""),
        ("busiest rank", lambda i: duration(i["ideal_ms"]), ""),
        ("idle", lambda i: percent(i["bubble"]), ""),
    ]  # fmt: skip
    rows = report["iterations"]
    most = 1000
    text = f"All {len(rows)} iterations" if len(rows) <= most else f"The last {most} iterations"
    return _details(text, _table(columns, rows[-most:]))


def _flags(report: Report) -> str:
    flags = report.get("flags")
    if not flags:
        return ""
    columns: list[Column] = [
        ("flag", lambda f: f[0], "text"),
        ("value", lambda f: f[1], "text path"),
    ]
    return _details(f"{len(flags)} flags of the run", _table(columns, list(flags.items())))

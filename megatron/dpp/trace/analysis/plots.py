"""Pictures of a report: PNG files drawn with matplotlib."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron.dpp.errors import ConfigError

COLOURS = {
    "F": "#4c8fd6",
    "B": "#e08a3c",
    "W": "#5fae6b",
    "span": "#9a83c9",
    "other": "#9a83c9",
    "warm-up": "#d8dbe0",
    "message": "#e3a7a7",
    "drain": "#c6cad1",
    "memory-cap": "#d9c26a",
    "tp-agreement": "#c58fbf",
    "lookahead": "#9fc8c4",
    "host": "#8a6d5a",
    "send": "#d59fc4",
}

Report = dict[str, Any]


def _parts(row: dict[str, Any]) -> dict[str, float]:
    return {**row["kinds_ms"], "other": row["other_ms"], **row["idle_ms"]}


def plot_time_per_rank(axes: Any, report: Report) -> None:
    """Stacked bars of where the pipeline's time went."""
    rows = report["ranks"]
    names = [name for name in COLOURS if any(_parts(row).get(name) for row in rows)]
    bottom = [0.0] * len(rows)
    places = range(len(rows))
    for name in names:
        values = [_parts(row).get(name, 0.0) for row in rows]
        axes.bar(places, values, bottom=bottom, color=COLOURS[name], label=name)
        bottom = [b + v for b, v in zip(bottom, values, strict=True)]
    axes.set_xlabel("rank")
    axes.set_ylabel("ms per iteration")
    axes.set_xticks(places, [row["rank"] for row in rows])
    axes.legend(fontsize="small", ncols=2)


def plot_timeline(axes: Any, report: Report) -> None:
    """The slices of one iteration."""
    line = report["timeline"]
    for wide in (True, False):
        for track, start, end, cls, _, _ in line["slices"]:
            if (len(cls) > 1) == wide:
                colour = COLOURS.get(cls, "#999999")
                height = 0.4 if wide else 0.8
                axes.barh(track, (end - start) / 1000, height, start / 1000, color=colour)
    axes.set_yticks(range(len(line["ranks"])), [f"rank {rank}" for rank in line["ranks"]])
    axes.invert_yaxis()
    axes.set_xlabel(f"ms since the start of iteration {line['iteration']}")


def _plot_both(name: str, label: str, scale: float = 1.0) -> Callable[[Any, Report], None]:
    """Bars of a per-rank value, this run beside the baseline."""

    def draw(axes: Any, report: Report) -> None:
        runs = [report] + ([report["baseline"]] if report.get("baseline") else [])
        width = 0.8 / len(runs)
        for index, run in enumerate(runs):
            values = [_value(row, name) * scale for row in run["ranks"]]
            places = [rank + index * width for rank in range(len(values))]
            axes.bar(places, values, width, label=run["run"]["schedule"])
        axes.set_xlabel("rank")
        axes.set_ylabel(label)
        axes.legend(fontsize="small")

    return draw


def _value(row: dict[str, Any], name: str) -> float:
    value = row["peaks"].get(name.removeprefix("peak ")) if name.startswith("peak ") else row[name]
    return float(value or 0.0)


def plot_iterations(axes: Any, report: Report) -> None:
    """Time of every iteration, this run beside the baseline."""
    for run in [report] + ([report["baseline"]] if report.get("baseline") else []):
        rows = run["iterations"]
        times = [row["total_ms"] for row in rows]
        axes.plot([row["iteration"] for row in rows], times, "o-", label=run["run"]["schedule"])
    axes.set_xlabel("iteration")
    axes.set_ylabel("ms")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize="small")


PLOTS: dict[str, Callable[[Any, Report], None]] = {
    "timeline": plot_timeline,
    "time-per-rank": plot_time_per_rank,
    "iteration-time": plot_iterations,
    "peak-memory": _plot_both("peak memory", "peak memory, MiB", 2**-20),
    "held-activations": _plot_both("peak held", "activations held at most"),
    "compute-ratio": _plot_both("compute_ratio", "share of the pipeline's time in tasks"),
    "compute-window": _plot_both("compute_window_ms", "first to last task, ms"),
    "sending-ratio": _plot_both("sending_ratio", "share of the time with messages on the way"),
    "sending-window": _plot_both("sending_ms", "messages on the way, ms"),
}


def write_plots(report: Report, directory: Path, *, flag: str = "drawing") -> list[Path]:
    """Draw every plot as a PNG file in ``directory``; returns their paths. ``flag`` names in an
    error what asked for it.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(f"{flag} needs matplotlib: pip install matplotlib") from error

    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, plot in PLOTS.items():
        figure = Figure(figsize=(11, 4.5) if name == "timeline" else (6.4, 4.0), layout="tight")
        FigureCanvasAgg(figure)
        plot(figure.add_subplot(), report)
        paths.append(directory / f"{name}.png")
        figure.savefig(paths[-1], dpi=130)
    return paths

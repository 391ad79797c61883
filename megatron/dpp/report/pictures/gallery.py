"""All pictures of a report by name, and their files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from megatron.dpp.report.analysis.formats import duration, mebibytes, number, percent
from megatron.dpp.report.analysis.report_data import Report
from megatron.dpp.report.pictures.charts import (
    per_rank,
    plot_bubble,
    plot_comparison,
    plot_experts,
    plot_time_per_rank,
    plot_time_per_token,
    plot_timeline,
)
from megatron.dpp.report.pictures.curves import (
    plot_grad_norm,
    plot_iterations,
    plot_loss,
    plot_memory,
    plot_speed,
)
from megatron.dpp.report.pictures.picture import Picture

PLOTS: dict[str, Callable[[Report, float], Picture | None]] = {
    "comparison": plot_comparison,
    "loss": plot_loss,
    "grad-norm": plot_grad_norm,
    "tokens-per-second": plot_speed,
    "memory": plot_memory,
    "iteration-time": plot_iterations,
    "timeline": plot_timeline,
    "time-per-rank": plot_time_per_rank,
    "bubble": plot_bubble,
    "time-per-token": plot_time_per_token,
    "experts": plot_experts,
    "peak-memory": per_rank(
        lambda row: row.peaks.get("memory"), mebibytes, "{rank} needs the most memory: {value}"
    ),
    "held-activations": per_rank(
        lambda row: row.peaks.get("held"), number,
        "{rank} holds the most activations: {value}",
    ),
    "compute-ratio": per_rank(
        lambda row: row.compute_ratio, percent,
        "{rank} computes for {value} of the pipeline",
    ),
    "compute-window": per_rank(
        lambda row: row.compute_window_ms, duration,
        "{rank} takes the longest from its first to its last task: {value}",
    ),
    "sending-ratio": per_rank(
        lambda row: row.sending_ratio, percent,
        "Messages of {rank} are on their way for {value} of the pipeline",
    ),
    "sending-window": per_rank(
        lambda row: row.sending_ms, duration,
        "Messages of {rank} are on their way the longest: {value}",
    ),
}  # fmt: skip
"""Name of a file -> its picture; None where the run has no such numbers."""

_WIDTHS = {"timeline": 1200.0, "comparison": 860.0}


def write_plots(report: Report, directory: Path) -> None:
    """Write every picture as ``NAME.svg``."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, plot in PLOTS.items():
        picture = plot(report, _WIDTHS.get(name, 700.0))
        if picture is not None:
            picture.write(directory / f"{name}.svg")

"""The gain of a dynamic run over a static one beside it, by ingredient."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from megatron.dpp.report.analysis.report_data import Report
from megatron.dpp.report.recorded import Recorded
from megatron.dpp.sim.arms import DYNAMIC, FUSED, Arms, parts

_DYNAMIC_RUN = "dpp"
_MOST_ITERATIONS = 5


def simulated_parts(runs: Sequence[Recorded]) -> dict[str, float]:
    """Each ingredient's share of the static schedule's time, simulated with the tasks of a dynamic
    run, its policy and the default cap.
    """
    last = runs[-1]
    arms = Arms(
        last.shape.num_chunks, split=last.split, w_pieces=last.num_pieces, policy=last.policy
    )
    times = {
        name: statistics.fmean(
            arms.run(name, run.shape, run.costs()).makespan for run in runs[-_MOST_ITERATIONS:]
        )
        for name in arms.names
    }
    return parts(times, arms.steps)[DYNAMIC if last.split else FUSED]


def gain_lines(report: Report, runs: Sequence[Recorded]) -> list[str]:
    """A line on a traced dynamic run and the first static one beside it; none for other runs.

    Args:
        runs: the recorded iterations of the report's own run.
    """
    own = report.pipeline
    static = next(
        (
            other.pipeline
            for other in report.others
            if other.pipeline and other.pipeline.run.schedule != _DYNAMIC_RUN
        ),
        None,
    )
    if own is None or static is None or not runs or not runs[-1].dynamic:
        return []
    if runs[-1].shape.num_ranks < 2 or not static.totals.iteration_ms:
        return []
    whole = 1.0 - own.totals.iteration_ms / static.totals.iteration_ms
    found = simulated_parts(runs)
    shown = ", ".join(f"{name} {100 * share:.1f} %" for name, share in found.items())
    rest = whole - sum(found.values())
    return [
        f"an iteration takes {100 * whole:.1f} % less time than under the static schedule beside "
        f"it: {shown} (simulated with this run's tasks and the default cap), "
        f"links, graphs and all else {100 * rest:.1f} %"
    ]

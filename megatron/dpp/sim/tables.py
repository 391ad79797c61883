"""Tables of simulated schedules, as text."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from megatron.dpp.sim import arms
from megatron.dpp.sim.costs import Shape
from megatron.dpp.sim.result import Result


def _mean(runs: Sequence[Result]) -> float:
    return statistics.fmean(run.makespan for run in runs)


def print_results(shape: Shape, results: Mapping[str, Sequence[Result]], unit: str = "") -> None:
    """Print a row per schedule.

    Args:
        results: one of each seed.
        unit: of times.
    """
    seeds = max(map(len, results.values()), default=0)
    plural = "es" if shape.num_microbatches > 1 else ""
    print(
        f"{shape.num_ranks} ranks x {shape.num_chunks} chunks, "
        f"{shape.num_microbatches} microbatch{plural}, {seeds} seed(s)"
    )
    print(f"{'schedule':24s} {'makespan':>10s} {'ratio':>7s} {'peak':>6s}  peak by rank")
    for name, runs in results.items():
        first = runs[0]
        makespan = _mean(runs)
        ratio = statistics.fmean(run.ratio for run in runs)
        chunks = len(first.slots) and 1 + max(s.action.chunk for s in first.slots[0])
        peaks = [held / chunks for held in first.peak_held]
        shown = " ".join(f"{peak:.3g}" for peak in peaks[:16]) + (" ..." if peaks[16:] else "")
        print(f"{name:24s} {makespan:9.4g}{unit or ' '} {ratio:7.3f} {max(peaks):6.3g}  {shown}")
    of = " of the longest sequence" if shape.largest else ""
    print(f"ratio: makespan / the busiest rank's own work; peak: whole ranks' activations{of} held")


def print_parts(
    chosen: arms.Arms, results: Mapping[str, Sequence[Result]], num_chunks: int
) -> None:
    """Print which ingredient saves what, and each arm's peak in whole ranks' activations."""
    times = {name: _mean(results[name]) for name in chosen.names}
    found = arms.parts(times, chosen.steps)
    names = arms.part_names(found.values())
    heads = "".join(f"{name:>9s}" for name in ("peak", *names, "all"))
    print(f"\n{'what comes from what, %':24s}{heads}")
    for name in chosen.names:
        peak = statistics.fmean(max(run.peak_held) / num_chunks for run in results[name])
        cells = "".join(f"{cell:>9s}" for cell in arms.part_cells(found.get(name), names))
        print(f"{name:24s}{peak:9.3g}{cells}")
    print(
        f"per cent of the time of {chosen.static} that each ingredient saves; order: at the cap "
        f"static; memory: beyond it, with a larger cap; links are alike in all rows"
    )

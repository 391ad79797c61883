"""The costs of a run that was traced, for the planner."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from megatron.dpp.errors import ConfigError, DataError
from megatron.dpp.sim.measured import MeasuredCosts, load_costs, parse_costs

_MISFIT = 0.15


def costs_of_run(name: str, root: Path) -> MeasuredCosts:
    """What the tasks and messages of a run took.

    Args:
        name: directory of its trace, or a cost file (``profiling/report.py --costs``).
        root: where a relative directory is looked for if it is not in the working directory.

    Raises:
        DataError: there is no such run, or no iteration of it was recorded in full.
    """
    path = Path(name)
    if path.is_file():
        return load_costs(path)
    from megatron.dpp.sim.whatif import cost_file, recorded
    from megatron.dpp.trace.align import align
    from megatron.dpp.trace.analysis.summary import analyse
    from megatron.dpp.trace.reader import find_directory, open_run

    files = open_run(find_directory(name, root))
    analysis = analyse(files, align(files, lambda file: None))
    ranks = analysis.shape.pipelines()[0]
    parts = zip(analysis.works, analysis.links, analysis.times, strict=True)
    runs = [recorded(analysis.shape, ranks, *part) for part in parts]
    whole = [run for run in runs if run is not None]
    if not whole:
        raise DataError(f"{name}: no iteration was recorded in full")
    return parse_costs(cost_file(whole), name)


def even_layers(num_layers: int, num_stages: int, remedy: str) -> list[int]:
    """Layers of each stage of a run with Megatron's default layout.

    Raises:
        ConfigError: they do not lie evenly; ``remedy`` ends the message.
    """
    if num_layers % num_stages:
        raise ConfigError(f"{num_layers} layers do not lie evenly on {num_stages} stages: {remedy}")
    return [num_layers // num_stages] * num_stages


def check_layers(measured: MeasuredCosts, layers: Sequence[int], remedy: str) -> None:
    """Refuse a run whose layers take no time, and layer counts with which its first or last stage,
    which have more than layers, would take less than their layers: it had another layout.

    Raises:
        DataError: naming the stage and its times; ``remedy`` ends the message.
    """
    times = [sum(statistics.median(kind or [0.0]) for kind in stage) for stage in measured.tasks]
    inner = sum(layers[1:-1])
    each = sum(times[1:-1]) / inner if inner else 0.0
    if each <= 0.0:
        raise DataError("the run's layers take no time; a plan from them would mean nothing")
    for stage in (0, len(layers) - 1):
        if times[stage] < (1 - _MISFIT) * layers[stage] * each:
            raise DataError(
                f"stage {stage}: its tasks take {times[stage] * 1e3:.3f} ms, less than "
                f"{layers[stage]} layers of {each * 1e3:.3f} ms: the run's layers did not lie so; "
                f"{remedy}"
            )

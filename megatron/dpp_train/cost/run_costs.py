"""The costs of a run that was traced, for the planner."""

from __future__ import annotations

from pathlib import Path

from megatron.dpp.errors import ConfigError, DataError
from megatron.dpp.sim.measured import MeasuredCosts, load_costs, parse_costs


def costs_of_run(name: str, root: Path) -> MeasuredCosts:
    """Times of a run's tasks and messages.

    Args:
        name: directory of its trace, or a cost file (``megatron-dpp report --costs``).
        root: parent of a relative directory that is not in the working directory.

    Raises:
        DataError: there is no such run, no iteration of it was recorded in full, or it ran in
            slices.
    """
    path = Path(name)
    if path.is_file():
        return load_costs(path)
    from megatron.dpp.report.align import align
    from megatron.dpp.report.analysis.summary import analyse
    from megatron.dpp.report.reader import open_run
    from megatron.dpp.report.recorded import cost_file, recorded_runs
    from megatron.dpp.report.run_files import find_run

    files = open_run(find_run(name, root).need_traces())
    analysis = analyse(files, align(files, lambda file: None))
    if analysis.sliced:
        raise DataError(
            f"{name}: its sequences ran in slices, and plans are for whole microbatches; take a "
            "run with --dpp-slice-tokens off"
        )
    runs = recorded_runs(analysis)
    if not runs:
        raise DataError(f"{name}: no iteration was recorded in full")
    return parse_costs(cost_file(runs), name)


def even_layers(num_layers: int, num_stages: int, remedy: str) -> list[int]:
    """Layers of each stage of a run with Megatron's default layout.

    Raises:
        ConfigError: they do not divide evenly; ``remedy`` ends the message.
    """
    if num_layers % num_stages:
        raise ConfigError(f"{num_layers} layers cannot be divided by {num_stages} stages: {remedy}")
    return [num_layers // num_stages] * num_stages

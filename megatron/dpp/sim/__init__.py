"""The simulator: a virtual clock that drives the same Scheduler as training does.

It serves to choose settings before a run, to explain a run, and to test ``schedule``. Read
``clock.py`` first, then ``costs.py`` (its input) and ``conditions.py`` (variation). Pure Python;
only PNG files need matplotlib. The command line is ``python -m megatron.dpp.sim --help``.
"""

from megatron.dpp.sim.clock import simulate
from megatron.dpp.sim.conditions import CONDITIONS, condition_costs, uniform
from megatron.dpp.sim.costs import Costs, Hop, Shape, SlowTimes, even_costs
from megatron.dpp.sim.measured import MeasuredCosts, load_costs, parse_costs
from megatron.dpp.sim.result import format_grid
from megatron.dpp.sim.schedules import STATIC, ScheduleConfig, find_schedule, replay, run_static

__all__ = [
    "CONDITIONS",
    "STATIC",
    "Costs",
    "Hop",
    "MeasuredCosts",
    "ScheduleConfig",
    "Shape",
    "SlowTimes",
    "condition_costs",
    "even_costs",
    "find_schedule",
    "format_grid",
    "load_costs",
    "parse_costs",
    "replay",
    "run_static",
    "simulate",
    "uniform",
]

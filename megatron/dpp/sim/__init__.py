"""Schedules without a machine: a virtual clock that drives the same Scheduler as training does.

For choosing settings before a run, for explaining one after it, and as the test bed of
``schedule``. The command line is ``python -m megatron.dpp.sim --help``. Start reading at
``clock.py``; ``costs.py`` is what it runs against, ``conditions.py`` what may vary. Pure Python;
matplotlib is needed only for pictures.
"""

from megatron.dpp.sim.clock import Placement, Result, Slot, interleaved_placement, simulate
from megatron.dpp.sim.conditions import CONDITIONS, condition_costs, uniform
from megatron.dpp.sim.costs import Costs, Hop, Shape, SlowTimes, even_costs
from megatron.dpp.sim.grid import format_grid
from megatron.dpp.sim.measured import MeasuredCosts, load_costs, parse_costs
from megatron.dpp.sim.schedules import STATIC, Plan, find_plan, run_static

__all__ = [
    "CONDITIONS",
    "STATIC",
    "Costs",
    "Hop",
    "MeasuredCosts",
    "Placement",
    "Plan",
    "Result",
    "Shape",
    "Slot",
    "SlowTimes",
    "condition_costs",
    "even_costs",
    "find_plan",
    "format_grid",
    "interleaved_placement",
    "load_costs",
    "parse_costs",
    "run_static",
    "simulate",
    "uniform",
]

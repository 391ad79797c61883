"""One cost model of a run: FLOPs, bytes, times and memory, and the layout planner on top of it.

Pure Python, no PyTorch. ``shape.py`` holds the data types, ``constants.py`` the fitted figures,
``memory.py`` and ``times.py`` the formulas. ``estimate.py`` and ``planner.py`` combine them with
the simulator; ``whatif.py`` predicts changes of a traced run.
"""

from megatron.dpp.plan.device import (
    Device,
    cpu_device,
    find_machine,
    gpu_device,
    known_gpu,
)
from megatron.dpp.plan.estimate import Estimate, estimate, least_seconds
from megatron.dpp.plan.from_flags import shape_of, stage_shape_of
from megatron.dpp.plan.memory import (
    layer_bytes,
    least_bytes,
    model_parameters,
    published_layer_bytes,
    rank_parameters,
    stage_bytes,
)
from megatron.dpp.plan.model_costs import ModelCosts, PartCosts
from megatron.dpp.plan.planner import Planner, Prediction, from_run
from megatron.dpp.plan.run_costs import costs_of_run, even_layers
from megatron.dpp.plan.shape import LayerLayout, ModelShape, RunSchedule, RunShape
from megatron.dpp.plan.text import lines
from megatron.dpp.plan.times import planning_costs

__all__ = [
    "Device",
    "Estimate",
    "LayerLayout",
    "ModelCosts",
    "ModelShape",
    "PartCosts",
    "Planner",
    "Prediction",
    "RunSchedule",
    "RunShape",
    "costs_of_run",
    "cpu_device",
    "estimate",
    "even_layers",
    "find_machine",
    "from_run",
    "gpu_device",
    "known_gpu",
    "layer_bytes",
    "least_bytes",
    "least_seconds",
    "lines",
    "model_parameters",
    "planning_costs",
    "published_layer_bytes",
    "rank_parameters",
    "shape_of",
    "stage_bytes",
    "stage_shape_of",
]

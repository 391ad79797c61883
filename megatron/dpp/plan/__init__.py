"""What a run will need and how long it will take, before it starts.

Pure Python, no PyTorch. ``shape.py`` is what is estimated, ``activations.py`` the formulas,
``estimate.py`` brings them together; the command line is ``megatron-dpp estimate``.
Called by ``launch`` (the ``train`` command) and, to compare with what was measured, by ``train``.
"""

from megatron.dpp.plan.activations import (
    head_bytes,
    interleaving_factor,
    layer_bytes,
    published_layer_bytes,
    stage_bytes,
)
from megatron.dpp.plan.device import (
    Device,
    Machine,
    cpu_device,
    find_machine,
    gpu_device,
    known_gpu,
)
from megatron.dpp.plan.estimate import Estimate, estimate
from megatron.dpp.plan.memory import RankMemory, least_bytes
from megatron.dpp.plan.model_costs import (
    ModelCosts,
    ModelShape,
    Part,
    attention_times,
    between_products,
    collectives,
    embedding_times,
    from_shapes,
    head_times,
)
from megatron.dpp.plan.parameters import model_parameters, rank_parameters
from megatron.dpp.plan.planner import Layout, Planner, Prediction, from_run
from megatron.dpp.plan.run_costs import costs_of_run, even_layers
from megatron.dpp.plan.shape import RunShape, shape_of
from megatron.dpp.plan.text import lines
from megatron.dpp.plan.timing import flops_per_token

__all__ = [
    "Device",
    "Estimate",
    "Layout",
    "Machine",
    "ModelCosts",
    "ModelShape",
    "Part",
    "Planner",
    "Prediction",
    "RankMemory",
    "RunShape",
    "attention_times",
    "between_products",
    "collectives",
    "costs_of_run",
    "cpu_device",
    "embedding_times",
    "estimate",
    "even_layers",
    "find_machine",
    "flops_per_token",
    "from_run",
    "from_shapes",
    "gpu_device",
    "head_bytes",
    "head_times",
    "interleaving_factor",
    "known_gpu",
    "layer_bytes",
    "least_bytes",
    "lines",
    "model_parameters",
    "published_layer_bytes",
    "rank_parameters",
    "shape_of",
    "stage_bytes",
]

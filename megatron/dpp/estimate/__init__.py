"""What a run will need and how long it will take, before it starts.

Pure Python, no PyTorch. ``shape.py`` is what is estimated, ``activations.py`` the formulas,
``estimate.py`` brings them together; the command line is ``python -m megatron.dpp.estimate``.
Called by ``launch`` (the ``train`` command) and, to compare with what was measured, by ``train``.
"""

from megatron.dpp.estimate.activations import (
    head_bytes,
    interleaving_factor,
    layer_bytes,
    published_layer_bytes,
    stage_bytes,
)
from megatron.dpp.estimate.device import (
    Device,
    Machine,
    cpu_device,
    find_machine,
    gpu_device,
    known_gpu,
)
from megatron.dpp.estimate.estimate import Estimate, estimate
from megatron.dpp.estimate.memory import RankMemory, least_bytes
from megatron.dpp.estimate.parameters import model_parameters, rank_parameters
from megatron.dpp.estimate.shape import RunShape, shape_of
from megatron.dpp.estimate.text import lines
from megatron.dpp.estimate.timing import flops_per_token

__all__ = [
    "Device",
    "Estimate",
    "Machine",
    "RankMemory",
    "RunShape",
    "cpu_device",
    "estimate",
    "find_machine",
    "flops_per_token",
    "gpu_device",
    "head_bytes",
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

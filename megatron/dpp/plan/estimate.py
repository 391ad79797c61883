"""Everything about a run that can be said before it: :func:`estimate`.

``train`` and ``auto`` call it for layouts that they consider, ``megatron-dpp estimate``
prints it, and ``train.measure`` compares it with the run.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.dpp.plan.device import Device
from megatron.dpp.plan.layer_times import part_times
from megatron.dpp.plan.memory import RankMemory, rank_memory
from megatron.dpp.plan.parameters import model_parameters
from megatron.dpp.plan.shape import RunShape
from megatron.dpp.plan.timing import (
    Traffic,
    bubble_formula,
    flops_per_token,
    model_costs,
    outside_seconds,
    predict,
    traffic,
)


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What :func:`estimate` says.

    Args:
        parameters: of the whole model.
        flops_per_token: forward and backward of the whole model.
        ranks: memory by pipeline rank.
        bubble_formula: waiting over ideal time, ``(p-1)/(v*m)``.
        bubble: share of the pipeline's time that a rank waits, from the simulated schedule.
        seconds: of an iteration.
        tokens_per_second: of all ranks together.
        flops_per_device: useful operations per second that this is.
        replayed: layers run as CUDA graphs.
    """

    shape: RunShape
    device: Device
    parameters: int
    flops_per_token: float
    ranks: tuple[RankMemory, ...]
    traffic: Traffic
    bubble_formula: float
    bubble: float
    seconds: float
    tokens_per_second: float
    flops_per_device: float
    replayed: bool

    @property
    def peak_bytes(self) -> float:
        """Of the rank that holds most."""
        return max(rank.total for rank in self.ranks)


def estimate(shape: RunShape, device: Device) -> Estimate:
    """Memory, traffic and time of a run."""
    costs = model_costs(shape, device)
    prediction = predict(shape, costs)
    seconds = prediction.seconds + outside_seconds(shape, device)
    tokens = shape.global_batch * shape.seq_length
    per_token = flops_per_token(shape)
    return Estimate(
        shape=shape,
        device=device,
        parameters=model_parameters(shape),
        flops_per_token=per_token,
        ranks=tuple(
            rank_memory(shape, rank, prediction.peak_bytes[rank]) for rank in range(shape.pipeline)
        ),
        traffic=traffic(shape),
        bubble_formula=bubble_formula(shape),
        bubble=max(0.0, prediction.bubble),  # one rank alone may come out at -2e-16
        seconds=seconds,
        tokens_per_second=tokens / seconds,
        flops_per_device=per_token * tokens / seconds / shape.world_size,
        replayed=part_times(shape, device).replayed,
    )

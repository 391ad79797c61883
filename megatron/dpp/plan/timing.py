"""How long an iteration takes, what travels, and how much of the pipeline waits.

Matrix products by the floating point operations that they take and the rate that is given;
traffic by its bytes and the links' bandwidth; the pipeline by the simulator, which runs the
schedule that training will run.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.dpp.plan.activations import deferred_bytes, head_bytes, layer_bytes
from megatron.dpp.plan.device import Device
from megatron.dpp.plan.layer_times import (
    backward_collectives,
    collective_bytes,
    forward_collectives,
    part_times,
)
from megatron.dpp.plan.model_costs import ModelCosts, Part
from megatron.dpp.plan.parameters import rank_parameters
from megatron.dpp.plan.planner import Planner, Prediction
from megatron.dpp.plan.shape import RunShape

_SIMULATED = (6, 3)
"""Microbatches that are simulated, and as many more for each rank: they fill the pipeline, reach
the steady state and drain it. Breadth-first has none: it holds them all."""
_GRAPH_LAYERS = 1.07
"""Room that an activation's graphs have for a backward's temporary tensors and their own inputs and
outputs (decision 0008), in activations of a layer; fitted to chunks of 2, 4 and 6 layers."""


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes that one rank sends.

    Args:
        hop: one activation to the next stage.
        pipeline: all hops of an iteration.
        tensor: all tensor-parallel collectives of an iteration.
        data: the data-parallel collectives of an iteration.
    """

    hop: float
    pipeline: float
    tensor: float
    data: float


def flops_per_token(shape: RunShape) -> float:
    """Forward and backward of the whole model, matrix products only, no recompute (the sum that
    ``train.flops`` logs throughput by)."""
    h, s = shape.hidden_size, shape.seq_length
    attention = h * (shape.queries + 2 * shape.keys) + shape.queries * (s + h)
    mlp = h * shape.ffn_hidden_size * (3 if shape.gated else 2)
    return 6.0 * (shape.num_layers * (attention + mlp) + h * shape.vocab_size)


def traffic(shape: RunShape) -> Traffic:
    """What a rank of the first stage sends in an iteration."""
    hop = shape.element_bytes * shape.outside
    hops = 2 * shape.chunks * shape.num_microbatches if shape.pipeline > 1 else 0
    layers = shape.layout.rank_layers(0) * shape.num_microbatches
    forwards = 2 if shape.recompute == "full" else 1
    collectives = forwards * forward_collectives(shape) + backward_collectives(shape)
    tensor = layers * collectives * collective_bytes(shape)
    return Traffic(
        hop=hop if shape.pipeline > 1 else 0.0,
        pipeline=hops * hop,
        tensor=tensor,
        data=_data_parallel_bytes(shape),
    )


def _data_parallel_bytes(shape: RunShape) -> float:
    count = max(rank_parameters(shape, rank) for rank in range(shape.pipeline))
    one_way = (shape.sharers - 1) / shape.sharers * count
    gradients, weights = one_way * shape.gradient_bytes, one_way * shape.element_bytes
    if shape.shard in ("none", "optimizer"):
        others = shape.replicas // shape.sharers  # which hold the same share, and sum it
        shares = 2 * (others - 1) / others * count / shape.sharers * shape.gradient_bytes
        return gradients + weights + shares
    gathers = 2 if shape.shard == "parameters" else 1
    return shape.num_microbatches * (gradients + gathers * weights)


def model_costs(shape: RunShape, device: Device) -> ModelCosts:
    """Times and activation sizes of the model's parts, as the simulator wants them."""
    times = part_times(shape, device)
    layer = Part(times.layer, layer_bytes(shape), deferred_bytes=deferred_bytes(shape))
    slots = times.replayed and shape.pipeline > 1
    head = Part(times.head, head_bytes(shape))
    near = shape.pipeline_per_node == shape.pipeline
    hop = shape.element_bytes * shape.outside / (device.link if near else device.network)
    return ModelCosts(
        shape.num_layers,
        layer,
        Part(times.lookup),
        head,
        hop,
        between=times.between,
        slot_layers=_GRAPH_LAYERS if slots else None,
    )


def predict(shape: RunShape, costs: ModelCosts) -> Prediction:
    """The pipeline's part of an iteration, and each rank's peak of activations."""
    known = shape.policy in ("megatron", "dynamic", "depth-first", "breadth-first")
    policy = shape.policy if known else "dynamic"
    most = _SIMULATED[0] + _SIMULATED[1] * shape.pipeline
    planner = Planner(
        costs,
        shape.pipeline,
        shape.num_microbatches,
        split_backward=shape.split_backward,
        most_simulated=None if policy == "breadth-first" else most,
    )
    return planner.predict(shape.layout, shape.cap, policy)


def bubble_formula(shape: RunShape) -> float:
    """``(p-1)/(v*m)``: waiting over ideal time, with even stages (Narayanan et al., 2021)."""
    return (shape.pipeline - 1) / (shape.chunks * shape.num_microbatches)


def outside_seconds(shape: RunShape, device: Device) -> float:
    """Gradient reduction and the optimizer's pass over its state, neither of them overlapped."""
    link = device.group_link(shape.replicas, shape.replicas_per_node)
    reduction = traffic(shape).data / link if shape.replicas > 1 else 0.0
    count = max(rank_parameters(shape, rank) for rank in range(shape.pipeline))
    own = count / shape.sharers
    touched = shape.element_bytes + 8 + shape.moment_bytes
    # Read and write weights, gradients and moments, in passes that are not all fused.
    return reduction + own * 2 * 2 * touched / device.bytes_per_second


def least_seconds(shape: RunShape, device: Device, *, planned: bool = False) -> float:
    """What an iteration cannot take less than, without simulation: the busiest rank's work, which
    begins when the first input has come to it, and what lies outside the pipeline. For simulating
    the most promising of many layouts first, and none that cannot win.

    Args:
        planned: layers will be laid out anew (``--dpp-plan``); then it is that of layers which are
            dealt out evenly by what they cost, in as many chunks as serve best.
    """
    costs = model_costs(shape, device)
    planner = Planner(costs, shape.pipeline, shape.num_microbatches)
    layouts = [shape.layout]
    if planned:
        chunks = [each for each in (1, 2, 4) if shape.num_layers >= each * shape.pipeline]
        layouts = [planner.balanced(each) for each in chunks]
    return min(map(planner.least_seconds, layouts)) + outside_seconds(shape, device)

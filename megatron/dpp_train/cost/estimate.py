"""The estimate of a run before it starts: memory, traffic, bubble and time.

``launch`` calls :func:`estimate` for the layouts that it considers, ``megatron-dpp estimate``
prints it, and ``loop.measure`` compares it with the run.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass

from megatron.dpp.schedule import BUILT_IN, HOLDS_ALL
from megatron.dpp_train.cost.device import Device
from megatron.dpp_train.cost.flops import flops_per_token
from megatron.dpp_train.cost.memory import (
    RankMemory,
    all_expert_parameters,
    least_bytes,
    model_parameters,
    rank_memory,
    rank_parameters,
    shared_parameters,
)
from megatron.dpp_train.cost.model_costs import ModelCosts
from megatron.dpp_train.cost.planner import Planner, Prediction
from megatron.dpp_train.cost.shape import RunShape
from megatron.dpp_train.cost.times import (
    collective_bytes,
    collectives,
    dispatch_bytes,
    hop_bytes,
    model_costs,
    part_times,
    ring_bytes,
)

_SIMULATED = (6, 3)
"""Microbatches that are simulated, and as many more for each rank: they fill the pipeline, reach
the steady state and drain it. A policy that holds all microbatches is simulated with all."""


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes that one rank sends.

    Args:
        hop: one activation to the next stage.
        pipeline: all hops of an iteration.
        tensor: all tensor-parallel collectives of an iteration.
        data: the data-parallel collectives of an iteration.
        experts: the dispatchers' all-to-alls of an iteration.
        context: keys and values that context-parallel ranks exchange in an iteration.
    """

    hop: float
    pipeline: float
    tensor: float
    data: float
    experts: float = 0.0
    context: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The result of :func:`estimate`.

    Args:
        parameters: of the whole model.
        flops_per_token: forward and backward of the whole model.
        ranks: memory by pipeline rank.
        bubble_formula: waiting over ideal time, ``(p-1)/(v*m)``.
        bubble: share of the pipeline's time that a rank waits, from the simulated schedule.
        seconds: of an iteration.
        tokens_per_second: of all ranks together.
        flops_per_device: useful FLOP/s of a device at that rate.
        replayed: layers run as CUDA graphs.
        slot_bytes: the part of each rank's activations that CUDA graphs reserve.
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
    slot_bytes: tuple[float, ...]

    @property
    def peak_bytes(self) -> float:
        """Memory of the fullest rank."""
        return max(rank.total for rank in self.ranks)


def estimate(shape: RunShape, device: Device) -> Estimate:
    """Memory, traffic and time of a run. Where ``--dpp-slice-tokens auto`` would run sequences
    whole that do not fit into the device's memory, they are cut."""
    shape = fitting(shape, device)
    prediction = _predicted(shape, device)
    seconds = prediction.seconds + outside_seconds(shape, device)
    tokens = shape.global_batch * shape.model.seq_length
    widths = [width for kind, count in shape.kinds for width in [kind.model.active_width] * count]
    per_token = float(flops_per_token(shape.model, widths))
    return Estimate(
        shape=shape,
        device=device,
        parameters=model_parameters(shape),
        flops_per_token=per_token,
        ranks=_memory(shape, prediction),
        traffic=traffic(shape),
        bubble_formula=bubble_formula(shape),
        bubble=max(0.0, prediction.bubble),  # one rank alone may come out at -2e-16
        seconds=seconds,
        tokens_per_second=tokens / seconds,
        flops_per_device=per_token * tokens / seconds / shape.world_size,
        replayed=part_times(shape.slice(0), device).replayed,
        slot_bytes=prediction.slot_bytes,
    )


def _memory(shape: RunShape, prediction: Prediction) -> tuple[RankMemory, ...]:
    held = zip(prediction.peak_bytes, prediction.key_bytes, strict=True)
    return tuple(
        rank_memory(shape, rank, peak - keys, keys) for rank, (peak, keys) in enumerate(held)
    )


def fitting(shape: RunShape, device: Device) -> RunShape:
    """The run, told that the device's memory does not hold whole sequences where it does not."""
    if shape.schedule.slice_tokens != "auto" or shape.num_slices > 1:
        return shape
    if least_bytes(shape) <= device.memory_bytes:
        ranks = _memory(shape, _predicted(shape, device))
        if max(rank.total for rank in ranks) <= device.memory_bytes:
            return shape
    return cut_for_memory(shape)


def cut_for_memory(shape: RunShape) -> RunShape:
    """The run whose memory does not hold whole sequences."""
    schedule = shape.schedule
    in_forward = schedule.head_in_forward or schedule.head_when_cut
    return dataclasses.replace(
        shape,
        schedule=dataclasses.replace(schedule, holds_whole=False, head_in_forward=in_forward),
    )


@functools.lru_cache(maxsize=1)
def _predicted(shape: RunShape, device: Device) -> Prediction:
    """The prediction of a run, kept for the next call: who asks for memory asks for time then."""
    return predict(shape, model_costs(shape, device))


def first_peak_bytes(shape: RunShape, device: Device) -> float:
    """Peak memory of the fullest rank of a run in slices, in a step of ``p + 1`` microbatches.
    Further ones only add to it, and take longer to simulate.
    """
    few = min(shape.num_microbatches, shape.pipeline + 1)
    first = dataclasses.replace(shape, num_microbatches=few)
    return max(rank.total for rank in _memory(shape, predict(first, model_costs(shape, device))))


def predict(shape: RunShape, costs: ModelCosts) -> Prediction:
    """The pipeline's part of an iteration, and each rank's peak of activations."""
    schedule = shape.schedule
    policy = schedule.policy if schedule.policy in BUILT_IN else "dynamic"
    most = _SIMULATED[0] + _SIMULATED[1] * shape.pipeline
    planner = Planner(
        costs,
        shape.pipeline,
        shape.num_microbatches,
        split_backward=schedule.split_backward,
        most_simulated=None if policy in HOLDS_ALL else most,
    )
    return planner.predict(shape.layout, schedule.cap, policy)


def traffic(shape: RunShape) -> Traffic:
    """Bytes that a rank of the first stage sends in an iteration."""
    hop, whole = (
        hop_bytes(each) if shape.pipeline > 1 else 0.0 for each in (shape.slice(0), shape)
    )
    layers = shape.layout.rank_layers(0) * shape.num_microbatches
    dense = sum(shape.dense_layers[:: shape.pipeline]) * shape.num_microbatches
    forward, backward = collectives(shape)
    forwards = 2 if shape.recompute == "full" else 1
    count = forwards * forward + backward
    return Traffic(
        hop=hop,
        pipeline=2 * shape.chunks * shape.num_microbatches * whole,
        tensor=layers * count * collective_bytes(shape),
        data=_data_parallel_bytes(shape),
        experts=(layers - dense) * 2 * (forwards + 1) * dispatch_bytes(shape),
        context=layers * _key_exchanges(shape) * ring_bytes(shape),
    )


def _key_exchanges(shape: RunShape) -> int:
    """Exchanges of a layer's keys and values between all context-parallel ranks."""
    if shape.gathers_keys:  # each forward gathers them, the backward scatters their gradients
        return 2 if shape.recompute == "none" else 3
    return 4 if shape.recompute == "full" else 3


def _data_parallel_bytes(shape: RunShape) -> float:
    fullest = max(range(shape.pipeline), key=lambda rank: rank_parameters(shape, rank))
    of_experts = all_expert_parameters(shape, fullest)
    dense = rank_parameters(shape, fullest) - of_experts
    sent = _reduced_bytes(shape, dense, shape.sharers, shape.replicas)
    return sent + _reduced_bytes(shape, of_experts, shape.expert_sharers, shape.expert_replicas)


def _reduced_bytes(shape: RunShape, count: int, sharers: int, replicas: int) -> float:
    """Bytes that a rank sends for ``count`` parameters of ``replicas`` ranks."""
    one_way = (sharers - 1) / sharers * count
    gradients, weights = one_way * shape.gradient_bytes, one_way * shape.element_bytes
    if shape.shard in ("none", "optimizer"):
        others = replicas // sharers  # they hold the same share, and all-reduce it
        shares = 2 * (others - 1) / others * count / sharers * shape.gradient_bytes
        return gradients + weights + shares
    gathers = 2 if shape.shard == "parameters" else 1
    return shape.num_microbatches * (gradients + gathers * weights)


def bubble_formula(shape: RunShape) -> float:
    """``(p-1)/(v*m)``: waiting over ideal time, with even stages (Narayanan et al., 2021)."""
    return (shape.pipeline - 1) / (shape.chunks * shape.num_microbatches)


def outside_seconds(shape: RunShape, device: Device) -> float:
    """Gradient reduction and the optimizer's pass over its state, neither of them overlapped."""
    link = device.group_link(shape.replicas, shape.replicas_per_node)
    reduction = traffic(shape).data / link if shape.replicas > 1 else 0.0
    own = max(shared_parameters(shape, rank) for rank in range(shape.pipeline))
    touched = shape.element_bytes + 8 + shape.precision.moments
    # Read and write weights, gradients and moments, in passes that are not all fused.
    return reduction + own * 2 * 2 * touched / device.bytes_per_second


def least_seconds(shape: RunShape, device: Device, *, planned: bool = False) -> float:
    """Lower bound of an iteration's time without simulation: the busiest rank's work, which starts
    when its first input arrives, and what lies outside the pipeline. ``auto`` simulates the most
    promising of many layouts first, and skips those that cannot win.

    Args:
        planned: layers will be laid out anew (``--dpp-plan``): the bound is that of balanced layers
            in the best number of chunks.
    """
    alike = "none" if shape.shard == "optimizer" else shape.shard  # in the pipeline
    inside = _least_pipeline_seconds(dataclasses.replace(shape, shard=alike), device, planned)
    return inside + outside_seconds(shape, device)


@functools.lru_cache(maxsize=256)
def _least_pipeline_seconds(shape: RunShape, device: Device, planned: bool) -> float:
    costs = model_costs(shape, device)
    planner = Planner(costs, shape.pipeline, shape.num_microbatches)
    layouts = [shape.layout]
    if planned:
        chunks = [each for each in (1, 2, 4) if shape.num_layers >= each * shape.pipeline]
        layouts = [planner.balanced(each) for each in chunks]
    return min(map(planner.least_seconds, layouts))

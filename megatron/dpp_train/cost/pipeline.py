"""Simulates the pipeline of a run, and lays its layers out.

No schedule can beat its busiest rank, so layers must balance the ranks, embedding and head
included.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from megatron.dpp.schedule import BUILT_IN, HOLDS_ALL, Kind, LastRank, Memory
from megatron.dpp.sim.costs import Costs, Hop, Shape
from megatron.dpp.sim.result import Result
from megatron.dpp.sim.schedules import ScheduleConfig
from megatron.dpp_train.cost.device import Device
from megatron.dpp_train.cost.memory import deferred_bytes, head_bytes, layer_bytes
from megatron.dpp_train.cost.shape import RunShape
from megatron.dpp_train.cost.times import Parts, part_times

_SIMULATED = (6, 3)
"""Microbatches that are simulated, and as many more for each rank: they fill the pipeline, reach
the steady state and drain it. A policy that holds all microbatches is simulated with all."""
_GRAPH_LAYERS = 1.07
"""Memory of an activation's graphs beside the chunk: temporaries, inputs and outputs, in
activations of a layer. Fitted to chunks of 2, 4 and 6 layers."""


class Prediction(NamedTuple):
    """A simulated iteration's pipeline: times in seconds, memory in bytes by rank.

    Args:
        bubble: share of it that ranks wait, on average.
        peak_bytes: of activations, with what CUDA graphs reserve.
        replayed: layers run as CUDA graphs.
    """

    seconds: float
    bubble: float
    peak_bytes: tuple[float, ...]
    replayed: bool


def predict(run: RunShape, device: Device) -> Prediction:
    """Simulates the schedule of a run. Its first microbatches are simulated; each further one adds
    the busiest rank's own work on it."""
    parts, policy = part_times(run, device), run.policy if run.policy in BUILT_IN else "dynamic"
    most = _SIMULATED[0] + _SIMULATED[1] * run.pipeline
    number = run.num_microbatches if policy in HOLDS_ALL else min(run.num_microbatches, most)
    shape = Shape(run.pipeline, run.chunks, number)
    graphs = parts.replayed and run.pipeline > 1
    config = ScheduleConfig(
        policy=policy,
        cap=run.cap,
        split_backward=run.split,
        w_pieces=run.layers,
        memory=tuple(_memory(run, rank, graphs=graphs) for rank in range(run.pipeline)),
    )
    result = config.run(shape, _costs(run, parts, number))
    times, busiest = run.num_microbatches / number, max(result.own)
    seconds = result.makespan + (times - 1) * busiest
    peaks = _held_bytes(run, result, graphs=graphs)
    if graphs:
        slots = result.peak_held
        if policy != "megatron" or run.split:  # the steps that capture fill a rank's cap
            all_of_them = run.num_microbatches * run.chunks
            slots = [min(math.floor(each), all_of_them) for each in config.caps(shape)]
        peaks = [peaks[rank] + n * _slot_bytes(run, rank) for rank, n in enumerate(slots)]
    return Prediction(
        seconds=seconds,
        bubble=max(0.0, 1 - times * statistics.fmean(result.own) / seconds),
        peak_bytes=tuple(peaks),
        replayed=parts.replayed,
    )


def _stage_times(layers: Sequence[int], parts: Parts, kind: Kind) -> list[float]:
    times = [count * parts.layer[kind] for count in layers]
    times[0] += parts.lookup[kind]
    times[-1] += parts.head[kind]
    return times


def _costs(run: RunShape, parts: Parts, units: int) -> Costs:
    times = [[[each] * units for each in _stage_times(run.layers, parts, kind)] for kind in Kind]
    forward, backward, weight = times
    hops = [Hop(parts.hop / 2, parts.hop / 2)] * (len(run.layers) - 1)
    overhead = dict.fromkeys(range(run.pipeline), parts.between) if parts.between else {}
    return Costs((forward, backward, weight), hops, overhead=overhead)


# Memory of a schedule


def _sizes(run: RunShape) -> tuple[list[float], list[float]]:
    """Activation of each virtual stage, and what its weight gradients keep of it."""
    sizes = [count * layer_bytes(run) for count in run.layers]
    sizes[-1] += head_bytes(run)
    return sizes, [count * deferred_bytes(run) for count in run.layers]


def _memory(run: RunShape, rank: int, *, graphs: bool) -> Memory:
    """A rank's memory as training measures it. Slots of CUDA graphs are kept whole until the last
    ``W``."""
    (sizes, deferred), own = _sizes(run), slice(rank, None, run.pipeline)
    last = LastRank.of(sizes[own], run.layers[own])
    activation = last.activation_bytes if rank == run.pipeline - 1 else max(sizes[own])
    whole = _slot_bytes(run, rank) if graphs else 0.0
    return Memory(
        activation_bytes=whole or activation,
        deferred_bytes=whole or max(deferred[own]),
        head_room=last.head_room,
        last_layers=last.layers,
        slots=graphs,
    )


def _slot_bytes(run: RunShape, rank: int) -> float:
    """Bytes of a slot: room for the rank's largest chunk and what graphs need beside it."""
    layers = run.layers[rank :: run.pipeline]
    return (max(layers) + _GRAPH_LAYERS) * layer_bytes(run) if any(layers) else 0.0


def _held_bytes(run: RunShape, result: Result, *, graphs: bool) -> list[float]:
    """Peak of each rank's activations outside of graphs' slots. ``B`` frees an activation, but for
    what its layers' ``W`` need, of which each piece frees a layer's share.
    """
    sizes, deferred = _sizes(run)
    if graphs:
        sizes = [0.0] * (len(sizes) - 1) + [head_bytes(run)]
    if graphs or not run.split:
        deferred = [0.0] * len(sizes)
    more = {
        Kind.F: sizes,
        Kind.B: [late - size for size, late in zip(sizes, deferred, strict=True)],
        Kind.W: [-late / max(1, n) for late, n in zip(deferred, run.layers, strict=True)],
    }
    return [
        max(itertools.accumulate(more[a.kind][a.chunk * run.pipeline + rank] for a, _, _ in tasks))
        for rank, tasks in enumerate(result.slots)
    ]


# Layouts


def least_seconds(run: RunShape, device: Device) -> float:
    """Lower bound of any schedule: a rank's own work, which starts when the first input has passed
    the stages before it.
    """
    parts, p = part_times(run, device), run.pipeline
    forward, backward, weight = (_stage_times(run.layers, parts, kind) for kind in Kind)
    least = begins = 0.0
    for rank in range(p):
        each = sum(sum(times[rank::p]) for times in (forward, backward, weight))
        least = max(least, begins + run.num_microbatches * each)
        begins += forward[rank] + parts.hop
    return least


def balanced(run: RunShape, device: Device) -> RunShape:
    """Deals layers out one by one, each to the rank, and there the stage, with the least work.

    Every stage but the first and the last has a layer at least.
    """
    number, p = len(run.layers), run.pipeline
    if number == 1:
        return run
    layers = [0, *[1] * (number - 2), 0]
    parts = part_times(run, device)
    kinds = zip(*(_stage_times(layers, parts, kind) for kind in Kind), strict=True)
    layer, stage = sum(parts.layer), [float(sum(each)) for each in kinds]
    rank = [float(sum(stage[r::p])) for r in range(p)]
    for _ in range(run.num_layers - sum(layers)):
        least = min(range(p), key=lambda r: rank[r])
        target = min(range(least, number, p), key=lambda s: stage[s])
        layers[target] += 1
        stage[target] += layer
        rank[least] += layer
    return dataclasses.replace(run, layers=tuple(layers))


def layout_text(layers: Sequence[int]) -> str:
    """The layers of each virtual stage as ``--pipeline-model-parallel-layout`` takes them.

    >>> layout_text((1, 3, 2, 0))
    'Et|ttt|tt|L'
    """
    return "E" + "|".join("t" * count for count in layers) + "L"

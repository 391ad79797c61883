"""Simulates the pipeline of a run, and lays its layers out.

No schedule can beat its busiest rank, so layers must balance the ranks, embedding and head
included. :func:`planned` balances the ranks, then moves single layers as long as the simulated
iteration gets shorter.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.dpp.schedule import BUILT_IN, HOLDS_ALL, Action, Kind, LastRank, Memory
from megatron.dpp.sim.costs import Costs, Hop, Shape
from megatron.dpp.sim.result import Result
from megatron.dpp.sim.schedules import ScheduleConfig
from megatron.dpp_train.cost import constants
from megatron.dpp_train.cost.device import Device
from megatron.dpp_train.cost.memory import deferred_bytes, head_bytes, key_bytes, layer_bytes
from megatron.dpp_train.cost.shape import RunShape
from megatron.dpp_train.cost.times import Parts, part_times

_SIMULATED = (6, 3)
"""Microbatches that are simulated, and as many more for each rank: they fill the pipeline, reach
the steady state and drain it. A policy that holds all microbatches is simulated with all."""
_MOST_TASKS = 50_000
"""Simulated tasks of a search for a layout: 0.1 to 1 s."""
_WORTH = 0.002
"""Share of an iteration that a change of layout must gain."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A simulated iteration's pipeline: times in seconds, memory in bytes by rank.

    Args:
        bubble: share of it that ranks wait, on average.
        peak_bytes: of activations, and of keys, values and their gradients.
        key_bytes: the latter alone, at that time.
        slot_bytes: the part of ``peak_bytes`` that CUDA graphs reserve.
    """

    seconds: float
    bubble: float
    peak_bytes: tuple[float, ...]
    key_bytes: tuple[float, ...]
    slot_bytes: tuple[float, ...]


def predict(run: RunShape, device: Device) -> Prediction:
    """Simulates the schedule of a run. Its first microbatches are simulated; each further one adds
    the busiest rank's own work on it."""
    parts, policy = part_times(run, device), run.policy if run.policy in BUILT_IN else "dynamic"
    most = _SIMULATED[0] + _SIMULATED[1] * run.pipeline
    number = run.num_microbatches if policy in HOLDS_ALL else min(run.num_microbatches, most)
    tokens = tuple(each.model.seq_length for each in run.slices)
    shape = Shape(run.pipeline, run.chunks, number)
    if len(tokens) > 1:
        shape = dataclasses.replace(
            shape, num_microbatches=number * len(tokens), sizes=number * tokens,
            largest=sum(tokens), groups=number * (len(tokens),),
        )  # fmt: skip
    slot = constants.GRAPH_LAYERS if parts.replayed and run.pipeline > 1 else None
    config = ScheduleConfig(
        policy=policy,
        cap=run.cap,
        split_backward=run.split,
        w_pieces=run.layers,
        memory=tuple(_memory(run, rank, slot) for rank in range(run.pipeline)),
        kappa=_kappa(run),
    )
    result = config.run(shape, _costs(run, parts, shape.num_microbatches))
    times, busiest = run.num_microbatches / number, max(result.own)
    seconds = result.makespan + (times - 1) * busiest
    peaks, keys = zip(*_held_bytes(run, result, slots=slot is not None), strict=True)
    slots = [0.0] * run.pipeline
    if slot is not None:
        numbers = result.peak_held
        if policy != "megatron" or run.split:  # the steps that capture fill a rank's cap
            cap = config.caps(Shape(run.pipeline, run.chunks, number))
            numbers = [min(math.floor(each), run.num_microbatches * run.chunks) for each in cap]
        slots = [n * _slot_bytes(run, rank, slot) for rank, n in enumerate(numbers)]
    return Prediction(
        seconds=seconds,
        bubble=max(0.0, 1 - times * statistics.fmean(result.own) / seconds),
        peak_bytes=tuple(map(sum, zip(peaks, slots, strict=True))),
        key_bytes=keys,
        slot_bytes=tuple(slots),
    )


def _stage_times(run: RunShape, parts: Parts, kind: Kind) -> list[float]:
    times = [count * parts.layer[kind] for count in run.layers]
    times[0] += parts.lookup[kind]
    times[-1] += parts.head[kind]
    return times


def _costs(run: RunShape, parts: Parts, units: int) -> Costs:
    more = parts.more
    forward, backward, weight = (
        [
            [time + count * more[i % len(more)][kind] for i in range(units)]
            for time, count in zip(_stage_times(run, parts, kind), run.layers, strict=True)
        ]
        for kind in Kind
    )
    hops = [Hop(parts.hop / 2, parts.hop / 2)] * (len(run.layers) - 1)
    overhead = dict.fromkeys(range(run.pipeline), parts.between) if parts.between else {}
    return Costs((forward, backward, weight), hops, overhead=overhead)


# Memory of a schedule


def _sizes(run: RunShape) -> tuple[list[float], list[float]]:
    """Activation of each virtual stage for a unit, and what its weight gradients keep of it."""
    unit = run.slices[0]
    each = deferred_bytes(unit)
    sizes = [count * layer_bytes(unit) for count in run.layers]
    sizes[-1] += head_bytes(unit)
    return sizes, [count * each for count in run.layers]


def _memory(run: RunShape, rank: int, slot: float | None) -> Memory:
    """A rank's memory as training measures it: of whole microbatches, cut or not. Slots of CUDA
    graphs are kept whole until the last ``W``.
    """
    whole_row = run.model.seq_length / run.slices[0].model.seq_length
    (sizes, deferred), own = _sizes(run), slice(rank, None, run.pipeline)
    last = LastRank.of(sizes[own], run.layers[own])
    activation = last.activation_bytes if rank == run.pipeline - 1 else max(sizes[own])
    whole = _slot_bytes(run, rank, slot) if slot is not None else 0.0
    return Memory(
        activation_bytes=whole_row * (whole or activation),
        deferred_bytes=whole_row * (whole or max(deferred[own])),
        head_room=last.head_room,
        last_layers=last.layers,
        slots=slot is not None,
    )


def _slot_bytes(run: RunShape, rank: int, slot: float) -> float:
    """Bytes of a slot: room for the rank's largest chunk and ``slot`` layers more."""
    layers = run.layers[rank :: run.pipeline]
    return (max(layers) + slot) * layer_bytes(run.slices[0]) if any(layers) else 0.0


def _kappa(run: RunShape) -> float:
    """Memory of a microbatch's keys, values and their gradients over its activations'."""
    if run.num_slices == 1:
        return 0.0
    unit = run.slices[0]
    share = unit.model.seq_length / run.model.seq_length
    return sum(key_bytes(unit)) * share / layer_bytes(unit)


def _held_bytes(run: RunShape, result: Result, *, slots: bool) -> list[tuple[float, float]]:
    """Peak of each rank's activations and keys, and the keys at that time. ``B`` frees an
    activation, but for what its layers' ``W`` need, of which each piece frees a layer's share.
    Slots hold the layers' activations.
    """
    sizes, deferred = _sizes(run)
    if slots:
        sizes = [0.0] * (len(sizes) - 1) + [head_bytes(run.slices[0])]
    if slots or not run.split:
        deferred = [0.0] * len(sizes)
    peaks = []
    for rank, tasks in enumerate(result.slots):
        held = keys = 0.0
        peak = (0.0, 0.0)
        for action, _, _ in tasks:
            stage = action.chunk * run.pipeline + rank
            share, more = _of_slice(run, action)
            keys += more * run.layers[stage]
            if action.kind == Kind.W:
                held -= share * deferred[stage] / run.layers[stage]
            elif action.kind == Kind.B:
                held += share * (deferred[stage] - sizes[stage])
            else:
                held += share * sizes[stage]
            peak = max(peak, (held + keys, keys))
        peaks.append(peak)
    return peaks


def _of_slice(run: RunShape, action: Action) -> tuple[float, float]:
    """A unit's tokens over the largest's, and the bytes of a layer's keys that its task takes."""
    if run.num_slices == 1:
        return 1.0, 0.0
    last, first = run.num_slices - 1, run.slices[0]
    place, (keys, gradients) = action.microbatch % (last + 1), key_bytes(first)
    more = keys if action.kind is Kind.F and place == 0 else 0.0
    if action.kind is Kind.B:
        more = gradients * (place == last) - (keys + gradients) * (place == 0)
    return run.slices[place].model.seq_length / first.model.seq_length, more


# Layouts


def least_seconds(run: RunShape, device: Device) -> float:
    """Lower bound of any schedule: a rank's own work, which starts when the first input has passed
    the stages before it.
    """
    parts, p = part_times(run, device), run.pipeline
    forward, backward, weight = (_stage_times(run, parts, kind) for kind in Kind)
    least = begins = 0.0
    for rank in range(p):
        each = sum(sum(times[rank::p]) for times in (forward, backward, weight))
        least = max(least, begins + run.num_microbatches * run.num_slices * each)
        begins += forward[rank] + run.layers[rank] * parts.more[0][Kind.F] + parts.hop
    return least


def _work(layers: Sequence[int], parts: Parts) -> list[float]:
    """Time of each stage's F, B and W for a unit."""
    work = [count * sum(parts.layer) for count in layers]
    work[0] += sum(parts.lookup)
    work[-1] += sum(parts.head)
    return work


def balanced(run: RunShape, device: Device) -> RunShape:
    """Deals layers out one by one, each to the rank, and there the stage, with the least work.

    Every stage but the first and the last has a layer at least.
    """
    number, p = len(run.layers), run.pipeline
    if number == 1:
        return run
    layers = [0, *[1] * (number - 2), 0]
    parts = part_times(run, device)
    stage, layer = _work(layers, parts), sum(parts.layer)
    rank = [sum(stage[r::p]) for r in range(p)]
    for _ in range(run.num_layers - sum(layers)):
        least = min(range(p), key=lambda r: rank[r])
        target = min(range(least, number, p), key=lambda s: stage[s])
        layers[target] += 1
        stage[target] += layer
        rank[least] += layer
    return dataclasses.replace(run, layers=tuple(layers))


def planned(run: RunShape, device: Device) -> RunShape:
    """Moves single layers between the stages of :func:`balanced` as long as the simulated iteration
    gets shorter."""
    best = balanced(run, device)
    seconds = predict(best, device).seconds
    units = min(run.num_microbatches, sum(_SIMULATED) * run.pipeline) * run.num_slices
    left = _MOST_TASKS // (units * (2 * len(run.layers) + run.num_layers))
    while left > 0:
        aim = seconds * (1 - _WORTH)
        moves = [each for each in _moves(best, device) if least_seconds(each, device) < aim][:left]
        left -= len(moves)
        tried = [(predict(each, device).seconds, each.layers) for each in moves]
        fastest, layers = min(tried, default=(math.inf, run.layers))
        if fastest >= aim:
            break
        best, seconds = dataclasses.replace(run, layers=layers), fastest
    return best


def _moves(run: RunShape, device: Device) -> list[RunShape]:
    """The run with one layer elsewhere, moves that relieve the busiest ranks first."""
    work, p = _work(run.layers, part_times(run, device)), run.pipeline
    last = len(run.layers) - 1
    rank, moves = [sum(work[r::p]) for r in range(p)], []
    for source, count in enumerate(run.layers):
        for target in range(last + 1):
            gain = rank[source % p] - rank[target % p]
            if source != target and gain >= 0 and count > (0 if source in (0, last) else 1):
                moves.append((-gain, source, target))
    return [dataclasses.replace(run, layers=_moved(run.layers, s, t)) for _, s, t in sorted(moves)]


def _moved(layers: Sequence[int], source: int, target: int) -> tuple[int, ...]:
    return tuple(n - (i == source) + (i == target) for i, n in enumerate(layers))


def layout_text(layers: Sequence[int]) -> str:
    """The layers of each virtual stage as ``--pipeline-model-parallel-layout`` takes them.

    >>> layout_text((1, 3, 2, 0))
    'Et|ttt|tt|L'
    """
    return "E" + "|".join("t" * count for count in layers) + "L"

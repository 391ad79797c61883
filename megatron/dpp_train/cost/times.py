"""Times of a model's parts (layer, embedding, head): on the device, and where launching is slower.

On a GPU the host queues kernels. Small layers run faster than the host launches them; then the host
sets the pace, unless CUDA graphs are replayed, and the device catches up during large products such
as the head's. :func:`model_costs` serves the estimate, :func:`planning_costs` the planner; both
read the same formulas.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.dpp.config import GRAPHS_PAY_FROM
from megatron.dpp.schedule import Kind
from megatron.dpp_train.cost import constants
from megatron.dpp_train.cost.device import Device, known_gpu
from megatron.dpp_train.cost.flops import core_products
from megatron.dpp_train.cost.memory import (
    deferred_bytes,
    embedding_parameters,
    head_bytes,
    head_parameters,
    key_bytes,
    layer_bytes,
    layer_parameters,
    logits,
    optimizer_bytes,
)
from megatron.dpp_train.cost.model_costs import ModelCosts, PartCosts, SliceCosts, Times
from megatron.dpp_train.cost.shape import RunShape


@dataclass(frozen=True, kw_only=True)
class PartTimes:
    """Seconds of ``F``, ``B`` and ``W`` for one microbatch, and between two tasks.

    Args:
        layer: one transformer layer.
        lookup: the embedding, as far as launching does not hide it.
        head: final norm, output layer and loss, likewise.
        between: from the end of a task to the next: the host's work while the device waits, and
            copies of inputs and outputs.
        replayed: layers run as CUDA graphs.
    """

    layer: Times
    lookup: Times
    head: Times
    between: float
    replayed: bool


def part_times(shape: RunShape, device: Device) -> PartTimes:
    """Times of the model's parts as they will be run."""
    whole = device_times(shape, device)
    layer, lookup, head = whole.layer, whole.lookup, whole.head
    if _replays(shape, device, layer, head):
        return whole
    dynamic = shape.schedule.dynamic
    paced = _paced(shape, layer, _launches(shape, device))
    waits = paced != layer and (dynamic or not device.queues)
    if device.queues and (dynamic or shape.pipeline == 1):
        gained = sum(paced) - sum(layer)
        lookup = _exposed(lookup, shape.layout.rank_layers(0) * gained)
        last = shape.layout.rank_layers(shape.pipeline - 1)
        loss = device.launch if gained else 0.0  # it has as many kernels as a layer
        head = _exposed(head, last * gained, loss)
    between = device.between if waits else 0.0
    return PartTimes(layer=paced, lookup=lookup, head=head, between=between, replayed=False)


def device_times(shape: RunShape, device: Device) -> PartTimes:
    """Times of the parts where launching is no limit, as with CUDA graphs."""
    return PartTimes(
        layer=_mean_layer_seconds(shape, device),
        lookup=_lookup_seconds(shape, device),
        head=_head_seconds(shape, device),
        between=device.between,
        replayed=True,
    )


def model_costs(shape: RunShape, device: Device) -> ModelCosts:
    """Times and activation sizes of the model's parts in a run, without weights and their state."""
    units = shape.slices
    each = [part_times(unit, device) for unit in units]
    times, first = _mean_times(each), units[0]
    layer = PartCosts(times.layer, layer_bytes(first), deferred_bytes=deferred_bytes(first))
    slots = times.replayed and shape.pipeline > 1
    near = shape.pipeline_per_node == shape.pipeline
    return ModelCosts(
        shape.num_layers,
        layer,
        PartCosts(times.lookup),
        PartCosts(times.head, head_bytes(first)),
        hop_bytes(first) / (device.link if near else device.network),
        between=times.between,
        slot_layers=constants.GRAPH_LAYERS if slots else None,
        slices=_slice_costs(units, [one.layer for one in each], times.layer),
    )


def _mean_times(each: Sequence[PartTimes]) -> PartTimes:
    """The times of a mean slice of a microbatch."""

    def mean(name: str) -> Times:
        forward, backward, weight = map(
            statistics.fmean, zip(*(getattr(one, name) for one in each), strict=True)
        )
        return forward, backward, weight

    return dataclasses.replace(
        each[0], layer=mean("layer"), lookup=mean("lookup"), head=mean("head")
    )


def _slice_costs(
    units: Sequence[RunShape], times: Sequence[Times], mean: Times
) -> SliceCosts | None:
    if len(units) == 1:
        return None
    keys, gradients = key_bytes(units[0])
    more = tuple((f - mean[0], b - mean[1], w - mean[2]) for f, b, w in times)
    tokens = tuple(unit.tokens for unit in units)
    return SliceCosts(tokens=tokens, more=more, key_bytes=keys, gradient_bytes=gradients)


def planning_costs(
    shape: RunShape,
    *,
    units: Sequence[RunShape] = (),
    device: Device | None = None,
    sigma: float = 0.0,
) -> ModelCosts:
    """Costs of the parts for planning a layout, with weights and their state.

    Times are those with CUDA graphs. Activations are kept until the last ``W``, as in graphs.

    Args:
        shape: one pipeline rank that holds all layers.
        units: the slices of a microbatch; empty for a whole one.
        device: an H200 by default. Layouts depend on the proportions of times only.
        sigma: spread of task times (of their logarithm) to assume.
    """
    device, units = device or known_gpu("H200"), units or [shape]
    every = [device_times(unit, device) for unit in units]
    times, unit = _mean_times(every), units[0]
    each = shape.element_bytes + shape.gradient_bytes + optimizer_bytes(shape)
    untied = dataclasses.replace(shape.model, tied=False)  # on a stage of its own
    head = each * head_parameters(dataclasses.replace(shape, model=untied))
    return ModelCosts(
        shape.num_layers,
        PartCosts(times.layer, layer_bytes(unit), each * layer_parameters(shape)),
        PartCosts(times.lookup, 0.0, each * embedding_parameters(shape)),
        PartCosts(times.head, head_bytes(unit), head),
        hop_bytes(unit) / device.link,
        sigma,
        times.between,
        slices=_slice_costs(units, [one.layer for one in every], times.layer),
    )


def hop_bytes(shape: RunShape) -> float:
    """Bytes of one activation on its way to the next stage."""
    return shape.element_bytes * shape.outside


# Collectives


def collectives(shape: RunShape) -> tuple[int, int]:
    """Tensor-parallel collectives of a layer's forward and backward.

    Sequence parallelism turns each all-reduce into an all-gather and a reduce-scatter, and gathers
    the inputs of two linear layers once more, for their weight gradients.
    """
    if shape.tensor == 1:
        return 0, 0
    return (4, 6) if shape.sequence_parallel else (2, 2)


def collective_bytes(shape: RunShape) -> float:
    """Bytes that a rank sends in one of them. In a ring, an all-reduce of a hidden state sends all
    of it twice, less the rank's own share; a gather or scatter half of that.
    """
    passes = 1 if shape.sequence_parallel else 2
    return passes * (shape.tensor - 1) / shape.tensor * shape.element_bytes * shape.elements


def collective_seconds(shape: RunShape, device: Device) -> float:
    """Seconds of one of them; none of it overlaps with other work."""
    if shape.tensor == 1:
        return 0.0
    link = device.group_link(shape.tensor, shape.tensor_per_node)
    return device.collective + collective_bytes(shape) / (constants.LINK_SHARE * link)


def dispatch_bytes(shape: RunShape) -> float:
    """Bytes that a rank sends in one of a layer's two all-to-alls: each token to its experts, or
    what they make of it back.
    """
    if shape.model.experts is None:
        return 0.0
    ranks = shape.expert * shape.expert_tensor
    sent = shape.routed * shape.model.hidden_size * shape.element_bytes
    return (ranks - 1) / ranks * sent


def dispatch_seconds(shape: RunShape, device: Device) -> float:
    """Seconds of one of them; none of it overlaps with other work."""
    ranks = shape.expert * shape.expert_tensor
    if shape.model.experts is None or ranks == 1:
        return 0.0
    link = device.group_link(ranks, shape.experts_per_node)
    return device.collective + dispatch_bytes(shape) / (constants.LINK_SHARE * link)


def ring_bytes(shape: RunShape) -> float:
    """Bytes of the keys and values that a rank passes on round its context-parallel group, once."""
    own = 2 * shape.tokens * shape.model.keys / shape.tensor * shape.element_bytes
    return (shape.context - 1) * own


def ring_seconds(shape: RunShape, device: Device) -> float:
    """Seconds of one such round. Attention computes beside it."""
    if shape.context == 1:
        return 0.0
    link = device.group_link(shape.context, shape.context_per_node)
    steps = (shape.context - 1) * device.collective
    return steps + ring_bytes(shape) / (constants.LINK_SHARE * link)


# On the device


def _linear_seconds(shape: RunShape, device: Device) -> float:
    """One pass of a layer's matrix products. The fullest rank's experts set the pace."""
    weights = shape.model.layer_weights()
    experts = shape.model.experts
    if experts is not None:
        more = (shape.imbalance - 1) * experts.topk * experts.ffn_hidden_size
        weights += round(more * shape.model.hidden_size * (3 if shape.model.gated else 2))
        weights += experts.number * shape.model.hidden_size  # the router
    return 2 * weights * shape.tokens / shape.tensor / device.flops


def _mean_layer_seconds(shape: RunShape, device: Device) -> Times:
    """Times of the mean layer, of a model that has layers of two kinds."""
    kinds = [(_layer_seconds(kind, device), count) for kind, count in shape.kinds]
    forward, backward, weight = (
        sum(times[part] * count for times, count in kinds) / max(1, shape.num_layers)
        for part in range(3)
    )
    return forward, backward, weight


def _layer_seconds(shape: RunShape, device: Device) -> Times:
    """Matrix products, collectives, and the kernels between the products."""
    model = shape.model
    linear = _linear_seconds(shape, device)
    scores = (2 if model.arch == "gpt" else 4) * core_products(model, shape.begin) * shape.tokens
    core, core_backward = (
        passes * slowdown * (scores / shape.tensor / device.flops)
        for passes, slowdown in zip((1, 2), _slowdowns(shape), strict=True)
    )
    ring, dispatch = ring_seconds(shape, device), 2 * dispatch_seconds(shape, device)
    if shape.gathers_keys:  # before attention and after it
        core, core_backward = core + ring, core_backward + ring
    else:
        core, core_backward = max(core, ring), max(core_backward, 2 * ring)
    again = shape.recompute != "none"
    kept = layer_bytes(dataclasses.replace(shape, recompute="none") if again else shape)
    before, after = (
        passes * (kept / device.bytes_per_second) for passes in constants.BETWEEN_PRODUCTS
    )
    each, (sums, sums_backward) = collective_seconds(shape, device), collectives(shape)
    forward = linear + core + sums * each + before + dispatch
    if not device.queues:
        gathers, back = constants.FSDP_COLLECTIVES.get(shape.shard, (0, 0))
        forward, after = forward + gathers * device.collective, after + back * device.collective
    repeated = {"none": 0.0, "selective": core, "full": forward}[shape.recompute]
    around = sums_backward * each + dispatch
    weight = linear
    if shape.adds_gradients:
        moved = constants.ADDED_GRADIENT_BYTES * layer_parameters(shape)
        weight += moved / device.bytes_per_second
    return forward, linear + core_backward + around + after + repeated, weight


def _slowdowns(shape: RunShape) -> tuple[float, float]:
    """Forward and backward of attention's core, over matrix products with as many operations."""
    if not shape.engine:
        return constants.ATTENTION_SLOWDOWN
    longer = constants.ENGINE_SLICES if shape.row else 1.0
    forward, backward = constants.ENGINE_ATTENTION_SLOWDOWN
    return longer * forward, longer * backward


def _table(shape: RunShape) -> float:
    """Weights of the embedding, and of the output layer, on one tensor-parallel rank."""
    return shape.model.vocab_size * shape.model.hidden_size / shape.tensor


def _head_seconds(shape: RunShape, device: Device) -> Times:
    """Output layer and loss. Their weight gradient is not deferred: it is in ``B``.

    The loss is megatron-core's vocabulary-parallel cross entropy, a sequence of fp32 kernels.
    """
    table, rate = _table(shape), device.bytes_per_second
    product = 2 * table * shape.tokens / device.flops
    loss, loss_backward = constants.LOSS_BYTES[shape.model.fused_loss]
    forward = product + loss * logits(shape) / rate
    adding = constants.TABLE_BYTES * table / rate
    backward = 2 * product + loss_backward * logits(shape) / rate + adding
    if shape.tensor == 1:
        return _in_forward(shape, forward, backward)
    each, gathers = collective_seconds(shape, device), shape.sequence_parallel
    forward += constants.LOSS_COLLECTIVES * device.collective + gathers * each
    return _in_forward(shape, forward, backward + (1 + gathers) * each)


def _in_forward(shape: RunShape, forward: float, backward: float) -> Times:
    """The head's times, whose backward F may run, too."""
    if shape.schedule.head_in_forward:
        return forward + backward, 0.0, 0.0
    return forward, backward, 0.0


def _lookup_seconds(shape: RunShape, device: Device) -> Times:
    """The embedding. Its gradient is as large as the table, whatever was looked up."""
    looked_up = 2 * shape.element_bytes * shape.elements
    of_table, of_lookup = constants.LOOKUP_BYTES
    backward = of_table * _table(shape) + of_lookup * looked_up
    rate, each = device.bytes_per_second, collective_seconds(shape, device)
    return looked_up / rate + each, backward / rate + each * shape.sequence_parallel, 0.0


# Launching


def _replays(shape: RunShape, device: Device, layer: Times, head: Times) -> bool:
    """Training will replay CUDA graphs, by its own rule (``--dpp-cuda-graphs``): the most
    launch-bound chunk of each rank counts, which has no head if there are several stages.
    """
    if shape.graphs != "auto":
        return shape.graphs == "on"
    least = _launches(shape, device)
    took = shape.num_layers * sum(_paced(shape, layer, least))
    if shape.pipeline * shape.chunks == 1:
        took += sum(head)
    return shape.num_layers * sum(least) >= GRAPHS_PAY_FROM * took


def _launches(shape: RunShape, device: Device) -> Times:
    """Seconds in which the host launches a layer's F, B and W."""
    around = constants.COLLECTIVE_LAUNCH * collectives(shape)[0]
    around += constants.FSDP_LAUNCH.get(shape.shard, 0.0)
    alone = constants.ENGINE_LAUNCH if shape.engine else 1.0
    once = device.launch * (alone + around * device.queues)
    again = once if shape.recompute == "full" else 0.0
    weights = device.launch * constants.WEIGHTS_LAUNCH if shape.schedule.split_backward else 0.0
    return once, once + again, weights


def _paced(shape: RunShape, layer: Times, least: Times) -> Times:
    """A layer's times, each at least its launching. A fused backward is one task."""
    forward, backward, weight = layer
    if shape.schedule.split_backward:
        weight = max(weight, least[Kind.W])
        return max(forward, least[Kind.F]), max(backward, least[Kind.B]), weight
    return max(forward, least[Kind.F]), max(backward + weight, least[Kind.B]) - weight, weight


def _exposed(part: Times, gained: float, least: float = 0.0) -> Times:
    """Times by which the head or the embedding lengthens its rank's work.

    While the device computes the part, the host goes on launching, and the layers that follow run
    at the device's rate. So the device gains back the time that it waited for launches before.
    Megatron's static pipelines wait for the device at each exchange; a CPU queues nothing.

    Args:
        gained: seconds that the rank's layers wait for their launches.
        least: seconds in which the host launches a pass of the part.
    """
    total = sum(part)
    share = max(0.0, total - gained) / total if total else 0.0
    forward, backward, weight = (share * seconds for seconds in part)
    return max(least, forward), max(least, backward), weight

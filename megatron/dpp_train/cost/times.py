"""Times of a model's parts (layer, embedding, head): on the device, and where launching is slower.

On a GPU the host queues kernels. Small layers run faster than the host launches them; then the host
sets the pace, unless CUDA graphs are replayed, and the device catches up during large products such
as the head's. Constants are fitted to runs on H200s (``tests/cost/test_measured.py``); those of
devices are in ``device.py``.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from megatron.dpp.config import GRAPHS_PAY_FROM
from megatron.dpp.schedule import Kind
from megatron.dpp_train.cost.device import Device
from megatron.dpp_train.cost.memory import layer_bytes, layer_parameters
from megatron.dpp_train.cost.shape import RunShape

Times = tuple[float, float, float]
"""Seconds of ``F``, ``B`` and ``W`` for one microbatch."""

_ATTENTION_SLOWDOWN = {False: (1.5, 2.0), True: (1.15, 1.6)}
"""Forward and backward of attention's core, over the time of matrix products with as many
operations: of local layers, and of Transformer Engine's (on an H100)."""
_ADDED_GRADIENT_BYTES = 12
"""Bytes of memory traffic of W per weight without ``--gradient-accumulation-fusion``: its product
is written in 16 bit, and added in fp32."""
_BETWEEN_PRODUCTS = (4.2, 7.4)
"""Passes of a layer's forward and backward over the bytes that it keeps: norms, biases, activation
functions and residual additions are kernels of their own."""
_LOSS_BYTES = {False: (62, 14), True: (36, 16)}
"""Bytes of memory traffic per logit in the loss's forward and backward, without and with
``--cross-entropy-loss-fusion``."""
_LOOKUP_BYTES = (26, 44)
"""Bytes of memory traffic of the embedding's backward, per weight of the table and per byte looked
up."""
_ENGINE_LAUNCH = 1.3
"""Launching a layer of Transformer Engine, in launches of a local one's."""
_COLLECTIVE_LAUNCH = 0.2
"""Launching one tensor-parallel collective, in launches of a layer's forward."""
_WEIGHTS_LAUNCH = 0.5
"""Launching a layer's deferred weight gradients, likewise. In a fused backward it costs nothing."""
_FSDP_LAUNCH = {"gradients": 0.97, "parameters": 1.25}
"""Launching what FSDP2 adds to a layer's pass (gathers, copies, hooks), likewise."""


class Parts(NamedTuple):
    """Times of a model's parts.

    Args:
        layer: the mean transformer layer.
        lookup: the embedding, as far as launching does not hide it.
        head: final norm, output layer and loss, likewise.
        between: seconds from the end of a task to the next: the host's work while the device waits,
            and copies of inputs and outputs.
        hop: seconds of an activation to the next stage.
        replayed: layers run as CUDA graphs.
    """

    layer: Times
    lookup: Times
    head: Times
    between: float
    hop: float
    replayed: bool


def part_times(shape: RunShape, device: Device) -> Parts:
    """Times of the model's parts as they will be run."""
    layer, head = _layer_seconds(shape, device), _head_seconds(shape, device)
    lookup = _lookup_seconds(shape, device)
    near = shape.on_a_node(shape.pipeline, shape.tensor * shape.replicas) == shape.pipeline
    hop = shape.element_bytes * shape.outside / (device.link if near else device.network)
    between, replayed = device.between, _replays(shape, device, layer, head)
    if not replayed:
        paced = _paced(shape, layer, _launches(shape, device))
        if device.queues and (shape.dynamic or shape.pipeline == 1):
            gained = sum(paced) - sum(layer)
            lookup = _exposed(lookup, shape.rank_layers(0) * gained)
            loss = device.launch if gained else 0.0  # it has as many kernels as a layer
            head = _exposed(head, shape.rank_layers(shape.pipeline - 1) * gained, loss)
        waits = paced != layer and (shape.dynamic or not device.queues)
        layer, between = paced, between if waits else 0.0
    return Parts(layer, lookup, head, between, hop, replayed)


# Collectives


def _collectives(shape: RunShape) -> tuple[int, int]:
    """Tensor-parallel collectives of a layer's forward and backward.

    Sequence parallelism turns each all-reduce into an all-gather and a reduce-scatter, and gathers
    the inputs of two linear layers once more, for their weight gradients.
    """
    if shape.tensor == 1:
        return 0, 0
    return (4, 6) if shape.sequence_parallel else (2, 2)


def _seconds(
    shape: RunShape, device: Device, ranks: int, stride: int, num_bytes: float, steps: int = 1
) -> float:
    """Seconds of a collective of ``ranks`` ranks ``stride`` apart, each of which sends so many
    bytes."""
    if ranks == 1:
        return 0.0
    link = device.group_link(ranks, shape.on_a_node(ranks, stride))
    return steps * device.collective + num_bytes / link


def collective_seconds(shape: RunShape, device: Device) -> float:
    """Seconds of a tensor-parallel collective; none of it overlaps with other work. In a ring, an
    all-reduce of a hidden state sends all of it twice, less the rank's own share; a gather or
    scatter half of that.
    """
    passes, others = 1 if shape.sequence_parallel else 2, (shape.tensor - 1) / shape.tensor
    sent = passes * others * shape.element_bytes * shape.elements
    return _seconds(shape, device, shape.tensor, 1, sent)


def _dispatch_seconds(shape: RunShape, device: Device) -> float:
    """Seconds of the mean layer's two all-to-alls, in which a rank sends each token to its experts,
    and back what they make of it."""
    ranks = shape.expert * shape.expert_tensor if shape.model.experts else 1
    sent = (ranks - 1) / ranks * shape.routed * shape.model.hidden_size * shape.element_bytes
    return 2 * shape.model.expert_share * _seconds(shape, device, ranks, 1, sent)


# On the device


def _layer_seconds(shape: RunShape, device: Device) -> Times:
    """Matrix products, collectives, and the kernels between the products."""
    model = shape.model
    linear = 2 * model.layer_weights * shape.tokens / shape.tensor / device.flops
    core, core_backward = _core_seconds(shape, device)
    kept = layer_bytes(dataclasses.replace(shape, recompute="none"))
    before, after = (passes * (kept / device.bytes_per_second) for passes in _BETWEEN_PRODUCTS)
    dispatch = _dispatch_seconds(shape, device)
    each, (sums, sums_backward) = collective_seconds(shape, device), _collectives(shape)
    forward = linear + core + sums * each + before + dispatch
    repeated = {"none": 0.0, "selective": core, "full": forward}[shape.recompute]
    weight = linear
    if shape.adds_gradients:
        moved = _ADDED_GRADIENT_BYTES * layer_parameters(shape)
        weight += moved / device.bytes_per_second
    around = sums_backward * each + dispatch
    return forward, linear + core_backward + around + after + repeated, weight


def _core_seconds(shape: RunShape, device: Device) -> tuple[float, float]:
    """Forward and backward of attention's core. Context-parallel ranks pass keys and values round a
    ring beside it, and in the backward their gradients too."""
    model = shape.model
    causal = 2 if model.arch == "gpt" else 4  # a causal mask halves the products
    scores = causal * model.seq_length * model.queries * shape.tokens
    product = scores / shape.tensor / device.flops
    slowdowns = _ATTENTION_SLOWDOWN[shape.engine]
    steps = shape.context - 1
    sent = steps * 2 * shape.tokens * model.keys / shape.tensor * shape.element_bytes
    ring = _seconds(shape, device, shape.context, shape.tensor, sent, steps)
    return max(slowdowns[0] * product, ring), max(2 * slowdowns[1] * product, 2 * ring)


def _table(shape: RunShape) -> float:
    """Weights of the embedding, and of the output layer, on one tensor-parallel rank."""
    return shape.model.vocab_size * shape.model.hidden_size / shape.tensor


def _head_seconds(shape: RunShape, device: Device) -> Times:
    """Output layer and loss. Their weight gradient is not deferred: it is in ``B``.

    The loss is megatron-core's vocabulary-parallel cross entropy, a sequence of fp32 kernels.
    """
    table, rate = _table(shape), device.bytes_per_second
    product = 2 * table * shape.tokens / device.flops
    loss, loss_backward = _LOSS_BYTES[shape.model.fused_loss]
    forward = product + loss * shape.logits / rate
    backward = 2 * product + loss_backward * shape.logits / rate
    each, gathers = collective_seconds(shape, device), shape.sequence_parallel
    forward += gathers * each
    backward += (1 + gathers) * each
    if shape.head_in_forward:
        return forward + backward, 0.0, 0.0
    return forward, backward, 0.0


def _lookup_seconds(shape: RunShape, device: Device) -> Times:
    """The embedding. Its gradient is as large as the table, whatever was looked up."""
    looked_up = 2 * shape.element_bytes * shape.elements
    of_table, of_lookup = _LOOKUP_BYTES
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
    took += sum(head) if len(shape.layers) == 1 else 0.0
    return shape.num_layers * sum(least) >= GRAPHS_PAY_FROM * took


def _launches(shape: RunShape, device: Device) -> Times:
    """Seconds in which the host launches a layer's F, B and W."""
    around = _COLLECTIVE_LAUNCH * _collectives(shape)[0]
    around += _FSDP_LAUNCH.get(shape.shard, 0.0)
    alone = _ENGINE_LAUNCH if shape.engine else 1.0
    once = device.launch * (alone + around * device.queues)
    again = once if shape.recompute == "full" else 0.0
    return once, once + again, device.launch * _WEIGHTS_LAUNCH * shape.split


def _paced(shape: RunShape, layer: Times, least: Times) -> Times:
    """A layer's times, each at least its launching. A fused backward is one task."""
    forward, backward, weight = layer
    if shape.split:
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

"""What a layer and the head take: on the device, and where the host is slower at launching them.

On a GPU the host queues kernels. Small layers run faster than they are launched; then the host sets
the pace, unless CUDA graphs are replayed, and the device catches up while it has a large product to
do, such as the head's. The constants below were fitted to runs on H200s
(docs/benchmarks/scaling-h200.md). ``timing`` is the caller.
"""

from __future__ import annotations

import dataclasses

from megatron.dpp.config import GRAPHS_PAY_FROM
from megatron.dpp.plan.activations import layer_bytes
from megatron.dpp.plan.device import Device
from megatron.dpp.plan.model_costs import (
    Times,
    attention_times,
    between_products,
    collectives,
    embedding_times,
    head_times,
)
from megatron.dpp.plan.shape import RunShape
from megatron.dpp.schedule import Kind

_BULK = 0.95
"""Share of a link that a tensor-parallel collective reaches, fitted like its latency."""
_LOSS_COLLECTIVES = 3
"""Of the loss over a vocabulary that is shared out: a few bytes for each token."""
_COLLECTIVE = 0.2
"""Launching one tensor-parallel collective, in layers' forwards."""
_WEIGHTS = 0.5
"""Launching a layer's deferred weight gradients; in a fused backward autograd's engine launches
them, at no cost that shows."""
_GATHERS = {"gradients": 0.97, "parameters": 1.25}
"""What FSDP2 launches around a layer in each pass (gathers, copies, hooks), in layers' forwards."""
_SHARDED = {"gradients": (1, 1), "parameters": (1, 2)}
"""FSDP2's collectives in a layer's forward and backward; a GPU has them beside its work."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PartTimes:
    """Seconds of ``F``, ``B`` and ``W`` for one microbatch, and between two tasks.

    Args:
        layer: one transformer layer.
        lookup: the embedding, and
        head: final norm, output layer and loss, as far as they are not hidden behind launching.
        between: what passes from the end of a task to the next: the host's part of it while the
            device waits, and copies of what is received and sent.
        replayed: layers run as CUDA graphs.
    """

    layer: Times
    lookup: Times
    head: Times
    between: float
    replayed: bool


def forward_collectives(shape: RunShape) -> int:
    """Tensor-parallel collectives of a layer's forward."""
    return collectives(shape.tensor, shape.sequence_parallel)[0]


def backward_collectives(shape: RunShape) -> int:
    """Those of a layer's backward."""
    return collectives(shape.tensor, shape.sequence_parallel)[1]


def collective_bytes(shape: RunShape) -> float:
    """What a rank sends in one of them: to sum a hidden state in a ring the whole twice, less its
    own share; to gather or scatter it half of that."""
    passes = 1 if shape.sequence_parallel else 2
    return passes * (shape.tensor - 1) / shape.tensor * shape.element_bytes * shape.elements


def collective_seconds(shape: RunShape, device: Device) -> float:
    """What one of them takes; nothing of it is hidden."""
    if shape.tensor == 1:
        return 0.0
    link = device.group_link(shape.tensor, shape.tensor_per_node)
    return device.collective + collective_bytes(shape) / (_BULK * link)


def part_times(shape: RunShape, device: Device) -> PartTimes:
    """How long the parts of the model take as they will be run."""
    layer, head = _layer_on_device(shape, device), _head_on_device(shape, device)
    lookup = _lookup_on_device(shape, device)
    if replays(shape, device, layer, head):
        between = device.between
        return PartTimes(layer=layer, lookup=lookup, head=head, between=between, replayed=True)
    least = _launches(shape, device)
    paced = _paced(shape, layer, least)
    waits = paced != layer and (shape.dynamic or not device.queues)
    if device.queues and (shape.dynamic or shape.pipeline == 1):
        gained = sum(paced) - sum(layer)
        lookup = _exposed(lookup, shape.layout.rank_layers(0) * gained)
        last = shape.layout.rank_layers(shape.pipeline - 1)
        loss = device.launch if gained else 0.0  # it has as many kernels as a layer
        head = _exposed(head, last * gained, loss)
    return PartTimes(
        layer=paced,
        lookup=lookup,
        head=head,
        between=device.between if waits else 0.0,
        replayed=False,
    )


def replays(shape: RunShape, device: Device, layer: Times, head: Times) -> bool:
    """Whether training will replay CUDA graphs, by its own rule (``--dpp-cuda-graphs``): of each
    rank's chunks the most launch-bound one counts, which has no head if there are several stages.
    """
    if shape.graphs != "auto":
        return shape.graphs == "on"
    least = _launches(shape, device)
    took = shape.num_layers * sum(_paced(shape, layer, least))
    if shape.pipeline * shape.chunks == 1:
        took += sum(head)
    return shape.num_layers * sum(least) >= GRAPHS_PAY_FROM * took


def _layer_on_device(shape: RunShape, device: Device) -> Times:
    """Matrix products, collectives, and what lies between the products."""
    h, t, tokens = shape.hidden_size, shape.tensor, shape.tokens
    weights = h * (2 * shape.queries + 2 * shape.keys)
    weights += h * shape.ffn_hidden_size * (3 if shape.gated else 2)
    linear = 2 * weights * tokens / t / device.flops
    scores = (2 if shape.arch == "gpt" else 4) * shape.seq_length * shape.queries * tokens
    core, core_backward = attention_times(scores / t, device.flops)
    kept = layer_bytes(dataclasses.replace(shape, recompute="none"))
    before, after = between_products(kept, device.bytes_per_second)
    each = collective_seconds(shape, device)
    forward = linear + core + forward_collectives(shape) * each + before
    if not device.queues:
        gathers, back = _SHARDED.get(shape.shard, (0, 0))
        forward, after = forward + gathers * device.collective, after + back * device.collective
    again = {"none": 0.0, "selective": core, "full": forward}[shape.recompute]
    reduced = backward_collectives(shape) * each
    return forward, linear + core_backward + reduced + after + again, linear


def _head_on_device(shape: RunShape, device: Device) -> Times:
    table = shape.vocab_size * shape.hidden_size / shape.tensor
    logits = shape.vocab_size * shape.tokens / shape.tensor
    rates = device.flops, device.bytes_per_second
    forward, backward, weight = head_times(table, shape.tokens, logits, *rates, shape.fused_loss)
    if shape.tensor == 1:
        return forward, backward, weight
    each, gathers = collective_seconds(shape, device), shape.sequence_parallel
    forward += _LOSS_COLLECTIVES * device.collective + gathers * each
    return forward, backward + (1 + gathers) * each, weight


def _launches(shape: RunShape, device: Device) -> Times:
    """Seconds that the host takes to launch a layer's F, B and W."""
    around = _COLLECTIVE * forward_collectives(shape) + _GATHERS.get(shape.shard, 0.0)
    once = device.launch * (1 + around * device.queues)
    again = once if shape.recompute == "full" else 0.0
    return once, once + again, device.launch * _WEIGHTS if shape.split_backward else 0.0


def _paced(shape: RunShape, layer: Times, least: Times) -> Times:
    """A layer's times where none is shorter than its launching; a fused backward is one task."""
    forward, backward, weight = layer
    if shape.split_backward:
        weight = max(weight, least[Kind.W])
        return max(forward, least[Kind.F]), max(backward, least[Kind.B]), weight
    return max(forward, least[Kind.F]), max(backward + weight, least[Kind.B]) - weight, weight


def _lookup_on_device(shape: RunShape, device: Device) -> Times:
    table = shape.vocab_size * shape.hidden_size / shape.tensor
    looked_up = 2 * shape.element_bytes * shape.elements
    forward, backward, weight = embedding_times(table, looked_up, device.bytes_per_second)
    each = collective_seconds(shape, device)  # the sum of the tables' parts, gathered in backward
    return forward + each, backward + each * shape.sequence_parallel, weight


def _exposed(part: Times, gained: float, least: float = 0.0) -> Times:
    """What of the head or the embedding lengthens its rank's work, where the rank's layers wait for
    their launches for ``gained`` seconds and the host needs ``least`` to launch a pass of the part.

    While the device computes it, the host goes on launching, and the layers that follow run as fast
    as the device can; so the device may gain back what it has waited for before. Megatron's static
    pipelines wait for the device at each exchange, a CPU queues nothing.
    """
    total = sum(part)
    share = max(0.0, total - gained) / total if total else 0.0
    forward, backward, weight = (share * seconds for seconds in part)
    return max(least, forward), max(least, backward), weight

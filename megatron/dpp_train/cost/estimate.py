"""The estimate of a run before it starts: memory, traffic, bubble and time, and its text."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.dpp.schedule import chosen_policy
from megatron.dpp_train.cost.device import Device
from megatron.dpp_train.cost.memory import (
    RankMemory,
    expert_parameters,
    model_parameters,
    rank_memory,
    rank_parameters,
    shared_parameters,
)
from megatron.dpp_train.cost.pipeline import Prediction, predict
from megatron.dpp_train.cost.shape import RunShape
from megatron.dpp_train.cost.times import (
    collective_bytes,
    collectives,
    dispatch_bytes,
    hop_bytes,
    part_times,
    ring_bytes,
)


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The result of :func:`estimate`.

    Args:
        ranks: memory by pipeline rank.
        seconds: of an iteration.
        replayed: layers run as CUDA graphs.
    """

    shape: RunShape
    device: Device
    ranks: tuple[RankMemory, ...]
    prediction: Prediction
    seconds: float
    replayed: bool

    @property
    def peak_bytes(self) -> float:
        """Memory of the fullest rank."""
        return max(rank.total for rank in self.ranks)

    @property
    def tokens_per_second(self) -> float:
        """Of all ranks together."""
        return self.shape.global_batch * self.shape.model.seq_length / self.seconds


def estimate(shape: RunShape, device: Device) -> Estimate:
    """Memory and time of a run."""
    found = predict(shape, device)
    ranks = (rank_memory(shape, rank, peak) for rank, peak in enumerate(found.peak_bytes))
    return Estimate(
        shape=shape,
        device=device,
        ranks=tuple(ranks),
        prediction=found,
        seconds=found.seconds + outside_seconds(shape, device),
        replayed=part_times(shape, device).replayed,
    )


def traffic(shape: RunShape) -> dict[str, float]:
    """Bytes that a rank of the first stage sends in an iteration, by the kind of parallelism."""
    layers = shape.rank_layers(0) * shape.num_microbatches
    dense = sum(shape.dense_layers[:: shape.pipeline]) * shape.num_microbatches
    forward, backward = collectives(shape)
    forwards = 2 if shape.recompute == "full" else 1
    tensor = layers * (forwards * forward + backward) * collective_bytes(shape)
    hops = 2 * shape.chunks * shape.num_microbatches if shape.pipeline > 1 else 0
    exchanges = 4 if shape.recompute == "full" else 3  # of keys and values, and of their gradients
    return {
        "pipeline": hops * hop_bytes(shape),
        "tensor": tensor,
        "data": _data_parallel_bytes(shape),
        "experts": (layers - dense) * 2 * (forwards + 1) * dispatch_bytes(shape),
        "context": layers * exchanges * ring_bytes(shape),
    }


def _data_parallel_bytes(shape: RunShape) -> float:
    """Bytes that a rank sends to reduce gradients, and to gather what is sharded."""
    fullest = max(range(shape.pipeline), key=lambda rank: rank_parameters(shape, rank))
    of_experts, sent = expert_parameters(shape, fullest), 0.0
    dense = rank_parameters(shape, fullest) - of_experts
    kinds = (dense, shape.replicas), (of_experts, shape.expert_replicas)
    for count, replicas in kinds:
        one_way = (replicas - 1) / replicas * count
        gradients, weights = one_way * shape.gradient_bytes, one_way * shape.element_bytes
        each = {"none": 2 * gradients, "optimizer": gradients + weights}
        gathers = 2 if shape.shard == "parameters" else 1
        of_fsdp = shape.num_microbatches * (gradients + gathers * weights)
        sent += each.get(shape.shard, of_fsdp)
    return sent


def outside_seconds(shape: RunShape, device: Device) -> float:
    """Gradient reduction and the optimizer's pass over its state, neither of them overlapped."""
    link = device.group_link(shape.replicas, shape.replicas_per_node)
    reduction = _data_parallel_bytes(shape) / link if shape.replicas > 1 else 0.0
    own = max(shared_parameters(shape, rank) for rank in range(shape.pipeline))
    touched = shape.element_bytes + 8 + shape.moment_bytes
    # Read and write weights, gradients and moments, in passes that are not all fused.
    return reduction + own * 2 * 2 * touched / device.bytes_per_second


# Text


def size(num_bytes: float) -> str:
    """Bytes as text.

    >>> size(3 * 2**30)
    '3.00 GiB'
    """
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.2f} {unit}"
    return f"{num_bytes:.0f} B"


def layout_line(shape: RunShape) -> str:
    """The parallel layout in one line."""
    sizes = {"tensor": shape.tensor, "pipeline": shape.pipeline, "chunks": shape.chunks}
    sizes |= {"context": shape.context, "expert": shape.expert, "data": shape.data}
    always = ("tensor", "pipeline", "data")
    parts = [f"{name} {n}" for name, n in sizes.items() if n > 1 or name in always]
    text = f"{' x '.join(parts)} = {shape.world_size} ranks"
    policy = f"policy {chosen_policy(shape.policy, shape.pipeline, shape.chunks)}"
    text += f", {policy if shape.dynamic else 'static'}" if shape.pipeline > 1 else ""
    return text + ("" if shape.shard == "none" else f", {shape.shard} sharded")


def lines(found: Estimate) -> list[str]:
    """The estimate, without a heading."""
    shape, device = found.shape, found.device
    precision = "fp32" if shape.element_bytes == 4 else "16 bit"
    table = [
        f"layout      {layout_line(shape)}",
        *_layer_lines(shape),
        f"batch       {shape.global_batch} x {shape.model.seq_length} tokens: "
        f"{shape.num_microbatches} of {shape.micro_batch} on each of {shape.data} replicas",
        f"parameters  {model_parameters(shape):,} in {precision}",
        "per rank    weights   gradients   optimizer activations   workspace         sum",
    ]
    table += [_rank_line(found, rank) for rank in range(shape.pipeline)]
    table += [f"            of {size(device.memory_bytes)} on {device.name}"]
    slots = max(found.prediction.slot_bytes)
    if slots:
        table.append(f"            CUDA graphs hold {size(slots)} of the activations")
    sent = [f"{name} {size(each)}" for name, each in traffic(shape).items() if each]
    graphs = ", replaying CUDA graphs" if found.replayed else ""
    return [
        *table,
        _bubble_line(found),
        f"traffic     {', '.join(sent) or 'none'} per rank and iteration",
        f"time        {found.seconds * 1e3:.1f} ms per iteration, "
        f"{found.tokens_per_second:,.0f} tokens/s, at {device.flops / 1e12:.3g} TFLOP/s in matrix "
        f"products ({device.source}){graphs}",
    ]


def _layer_lines(shape: RunShape) -> list[str]:
    """The layers of each stage where they differ, chunk by chunk."""
    if len(set(shape.layers)) == 1:
        return []
    p = shape.pipeline
    chunks = (shape.layers[first : first + p] for first in range(0, len(shape.layers), p))
    text = ", then ".join(" ".join(map(str, each)) for each in chunks)
    return [f"layers      of each rank: {text}"]


def _rank_line(found: Estimate, rank: int) -> str:
    parts = (*found.ranks[rank], found.ranks[rank].total)
    return f"stage {rank:<3d} " + " ".join(f"{size(part):>11s}" for part in parts)


def _bubble_line(found: Estimate) -> str:
    shape = found.shape
    if shape.pipeline == 1:
        return "bubble      none: no pipeline"
    formula = (shape.pipeline - 1) / (shape.chunks * shape.num_microbatches)
    return (
        f"bubble      simulated: {found.prediction.bubble:.1%} of the pipeline's time; by the "
        f"formula of even stages: {formula / (1 + formula):.1%}"
    )

"""The estimate of a run before it starts: memory, bubble and time, and its text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron.dpp.schedule import chosen_policy
from megatron.dpp_train.cost.device import Device, Devices
from megatron.dpp_train.cost.flags import Given, shape_of
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


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The result of :func:`estimate`.

    Args:
        ranks: memory by pipeline rank.
        seconds: of an iteration.
    """

    ranks: list[RankMemory]
    prediction: Prediction
    seconds: float

    @property
    def peak_bytes(self) -> float:
        """Memory of the fullest rank."""
        return max(rank.total for rank in self.ranks)


def estimate(shape: RunShape, device: Device) -> Estimate:
    """Memory and time of a run."""
    found = predict(shape, device)
    ranks = [rank_memory(shape, rank, peak) for rank, peak in enumerate(found.peak_bytes)]
    seconds = found.seconds + outside_seconds(shape, device)
    return Estimate(ranks=ranks, prediction=found, seconds=seconds)


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
    link = device.group_link(shape.replicas, shape.on_a_node(shape.replicas, shape.tensor))
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


def describe(flags: Mapping[str, object], devices: Devices, *, arch: str = "gpt") -> list[str]:
    """Lines of text: layout, memory per rank, bubble and time of an iteration.

    Args:
        arch: ``gpt`` or ``bert``.

    Raises:
        ConfigError: a flag is missing or has a value that is not possible, or sizes do not divide.
    """
    given, device, on_gpu = Given(flags), devices.device, devices.on_gpu
    shape = shape_of(given, devices.number, devices.per_node, on_gpu=on_gpu, arch=arch)
    found, p = estimate(shape, device), shape.pipeline
    text = [f"layout      {layout_line(shape)}"]
    if len(set(shape.layers)) > 1:
        chunks = (shape.layers[first : first + p] for first in range(0, len(shape.layers), p))
        each = ", then ".join(" ".join(map(str, layers)) for layers in chunks)
        text.append(f"layers      of each rank: {each}")
    text += [
        f"batch       {shape.global_batch} x {shape.model.seq_length} tokens: "
        f"{shape.num_microbatches} of {shape.micro_batch} on each of {shape.data} replicas",
        f"parameters  {model_parameters(shape):,} in {8 * shape.element_bytes} bit",
        "per rank    weights   gradients   optimizer activations   workspace         sum",
    ]
    for rank, memory in enumerate(found.ranks):
        columns = (f"{size(part):>11s}" for part in (*memory, memory.total))
        text.append(f"stage {rank:<3d} {' '.join(columns)}")
    text.append(f"            of {size(device.memory_bytes)} on {device.name}")
    share = f"{found.prediction.bubble:.1%} of the pipeline's time, simulated"
    graphs = ", replaying CUDA graphs" if found.prediction.replayed else ""
    text += [
        f"bubble      {share if p > 1 else 'none: no pipeline'}",
        f"time        {found.seconds * 1e3:.1f} ms per iteration, "
        f"{shape.global_tokens / found.seconds:,.0f} tokens/s, at {device.flops / 1e12:.3g} "
        f"TFLOP/s in matrix products ({device.source}){graphs}",
    ]
    if given.is_cut:
        text.append("slices      are estimated as whole sequences; they keep less memory")
    return text

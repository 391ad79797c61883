"""An estimate as a few lines of text."""

from __future__ import annotations

from megatron.dpp.config import POOL_GROWTH
from megatron.dpp.schedule import chosen_policy
from megatron.dpp_train.cost.constants import GRAPH_LAYERS
from megatron.dpp_train.cost.estimate import Estimate
from megatron.dpp_train.cost.memory import (
    interleaving_factor,
    loss_bytes,
    published_layer_bytes,
)
from megatron.dpp_train.cost.shape import RunShape

_SHARDS = {
    "none": "",
    "optimizer": ", optimizer sharded (ZeRO 1)",
    "gradients": ", optimizer and gradients sharded (ZeRO 2)",
    "parameters": ", optimizer, gradients and parameters sharded (ZeRO 3)",
}


def size(num_bytes: float) -> str:
    """Bytes as text.

    >>> size(3 * 2**30)
    '3.00 GiB'
    """
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.2f} {unit}"
    return f"{num_bytes:.0f} B"


def count(number: float) -> str:
    """A large number as text.

    >>> count(345_000_000)
    '345.0 M'
    """
    for unit, factor in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= factor:
            return f"{number / factor:.1f} {unit}"
    return f"{number:.0f}"


def _several(number: int, word: str, ending: str = "s") -> str:
    return f"{number} {word}{'' if number == 1 else ending}"


def layout_line(shape: RunShape) -> str:
    """The parallel layout in one line."""
    parts = [f"tensor {shape.tensor}", f"pipeline {shape.pipeline}"]
    parts += [f"{shape.chunks} chunks"] if shape.chunks > 1 else []
    parts += [f"context {shape.context}"] if shape.context > 1 else []
    parts += [f"data {shape.data}"]
    policy = chosen_policy(shape.schedule.policy, shape.pipeline)
    schedule = f"policy {policy}" if shape.schedule.dynamic else "static"
    text = f"{' x '.join(parts)} = {shape.world_size} ranks"
    if shape.pipeline > 1:
        text += f", {schedule}"
    return text + _SHARDS[shape.shard]


def _uneven(shape: RunShape) -> list[str]:
    """The layers of each stage where they differ, chunk by chunk."""
    if len(set(shape.layers)) == 1:
        return []
    chunks = [
        " ".join(map(str, shape.layers[first : first + shape.pipeline]))
        for first in range(0, len(shape.layers), shape.pipeline)
    ]
    return [f"layers        of each rank: {', then '.join(chunks)}"]


def _eight_bit(shape: RunShape) -> list[str]:
    """A line on what is counted of 8-bit layers, where there are any."""
    if not shape.precision.eight_bit:
        return []
    return [
        "8 bit         copies of the layers' weights are counted; matrix products and activations "
        "count as in 16 bit"
    ]


def _slices(shape: RunShape) -> list[str]:
    """A line on slices, where they were asked for."""
    if shape.schedule.slice_tokens == "off":
        return []
    if not shape.schedule.dynamic:
        return ["slices        none: without a dynamic pipeline no sequence is cut"]
    slices, length = shape.slices, shape.model.seq_length
    if len(slices) == 1 and shape.schedule.slice_tokens == "auto":
        return [f"slices        auto takes {shape.weighed.text}"]
    if len(slices) == 1:
        return [f"slices        none: {length} tokens are not cut, as up to 1.5 slices stay whole"]
    return [
        f"slices        {len(slices)} of {slices[0].model.seq_length} tokens; shorter sequences "
        f"than {length} tokens are not counted"
    ]


def lines(found: Estimate) -> list[str]:
    """The estimate, without a heading."""
    shape, device = found.shape, found.device
    graphs = ", replaying CUDA graphs" if found.replayed else ""
    precision = "fp32" if shape.element_bytes == 4 else "16 bit"
    table = [
        f"layout        {layout_line(shape)}",
        *_uneven(shape),
        *_slices(shape),
        f"batch         {_several(shape.global_batch, 'sample')} of {shape.model.seq_length} "
        f"tokens: {_several(shape.num_microbatches, 'microbatch', 'es')} of {shape.micro_batch} on "
        f"{_several(shape.data, 'replica')}",
        f"parameters    {found.parameters:,} ({count(found.parameters)}), {precision}; "
        f"{count(found.flops_per_token)}FLOP per token",
        *_eight_bit(shape),
        "",
        "per rank         weights   gradients   optimizer  activations"
        f"{'        keys' if _is_cut(shape) else ''}  backward      sum",
    ]
    table += [_rank_line(found, rank) for rank in range(shape.pipeline)]
    table += [
        f"  of {size(device.memory_bytes)} on {device.name}; activations by the published formula: "
        f"{_published(shape)}",
        _logits_line(shape),
        *_graphs_line(found),
        "",
        _bubble_line(found),
        f"traffic       per rank and iteration: {_traffic(found)}",
        f"time          {found.seconds * 1e3:.1f} ms per iteration, "
        f"{found.tokens_per_second:,.0f} tokens/s, at {device.flops / 1e12:.3g} TFLOP/s in matrix "
        f"products ({device.source}){graphs}",
    ]
    return table


def _graphs_line(found: Estimate) -> list[str]:
    """A line on the memory of CUDA graphs, where there are any."""
    most = max(found.slot_bytes)
    if not most:
        return []
    stage, shape = found.slot_bytes.index(most), found.shape
    layers = max(shape.layers[stage :: shape.pipeline])
    bound = most * POOL_GROWTH * layers / (layers + GRAPH_LAYERS)
    return [
        f"  CUDA graphs: {size(most)} of the activations of stage {stage}, never freed; up to "
        f"{size(bound)} where pools grow as much as was ever measured; none with "
        "--dpp-cuda-graphs off"
    ]


def _is_cut(shape: RunShape) -> bool:
    return shape.num_slices > 1


def _logits_line(shape: RunShape) -> str:
    """The share of the logits, with what the loss keeps of them."""
    each, unit = size(loss_bytes(shape.slice(0))), "slice" if _is_cut(shape) else "microbatch"
    if shape.schedule.head_in_forward:
        return f"  logits: {each} on the last stage, of one {unit} at a time"
    return f"  logits: {each} on the last stage, of each {unit} between its forward and backward"


def _rank_line(found: Estimate, rank: int) -> str:
    memory = found.ranks[rank]
    parts = (
        memory.weights,
        memory.gradients,
        memory.optimizer,
        memory.activations,
        *([memory.keys] if _is_cut(found.shape) else []),
        memory.workspace,
        memory.total,
    )
    return f"  stage {rank:<3d} " + " ".join(f"{size(part):>11s}" for part in parts)


def _published(shape: RunShape) -> str:
    layer = published_layer_bytes(shape)
    whole = layer * shape.num_layers * interleaving_factor(shape.pipeline, shape.chunks)
    return f"{size(whole)} on the first stage (16 bit, with dropout, {size(layer)} a layer)"


def _bubble_line(found: Estimate) -> str:
    shape = found.shape
    if shape.pipeline == 1:
        return "bubble        none: no pipeline"
    formula = found.bubble_formula
    uncut, these = (" uncut", "slices") if _is_cut(shape) else ("", "stages")
    return (
        f"bubble        (p-1)/(v*m) = {formula:.1%} of the ideal time{uncut}, "
        f"{formula / (1 + formula):.1%} of the whole; this schedule with these {these}, simulated: "
        f"{found.bubble:.1%} of the whole"
    )


def _traffic(found: Estimate) -> str:
    sent = found.traffic
    parts = []
    if found.shape.pipeline > 1:
        parts.append(f"pipeline {size(sent.pipeline)} in hops of {size(sent.hop)}")
    if found.shape.tensor > 1:
        parts.append(f"tensor {size(sent.tensor)}")
    if found.shape.data * found.shape.context > 1:
        parts.append(f"data {size(sent.data)}")
    if sent.experts:
        parts.append(f"experts {size(sent.experts)}")
    if sent.context:
        parts.append(f"context {size(sent.context)}")
    return ", ".join(parts) or "none"

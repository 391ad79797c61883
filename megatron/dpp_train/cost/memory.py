"""Memory of each pipeline rank: parameters and their state, activations, a backward's workspace.

The number of microbatches in flight has no formula: the schedule that will run is simulated
(``pipeline.py``). An activation lives from its forward to its backward, which leaves the inputs and
the output gradients of the linear layers until their ``W``, one layer at a time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

from megatron.dpp_train.cost.shape import Model, RunShape

_STATISTICS = 2 * 4
"""Mean and reciprocal deviation of a norm, per token, in fp32."""


class RankMemory(NamedTuple):
    """Peak memory of one rank of a pipeline stage, in bytes.

    Args:
        activations: kept by forwards for their backwards, at the peak.
        workspace: temporaries of a backward, and gathered parameters.
    """

    weights: float
    gradients: float
    optimizer: float
    activations: float
    workspace: float

    @property
    def total(self) -> float:
        """Everything."""
        return sum(self)


# Parameters of megatron-core's GPT and BERT, exact


def layer_parameters(shape: RunShape) -> int:
    """Parameters of the larger kind of transformer layer on one rank of its stage."""
    return max(_layer_parameters(kind) for kind, _ in shape.kinds)


def _layer_parameters(shape: RunShape) -> int:
    model, t, h = shape.model, shape.tensor, shape.model.hidden_size
    qkv = (model.queries + 2 * model.keys) // t
    count = h * qkv + model.queries // t * h + 2 * model.norm_vectors * h
    count += 2 * model.qk_norm * model.head_size * model.norm_vectors
    count += model.softmax_offsets * model.num_heads // t
    count += qkv if model.qkv_bias or model.linear_bias else 0
    count += h if model.linear_bias else 0
    if not model.experts:
        return count + _mlp_parameters(model, model.ffn_hidden_size, t)
    count += (h + model.linear_bias) * model.experts  # the router
    count += _mlp_parameters(model, model.shared_width, t) if model.shared_width else 0
    return count + _expert_parameters(shape)


def _expert_parameters(shape: RunShape) -> int:
    """The part of a layer's parameters that belongs to experts of this rank."""
    each = _mlp_parameters(shape.model, shape.model.expert_width, shape.expert_tensor)
    return shape.model.experts // shape.expert * each


def _mlp_parameters(model: Model, width: int, tensor: int) -> int:
    """Parameters of an MLP of ``width`` on one of ``tensor`` ranks."""
    into = width * model.into // tensor
    count = model.hidden_size * (into + width // tensor)
    return count + (into + model.hidden_size if model.linear_bias else 0)


def _embedding_parameters(shape: RunShape) -> int:
    """Parameters of the first stage beside its layers."""
    model = shape.model
    rows = model.vocab_size // shape.tensor + model.num_positions + 2 * model.binary_head
    return rows * model.hidden_size


def _head_parameters(shape: RunShape) -> int:
    """Parameters of the last stage beside its layers. A tied output layer counts where the stage
    does not hold the embedding. BERT's head has a dense layer and a norm before the output layer,
    whose bias is sharded; with the binary head also a pooler and two logits.
    """
    model, h = shape.model, shape.model.hidden_size
    own = 0 if model.tied and shape.pipeline == 1 else 1
    count = model.norm_vectors * h + own * model.vocab_size // shape.tensor * h
    if model.arch == "bert":
        dense = h * h + h + 2 * h
        count += dense + model.vocab_size // shape.tensor + model.binary_head * (dense + 2)
    return count


def rank_parameters(shape: RunShape, rank: int) -> int:
    """Parameters of pipeline rank ``rank`` (of one of its tensor-parallel ranks)."""
    count = round(_of_rank(shape, rank, _layer_parameters))
    count += _embedding_parameters(shape) if rank == 0 else 0
    return count + (_head_parameters(shape) if rank == shape.pipeline - 1 else 0)


def shared_parameters(shape: RunShape, rank: int) -> float:
    """The parameters of ``rank`` whose optimizer state it holds; experts have replicas of their
    own.
    """
    of_experts = expert_parameters(shape, rank)
    dense = rank_parameters(shape, rank) - of_experts
    return dense / shape.sharers + of_experts / shape.expert_sharers


def expert_parameters(shape: RunShape, rank: int) -> int:
    """Parameters of ``rank`` that belong to experts."""
    if not shape.model.experts:
        return 0
    dense = sum(shape.dense_layers[rank :: shape.pipeline])
    return (shape.rank_layers(rank) - dense) * _expert_parameters(shape)


def _of_rank(shape: RunShape, rank: int, cost: Callable[[RunShape], float]) -> float:
    """The sum of ``cost`` over a rank's layers, with experts and without."""
    dense = sum(shape.dense_layers[rank :: shape.pipeline]) if shape.model.dense else 0
    counts = (shape.rank_layers(rank) - dense, dense)
    return sum(n * cost(kind) for n, (kind, _) in zip(counts, shape.kinds, strict=False))


def model_parameters(shape: RunShape) -> int:
    """Parameters of the whole model, each counted once."""
    whole = dataclasses.replace(
        shape, layers=(shape.num_layers,), tensor=1, pipeline=1, expert=1, expert_tensor=1
    )
    return rank_parameters(whole, 0)


# Activations of one microbatch


def layer_bytes(shape: RunShape) -> float:
    """Bytes that one layer keeps for its backward, of the kind that keeps most."""
    return max(_layer_bytes(kind) for kind, _ in shape.kinds)


def _layer_bytes(shape: RunShape) -> float:
    if shape.recompute == "full":
        return shape.outside * shape.element_bytes / shape.recompute_num_layers
    return _norm_bytes(shape) * 2 + _attention_bytes(shape) + _mlp_bytes(shape)


def _norm_bytes(shape: RunShape) -> float:
    """A norm's input, statistics and output (the input of the linear layer behind it)."""
    tokens = shape.outside / shape.model.hidden_size
    statistics = _STATISTICS if shape.model.norm_vectors == 2 else _STATISTICS // 2
    return 2 * shape.outside * shape.element_bytes + statistics * tokens


def _attention_bytes(shape: RunShape) -> float:
    """Queries, keys and values, the core of attention, the projection's input, a dropout mask."""
    model, e, t, tokens = shape.model, shape.element_bytes, shape.tensor, shape.tokens
    total = e * tokens * 2 * (model.queries + model.keys) / t
    if model.rotary:
        total += e * tokens * (model.queries + model.keys) / t
    total += shape.outside if model.hidden_dropout else 0
    if shape.recompute == "selective":
        return total
    if model.flash:
        return total + 4 * tokens * model.num_heads / t  # the kernel's log-sum-exp, in fp32
    scores = shape.micro_batch * model.num_heads * model.seq_length**2 / shape.context / t
    return total + e * scores + (scores + e * scores if model.attention_dropout else 0)


def _mlp_bytes(shape: RunShape) -> float:
    """Inputs of the activation function and of the second linear layer, and a dropout mask."""
    model, e = shape.model, shape.element_bytes
    masks = shape.outside if model.hidden_dropout else 0
    if not model.experts:
        width = (1 + model.into) * model.ffn_hidden_size / shape.tensor
        return e * shape.tokens * width + masks
    shared = shape.tokens * (1 + model.into) * model.shared_width / shape.tensor
    # Of a token that is sent to an expert: its input, those of activation function and second
    # linear layer, and what is between as the token's probability weighs it.
    width = model.hidden_size + 3 * model.expert_width / shape.expert_tensor
    # Scores, probabilities and indices of router and dispatcher, as counted for 4 to 16 experts.
    each = model.experts * (e + 1) + model.topk * (2 * e + 9) + 5
    routing = shape.tokens / shape.tensor * each + shape.routed * (e + 3)
    return e * (shape.routed * width + shared) + routing + masks


def deferred_bytes(shape: RunShape) -> float:
    """Bytes that a layer's backward keeps for its deferred weight gradients: the inputs of its four
    linear layers and the gradients of their outputs, of the kind that keeps most.
    """
    return max(_deferred_bytes(kind) for kind, _ in shape.kinds)


def _deferred_bytes(shape: RunShape) -> float:
    model, t, into = shape.model, shape.tensor, shape.model.into
    width, of_experts = model.ffn_hidden_size / t, 0.0
    if model.experts:
        width = model.shared_width / t
        wide = (1 + into) * model.expert_width / shape.expert_tensor
        of_experts = shape.routed * (2 * model.hidden_size + wide)
    inputs = 2 * shape.outside + shape.tokens * (model.queries / t + width)
    column = (model.queries + 2 * model.keys) / t + width * into
    gradients = shape.tokens * column + 2 * shape.elements
    return shape.element_bytes * (inputs + gradients + of_experts)


def head_bytes(shape: RunShape) -> float:
    """Bytes that a microbatch keeps of the final norm, the output layer and the loss: the gradient
    of the hidden states where F runs the backward of the latter two, else exponentials in fp32.
    """
    hidden = shape.elements * shape.element_bytes
    total = _norm_bytes(shape) + (hidden if shape.head_in_forward else 4 * shape.logits)
    # BERT: dense layer, activation function, and norm before the output layer
    return total + (3 * hidden if shape.model.arch == "bert" else 0)


# All of a rank


def rank_memory(shape: RunShape, rank: int, activations: float) -> RankMemory:
    """The memory of pipeline rank ``rank`` when its activations take so many bytes."""
    count, own = rank_parameters(shape, rank), shared_parameters(shape, rank)
    held, gathered = float(count), 0.0
    if shape.shard in ("gradients", "parameters"):
        gathered, held = _gathered_bytes(shape, count), own
    copies = shape.copy_bytes * _of_rank(shape, rank, _layer_parameters)
    return RankMemory(
        weights=held * shape.element_bytes + copies,
        gradients=held * shape.gradient_bytes,
        optimizer=own * optimizer_bytes(shape),
        activations=activations,
        workspace=_workspace_bytes(shape, rank) + gathered,
    )


def optimizer_bytes(shape: RunShape) -> int:
    """Bytes that the optimizer keeps of a parameter, with its fp32 copy."""
    return shape.moment_bytes + (4 if shape.element_bytes == 2 else 0)


def least_bytes(shape: RunShape) -> float:
    """Memory of the fullest rank under any schedule: rank ``r`` of ``p`` runs ``p - r`` forwards
    before its first gradient arrives. Needs no simulation, so it serves models of any size.
    """
    found = []
    for rank in range(shape.pipeline):
        held = _of_rank(shape, rank, layer_bytes)
        held += head_bytes(shape) if rank == shape.pipeline - 1 else 0
        units = min(shape.num_microbatches, shape.pipeline - rank)
        found.append(rank_memory(shape, rank, units * held).total)
    return max(found)


def _gathered_bytes(shape: RunShape, count: int) -> float:
    """Parameters that FSDP2 has gathered at once, and the gradients of one of its units.

    Stage 2 gathers all parameters; stage 3 the root's (embeddings, head) and two layers'.
    """
    layer = layer_parameters(shape)
    root = count - sum(each * _layer_parameters(kind) for kind, each in shape.kinds)
    whole = count if shape.shard == "gradients" else root + 2 * layer
    return float((whole + layer) * shape.element_bytes)


def _workspace_bytes(shape: RunShape, rank: int) -> float:
    """Peak of a backward beyond what forwards have kept.

    Within a layer: the gradients of the MLP and of its weight, and what is recomputed. On the last
    rank, before that: in 16 bits the logits or their gradient, with a fused loss also an fp32 copy
    of the logits, and what the loss keeps where F runs this backward; after it, with tied weights,
    the embedding's gradient until its second half is added.
    """
    layer = max(_layer_workspace(kind) for kind, _ in shape.kinds)
    if rank != shape.pipeline - 1:
        return layer
    model, each = shape.model, shape.element_bytes if shape.element_bytes < 4 else 0
    at_loss = shape.logits * (each + 4 * model.fused_loss + 4 * shape.head_in_forward)
    table = shape.element_bytes * model.vocab_size * model.hidden_size / shape.tensor
    below = layer - head_bytes(shape) + (table if model.tied and shape.pipeline == 1 else 0)
    return max(at_loss, below)


def _layer_workspace(shape: RunShape) -> float:
    e, model = shape.element_bytes, shape.model
    tokens, width = float(shape.tokens), model.into * model.ffn_hidden_size / shape.tensor
    if model.experts:
        tokens, width = shape.routed, model.into * model.expert_width / shape.expert_tensor
    total = e * width * (tokens + model.hidden_size) + 2 * shape.outside * e
    total += e * shape.elements if shape.sequence_parallel else 0  # gathered, for W
    if shape.recompute == "full":
        again = dataclasses.replace(shape, recompute="none")
        total += layer_bytes(again) * shape.recompute_num_layers
    return total

"""Memory of each pipeline rank: parameters and their state, activations, a backward's workspace.

The number of microbatches in flight has no formula: the schedule that will run is simulated
(``pipeline.py``). An activation lives from its forward to its backward, which leaves the inputs and
the output gradients of the linear layers until their ``W``, one layer at a time.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from megatron.dpp_train.cost.shape import Model, RunShape


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


# Parameters of megatron-core's GPT and BERT


def layer_parameters(shape: RunShape) -> float:
    """Parameters of the mean transformer layer on one rank of its stage."""
    model, t, h = shape.model, shape.tensor, shape.model.hidden_size
    qkv = (model.queries + 2 * model.keys) // t
    count = h * qkv + model.queries // t * h + 2 * model.norm_vectors * h
    count += 2 * model.qk_norm * model.head_size * model.norm_vectors
    count += model.softmax_offsets * model.num_heads // t
    count += qkv if model.qkv_bias or model.linear_bias else 0
    count += h if model.linear_bias else 0
    beside = (h + model.linear_bias) * model.experts  # the router
    beside += _mlp_parameters(model, model.shared_width, t) if model.shared_width else 0
    mlp = _mlp_parameters(model, model.ffn_hidden_size, t)
    return count + model.mean(beside, mlp) + _expert_parameters(shape)


def _expert_parameters(shape: RunShape) -> float:
    """The part of the mean layer's parameters that belongs to experts of this rank."""
    each = _mlp_parameters(shape.model, shape.model.expert_width, shape.expert_tensor)
    return shape.model.mean(shape.model.experts // shape.expert * each, 0)


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
    count = round(shape.rank_layers(rank) * layer_parameters(shape))
    count += _embedding_parameters(shape) if rank == 0 else 0
    return count + (_head_parameters(shape) if rank == shape.pipeline - 1 else 0)


def shared_parameters(shape: RunShape, rank: int) -> float:
    """The parameters of ``rank`` whose optimizer state it holds; experts have replicas of their
    own.
    """
    count, of_experts = rank_parameters(shape, rank), expert_parameters(shape, rank)
    if shape.shard == "none":
        return count
    return (count - of_experts) / shape.replicas + of_experts / shape.expert_replicas


def expert_parameters(shape: RunShape, rank: int) -> int:
    """Parameters of ``rank`` that belong to experts."""
    return round(shape.rank_layers(rank) * _expert_parameters(shape))


def model_parameters(shape: RunShape) -> int:
    """Parameters of the whole model, each counted once."""
    whole = dataclasses.replace(
        shape, layers=(shape.num_layers,), tensor=1, pipeline=1, expert=1, expert_tensor=1
    )
    return rank_parameters(whole, 0)


# Activations of one microbatch


def layer_bytes(shape: RunShape) -> float:
    """Bytes that the mean layer keeps for its backward."""
    if shape.recompute == "full":
        return shape.outside * shape.element_bytes / shape.recompute_num_layers
    return _norm_bytes(shape) * 2 + _attention_bytes(shape) + _mlp_bytes(shape)


def _norm_bytes(shape: RunShape) -> float:
    """A norm's input and output (the input of the linear layer behind it), and its statistics in
    fp32, for each token mean and deviation or one of them."""
    tokens = shape.outside / shape.model.hidden_size
    return 2 * shape.outside * shape.element_bytes + 4 * shape.model.norm_vectors * tokens


def _attention_bytes(shape: RunShape) -> float:
    """Queries, keys and values, the core of attention, the projection's input, a dropout mask."""
    model, e, t, tokens = shape.model, shape.element_bytes, shape.tensor, shape.tokens
    total = e * tokens * (2 + model.rotary) * (model.queries + model.keys) / t
    total += shape.outside if model.hidden_dropout else 0
    if shape.recompute == "selective":
        return total
    if model.flash:
        return total + 4 * tokens * model.num_heads / t  # the kernel's log-sum-exp, in fp32
    scores = shape.micro_batch * model.num_heads * model.seq_length**2 / shape.context / t
    return total + e * scores + (scores + e * scores if model.attention_dropout else 0)


def _mlp_bytes(shape: RunShape) -> float:
    """Inputs of the activation function and of the second linear layer, and a dropout mask."""
    model, e, t, wide = shape.model, shape.element_bytes, shape.tensor, 1 + shape.model.into
    masks = shape.outside if model.hidden_dropout else 0
    # Of a token that is sent to an expert: its input, those of activation function and second
    # linear layer, and what is between as the token's probability weighs it.
    width = model.hidden_size + 3 * model.expert_width / shape.expert_tensor
    # Scores, probabilities and indices of router and dispatcher, as counted for 4 to 16 experts.
    each = model.experts * (e + 1) + model.topk * (2 * e + 9) + 5
    of_experts = shape.tokens / t * each + shape.routed * (e + 3 + e * width)
    of_experts += e * shape.tokens * wide * model.shared_width / t
    return masks + model.mean(of_experts, e * shape.tokens * wide * model.ffn_hidden_size / t)


def deferred_bytes(shape: RunShape) -> float:
    """Bytes that the mean layer's backward keeps for its deferred weight gradients: the inputs of
    its four linear layers and the gradients of their outputs.
    """
    model, t, into = shape.model, shape.tensor, shape.model.into
    width = model.mean(model.shared_width, model.ffn_hidden_size) / t
    wide = (1 + into) * model.expert_width / shape.expert_tensor
    of_experts = model.mean(shape.routed * (2 * model.hidden_size + wide), 0)
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
    layers = shape.rank_layers(rank) * layer_parameters(shape)
    held, gathered = float(count), 0.0
    if shape.shard in ("gradients", "parameters"):
        # FSDP2 gathers all parameters (stage 2), or those of embeddings, head and two layers (3);
        # the gradients of one layer come on top.
        layer, held = layer_parameters(shape), own
        whole = count if shape.shard == "gradients" else count - layers + 2 * layer
        gathered = (whole + layer) * shape.element_bytes
    of_optimizer = shape.moment_bytes + (4 if shape.element_bytes == 2 else 0)  # an fp32 copy
    return RankMemory(
        weights=held * shape.element_bytes + layers * shape.copy_bytes,
        gradients=held * shape.gradient_bytes,
        optimizer=own * of_optimizer,
        activations=activations,
        workspace=_workspace_bytes(shape, rank) + gathered,
    )


def least_bytes(shape: RunShape) -> float:
    """Memory of the fullest rank under any schedule: rank ``r`` of ``p`` runs ``p - r`` forwards
    before its first gradient arrives. Needs no simulation, so it serves models of any size.
    """
    found = []
    for rank in range(shape.pipeline):
        held = shape.rank_layers(rank) * layer_bytes(shape)
        held += head_bytes(shape) if rank == shape.pipeline - 1 else 0
        units = min(shape.num_microbatches, shape.pipeline - rank)
        found.append(rank_memory(shape, rank, units * held).total)
    return max(found)


def _workspace_bytes(shape: RunShape, rank: int) -> float:
    """Peak of a backward beyond what forwards have kept.

    Within a layer: the gradients of the MLP and of its weight, and what is recomputed. On the last
    rank, before that: in 16 bits the logits or their gradient, with a fused loss also an fp32 copy
    of the logits, and what the loss keeps where F runs this backward; after it, with tied weights,
    the embedding's gradient until its second half is added.
    """
    layer, model = _layer_workspace(shape), shape.model
    if rank != shape.pipeline - 1:
        return layer
    each = shape.element_bytes if shape.element_bytes < 4 else 0
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

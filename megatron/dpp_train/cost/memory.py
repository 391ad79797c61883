"""Memory of each pipeline rank: parameters and their state, activations, a backward's workspace.

Two views of activations. :func:`published_layer_bytes` is the formula of Korthikanti et al.,
"Reducing Activation Recomputation in Large Transformer Models" (2022), in 16 bits with dropout.
:func:`layer_bytes` and those below it count what the layers here keep;
``tests/cost/test_against_models.py`` holds them to what autograd saves.

The number of microbatches in flight has no formula: the schedule that will run is simulated
(``estimate.py``). An activation lives from its forward to its backward, which leaves the inputs and
the output gradients of the linear layers until their ``W``, one layer at a time. CUDA graphs keep a
slot for each activation that the cap allows, as large as the rank's largest chunk.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from megatron.dpp_train.cost.shape import ExpertShape, ModelShape, RunShape

_STATISTICS = 2 * 4
"""Mean and reciprocal deviation of a norm, per token, in fp32."""
_MASTER = 4
"""Bytes of a parameter's fp32 copy where the parameter itself has 16 bits."""


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Peak memory of one rank of a pipeline stage, in bytes.

    Args:
        parameters: their number.
        activations: kept by forwards for their backwards, at the peak.
        keys: keys and values of cut sequences, and their gradients, at the same time.
        workspace: temporaries of a backward, and gathered parameters.
    """

    parameters: int
    weights: float
    gradients: float
    optimizer: float
    activations: float
    workspace: float
    keys: float = 0.0

    @property
    def state(self) -> float:
        """The part that does not depend on the batch."""
        return self.weights + self.gradients + self.optimizer

    @property
    def total(self) -> float:
        """Everything."""
        return self.state + self.activations + self.keys + self.workspace


# Parameters of megatron-core's GPT and BERT, exact


def layer_parameters(shape: RunShape) -> int:
    """Parameters of the larger kind of transformer layer on one rank of its stage."""
    return max(_layer_parameters(kind) for kind, _ in shape.kinds)


def _layer_parameters(shape: RunShape) -> int:
    model, t, h = shape.model, shape.tensor, shape.model.hidden_size
    qkv = (model.queries + 2 * model.keys) // t
    count = h * qkv + model.queries // t * h + model.layer_norms * model.norm_vectors * h
    if model.qk_norm_over_heads:
        count += (model.queries + model.keys) // t * model.norm_vectors
    else:
        count += 2 * model.qk_norm * model.head_size * model.norm_vectors
    if model.softmax_offsets:
        count += model.num_heads // t
    if model.qkv_bias or model.linear_bias:
        count += qkv
    if model.linear_bias:
        count += h
    if model.experts is None:
        return count + _mlp_parameters(model, model.ffn_hidden_size, t)
    router, shared = (h + model.linear_bias) * model.experts.number, model.experts.shared
    count += _mlp_parameters(model, shared, t) if shared else 0
    return count + router + expert_parameters(shape)


def expert_parameters(shape: RunShape) -> int:
    """The part of a layer's parameters that belongs to experts of this rank."""
    experts = shape.model.experts
    if experts is None:
        return 0
    each = _mlp_parameters(shape.model, experts.ffn_hidden_size, shape.expert_tensor)
    return experts.number // shape.expert * each


def _mlp_parameters(model: ModelShape, width: int, tensor: int) -> int:
    """Parameters of an MLP of ``width`` on one of ``tensor`` ranks."""
    into = width * (2 if model.gated else 1) // tensor
    count = model.hidden_size * (into + width // tensor)
    return count + (into + model.hidden_size if model.linear_bias else 0)


def embedding_parameters(shape: RunShape) -> int:
    """Parameters of the first stage beside its layers."""
    model = shape.model
    token_types = 2 if model.binary_head else 0
    rows = model.vocab_size // shape.tensor + model.num_positions + token_types
    return rows * model.hidden_size


def head_parameters(shape: RunShape) -> int:
    """Parameters of the last stage beside its layers. A tied output layer counts where the stage
    does not hold the embedding.

    BERT's head has a dense layer and a norm before the output layer, whose bias is sharded; with
    the binary head also a pooler and two logits.
    """
    model, h = shape.model, shape.model.hidden_size
    own = 0 if model.tied and shape.pipeline == 1 else 1
    count = model.norm_vectors * h + own * model.vocab_size // shape.tensor * h
    if model.arch == "bert":
        dense = h * h + h + 2 * h
        count += dense + model.vocab_size // shape.tensor
        count += dense + 2 if model.binary_head else 0
    return count


def rank_parameters(shape: RunShape, rank: int) -> int:
    """Parameters of pipeline rank ``rank`` (of one of its tensor-parallel ranks)."""
    stages = range(rank, len(shape.layers), shape.pipeline)
    count = round(sum(_of_layers(shape, stage, _layer_parameters) for stage in stages))
    if rank == 0:
        count += embedding_parameters(shape)
    if rank == shape.pipeline - 1:
        count += head_parameters(shape)
    return count


def shared_parameters(shape: RunShape, rank: int) -> float:
    """The parameters of ``rank`` whose optimizer state it holds. Experts have replicas of their
    own.
    """
    of_experts = all_expert_parameters(shape, rank)
    dense = rank_parameters(shape, rank) - of_experts
    return dense / shape.sharers + of_experts / shape.expert_sharers


def all_expert_parameters(shape: RunShape, rank: int) -> int:
    """Parameters of ``rank`` that belong to experts."""
    dense = sum(shape.dense_layers[rank :: shape.pipeline])
    return (shape.layout.rank_layers(rank) - dense) * expert_parameters(shape)


def _of_layers(shape: RunShape, stage: int, cost: Callable[[RunShape], float]) -> float:
    """The sum of ``cost`` over a virtual stage's layers, with experts and without."""
    dense = shape.dense_layers[stage]
    counts = (shape.layers[stage] - dense, dense)
    return sum(n * cost(kind) for n, (kind, _) in zip(counts, shape.kinds, strict=False))


def model_parameters(shape: RunShape) -> int:
    """Parameters of the whole model, each counted once."""
    whole = dataclasses.replace(
        shape, layers=(shape.num_layers,), tensor=1, pipeline=1, expert=1, expert_tensor=1
    )
    return rank_parameters(whole, 0)


# Activations of one microbatch


def published_layer_bytes(shape: RunShape) -> float:
    """Korthikanti et al.: ``s*b*h*(34 + 5*a*s/h)``, equations 1, 2, 4 and 6; without the second
    term with selective recompute or flash attention; ``2*s*b*h`` with full recompute.
    """
    model, t = shape.model, shape.tensor
    if shape.recompute == "full":
        return 2 * shape.outside
    kept = not (model.flash or shape.recompute == "selective")
    matrix = 5 * model.num_heads * model.seq_length / model.hidden_size if kept else 0.0
    sharded = 34 / t if shape.sequence_parallel else 10 + 24 / t
    return shape.elements * (sharded + matrix / t)


def interleaving_factor(pipeline: int, chunks: int) -> float:
    """Activations that the interleaved schedule holds on its first rank over those of 1F1B: section
    4.2.3 of the same paper, ``1 + (p-1)/(p*v)``.
    """
    return 1.0 if chunks == 1 else 1 + (pipeline - 1) / (pipeline * chunks)


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
    context = e * tokens * model.queries / t
    gathered = shape.gathers_keys and shape.recompute != "selective"
    keys = 2 * model.keys * (shape.context if gathered else 1)
    total = e * tokens * (model.queries + keys) / t + context
    if model.rotary and shape.row and shape.recompute != "selective":
        total -= e * tokens * keys / t  # the rotated queries alone: the store has the keys
    elif model.rotary:
        total += e * tokens * (model.queries + model.keys) / t
    total += shape.outside if model.hidden_dropout else 0
    if shape.recompute == "selective":
        return total
    scores = shape.micro_batch * model.num_heads * model.seq_length**2 / shape.context / t
    if not model.flash:
        softmax = e * scores
        return total + softmax + (scores + e * scores if model.attention_dropout else 0)
    return total + 4 * tokens * model.num_heads / t  # the kernel's log-sum-exp, in fp32


def _mlp_bytes(shape: RunShape) -> float:
    """Inputs of the activation function and of the second linear layer, and a dropout mask."""
    model = shape.model
    masks = shape.outside if model.hidden_dropout else 0
    if model.experts is None:
        width = (model.ffn_inputs + model.ffn_hidden_size) / shape.tensor
        return shape.element_bytes * shape.tokens * width + masks
    into = 3 if model.gated else 2
    shared = shape.tokens * into * model.experts.shared / shape.tensor
    # Of a token that is sent to an expert: its input, those of activation function and second
    # linear layer, and what is between as the token's probability weighs it.
    width = model.hidden_size + 3 * model.experts.ffn_hidden_size / shape.expert_tensor
    elements = shape.element_bytes * (shape.routed * width + shared)
    return elements + _routing_bytes(shape, model.experts) + masks


def _routing_bytes(shape: RunShape, experts: ExpertShape) -> float:
    """Scores, probabilities and indices of a layer's router and dispatcher, as counted in models of
    4 to 16 experts.
    """
    e = shape.element_bytes
    each = experts.number * (e + 1) + experts.topk * (2 * e + 9) + 5
    return shape.tokens / shape.tensor * each + shape.routed * (e + 3)


def deferred_bytes(shape: RunShape) -> float:
    """Bytes that a layer's backward keeps for its deferred weight gradients: the inputs of its four
    linear layers and the gradients of their outputs, of the kind that keeps most.
    """
    return max(_deferred_bytes(kind) for kind, _ in shape.kinds)


def _deferred_bytes(shape: RunShape) -> float:
    model, t, into = shape.model, shape.tensor, 2 if shape.model.gated else 1
    experts, width = model.experts, model.ffn_hidden_size / t
    of_experts = 0.0
    if experts is not None:
        width = experts.shared / t
        wide = (1 + into) * experts.ffn_hidden_size / shape.expert_tensor
        of_experts = shape.routed * (2 * model.hidden_size + wide)
    inputs = 2 * shape.outside + shape.tokens * (model.queries / t + width)
    column = (model.queries + 2 * model.keys) / t + width * into
    gradients = shape.tokens * column + 2 * shape.elements
    return shape.element_bytes * (inputs + gradients + of_experts)


def head_bytes(shape: RunShape) -> float:
    """Bytes that a microbatch keeps of the final norm, the output layer and the loss: the gradient
    of the hidden states where F runs the backward of the latter two, else their logits.
    """
    total = _norm_bytes(shape)
    if shape.schedule.head_in_forward:
        total += shape.elements * shape.element_bytes
    else:
        total += loss_bytes(shape)
    if shape.model.arch == "bert":  # dense layer, activation function, norm before the output layer
        total += 3 * shape.elements * shape.element_bytes
    return total


def loss_bytes(shape: RunShape) -> float:
    """Bytes that the output layer and the loss keep of a microbatch: exponentials in fp32."""
    return 4 * logits(shape)


def logits(shape: RunShape) -> float:
    """Logits of a microbatch on one tensor-parallel rank."""
    return shape.tokens * shape.model.vocab_size / shape.tensor


def key_bytes(shape: RunShape) -> tuple[float, float]:
    """Bytes of a cut microbatch's keys and values in one layer, from F to B of its first slice, and
    of their gradients in fp32, from B of its last slice on.
    """
    groups = max(1, shape.model.num_groups / shape.tensor)
    elements = 2 * shape.micro_batch * shape.row * groups * shape.model.head_size
    return elements * shape.element_bytes, elements * 4


def stage_bytes(shape: RunShape, stage: int) -> float:
    """Bytes that one microbatch, or slice, keeps on a virtual stage."""
    total = _of_layers(shape, stage, layer_bytes)
    return total + (head_bytes(shape) if stage == len(shape.layers) - 1 else 0)


# All of a rank


def rank_memory(shape: RunShape, rank: int, activations: float, keys: float = 0.0) -> RankMemory:
    """The memory of pipeline rank ``rank`` when its activations and the keys of its slices take so
    many bytes.
    """
    count = rank_parameters(shape, rank)
    own = shared_parameters(shape, rank)
    held: float = count
    gathered = 0.0
    if shape.shard in ("gradients", "parameters"):
        gathered, held = _gathered_bytes(shape, count), own
    return RankMemory(
        parameters=count,
        weights=held * shape.element_bytes + _copied_bytes(shape, rank),
        gradients=held * shape.gradient_bytes,
        optimizer=own * optimizer_bytes(shape),
        activations=activations,
        workspace=_workspace_bytes(shape.slice(0), rank) + gathered,
        keys=keys,
    )


def _copied_bytes(shape: RunShape, rank: int) -> float:
    """8-bit copies of the weights of a rank's layers."""
    stages = range(rank, len(shape.layers), shape.pipeline)
    layers = sum(_of_layers(shape, stage, _layer_parameters) for stage in stages)
    return shape.precision.copies * layers


def optimizer_bytes(shape: RunShape) -> int:
    """Bytes that the optimizer keeps of a parameter."""
    return shape.precision.moments + (_MASTER if shape.element_bytes == 2 else 0)


def least_bytes(shape: RunShape) -> float:
    """Memory of the fullest rank under any schedule: rank ``r`` of ``p`` runs ``p - r`` forwards
    before its first gradient arrives. Needs no simulation, so it serves models of any size.
    """
    return max(
        rank_memory(shape, rank, _first_forwards_bytes(shape, rank)).total
        for rank in range(shape.pipeline)
    )


def _first_forwards_bytes(shape: RunShape, rank: int) -> float:
    stages, num_slices = range(rank, len(shape.layers), shape.pipeline), shape.num_slices
    last = shape.slice(num_slices - 1)
    held = sum(stage_bytes(last, stage) for stage in stages)
    keys = sum(key_bytes(last)) * shape.layout.rank_layers(rank)
    units = num_slices * shape.num_microbatches
    return min(units, shape.pipeline - rank + num_slices - 1) * held + keys


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
    model, count = shape.model, logits(shape)
    at_loss = count * (shape.element_bytes if shape.element_bytes < 4 else 0)
    at_loss += count * 4 if model.fused_loss else 0
    at_loss += loss_bytes(shape) if shape.schedule.head_in_forward else 0
    table = shape.element_bytes * model.vocab_size * model.hidden_size / shape.tensor
    below = layer - head_bytes(shape) + (table if model.tied and shape.pipeline == 1 else 0)
    return max(at_loss, below)


def _layer_workspace(shape: RunShape) -> float:
    e, outside, model = shape.element_bytes, shape.outside, shape.model
    tokens, width = float(shape.tokens), model.ffn_inputs / shape.tensor
    if model.experts is not None:
        tokens = shape.routed
        width = model.experts.ffn_hidden_size * (2 if model.gated else 1) / shape.expert_tensor
    total = e * width * (tokens + model.hidden_size) + 2 * outside * e
    total += key_bytes(shape)[0]  # the gradients of all keys that a slice sees
    if shape.sequence_parallel:  # the gathered input, for the weight gradient
        total += e * shape.elements
    if shape.recompute == "full":
        again = dataclasses.replace(shape, recompute="none")
        total += layer_bytes(again) * shape.recompute_num_layers
    return total

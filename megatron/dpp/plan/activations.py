"""Bytes that a microbatch leaves behind for its backward.

Two views. :func:`published_layer_bytes` are the formulas of Korthikanti et al., "Reducing
Activation Recomputation in Large Transformer Models" (2022), in 16 bits and with dropout.
:func:`layer_bytes` and its kin count what the layers that are run here really keep (no masks
without dropout, flash attention's logarithms, 4 bytes in fp32);
``tests/estimate`` holds them to what autograd saves.
"""

from __future__ import annotations

import dataclasses

from megatron.dpp.plan.shape import RunShape

_STATISTICS = 2 * 4
"""Mean and reciprocal deviation of a norm, per token, in fp32."""


def published_layer_bytes(
    *,
    seq_length: int,
    micro_batch: int,
    hidden_size: int,
    num_heads: int,
    tensor: int = 1,
    sequence_parallel: bool = False,
    attention_matrix: bool = True,
    full_recompute: bool = False,
) -> float:
    """Korthikanti et al.: ``s*b*h*(34 + 5*a*s/h)``, equations 1, 2, 4 and 6; ``2*s*b*h`` with full
    recompute.

    Args:
        attention_matrix: False with selective recompute or flash attention: without the second
            term.
    """
    if full_recompute:
        return 2 * seq_length * micro_batch * hidden_size / (tensor if sequence_parallel else 1)
    matrix = 5 * num_heads * seq_length / hidden_size if attention_matrix else 0.0
    shared = (10 + 24 / tensor) if not sequence_parallel else 34 / tensor
    return seq_length * micro_batch * hidden_size * (shared + matrix / tensor)


def interleaving_factor(pipeline: int, chunks: int) -> float:
    """How much more the interleaved schedule holds on its first rank than 1F1B does: section 4.2.3
    of the same paper, ``1 + (p-1)/(p*v)``."""
    return 1.0 if chunks == 1 else 1 + (pipeline - 1) / (pipeline * chunks)


def layer_bytes(shape: RunShape) -> float:
    """What one layer keeps for its backward."""
    if shape.recompute == "full":
        return shape.outside * shape.element_bytes / shape.recompute_num_layers
    return _norm_bytes(shape) * 2 + attention_bytes(shape) + mlp_bytes(shape)


def _norm_bytes(shape: RunShape) -> float:
    """A norm: its input, its statistics, its output (the input of the linear layer behind it)."""
    tokens = shape.outside / shape.hidden_size
    statistics = _STATISTICS if shape.norm_vectors == 2 else _STATISTICS // 2
    return 2 * shape.outside * shape.element_bytes + statistics * tokens


def attention_bytes(shape: RunShape) -> float:
    """Queries, keys and values, the core of attention, the input of the projection out, a mask."""
    e, t, tokens = shape.element_bytes, shape.tensor, shape.tokens
    context = e * tokens * shape.queries / t
    total = e * tokens * (shape.queries + 2 * shape.keys) / t + context
    total += e * tokens * (shape.queries + shape.keys) / t if shape.rotary else 0
    total += shape.outside if shape.hidden_dropout else 0
    if shape.recompute == "selective":
        return total
    scores = shape.micro_batch * shape.num_heads * shape.seq_length**2 / shape.context / t
    if not shape.flash:
        softmax = e * scores
        return total + softmax + (scores + e * scores if shape.attention_dropout else 0)
    return total + 4 * tokens * shape.num_heads / t  # the kernel's log-sum-exp, in fp32


def mlp_bytes(shape: RunShape) -> float:
    """Inputs of the activation function and of the second linear layer, and a mask."""
    e, tokens = shape.element_bytes, shape.tokens
    width = shape.ffn_hidden_size * (3 if shape.gated else 2) / shape.tensor
    return e * tokens * width + (shape.outside if shape.hidden_dropout else 0)


def deferred_bytes(shape: RunShape) -> float:
    """What a layer's backward keeps for its weight gradients when those are deferred: the inputs of
    its four linear layers and the gradients of their outputs.
    """
    width = shape.ffn_hidden_size / shape.tensor
    inputs = 2 * shape.outside + shape.tokens * (shape.queries / shape.tensor + width)
    column = (shape.queries + 2 * shape.keys) / shape.tensor + width * (2 if shape.gated else 1)
    gradients = shape.tokens * column + 2 * shape.elements
    return shape.element_bytes * (inputs + gradients)


def head_bytes(shape: RunShape) -> float:
    """Final norm, output layer and loss. The loss keeps its exponentials in fp32."""
    total = _norm_bytes(shape) + 4 * shape.tokens * shape.vocab_size / shape.tensor
    if shape.arch == "bert":  # dense layer, activation function, norm before the output layer
        total += 3 * shape.elements * shape.element_bytes
    return total


def stage_bytes(shape: RunShape, stage: int) -> float:
    """What one microbatch keeps on a virtual stage."""
    total = shape.layers[stage] * layer_bytes(shape)
    return total + (head_bytes(shape) if stage == len(shape.layers) - 1 else 0)


def workspace_bytes(shape: RunShape, rank: int) -> float:
    """The most that a backward holds on top of what forwards have kept.

    Inside a layer: the gradients of an MLP and of its weight, and what is recomputed. On the last
    rank, before that: in 16 bits the logits, or their gradient, beside the loss's exponentials, and
    with a fused loss an fp32 copy of the logits, as its kernels do not work in place; after it, the
    embedding's gradient that waits for its second half when the weights are shared.
    """
    layer = _layer_workspace(shape)
    if rank != shape.pipeline - 1:
        return layer
    logits = shape.tokens * shape.vocab_size / shape.tensor
    at_loss = logits * (shape.element_bytes if shape.element_bytes < 4 else 0)
    at_loss += logits * 4 if shape.fused_loss else 0
    table = shape.element_bytes * shape.vocab_size * shape.hidden_size / shape.tensor
    below = layer - head_bytes(shape) + (table if shape.tied and shape.pipeline == 1 else 0)
    return max(at_loss, below)


def _layer_workspace(shape: RunShape) -> float:
    e, outside = shape.element_bytes, shape.outside
    width = shape.ffn_hidden_size * (2 if shape.gated else 1) / shape.tensor
    total = e * width * (shape.tokens + shape.hidden_size) + 2 * outside * e
    if shape.sequence_parallel:  # the gathered input, for the weight gradient
        total += e * shape.elements
    if shape.recompute == "full":
        again = dataclasses.replace(shape, recompute="none")
        total += layer_bytes(again) * shape.recompute_num_layers
    return total

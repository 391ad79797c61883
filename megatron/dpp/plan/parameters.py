"""How many parameters each rank holds, to the last one: megatron-core's GPT and BERT."""

from __future__ import annotations

import dataclasses

from megatron.dpp.plan.shape import RunShape


def layer_parameters(shape: RunShape) -> int:
    """Of one transformer layer on one tensor-parallel rank."""
    h, t = shape.hidden_size, shape.tensor
    qkv = (shape.queries + 2 * shape.keys) // t
    ffn = shape.ffn_hidden_size // t
    into = ffn * (2 if shape.gated else 1)
    count = h * qkv + shape.queries // t * h + h * into + ffn * h
    count += 2 * shape.norm_vectors * h
    if shape.qkv_bias or shape.linear_bias:
        count += qkv
    if shape.linear_bias:
        count += h + into + h
    return count


def embedding_parameters(shape: RunShape) -> int:
    """Of the first stage beside its layers."""
    h = shape.hidden_size
    token_types = 2 * h if shape.binary_head else 0
    return shape.vocab_size // shape.tensor * h + shape.num_positions * h + token_types


def head_parameters(shape: RunShape) -> int:
    """Of the last stage beside its layers, on a stage that does not hold the embedding."""
    own = 0 if shape.tied and shape.pipeline == 1 else 1
    count = shape.norm_vectors * shape.hidden_size
    count += own * shape.vocab_size // shape.tensor * shape.hidden_size
    return count + (_bert_head(shape) if shape.arch == "bert" else 0)


def _bert_head(shape: RunShape) -> int:
    """A dense layer with a norm before the output layer, whose bias is shared out; with the binary
    head a pooler and two logits."""
    h = shape.hidden_size
    count = h * h + h + 2 * h + shape.vocab_size // shape.tensor
    return count + (h * h + h + 2 * h + 2 if shape.binary_head else 0)


def rank_parameters(shape: RunShape, rank: int) -> int:
    """Of pipeline rank ``rank`` (one tensor-parallel rank of it)."""
    count = shape.layout.rank_layers(rank) * layer_parameters(shape)
    if rank == 0:
        count += embedding_parameters(shape)
    if rank == shape.pipeline - 1:
        count += head_parameters(shape)
    return count


def model_parameters(shape: RunShape) -> int:
    """Of the whole model, each counted once."""
    whole = dataclasses.replace(shape, tensor=1, pipeline=1, layers=(shape.num_layers,))
    return rank_parameters(whole, 0)

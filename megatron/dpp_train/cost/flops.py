"""Floating point operations (FLOPs) of training: matrix products only, without recompute."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence

from megatron.dpp.sim.lengths import LengthCosts, read_costs
from megatron.dpp_train.cost.from_flags import layers_of, model_of
from megatron.dpp_train.cost.shape import LayerLayout, ModelShape
from megatron.dpp_train.options.layer_patterns import layers_with_experts
from megatron.dpp_train.options.run_config import Settings


def core_products(model: ModelShape, before: int = 0) -> int:
    """Multiply-adds per token of attention's core (scores and context) under a causal mask; without
    one there are twice as many.

    Args:
        before: tokens of the sequence before those of ``model``, which all of these attend to.
    """
    return (2 * before + model.seq_length) * model.queries


def flops_per_token(model: ModelShape, widths: Sequence[int], *, outputs: int | None = None) -> int:
    """FLOPs of a token's forward and backward: 2 per multiply-add, three products per weight.

    Attention counts as causal, as in Megatron-LM's count.

    Args:
        widths: each layer's MLP width.
        outputs: width of all that follows the layers; the vocabulary by default.
    """
    layers = sum(model.layer_weights(width) + core_products(model) for width in widths)
    head = model.vocab_size if outputs is None else outputs
    return 6 * (layers + model.hidden_size * head)


def flops_per_iteration(args: Settings, batch_size: int) -> float:
    """FLOPs of an iteration over ``batch_size`` samples as Megatron-LM logs them: experts and
    layers that predict further tokens included, the gate of ``--quick-geglu`` not.
    """
    further = args.mtp_num_layers or 0
    experts = (args.moe_ffn_hidden_size or 0) * args.moe_router_topk if args.num_experts else 0
    experts += (args.moe_shared_expert_intermediate_size or 0) if args.num_experts else 0
    pattern = layers_with_experts(args)
    pattern = [*pattern, *pattern[-1:] * further]  # further layers are like the last
    widths = [experts if with_experts else args.ffn_hidden_size for with_experts in pattern]
    joints = further * (2 * args.hidden_size + 3)  # projection of state and embedding; norms
    model = dataclasses.replace(model_of(args), gated=bool(args.swiglu or args.geglu))
    outputs = joints + (1 + further) * args.padded_vocab_size
    tokens = batch_size * args.seq_length
    return float(tokens * flops_per_token(model, widths, outputs=outputs))


def flops_of_lengths(args: Settings, tokens: int, squares: int) -> float:
    """FLOPs of an iteration over sequences of unlike length, counted as
    :func:`flops_per_iteration`.

    Args:
        tokens: sum of their lengths, without padding.
        squares: sum of their squared lengths.
    """
    draft, found = args.draft(), []
    for draft.seq_length in (1, 2):
        found.append(flops_per_iteration(draft, 1) / draft.seq_length)
    short, longer = found  # of a token: attention grows with the length, the rest does not
    return (2 * short - longer) * tokens + (longer - short) * squares


def length_costs(args: Settings) -> LengthCosts:
    """Times of a stage over the lengths of sequences: those of ``--length-costs``, else of a layer
    by its FLOPs, in units of a token's share without attention.

    Raises:
        DataError: the file cannot be read.
    """
    if args.length_costs:
        return read_costs(args.length_costs)
    return model_of(args).length_costs


def head_share(args: Settings) -> float:
    """Share that a token takes more on the last pipeline rank than on another, by the FLOPs of the
    LM head and of layers without attention's core; 0 where fewer layers make up for the head, and
    with ``--length-costs``, whose times are means of all ranks.
    """
    num_ranks = args.pipeline_model_parallel_size
    if args.length_costs or num_ranks == 1:
        return 0.0
    model, layout = model_of(args), LayerLayout(num_ranks, layers_of(args))
    *others, last = (layout.rank_layers(rank) for rank in range(num_ranks))
    head = model.hidden_size * model.vocab_size / model.layer_weights()
    return max(0.0, (last + head) / max(statistics.fmean(others), 1.0) - 1.0)

"""Floating point operations of one iteration, counted as Megatron-LM counts them (matrix products
only)."""

from __future__ import annotations

import argparse

from megatron.dpp.plan.layer_patterns import layers_with_experts


def flops_per_iteration(args: argparse.Namespace, batch_size: int) -> float:
    """Operations of forward and backward over ``batch_size`` samples; recomputation is not counted.

    Each product runs three times (forward, input gradient, weight gradient) at 2 operations per
    element; causal attention counts half of its scores.
    """
    queries = args.kv_channels * args.num_attention_heads
    groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    keys_and_values = 2 * args.kv_channels * groups
    attention = args.hidden_size * (queries + keys_and_values)  # projections in
    attention += queries * args.seq_length  # scores and context, half of each
    attention += queries * args.hidden_size  # projection out
    products = 3 if args.swiglu else 2
    further = args.mtp_num_layers or 0
    layers = args.num_layers + further
    pattern = layers_with_experts(args)
    with_experts = sum(pattern) + further * pattern[-1]  # further ones are like the last
    experts = args.moe_ffn_hidden_size * args.moe_router_topk if with_experts else 0
    experts += (args.moe_shared_expert_intermediate_size or 0) if with_experts else 0
    widths = (layers - with_experts) * args.ffn_hidden_size + with_experts * experts
    joints = further * (2 * args.hidden_size + 3)  # projection of state and embedding; norms
    logits = (1 + further) * args.padded_vocab_size
    per_token = 6 * (layers * attention + args.hidden_size * (widths * products + joints + logits))
    return float(batch_size * args.seq_length * per_token)

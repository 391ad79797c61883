"""Floating point operations of one iteration, counted as Megatron-LM counts them (matrix products
only)."""

from __future__ import annotations

import argparse


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
    if args.num_experts:
        shared = args.moe_shared_expert_intermediate_size or 0
        width = args.moe_ffn_hidden_size * args.moe_router_topk + shared
    else:
        width = args.ffn_hidden_size
    layer = attention + args.hidden_size * width * products
    per_token = 6 * (args.num_layers * layer + args.hidden_size * args.padded_vocab_size)
    return float(batch_size * args.seq_length * per_token)

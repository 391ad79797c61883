"""Rules on slices and the LM head: ``--dpp-slice-tokens``, ``--dpp-head-in-forward``."""

from __future__ import annotations

from typing import Any

from megatron.dpp.errors import require
from megatron.dpp.naming import flag_name
from megatron.dpp.schedule import in_bytes
from megatron.dpp.sim.slices import check_slice_tokens
from megatron.dpp_train.options.run_config import Settings

_REFUSED = {
    "context_parallel_size": (1, "keys would cross ranks and slices"),
    "mtp_num_layers": (None, "it predicts tokens of the next slice"),
    "multi_latent_attention": (False, "its keys would take ten times the memory"),
    "window_size": (None, "a slice attends to all keys before it"),
    "softmax_type": ("vanilla", "the kernels of slices know no further logits"),
    "qk_clip": (False, "it reads the scores of whole sequences"),
    "experimental_attention_variant": (None, "its attention is not plain causal attention"),
    "fp8_dot_product_attention": (False, "keys of earlier slices would have another scale"),
    "fp8_multi_head_attention": (False, "keys of earlier slices would have another scale"),
    "reset_attention_mask": (False, "a slice attends to all keys before it"),
    "fine_grained_activation_offloading": (False, "activations of slices stay on the device"),
}
"""Settings with the value that goes with slices, and the reason why no other does."""


def check_head(args: Settings) -> None:
    """Refuse a backward of the LM head in F where it would change numbers."""
    if args.dpp_head_in_forward != "on":
        return
    require(
        args.mtp_num_layers is None,
        f"--dpp-head-in-forward on: --mtp-num-layers {args.mtp_num_layers} runs the output layer "
        "several times: leave one of them out",
    )
    stages = args.pipeline_model_parallel_size * (args.virtual_pipeline_model_parallel_size or 1)
    require(
        stages > 1 or args.untie_embeddings_and_output_weights,
        "--dpp-head-in-forward on: in one stage the output layer's weight is the embedding's, and "
        "would get its gradients in another order: use --untie-embeddings-and-output-weights, or "
        "leave it out",
    )


def check_slices(args: Settings) -> None:
    """Derives ``slice_tokens``: tokens of a slice into which the trainer cuts sequences of unlike
    length, 0 for ``auto``; None where it cuts none. Those of one length are cut by the schedule.
    Derives ``holds_whole``: ``auto`` may run sequences whole.

    Raises:
        ConfigError: a setting that does not go with slices.
    """
    asked = args.dpp_slice_tokens
    what = f"--dpp-slice-tokens {asked}"
    args.slice_tokens, args.holds_whole = None, not in_bytes(args.dpp_activation_cap)
    require(
        asked == "off" or args.use_dpp or args.pipeline_model_parallel_size == 1,
        f"{what} needs the dynamic schedule: static ones run whole microbatches; add --use-dpp "
        "(train: leave --no-dpp out)",
    )
    if asked == "off" or not args.use_dpp:
        return
    for name, (usual, why) in _REFUSED.items():
        found = getattr(args, name)
        given = f"{flag_name(name)}{'' if found is True else f' {_as_given(found)}'}"
        require(found in (usual, None), f"{what} does not go with {given}: {why}")
    require(
        args.dpp_cuda_graphs != "on",
        f"{what} does not go with --dpp-cuda-graphs on: keys grow from slice to slice. Leave it "
        "out",
    )
    balancing = args.moe_router_load_balancing_type
    kinds = {balancing} if isinstance(balancing, str) else set(balancing or ())
    of_all = sorted(kinds & {"seq_aux_loss", "global_aux_loss"})
    require(
        not (args.num_experts and of_all),
        f"{what} does not go with --moe-router-load-balancing-type {' '.join(of_all)}, which needs "
        "all slices of a sequence; use aux_loss",
    )
    if args.variable_lengths:
        _check_unlike(args, what)
        args.slice_tokens = 0 if asked == "auto" else int(asked)
        if args.slice_tokens:
            check_slice_tokens(args.slice_tokens, args.length_multiple)


def _as_given(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


def _check_unlike(args: Settings, what: str) -> None:
    """Refuse what the plan of a batch with slices decides otherwise."""
    require(
        args.micro_batch_size == 1,
        f"{what} with --micro-batch-size {args.micro_batch_size}: a sequence that is cut has a row "
        "of its own; give --micro-batch-size 1",
    )
    given = dict(getattr(args, "given", {}))
    require(
        "packing_budget" not in given,
        f"{what} does not go with --packing-budget: rows of packed sequences have up to 1.5 slices",
    )
    require(
        args.dpp_length_buckets == "off",
        f"{what} does not go with --dpp-length-buckets {args.dpp_length_buckets}: slices have few "
        "lengths already",
    )
    shares_order = args.num_experts and args.expert_model_parallel_size > 1
    require(
        not shares_order or args.data_parallel_size == 1,
        f"{what} does not go with --expert-model-parallel-size {args.expert_model_parallel_size} "
        "over replicas of unlike lengths: they run one order, and would have other slices",
    )

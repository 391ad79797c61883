"""Rules of ``validate`` for mixtures of experts and multi-token prediction.

Most are megatron-core's own, which would raise them late in the start or in the first forward.
"""

from __future__ import annotations

import argparse
import importlib.util

from megatron.dpp.errors import ConfigError
from megatron.dpp.plan.layer_patterns import layers_with_experts

Args = argparse.Namespace


def check_experts(args: Args) -> None:
    """Check and derive what ``--num-experts`` asks for, in place.

    Raises:
        ConfigError: the first setting that cannot work.
    """
    args.num_experts = args.num_experts or None
    for name in ("moe_router_load_balancing_type", "moe_aux_loss_coeff"):
        value = getattr(args, name)
        if isinstance(value, list) and len(value) == 1:
            setattr(args, name, value[0])
    if not args.num_experts:
        _refuse(
            args.expert_model_parallel_size > 1,
            f"--expert-model-parallel-size {args.expert_model_parallel_size} needs --num-experts",
        )
        return
    if args.moe_ffn_hidden_size is None:
        args.moe_ffn_hidden_size = args.ffn_hidden_size
    _refuse(
        args.overlap_moe_expert_parallel_comm,
        "--overlap-moe-expert-parallel-comm is not supported here: it runs layers of two "
        "microbatches in turns, by a schedule of its own; leave it out",
    )
    _expert_layers(args)
    _router(args)
    _expert_layout(args)


def _expert_layers(args: Args) -> None:
    pattern = layers_with_experts(args)
    _refuse(
        len(pattern) != args.num_layers or not set(pattern) <= {0, 1},
        f"--moe-layer-freq {pattern} must have a 0 or 1 for each of --num-layers {args.num_layers}",
    )
    _refuse(
        args.add_bias_linear
        and args.transformer_impl == "local"
        and args.expert_model_parallel_size == 1,
        "--num-experts with --transformer-impl local: megatron-core's own linear layers cannot add "
        "an expert's bias; add --disable-bias-linear",
    )
    _refuse(
        args.bias_gelu_fusion and not args.swiglu,
        "--num-experts: experts cannot fuse bias and GeLU; add --no-bias-gelu-fusion, "
        "--disable-bias-linear or --swiglu",
    )
    _refuse(
        args.add_bias_linear and args.moe_shared_expert_intermediate_size,
        "--moe-shared-expert-intermediate-size: shared experts have no bias; add "
        "--disable-bias-linear",
    )


def _router(args: Args) -> None:
    kind, coefficient, topk = (
        args.moe_router_load_balancing_type,
        args.moe_aux_loss_coeff,
        args.moe_router_topk,
    )
    _refuse(
        not 1 <= topk <= args.num_experts,
        f"--moe-router-topk {topk} must be between 1 and --num-experts {args.num_experts}",
    )
    _refuse(
        topk == 1
        and args.moe_router_score_function == "softmax"
        and not args.moe_router_pre_softmax
        and kind != "sinkhorn",
        "--moe-router-topk 1 needs --moe-router-pre-softmax: a softmax over one expert has no "
        "gradient",
    )
    _refuse(
        kind == "sinkhorn" and coefficient,
        f"--moe-router-load-balancing-type sinkhorn has no auxiliary loss: --moe-aux-loss-coeff "
        f"{coefficient} must be 0",
    )
    kinds, coefficients = (
        len(value) if isinstance(value, list) else 1 for value in (kind, coefficient)
    )
    _refuse(
        kinds != coefficients,
        f"--moe-router-load-balancing-type names {kinds} losses and --moe-aux-loss-coeff "
        f"{coefficients} weights: give one for each",
    )


def _expert_layout(args: Args) -> None:
    _refuse(
        args.moe_token_dispatcher_type == "flex" and importlib.util.find_spec("deep_ep") is None,
        "--moe-token-dispatcher-type flex needs DeepEP, which is not installed; use alltoall or "
        "allgather",
    )
    tensor, pipeline = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    expert, expert_tensor = args.expert_model_parallel_size, args.expert_tensor_parallel_size
    _refuse(
        args.num_experts % expert,
        f"--num-experts {args.num_experts} is not a multiple of --expert-model-parallel-size "
        f"{expert}",
    )
    model = expert * expert_tensor * pipeline
    _refuse(
        args.world_size % model,
        f"{args.world_size} processes cannot hold --expert-model-parallel-size {expert} x "
        f"--expert-tensor-parallel-size {expert_tensor} x --pipeline-model-parallel-size "
        f"{pipeline}: start a multiple of {model}",
    )
    _refuse(
        tensor > 1 and not args.sequence_parallel,
        f"--num-experts with --tensor-model-parallel-size {tensor} needs --sequence-parallel",
    )
    _refuse(
        args.add_bias_linear and expert_tensor > 1,
        f"--num-experts with --expert-tensor-parallel-size {expert_tensor} (by default the "
        "tensor-parallel size): split experts have no bias; add --disable-bias-linear, or "
        "--expert-tensor-parallel-size 1",
    )
    _refuse(
        expert == 1 and expert_tensor < tensor,
        f"--expert-tensor-parallel-size {expert_tensor} below --tensor-model-parallel-size "
        f"{tensor} needs --expert-model-parallel-size of at least 2: without, megatron-core leaves "
        "the experts' gradients of the tensor-parallel ranks apart",
    )
    if args.use_dpp:
        _refuse_order(args)


def _refuse_order(args: Args) -> None:
    """Refuse experts whose collectives span data-parallel replicas."""
    kinds = args.moe_router_load_balancing_type
    refused = {
        "--expert-model-parallel-size above 1": args.expert_model_parallel_size > 1,
        "--expert-tensor-parallel-size above --tensor-model-parallel-size": (
            args.expert_tensor_parallel_size > args.tensor_model_parallel_size
        ),
        "--moe-router-load-balancing-type global_aux_loss with data-parallel replicas": (
            "global_aux_loss" in ([kinds] if isinstance(kinds, str) else kinds)
            and args.data_parallel_size > 1
        ),
    }
    for what, asked in refused.items():
        _refuse(
            asked,
            f"{what} needs the same order of tasks on all replicas, which --use-dpp does not "
            "promise; leave one of them out",
        )


def check_prediction(args: Args) -> None:
    """Check what ``--mtp-num-layers`` asks for.

    Raises:
        ConfigError: the first setting that cannot work.
    """
    args.mtp_num_layers = args.mtp_num_layers or None
    if args.mtp_num_layers is None:
        return
    _refuse(
        args.position_embedding_type not in ("rope", "none"),
        f"--mtp-num-layers does not go with --position-embedding-type "
        f"{args.position_embedding_type}; use rope or none",
    )
    _refuse(
        args.pipeline_model_parallel_layout,
        "--mtp-num-layers puts its layers on the last stage; it does not go with "
        "--pipeline-model-parallel-layout",
    )
    _refuse(
        args.pipeline_model_parallel_size > 1
        and not args.untie_embeddings_and_output_weights
        and args.ckpt_format != "torch"
        and (args.save or args.load),
        "--mtp-num-layers with several stages: megatron-core cannot write or read the tied "
        f"embeddings of such a model with --ckpt-format {args.ckpt_format}; add "
        "--untie-embeddings-and-output-weights, or --ckpt-format torch",
    )


def _refuse(condition: object, message: str) -> None:
    if condition:
        raise ConfigError(message)

"""Rules of ``validate`` for mixtures of experts and multi-token prediction.

Most are megatron-core's own, which would raise them late in the start or in the first forward. Each
raises ConfigError for the first setting that cannot work.
"""

from __future__ import annotations

import math

from megatron.dpp.errors import require, require_multiple, require_value
from megatron.dpp_train.options.layer_patterns import layers_with_experts
from megatron.dpp_train.options.run_config import Settings


def check_experts(args: Settings) -> None:
    """Check and derive what ``--num-experts`` asks for, in place."""
    args.num_experts = args.num_experts or None
    for name in ("moe_router_load_balancing_type", "moe_aux_loss_coeff"):
        value = getattr(args, name)
        if isinstance(value, list) and len(value) == 1:
            setattr(args, name, value[0])
    if not args.num_experts:
        require(
            args.expert_model_parallel_size <= 1,
            f"--expert-model-parallel-size {args.expert_model_parallel_size} needs --num-experts",
        )
        return
    if args.moe_ffn_hidden_size is None:
        args.moe_ffn_hidden_size = args.ffn_hidden_size
    require(
        not args.overlap_moe_expert_parallel_comm,
        "--overlap-moe-expert-parallel-comm is not supported here: it runs layers of two "
        "microbatches in turns, by a schedule of its own; leave it out",
    )
    _expert_layers(args)
    _router(args)
    _expert_layout(args)


def _expert_layers(args: Settings) -> None:
    pattern = layers_with_experts(args)
    require(
        len(pattern) == args.num_layers and set(pattern) <= {0, 1},
        f"--moe-layer-freq {pattern} must have a 0 or 1 for each of --num-layers {args.num_layers}",
    )
    require(
        not (args.moe_grouped_gemm and args.add_bias_linear and args.transformer_impl == "local"),
        "--moe-grouped-gemm with --transformer-impl local: grouped products add no bias; add "
        "--disable-bias-linear",
    )
    require(
        not args.bias_gelu_fusion or args.swiglu,
        "--num-experts: experts cannot fuse bias and GeLU; add --no-bias-gelu-fusion, "
        "--disable-bias-linear or --swiglu",
    )
    require(
        not args.add_bias_linear or not args.moe_shared_expert_intermediate_size,
        "--moe-shared-expert-intermediate-size: shared experts have no bias; add "
        "--disable-bias-linear",
    )


def _router(args: Settings) -> None:
    kind, coefficient, topk = (
        args.moe_router_load_balancing_type,
        args.moe_aux_loss_coeff,
        args.moe_router_topk,
    )
    within = f"between 1 and --num-experts {args.num_experts}"
    require_value(args, "moe_router_topk", 1 <= topk <= (args.num_experts or 0), within)
    require(
        topk != 1
        or args.moe_router_score_function != "softmax"
        or args.moe_router_pre_softmax
        or kind == "sinkhorn",
        "--moe-router-topk 1 needs --moe-router-pre-softmax: a softmax over one expert has no "
        "gradient",
    )
    require(
        kind != "sinkhorn" or not coefficient,
        f"--moe-router-load-balancing-type sinkhorn has no auxiliary loss: --moe-aux-loss-coeff "
        f"{coefficient} must be 0",
    )
    kinds, coefficients = (
        len(value) if isinstance(value, list) else 1 for value in (kind, coefficient)
    )
    require(
        kinds == coefficients,
        f"--moe-router-load-balancing-type names {kinds} losses and --moe-aux-loss-coeff "
        f"{coefficients} weights: give one for each",
    )


def _expert_layout(args: Settings) -> None:
    tensor, pipeline = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    expert, expert_tensor = args.expert_model_parallel_size, args.expert_tensor_parallel_size
    require_value(args, "expert_model_parallel_size", expert >= 1, "at least 1")
    require_value(args, "expert_tensor_parallel_size", expert_tensor >= 1, "at least 1")
    require_multiple(args, "num_experts", "expert_model_parallel_size")
    model = expert * expert_tensor * pipeline
    require(
        args.world_size % model == 0,
        f"{args.world_size} processes cannot hold --expert-model-parallel-size {expert} x "
        f"--expert-tensor-parallel-size {expert_tensor} x --pipeline-model-parallel-size "
        f"{pipeline}: start a multiple of {model}",
    )
    require(
        tensor <= 1 or args.sequence_parallel,
        f"--num-experts with --tensor-model-parallel-size {tensor} needs --sequence-parallel",
    )
    require(
        not args.add_bias_linear or expert_tensor <= 1,
        f"--num-experts with --expert-tensor-parallel-size {expert_tensor} (by default the "
        "tensor-parallel size): split experts have no bias; add --disable-bias-linear, or "
        "--expert-tensor-parallel-size 1",
    )
    require(
        expert != 1 or expert_tensor >= tensor,
        f"--expert-tensor-parallel-size {expert_tensor} below --tensor-model-parallel-size "
        f"{tensor} needs --expert-model-parallel-size of at least 2: without, megatron-core leaves "
        "the experts' gradients of the tensor-parallel ranks apart",
    )


def replicas_in_step(args: Settings) -> int:
    """Data-parallel replicas that run their tasks in one order with ``--use-dpp``, as experts or
    ``global_aux_loss`` communicate inside of tasks. Their ranks are neighbours.
    """
    if not args.num_experts:
        return 1
    if "global_aux_loss" in args.moe_router_load_balancing_type:
        return int(args.data_parallel_size)
    shared: int = args.tensor_model_parallel_size * args.context_parallel_size
    of_experts: int = args.expert_model_parallel_size * args.expert_tensor_parallel_size
    return math.lcm(shared, of_experts) // shared


def check_prediction(args: Settings) -> None:
    """Check multi-token prediction."""
    args.mtp_num_layers = args.mtp_num_layers or None
    if args.mtp_num_layers is None:
        return
    require(
        args.position_embedding_type in ("rope", "none"),
        f"--mtp-num-layers does not go with --position-embedding-type "
        f"{args.position_embedding_type}; use rope or none",
    )
    require(
        not args.pipeline_model_parallel_layout,
        "--mtp-num-layers puts its layers on the last stage; it does not go with "
        "--pipeline-model-parallel-layout",
    )
    require(
        args.pipeline_model_parallel_size <= 1
        or args.untie_embeddings_and_output_weights
        or args.ckpt_format == "torch"
        or (not args.save and not args.load),
        "--mtp-num-layers with several stages: megatron-core cannot write or read the tied "
        f"embeddings of such a model with --ckpt-format {args.ckpt_format}; add "
        "--untie-embeddings-and-output-weights, or --ckpt-format torch",
    )

"""Shapes of a run and of its model, from checked training flags."""

from __future__ import annotations

import dataclasses

from megatron.dpp.config import EIGHT_BIT_RECIPES, ENGINE_ROWS
from megatron.dpp.errors import ConfigError, require
from megatron.dpp.naming import flag_name
from megatron.dpp.schedule import HOLDS_ALL
from megatron.dpp_train.cost.device import Device
from megatron.dpp_train.cost.shape import ExpertShape, ModelShape, Precision, RunSchedule, RunShape
from megatron.dpp_train.options.layer_patterns import layers_with_experts, layout_stages
from megatron.dpp_train.options.run_config import Settings


def shape_of(
    args: Settings, *, on_gpu: bool, arch: str = "gpt", per_node: int | None = None
) -> RunShape:
    """The shape of a run from flags that ``preflight`` has checked.

    Args:
        per_node: ranks of each node; all of them by default.

    Raises:
        ConfigError: a kind of model that is not estimated.
    """
    for name in ("multi_latent_attention", "mtp_num_layers"):
        if getattr(args, name):
            raise ConfigError(f"{flag_name(name)}: models with it are not estimated")
    replicas = args.micro_batch_size * args.data_parallel_size
    shard, instances = _sharding(args)
    model = model_of(args, arch=arch)
    local = args.transformer_impl == "local"
    of_engine = args.use_torch_fsdp2 or args.deepspeed_zero_stage  # they keep the sums
    shape = RunShape(
        model=dataclasses.replace(model, flash=not local or on_gpu),
        layers=layers_of(args),
        tensor=args.tensor_model_parallel_size,
        pipeline=args.pipeline_model_parallel_size,
        data=args.data_parallel_size,
        context=args.context_parallel_size,
        engine=not local,
        adds_gradients=on_gpu and not (args.gradient_accumulation_fusion or of_engine),
        gathers_keys=local,
        sequence_parallel=args.sequence_parallel,
        per_node=per_node or args.world_size,
        mapped=args.use_tp_pp_dp_mapping,
        micro_batch=args.micro_batch_size,
        num_microbatches=args.global_batch_size // replicas,
        precision=_precision(args),
        shard=shard,
        instances=instances,
        recompute=args.recompute_granularity or "none",
        recompute_num_layers=args.recompute_num_layers or 1,
        schedule=_schedule(args, on_gpu=on_gpu),
        expert=args.expert_model_parallel_size,
        expert_tensor=args.expert_tensor_parallel_size or 1,
    )
    whole, cut = (args.use_dpp and _head_in_forward(args, cut=each) for each in (False, True))
    schedule = dataclasses.replace(
        shape.schedule,
        head_in_forward=cut if shape.num_slices > 1 else whole,
        head_when_cut=cut,
    )
    return dataclasses.replace(shape, schedule=schedule)


def check_format(args: Settings, device: Device) -> None:
    """Refuse 8-bit layers on a device without matrix units for them (ConfigError)."""
    require(
        not args.fp8 or device.fp8,
        f"--fp8-format {args.fp8}: {device.name} has no 8-bit matrix units, which GPUs have from "
        "Ada and Hopper on (--gpu H100 plans for one); leave it out",
    )


def stage_shape_of(args: Settings) -> RunShape:
    """One microbatch of the model on a pipeline rank that would hold all layers, for planning.

    Data-parallel sharding and recompute are left out.
    """
    return RunShape(
        model=model_of(args),
        layers=(args.num_layers,),
        tensor=args.tensor_model_parallel_size,
        sequence_parallel=args.sequence_parallel,
        micro_batch=args.micro_batch_size,
        expert=args.expert_model_parallel_size,
        expert_tensor=args.expert_tensor_parallel_size or 1,
    )


def slices_of(
    args: Settings, num_microbatches: int, *, num_chunks: int = 0, cap: str = ""
) -> list[RunShape]:
    """The slices of one microbatch, as training cuts it, for planning; itself where it cuts none.

    Args:
        num_chunks, cap: by which ``auto`` weighs, in the place of the flags' own.
    """
    ranks, one = args.pipeline_model_parallel_size, stage_shape_of(args)
    schedule = _schedule(args, on_gpu=False)
    schedule = dataclasses.replace(
        schedule, head_in_forward=_head_in_forward(args, cut=True), cap=cap or schedule.cap
    )
    chunks = num_chunks or args.virtual_pipeline_model_parallel_size or 1
    units = dataclasses.replace(
        one, pipeline=ranks, layers=(1,) * ranks * chunks, num_microbatches=num_microbatches,
        schedule=schedule,
    ).slices  # fmt: skip
    return units if len(units) > 1 else [one]


def model_of(args: Settings, *, arch: str = "gpt") -> ModelShape:
    """The model alone, with flash attention."""
    heads = args.num_attention_heads
    pattern = layers_with_experts(args) if args.num_experts else []
    learned = args.position_embedding_type == "learned_absolute"
    return ModelShape(
        arch=arch,
        hidden_size=args.hidden_size,
        seq_length=args.seq_length,
        vocab_size=args.padded_vocab_size,
        num_heads=heads,
        num_groups=args.num_query_groups if args.group_query_attention else heads,
        head_size=args.kv_channels,
        ffn_hidden_size=args.ffn_hidden_size,
        gated=bool(args.swiglu or args.quick_geglu or args.geglu),
        num_positions=args.max_position_embeddings if learned else 0,
        rotary=args.position_embedding_type in ("rope", "yarn"),
        tied=not args.untie_embeddings_and_output_weights,
        linear_bias=args.add_bias_linear,
        qkv_bias=args.add_qkv_bias,
        norm_vectors=1 if args.normalization == "RMSNorm" else 2,
        binary_head=arch == "bert" and args.bert_binary_head,
        fused_loss=args.cross_entropy_loss_fusion,
        hidden_dropout=args.hidden_dropout > 0,
        attention_dropout=args.attention_dropout > 0,
        experts=_experts(args),
        dense=tuple(at for at, with_experts in enumerate(pattern) if not with_experts),
        qk_norm=args.qk_layernorm,
        qk_norm_over_heads=args.qk_norm_over_heads,
        softmax_offsets=args.softmax_type == "learnable",
        layer_norms=2 * args.input_norms + 2 * args.output_norms,
    )


def _experts(args: Settings) -> ExpertShape | None:
    if not args.num_experts:
        return None
    return ExpertShape(
        number=args.num_experts,
        topk=args.moe_router_topk,
        ffn_hidden_size=args.moe_ffn_hidden_size or args.ffn_hidden_size,
        shared=args.moe_shared_expert_intermediate_size or 0,
    )


def _schedule(args: Settings, *, on_gpu: bool) -> RunSchedule:
    graphs = args.dpp_cuda_graphs if on_gpu and is_captured(args) else "off"
    if not args.use_dpp:
        return RunSchedule(cuda_graphs=graphs, slice_tokens=args.dpp_slice_tokens)
    return RunSchedule(
        dynamic=True,
        policy=args.dpp_policy,
        cap=args.dpp_activation_cap,
        split_backward=args.splits_backward and not args.fp8,
        cuda_graphs=graphs,
        slice_tokens=args.dpp_slice_tokens,
    )


def _head_in_forward(args: Settings, *, cut: bool) -> bool:
    """F runs the backward of the LM head: asked for, or as ``auto`` decides."""
    if args.dpp_head_in_forward == "auto" and (cut or args.dpp_policy in HOLDS_ALL):
        stages = len(layers_of(args))
        return bool(stages > 1 or args.untie_embeddings_and_output_weights)
    return bool(args.dpp_head_in_forward == "on")


def is_captured(args: Settings) -> bool:
    """``core.graphs`` can capture this run's chunks as CUDA graphs."""
    engine = args.transformer_impl == "transformer_engine"
    obstacles = (
        args.overlap_param_gather,
        args.deepspeed_zero_stage,
        args.context_parallel_size > 1,
        args.num_experts,
        args.dpp_slice_tokens != "off",
        engine and (args.tensor_model_parallel_size > 1 or args.seq_length % ENGINE_ROWS),
        args.fp8 and (args.fp8_recipe not in EIGHT_BIT_RECIPES or args.fp8_param_gather),
    )
    return not any(obstacles)


def _precision(args: Settings) -> Precision:
    half = args.fp16 or args.bf16
    wide = not half or (args.accumulate_allreduce_grads_in_fp32 and not args.deepspeed_zero_stage)
    momentum = 4 if args.sgd_momentum else 0
    moments = 8 if args.optimizer == "adam" else momentum  # each moment in fp32
    return Precision(
        element=2 if half else 4,
        gradient=4 if wide else 2,
        moments=moments,
        copies=2 if args.fp8 and not args.fp8_param_gather else 0,  # by rows and by columns
        eight_bit=bool(args.fp8),
    )


def _sharding(args: Settings) -> tuple[str, int]:
    """The kind of data-parallel sharding, and the groups that share an optimizer each."""
    kinds = ("none", "optimizer", "gradients", "parameters")
    stage = int(args.use_distributed_optimizer)
    instances = args.num_distributed_optimizer_instances if stage else 1
    if args.use_torch_fsdp2:
        stage = 3 if args.torch_fsdp2_reshard_after_forward else 2
    return kinds[args.deepspeed_zero_stage or stage], instances


def layers_of(args: Settings) -> tuple[int, ...]:
    """Layers of each virtual stage, as megatron-core distributes them."""
    pipeline = args.pipeline_model_parallel_size
    chunks = args.virtual_pipeline_model_parallel_size or 1
    if args.pipeline_model_parallel_layout is not None:
        parts = layout_stages(args.pipeline_model_parallel_layout)
        return tuple(stage.count("t") for stage in parts)
    ends = {
        0: args.decoder_first_pipeline_num_layers,
        pipeline - 1: args.decoder_last_pipeline_num_layers,
    }
    given = {rank: count for rank, count in ends.items() if count is not None}
    embedding = int(args.account_for_embedding_in_pipeline_split)
    loss = int(args.account_for_loss_in_pipeline_split)
    rest = args.num_layers + embedding + loss - sum(given.values())
    inner = pipeline - len(given)
    per_rank = [given.get(rank, rest // max(inner, 1)) for rank in range(pipeline)]
    stages = [per_rank[stage % pipeline] // chunks for stage in range(pipeline * chunks)]
    stages[0] -= embedding
    stages[-1] -= loss
    return tuple(stages)

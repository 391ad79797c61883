"""A section of the settings, which ``cli.write_sections`` writes."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.dpp_train.options.section import UNSET, Section


class Parallel(Section):
    """Parallel sizes, the layout of layers, and the reduction of gradients."""

    distributed_backend: str = "nccl"
    distributed_timeout_minutes: int = 10
    num_layers_per_virtual_pipeline_stage: int | None = None
    num_virtual_stages_per_pipeline_rank: int | None = None
    pipeline_model_parallel_layout: str | None = None
    decoder_first_pipeline_num_layers: int | None = None
    decoder_last_pipeline_num_layers: int | None = None
    overlap_p2p_comm: bool = True
    overlap_grad_reduce: bool = False
    align_grad_reduce: bool = True
    ddp_num_buckets: int | None = None
    use_torch_fsdp2: bool = False
    torch_fsdp2_reshard_after_forward: bool = True
    deepspeed_zero_stage: int | None = None
    ddp_bucket_size: int | None = None
    ddp_pad_buckets_for_high_nccl_busbw: bool = False
    ddp_reduce_scatter_with_fp32_accumulation: bool = False
    ddp_average_in_collective: bool = False
    align_param_gather: bool = True
    scatter_gather_tensors_in_pipeline: bool = True
    gradient_reduce_div_fusion: bool = True
    cp_comm_type: Sequence[str] = ("p2p",)
    use_tp_pp_dp_mapping: bool = False
    enable_gloo_process_groups: bool = True
    nccl_communicator_config_path: str | None = None
    high_priority_stream_groups: Sequence[str] = ()
    local_rank: int | None = None
    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_comm_backend: str | None = None
    pipeline_model_parallel_size: int = 1
    sequence_parallel: bool = False
    context_parallel_size: int = 1
    hierarchical_context_parallel_sizes: Sequence[int] | None = None
    hybrid_context_parallel: bool = False
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int = UNSET
    async_tensor_model_parallel_allreduce: bool = True
    tp_comm_overlap: bool = False
    tp_comm_bulk_wgrad: bool = True
    tp_comm_bulk_dgrad: bool = True
    tp_comm_overlap_ag: bool = True
    tp_comm_overlap_rs: bool = True
    tp_comm_overlap_rs_dgrad: bool = False
    tp_comm_split_ag: bool = True
    tp_comm_atomic_ag: bool = False
    tp_comm_split_rs: bool = True
    tp_comm_atomic_rs: bool = False
    tp_comm_overlap_disable_qkv: bool = False
    tp_comm_overlap_disable_fc1: bool = False
    tp_comm_bootstrap_backend: str = "nccl"
    overlap_moe_expert_parallel_comm: bool = False
    use_ring_exchange_p2p: bool = False
    defer_embedding_wgrad_compute: bool = False
    overlap_p2p_comm_warmup_flush: bool = False
    mtp_standalone: bool = False
    mtp_num_layers: int | None = None
    mtp_loss_scaling_factor: float = 0.1
    account_for_embedding_in_pipeline_split: bool = False
    account_for_loss_in_pipeline_split: bool = False
    tp_only_amax_red: bool = False
    inference_fuse_tp_communication: bool = False
    num_distributed_optimizer_instances: int = 1
    fp8_param_gather: bool = False
    use_megatron_fsdp: bool = False
    use_custom_fsdp: bool = False
    data_parallel_sharding_strategy: str = "no_shard"
    suggested_communication_unit_size: int | None = None
    preserve_fp32_weights: bool = True
    keep_fp8_transpose_cache: bool = False
    fsdp_double_buffer: bool = False
    outer_dp_sharding_strategy: str = "no_shard"
    disable_symmetric_registration: bool = False
    fsdp_manual_registration: bool = False
    world_size: int = UNSET
    data_parallel_size: int = UNSET
    virtual_pipeline_model_parallel_size: int | None = None

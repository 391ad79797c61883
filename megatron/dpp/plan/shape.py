"""What a run is, as far as its size in memory, time and traffic depends on it.

A :class:`RunShape` is made from checked training flags by :func:`shape_of`; the rest of the package
computes from it and reads no flags. It holds the model, how it is cut over ranks, and what each
number is stored in.
"""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import dataclass
from typing import Any

from megatron.dpp.config import ENGINE_ROWS
from megatron.dpp.errors import ConfigError
from megatron.dpp.plan.layer_patterns import layout_stages
from megatron.dpp.plan.planner import Layout


@dataclass(frozen=True, kw_only=True)
class RunShape:
    """A model and its layout. Names are those of Megatron's flags.

    Args:
        layers: transformer layers of each virtual stage, stage ``chunk * pipeline + rank``.
        vocab_size: rows of the embedding, padding included.
        num_positions: rows of the learned position embedding; 0 without one.
        rotary: queries and keys are rotated, so they are kept beside the values they came with.
        norm_vectors: parameters of a norm in units of the hidden size: 2 LayerNorm, 1 RMSNorm.
        element_bytes: of a parameter and an activation: 4 in fp32, else 2.
        gradient_bytes: of an element of the gradient buffer.
        moment_bytes: what the optimizer keeps of a parameter beside its fp32 copy.
        shard: what data-parallel ranks share out: ``none``, ``optimizer`` (stage 1 of ZeRO),
            ``gradients`` (2) or ``parameters`` (3).
        instances: groups of replicas that share out an optimizer each, with ``optimizer``.
        recompute: ``none``, ``selective`` (the core of attention) or ``full``.
        flash: attention without its s*s matrices.
        fused_loss: ``--cross-entropy-loss-fusion``.
        dynamic: ``--use-dpp``, whose ``policy`` may be Megatron's own order.
        split_backward: weight gradients are tasks of their own.
        cuda_graphs: ``--dpp-cuda-graphs``; ``off`` where there is no GPU or a chunk cannot be
            captured, whatever is recomputed or shared out.
        per_node: ranks of one node.
        mapped: ``--use-tp-pp-dp-mapping``: the pipeline's stages are nearer than the replicas.
    """

    arch: str
    layers: tuple[int, ...]
    hidden_size: int
    num_heads: int
    num_groups: int
    head_size: int
    ffn_hidden_size: int
    gated: bool
    seq_length: int
    vocab_size: int
    num_positions: int
    rotary: bool
    tied: bool
    linear_bias: bool
    qkv_bias: bool
    norm_vectors: int
    binary_head: bool
    tensor: int
    pipeline: int
    data: int
    context: int
    sequence_parallel: bool
    micro_batch: int
    num_microbatches: int
    element_bytes: int
    gradient_bytes: int
    moment_bytes: int
    shard: str
    instances: int
    recompute: str
    recompute_num_layers: int
    flash: bool
    fused_loss: bool
    hidden_dropout: bool
    attention_dropout: bool
    dynamic: bool
    policy: str
    cap: str
    split_backward: bool
    cuda_graphs: str
    per_node: int
    mapped: bool

    @property
    def graphs(self) -> str:
        """Whether chunks are captured: ``on``, ``off``, or ``auto`` where that depends on times."""
        if self.shard in ("gradients", "parameters"):
            return "off"
        never = not self.dynamic or self.recompute == "full"
        return "off" if self.cuda_graphs == "auto" and never else self.cuda_graphs

    @property
    def num_layers(self) -> int:
        """Of the whole model."""
        return sum(self.layers)

    @property
    def chunks(self) -> int:
        """Virtual stages of a pipeline rank."""
        return len(self.layers) // self.pipeline

    @property
    def layout(self) -> Layout:
        """The stages as the simulator takes them."""
        return Layout(self.pipeline, self.layers)

    @property
    def world_size(self) -> int:
        """Ranks of the run."""
        return self.tensor * self.pipeline * self.data * self.context

    @property
    def replicas(self) -> int:
        """Ranks that reduce a gradient between them."""
        return self.data * self.context

    @property
    def sharers(self) -> int:
        """Those of them that share out an optimizer's state."""
        if self.shard == "optimizer":
            return self.replicas // self.instances
        return 1 if self.shard == "none" else self.replicas

    @property
    def tokens(self) -> int:
        """Of one microbatch on one rank."""
        return self.micro_batch * self.seq_length // self.context

    @property
    def global_batch(self) -> int:
        """Samples of an iteration."""
        return self.micro_batch * self.num_microbatches * self.data

    @property
    def elements(self) -> int:
        """Of one microbatch's hidden state where tensor-parallel ranks hold all of it: s*b*h."""
        return self.tokens * self.hidden_size

    @property
    def outside(self) -> float:
        """The same outside the tensor-parallel regions: sequence parallelism shares it out."""
        return self.elements / (self.tensor if self.sequence_parallel else 1)

    @property
    def queries(self) -> int:
        """Width of all heads' queries."""
        return self.num_heads * self.head_size

    @property
    def keys(self) -> int:
        """Width of all groups' keys; as much again for the values."""
        return self.num_groups * self.head_size

    @property
    def tensor_per_node(self) -> int:
        """Ranks of a tensor-parallel group that share a node, where these are fewest."""
        return self._on_a_node(self.tensor, 1)

    @property
    def replicas_per_node(self) -> int:
        """Ranks of a group that reduces gradients that share a node, where these are fewest."""
        inner = self.tensor * (self.pipeline if self.mapped else 1)
        return self._on_a_node(self.replicas, inner)

    @property
    def pipeline_per_node(self) -> int:
        """Stages of a pipeline that share a node, where these are fewest; megatron-core lays it
        across nodes last."""
        inner = self.tensor * self.context * (1 if self.mapped else self.data)
        return self._on_a_node(self.pipeline, inner)

    def _on_a_node(self, size: int, stride: int) -> int:
        """The least that a node has of a group, of all groups of ``size`` ranks ``stride`` apart:
        where they do not lie evenly, the slowest is waited for."""
        node, block = self.per_node, size * stride
        whole = node % stride == 0 and (node % block == 0 or block % node == 0)
        if whole or stride % node == 0:  # nearly always, and ``auto`` asks thousands of times
            return max(1, min(size, node // stride))
        starts = range(0, self.world_size, block)
        firsts = {(start + lane) % node for start in starts for lane in range(stride)}
        members = range(0, block, stride)
        return min(
            count
            for first in firsts
            for count in Counter((first + each) // node for each in members).values()
        )


def shape_of(
    args: argparse.Namespace, *, on_gpu: bool, arch: str = "gpt", per_node: int | None = None
) -> RunShape:
    """The shape of a run from flags that ``train.preflight`` has checked.

    Args:
        per_node: ranks of each node; all of them by default.

    Raises:
        ConfigError: a kind of model that is not estimated.
    """
    _refuse_what_is_not_estimated(args)
    replicas = args.micro_batch_size * args.data_parallel_size
    local = args.transformer_impl == "local"
    return RunShape(
        arch=arch,
        layers=_layers(args),
        hidden_size=args.hidden_size,
        num_heads=args.num_attention_heads,
        num_groups=args.num_query_groups
        if args.group_query_attention
        else args.num_attention_heads,
        head_size=args.kv_channels,
        ffn_hidden_size=args.ffn_hidden_size,
        gated=bool(args.swiglu or args.quick_geglu),
        seq_length=args.seq_length,
        vocab_size=args.padded_vocab_size,
        num_positions=args.max_position_embeddings
        if args.position_embedding_type == "learned_absolute"
        else 0,
        rotary=args.position_embedding_type == "rope",
        tied=not args.untie_embeddings_and_output_weights,
        linear_bias=args.add_bias_linear,
        qkv_bias=args.add_qkv_bias,
        norm_vectors=1 if args.normalization == "RMSNorm" else 2,
        binary_head=arch == "bert" and args.bert_binary_head,
        tensor=args.tensor_model_parallel_size,
        pipeline=args.pipeline_model_parallel_size,
        data=args.data_parallel_size,
        context=args.context_parallel_size,
        sequence_parallel=args.sequence_parallel,
        micro_batch=args.micro_batch_size,
        num_microbatches=args.global_batch_size // replicas,
        **_numbers(args),
        recompute=args.recompute_granularity or "none",
        recompute_num_layers=args.recompute_num_layers or 1,
        flash=not local or on_gpu,
        fused_loss=args.cross_entropy_loss_fusion,
        hidden_dropout=args.hidden_dropout > 0,
        attention_dropout=args.attention_dropout > 0,
        dynamic=args.use_dpp,
        policy=args.dpp_policy if args.use_dpp else "megatron",
        cap=args.dpp_activation_cap if args.use_dpp else "megatron",
        split_backward=args.use_dpp and args.dpp_split_backward,
        cuda_graphs=args.dpp_cuda_graphs if on_gpu and _captured(args) else "off",
        per_node=per_node or args.world_size,
        mapped=args.use_tp_pp_dp_mapping,
    )


def _refuse_what_is_not_estimated(args: argparse.Namespace) -> None:
    for flag, given in {
        "--num-experts": args.num_experts,
        "--multi-latent-attention": args.multi_latent_attention,
        "--mtp-num-layers": args.mtp_num_layers,
    }.items():
        if given:
            raise ConfigError(f"{flag}: models with it are not estimated")


def _captured(args: argparse.Namespace) -> bool:
    """Whether chunks can be captured as CUDA graphs, as ``mcore.graphs`` has it."""
    engine = args.transformer_impl == "transformer_engine"
    ways = (
        args.overlap_param_gather,
        args.deepspeed_zero_stage,
        args.context_parallel_size > 1,
        engine and (args.tensor_model_parallel_size > 1 or args.seq_length % ENGINE_ROWS),
    )
    return not any(ways)


def _numbers(args: argparse.Namespace) -> dict[str, Any]:
    half = args.fp16 or args.bf16
    wide = not half or args.accumulate_allreduce_grads_in_fp32
    shard = "optimizer" if args.use_distributed_optimizer else "none"
    instances = args.num_distributed_optimizer_instances if shard == "optimizer" else 1
    if args.use_torch_fsdp2:
        shard = "parameters" if args.torch_fsdp2_reshard_after_forward else "gradients"
        wide = not half
    if args.deepspeed_zero_stage:
        shard = ("optimizer", "gradients", "parameters")[args.deepspeed_zero_stage - 1]
        wide = not half
    return {
        "element_bytes": 2 if half else 4,
        "gradient_bytes": 4 if wide else 2,
        "moment_bytes": _moment_bytes(args),
        "shard": shard,
        "instances": instances,
    }


def _moment_bytes(args: argparse.Namespace) -> int:
    """Adam's two moments, or the momentum of gradient descent, each in fp32."""
    if args.optimizer == "adam":
        return 8
    return 4 if args.sgd_momentum else 0


def _layers(args: argparse.Namespace) -> tuple[int, ...]:
    """Layers of each virtual stage, as megatron-core deals them out."""
    pipeline = args.pipeline_model_parallel_size
    chunks = args.virtual_pipeline_model_parallel_size or 1
    if args.pipeline_model_parallel_layout is not None:
        parts = layout_stages(args.pipeline_model_parallel_layout)
        return tuple(stage.count("t") for stage in parts)
    first = args.decoder_first_pipeline_num_layers
    last = args.decoder_last_pipeline_num_layers
    per_rank = [0] * pipeline
    inner = list(range(pipeline))
    for rank, given in ((0, first), (pipeline - 1, last)):
        if given is not None:
            per_rank[rank] = given
            inner.remove(rank)
    standalone = args.account_for_embedding_in_pipeline_split
    standalone += args.account_for_loss_in_pipeline_split
    rest = args.num_layers + standalone - sum(per_rank)
    for rank in inner:
        per_rank[rank] = rest // len(inner)
    stages = [per_rank[s % pipeline] // chunks for s in range(pipeline * chunks)]
    stages[0] -= args.account_for_embedding_in_pipeline_split
    stages[-1] -= args.account_for_loss_in_pipeline_split
    return tuple(stages)

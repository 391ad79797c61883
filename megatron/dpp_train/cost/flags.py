"""Reads the shape of a run from Megatron's flags, by their names and Megatron's own defaults."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from megatron.dpp.config import EIGHT_BIT_RECIPES, ENGINE_ROWS
from megatron.dpp.errors import ConfigError
from megatron.dpp.schedule import HOLDS_ALL
from megatron.dpp_train.cost.shape import Model, RunShape

_DEFAULTS: Mapping[str, object] = {
    "attention_dropout": 0.1,
    "dpp_activation_cap": "auto",
    "dpp_cuda_graphs": "auto",
    "dpp_head_in_forward": "auto",
    "dpp_policy": "auto",
    "dpp_split_backward": "auto",
    "fp8_recipe": "delayed",
    "hidden_dropout": 0.1,
    "moe_router_topk": 2,
    "normalization": "LayerNorm",
    "optimizer": "adam",
    "position_embedding_type": "learned_absolute",
    "sgd_momentum": 0.9,
    "transformer_impl": "transformer_engine",
}
"""Defaults that are neither 0 nor empty."""
_VOCABULARY = 50304
"""Words where no flag says how many: GPT-2's, padded."""
_NOT_ESTIMATED = ("multi_latent_attention", "mtp_num_layers", "hybrid_layer_pattern")


def name_of(flag: str) -> str:
    """A flag as the name of its value: ``num_layers``."""
    return flag.lstrip("-").replace("-", "_")


class Given:
    """Flags with Megatron's defaults.

    Args:
        flags: by name; a switch is True.
    """

    def __init__(self, flags: Mapping[str, object]) -> None:
        self.values = {name_of(flag): value for flag, value in flags.items()}

    def on(self, name: str) -> bool:
        """A switch is on, or a value given and not 0."""
        return self.values.get(name) not in (None, False, 0, "", "0")

    def word(self, name: str) -> str:
        """A value as text; empty without one."""
        value = self.values.get(name)
        if isinstance(value, list):
            return " ".join(map(str, value))
        return str(_DEFAULTS.get(name, "") if value is None or value is False else value)

    def number(self, name: str, default: int = 0, least: int = 1) -> int:
        """A whole number.

        Raises:
            ConfigError: it is none, or below ``least``; or is not given, and has no default.
        """
        text = self.word(name)
        if not text and default >= least:
            return default
        if not re.fullmatch("[0-9]{1,12}", text) or int(text) < least:
            flag = f"--{name.replace('_', '-')}"
            given = f" {text}: expected" if text else " is needed:"
            raise ConfigError(f"{flag}{given} a whole number of at least {least}")
        return int(text)

    @property
    def is_cut(self) -> bool:
        """True if sequences are cut into slices."""
        return self.word("dpp_slice_tokens") not in ("", "off")


def shape_of(given: Given, world_size: int, per_node: int, *, on_gpu: bool, arch: str) -> RunShape:
    """The shape of a run.

    Raises:
        ConfigError: a flag is missing or wrong, sizes do not divide, or a kind of model is not
            estimated.
    """
    for name in _NOT_ESTIMATED:
        if given.on(name):
            raise ConfigError(f"--{name.replace('_', '-')}: models with it are not estimated")
    tensor, pipeline = (given.number(f"{x}_model_parallel_size", 1) for x in ("tensor", "pipeline"))
    context, micro = given.number("context_parallel_size", 1), given.number("micro_batch_size", 1)
    size = tensor * pipeline * context
    parts = f"tensor {tensor} x pipeline {pipeline} x context {context} = {size}"
    _divides(parts, size, world_size, "ranks")
    data = world_size // size
    batch = given.number("global_batch_size", micro * data)
    _divides(f"--micro-batch-size {micro} x {data} replicas", micro * data, batch, "samples")
    model = _model(given, tensor, arch)
    _divides(f"--tensor-model-parallel-size {tensor}", tensor, model.num_heads, "attention heads")
    expert = given.number("expert_model_parallel_size", 1)
    expert_tensor = given.number("expert_tensor_parallel_size", tensor if model.experts else 1)
    _divides(f"--expert-model-parallel-size {expert}", expert, model.experts or 1, "experts")
    ranks, parts = world_size // pipeline, f"expert {expert} x expert tensor {expert_tensor}"
    _divides(parts, expert * expert_tensor, ranks, "ranks of a stage")
    engine = given.word("transformer_impl") != "local"
    shape = RunShape(
        model=dataclasses.replace(model, flash=engine or on_gpu),
        layers=_layers(given, pipeline),
        tensor=tensor,
        pipeline=pipeline,
        data=data,
        context=context,
        engine=engine,
        sequence_parallel=given.on("sequence_parallel") and tensor > 1,
        per_node=per_node,
        micro_batch=micro,
        num_microbatches=batch // (micro * data),
        recompute_num_layers=given.number("recompute_num_layers", 1),
        expert=expert,
        expert_tensor=expert_tensor,
        **_state(given),
    )
    return _scheduled(given, shape, on_gpu=on_gpu)


def _divides(what: str, number: int, of: int, unit: str) -> None:
    if of % number:
        raise ConfigError(f"{what} does not divide {of} {unit}")


def _state(given: Given) -> dict[str, Any]:
    """Bytes of each number that a run keeps, and who shares or computes it again."""
    shard = "optimizer" if given.on("use_distributed_optimizer") else "none"
    half = (given.on("bf16") and given.on("grad_reduce_in_bf16")) or given.on("fp16")
    half = half and not given.on("accumulate_allreduce_grads_in_fp32")
    if given.on("use_torch_fsdp2"):  # its gradients have the parameters' type
        shard = "gradients" if given.on("torch_fsdp2_no_reshard_after_forward") else "parameters"
        half = given.on("bf16") or given.on("fp16")
    momentum = 0 if given.word("sgd_momentum") in ("0", "0.0") else 4
    selective = "selective" if given.on("recompute_activations") else "none"
    return {
        "element_bytes": 2 if given.on("bf16") or given.on("fp16") else 4,
        "gradient_bytes": 2 if half else 4,
        "moment_bytes": 8 if given.word("optimizer") == "adam" else momentum,  # in fp32
        "copy_bytes": 2 if given.on("fp8_format") and not given.on("fp8_param_gather") else 0,
        "shard": shard,
        "recompute": given.word("recompute_granularity") or selective,
    }


def _scheduled(given: Given, shape: RunShape, *, on_gpu: bool) -> RunShape:
    """The shape with the schedule that runs it."""
    added = given.on("no_gradient_accumulation_fusion") and shape.shard in ("none", "optimizer")
    if on_gpu:
        shape = dataclasses.replace(shape, adds_gradients=added, graphs=_graphs(given, shape))
    if not given.on("use_dpp"):
        return shape
    split = given.word("dpp_split_backward")
    whole = split == "off" or (split == "auto" and shape.recompute == "full")
    shape = dataclasses.replace(
        shape,
        dynamic=True,
        policy=given.word("dpp_policy"),
        cap=given.word("dpp_activation_cap"),
        split=not (whole or given.on("fp8_format")),
    )
    head = given.word("dpp_head_in_forward")
    if head == "auto":  # where the logits of several microbatches would exist
        several = given.is_cut or shape.policy in HOLDS_ALL
        head = "on" if several and (len(shape.layers) > 1 or not shape.model.tied) else "off"
    return dataclasses.replace(shape, head_in_forward=head == "on")


def _graphs(given: Given, shape: RunShape) -> str:
    """CUDA graphs of Megatron's own or ours; ``off`` where chunks cannot be captured."""
    if given.word("cuda_graph_impl") not in ("", "none"):
        return "on"
    obstacles = (
        given.on("overlap_param_gather"),
        shape.shard in ("gradients", "parameters"),
        shape.model.experts,
        given.is_cut,
        shape.engine and shape.model.seq_length % ENGINE_ROWS,
        given.on("fp8_format") and given.word("fp8_recipe") not in EIGHT_BIT_RECIPES,
    )
    asked = given.word("dpp_cuda_graphs")
    never = asked == "auto" and (not given.on("use_dpp") or shape.recompute == "full")
    return "off" if never or any(obstacles) else asked


def _model(given: Given, tensor: int, arch: str) -> Model:
    hidden, heads = given.number("hidden_size"), given.number("num_attention_heads")
    gated = given.on("swiglu") or given.on("quick_geglu")
    ffn = given.number("ffn_hidden_size", hidden * 8 // 3 // 64 * 64 if gated else 4 * hidden)
    embedding = given.word("position_embedding_type")
    rotary = embedding in ("rope", "yarn", "mrope") or given.on("use_rotary_position_embeddings")
    learned, grouped = embedding == "learned_absolute" and not rotary, "group_query_attention"
    length, experts = given.number("seq_length"), given.number("num_experts", 0, 0)
    return Model(
        arch=arch,
        hidden_size=hidden,
        seq_length=length,
        vocab_size=_vocabulary(given, tensor),
        num_heads=heads,
        num_groups=given.number("num_query_groups", 1) if given.on(grouped) else heads,
        head_size=given.number("kv_channels", max(1, hidden // heads)),
        ffn_hidden_size=ffn,
        gated=gated,
        num_positions=given.number("max_position_embeddings", length) if learned else 0,
        rotary=rotary,
        tied=not given.on("untie_embeddings_and_output_weights"),
        linear_bias=not given.on("disable_bias_linear"),
        qkv_bias=given.on("add_qkv_bias"),
        norm_vectors=1 if given.word("normalization") == "RMSNorm" else 2,
        binary_head=arch == "bert" and not given.on("bert_no_binary_head"),
        fused_loss=given.on("cross_entropy_loss_fusion"),
        hidden_dropout=float(given.word("hidden_dropout")) > 0,
        attention_dropout=float(given.word("attention_dropout")) > 0,
        qk_norm=given.on("qk_layernorm"),
        softmax_offsets=given.word("softmax_type") == "learnable",
        experts=experts,
        topk=given.number("moe_router_topk") if experts else 0,
        expert_width=given.number("moe_ffn_hidden_size", ffn),
        shared_width=given.number("moe_shared_expert_intermediate_size", 0, 0),
        expert_share=_expert_share(given) if experts else 0.0,
    )


def _vocabulary(given: Given, tensor: int) -> int:
    words = given.number("padded_vocab_size", 0, 0)
    if words or not given.on("vocab_size"):
        return words or _VOCABULARY
    multiple = given.number("make_vocab_size_divisible_by", 128) * tensor
    return -(-given.number("vocab_size") // multiple) * multiple


def _expert_share(given: Given) -> float:
    """Share of the layers with experts, of ``--moe-layer-freq`` N or a list like
    ``([0]*3+[1]*58)``."""
    text, number = given.word("moe_layer_freq") or "1", given.number("num_layers")
    if text.isdecimal():
        return -(-number // max(1, int(text))) / number
    parts = re.findall(r"\[([01, ]+)\](?:\s*\*\s*([0-9]+))?", text)
    pattern = [x for one, n in parts for x in re.findall("[01]", one) * int(n or 1)]
    if len(pattern) != number:
        raise ConfigError(f"--moe-layer-freq {text}: expected {number} layers, or a number")
    return pattern.count("1") / number


def _layers(given: Given, pipeline: int) -> tuple[int, ...]:
    """Layers of each virtual stage, as megatron-core distributes them."""
    layout, number = given.word("pipeline_model_parallel_layout"), given.number("num_layers")
    if layout:
        text = layout.replace(",", "")
        for repeated in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
            text = re.sub(repeated, lambda found: found[1] * int(found[2]), text)
        stages = [stage.count("t") for stage in text.split("|")]
        if len(stages) % pipeline or sum(stages) != number:
            raise ConfigError(
                f"--pipeline-model-parallel-layout {layout}: {sum(stages)} layers on {len(stages)} "
                f"stages, expected {number} on a multiple of {pipeline}"
            )
        return tuple(stages)
    names = (f"decoder_{end}_pipeline_num_layers" for end in ("first", "last"))
    ends = zip((0, pipeline - 1), names, strict=True)
    fixed = {rank: given.number(name, 0, 0) for rank, name in ends if given.on(name)}
    extra = [int(given.on(f"account_for_{x}_in_pipeline_split")) for x in ("embedding", "loss")]
    rest, inner = number + sum(extra) - sum(fixed.values()), max(1, pipeline - len(fixed))
    _divides(f"--pipeline-model-parallel-size {pipeline}", inner, rest, "layers")
    ranks = [fixed.get(rank, rest // inner) for rank in range(pipeline)]
    chunks = given.number("num_virtual_stages_per_pipeline_rank", 1)
    if given.on("num_layers_per_virtual_pipeline_stage"):
        each = given.number("num_layers_per_virtual_pipeline_stage")
        _divides(f"--num-layers-per-virtual-pipeline-stage {each}", each, max(ranks), "layers")
        chunks = max(ranks) // each
    for each in ranks:
        _divides(f"--num-virtual-stages-per-pipeline-rank {chunks}", chunks, each, "layers")
    counts = [ranks[stage % pipeline] // chunks for stage in range(pipeline * chunks)]
    counts[0] -= extra[0]
    counts[-1] -= extra[1]
    return tuple(counts)

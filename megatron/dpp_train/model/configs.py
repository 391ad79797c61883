"""Turns checked arguments into PyTorch's values and megatron-core's configuration objects."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig
from megatron.core.datasets.utils import get_blend_from_list
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.num_microbatches_calculator import (
    RampupBatchsizeNumMicroBatchesCalculator,
)
from megatron.core.optimizer import AdamOptimizerConfig, OptimizerConfig, SGDOptimizerConfig
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megatron.dpp.errors import ConfigError, DataError, one_line
from megatron.dpp_train.data.words import data_words
from megatron.dpp_train.options.fields import enum_rows
from megatron.dpp_train.options.run_config import RunConfig
from megatron.dpp_train.options.validate_packages import check_engine
from megatron.dpp_train.text_files import read_json

_DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.uint8,
}


def settled(args: RunConfig) -> RunConfig:
    """Checked arguments with the values that need PyTorch: the device and what depends on it,
    dtypes, megatron-core's enumerations, and the number of iterations. ``args`` stays as it is.

    Raises:
        ConfigError: ``--device cuda`` on a machine without a GPU, or a setting that wants one.
    """
    values = _device_values(args) | _enumerations(args)
    if args.device == "auto":
        check_engine(args.with_(device=values["device"]))
    values["params_dtype"] = _DTYPES["fp16" if args.fp16 else "bf16" if args.bf16 else "fp32"]
    for name in ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"):
        value = getattr(args, name)
        values[name] = _DTYPES.get(value, value)
    if args.train_samples and not args.train_iters:
        values["train_iters"] = _iterations(args, args.train_samples)
    return args.with_(**values)


def _enumerations(args: RunConfig) -> dict[str, Any]:
    """Members of megatron-core's enumerations for the names in ``args``."""
    members: dict[str, Any] = {}
    for row in enum_rows():
        value = getattr(args, row["name"], None)
        if isinstance(value, str):
            module, name = row["enum"].split(":")
            members[row["name"]] = getattr(importlib.import_module(module), name)[value]
    return members


def _device_values(args: RunConfig) -> dict[str, Any]:
    """``--device auto`` resolved, and kernels and processes switched off that this device lacks:
    Megatron would stop with an error in mid-start, or hang."""
    device = args.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: PyTorch sees no GPU here; use --device cpu")
    on_cpu = device == "cpu"
    values: dict[str, Any] = {"device": device}
    if on_cpu:
        # The persistent checkpoint worker takes a GPU first; without it each save starts its own.
        values |= {"distributed_backend": "gloo", "use_persistent_ckpt_worker": False}
        values["te_rng_tracker"] = False  # its generators are a GPU's
    if on_cpu or args.distributed_backend == "gloo":  # they are NCCL's
        values |= {"nccl_communicator_config_path": None, "high_priority_stream_groups": []}
    if on_cpu or not _can_fuse_weight_gradients():
        values["gradient_accumulation_fusion"] = False
    if on_cpu or importlib.util.find_spec("scaled_upper_triang_masked_softmax_cuda") is None:
        values["masked_softmax_fusion"] = False
    # Transformer Engine's kernel does the fused rotation. It would read a CPU's memory, too.
    if on_cpu or importlib.util.find_spec("transformer_engine") is None:
        values["apply_rope_fusion"] = False
    return values


def _can_fuse_weight_gradients() -> bool:
    from megatron.dpp.core.wgrad import fused  # on a CPU megatron-core needs its support first

    return fused.available()


def _iterations(args: RunConfig, samples: int) -> int:
    """Iterations that ``--train-samples`` makes, the ramp of the batch size included."""
    iterations = consumed = 0
    if args.rampup_batch_size is not None:
        start, increment, ramp = map(int, args.rampup_batch_size)
        calculator = RampupBatchsizeNumMicroBatchesCalculator(
            args.global_batch_size,
            args.micro_batch_size,
            args.data_parallel_size,
            args.decrease_batch_size_if_needed,
            -1,  # no rank: it prints nothing
            start,
            increment,
            ramp,
        )
        while consumed <= min(ramp, samples):
            calculator.update(consumed, consistency_check=False)
            consumed += calculator.get_current_global_batch_size()
            iterations += 1
    return int(iterations + max(0, samples - consumed) // args.global_batch_size)


def _same_names(kind: Any, args: RunConfig) -> dict[str, Any]:
    return {
        f.name: getattr(args, f.name) for f in dataclasses.fields(kind) if hasattr(args, f.name)
    }


def transformer_config(args: RunConfig) -> TransformerConfig:
    """The model's shape and execution."""
    kind = MLATransformerConfig if args.multi_latent_attention else TransformerConfig
    values = _same_names(kind, args)
    if args.rope_type is None:
        values.pop("rope_type", None)
    values |= {
        "persist_layer_norm": not args.no_persist_layer_norm,
        "deallocate_pipeline_outputs": True,
        "variable_seq_lengths": args.variable_seq_lengths,
        "pipeline_dtype": args.params_dtype,
        "batch_p2p_comm": not args.overlap_p2p_comm,
        "num_moe_experts": args.num_experts,
        # The local layers have grouped products of their own.
        "moe_grouped_gemm": args.moe_grouped_gemm and args.transformer_impl != "local",
        "cuda_graph_scope": [],  # as Megatron-LM's flag; the field's own default is deprecated
        "num_layers_in_first_pipeline_stage": args.decoder_first_pipeline_num_layers,
        "num_layers_in_last_pipeline_stage": args.decoder_last_pipeline_num_layers,
        "inference_sampling_seed": args.seed,
        "bias_activation_fusion": args.bias_swiglu_fusion if args.swiglu else args.bias_gelu_fusion,
        "num_query_groups": args.num_query_groups if args.group_query_attention else None,
        "cp_comm_type": args.cp_comm_type[0] if len(args.cp_comm_type) == 1 else args.cp_comm_type,
    }
    values |= _activation(args)
    if args.init_method_xavier_uniform:
        values["init_method"] = torch.nn.init.xavier_uniform_
        values["output_layer_init_method"] = torch.nn.init.xavier_uniform_
    config = kind(**values)
    if args.position_embedding_type == "yarn":
        for name, value in _yarn(args).items():  # no fields: megatron-core looks for attributes
            setattr(config, f"yarn_{name}", value)
    return config


def _yarn(args: RunConfig) -> dict[str, Any]:
    """Settings of ``YarnRotaryEmbedding``."""
    return {
        "rotary_scaling_factor": args.rotary_scaling_factor,
        "original_max_position_embeddings": args.yarn_original_max_position_embeddings,
        "beta_fast": args.yarn_beta_fast,
        "beta_slow": args.yarn_beta_slow,
        "mscale": args.mscale,
        "mscale_all_dim": args.mscale_all_dim,
        "correction_range_round_to_int": args.yarn_correction_range_round_to_int,
    }


def _activation(args: RunConfig) -> dict[str, Any]:
    if args.swiglu:
        return {"activation_func": F.silu, "gated_linear_unit": True}
    if args.squared_relu:
        from megatron.core.activations import squared_relu

        return {"activation_func": squared_relu}
    if args.geglu:
        from megatron.dpp_train.model.forms import gated_gelu

        return {
            "activation_func": gated_gelu,
            "gated_linear_unit": True,
            "bias_activation_fusion": False,
        }
    if args.quick_geglu:
        from megatron.core.fusions.fused_bias_geglu import quick_gelu

        return {"activation_func": quick_gelu, "gated_linear_unit": True}
    return {}


def ddp_config(args: RunConfig, num_parameters: int) -> DistributedDataParallelConfig:
    """Buckets and reduction of gradients; ``num_parameters`` counts this rank's."""
    values = _same_names(DistributedDataParallelConfig, args)
    size = args.ddp_bucket_size
    if args.ddp_num_buckets:
        size = num_parameters // args.ddp_num_buckets
    if size is None:
        size = max(40_000_000, 1_000_000 * args.data_parallel_size * args.context_parallel_size)
    values |= {
        "grad_reduce_in_fp32": args.accumulate_allreduce_grads_in_fp32,
        "check_for_nan_in_grad": args.check_for_nan_in_loss_and_grad,
        "pad_buckets_for_high_nccl_busbw": args.ddp_pad_buckets_for_high_nccl_busbw,
        "reduce_scatter_with_fp32_accumulation": args.ddp_reduce_scatter_with_fp32_accumulation,
        "average_in_collective": args.ddp_average_in_collective,
        "bucket_size": size if args.overlap_grad_reduce else None,
    }
    return DistributedDataParallelConfig(**values)


def optimizer_config(args: RunConfig) -> OptimizerConfig:
    """Adam's or SGD's settings, loss scaling, clipping, the distributed optimizer."""
    kind = AdamOptimizerConfig if args.optimizer == "adam" else SGDOptimizerConfig
    return kind(**_same_names(kind, args))


def check_with_core(args: RunConfig) -> None:
    """Lets megatron-core check the settings that its dataclasses take.

    Raises:
        ConfigError: it refuses; the message is its own.
    """
    try:
        transformer_config(args)
        optimizer_config(args)
    except (AssertionError, ValueError, TypeError) as error:
        raise ConfigError(f"megatron-core refuses these settings: {one_line(error)}") from error


def sequences_per_dataset(args: RunConfig) -> dict[str, int] | None:
    """Sequences per data set from ``--per-dataset-sequences-path``, or None without it.

    Raises:
        DataError: the file is missing or not JSON.
    """
    path = args.per_dataset_sequences_path
    if path is None:
        return None
    flag = "--per-dataset-sequences-path"
    counts = read_json(path, flag)
    if not isinstance(counts, dict) or not all(type(each) is int for each in counts.values()):
        raise DataError(f"{flag} {path}: expected a JSON object of data prefixes and numbers")
    return counts


def dataset_values(args: RunConfig, tokenizer: Any) -> dict[str, Any]:
    """Settings that GPT's and BERT's data sets share.

    Raises:
        DataError: a file of ``--data-args-path`` or ``--per-split-data-args-path`` is bad.
    """
    words, per_split = data_words(args)
    return _same_names(BlendedMegatronDatasetConfig, args) | {
        "random_seed": args.seed,
        "sequence_length": args.seq_length,
        "blend": words and get_blend_from_list(words),
        "blend_per_split": per_split and [get_blend_from_list(each) for each in per_split],
        "path_to_cache": args.data_cache_path,
        "tokenizer": tokenizer,
        "multiple_validation_sets": False,
        "fast_cache_load": args.dataloader_fast_cache_load,
        "defer_npy_index_mmap": args.dataloader_defer_npy_index_mmap,
    }

"""GPT: its chunks, its data, its forward step and loss. ``pretrain`` gets them as a
:class:`~.task.Task`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_attr_wrapped_model, get_batch_on_this_cp_rank

from megatron.dpp.train.configs import dataset_values, sequences_per_dataset
from megatron.dpp.train.data import is_end_stage, tensor_parallel_batch
from megatron.dpp.train.initialize import Run
from megatron.dpp.train.losses import checked, masked_sum

Args = argparse.Namespace


def build_chunk(
    args: Args,
    config: TransformerConfig,
    pre_process: bool,
    post_process: bool,
    vp_stage: int | None,
) -> GPTModel:
    """One chunk of a GPT model."""
    from megatron.dpp.mcore.layers import block_spec, prediction_spec

    layers = {
        "implementation": layer_implementation(args),
        "vp_stage": vp_stage,
        "own_masks": args.reset_attention_mask,
    }
    return GPTModel(
        config=config,
        transformer_layer_spec=block_spec(config, arch="gpt", **layers),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
        parallel_output=True,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        mtp_block_spec=prediction_spec(config, **layers),
        vp_stage=vp_stage,
    )


def layer_implementation(args: Args) -> str:
    """Which layer spec ``--transformer-impl`` means here.

    ``local`` is megatron-core's own on a CPU, for Megatron-LM's numbers to the last digits, and
    ours with PyTorch's attention on a GPU.
    """
    if args.transformer_impl != "local":
        return str(args.transformer_impl)
    return "torch" if args.device == "cuda" else "megatron"


def datasets(run: Run) -> tuple[type, GPTDatasetConfig]:
    """The data set class and its configuration."""
    args = run.args
    config = GPTDatasetConfig(
        **dataset_values(args, run.tokenizer),
        sequences_per_dataset=sequences_per_dataset(args),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        object_storage_cache_path=args.object_storage_cache_path,
        context_parallel_size=args.context_parallel_size,
        data_parallel_size=args.data_parallel_size,
        sequence_parallel_size=args.tensor_model_parallel_size * args.sequence_parallel,
    )
    return (MockGPTDataset if args.mock_data else GPTDataset), config


def _layout(args: Args, first: bool, last: bool) -> dict[str, Any]:
    """Shapes and dtypes of what a chunk needs; with one stage that is everything, and layers that
    predict further tokens (on the last stage) embed these."""
    flat = (args.micro_batch_size, args.seq_length)
    layout: dict[str, Any] = {}
    if first or (last and args.mtp_num_layers):
        layout |= {"tokens": (flat, torch.int64), "position_ids": (flat, torch.int64)}
    if last:
        layout |= {"labels": (flat, torch.int64), "loss_mask": (flat, torch.float32)}
    if args.create_attention_mask_in_dataloader:
        square = (args.micro_batch_size, 1, args.seq_length, args.seq_length)
        layout["attention_mask"] = (square, torch.bool)
    return layout


def get_batch(run: Run, iterator: Any, vp_stage: int | None) -> dict[str, Any]:
    """This chunk's share of the next batch; empty on stages in the middle."""
    if not is_end_stage(vp_stage):
        return {}
    ignore = vp_stage is None
    first = mpu.is_pipeline_first_stage(ignore_virtual=ignore, vp_stage=vp_stage)
    last = mpu.is_pipeline_last_stage(ignore_virtual=ignore, vp_stage=vp_stage)
    batch = tensor_parallel_batch(iterator, _layout(run.args, first, last), run.device)
    sliced: dict[str, Any] = get_batch_on_this_cp_rank(batch)
    return sliced


def forward_step(run: Run) -> Callable[..., Any]:
    """megatron-core's ``forward_step_func`` for GPT."""

    def step(iterator: Any, model: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
        with run.recorder.span("batch"), run.timed("batch-generator", level=2):
            batch = get_batch(run, iterator, get_attr_wrapped_model(model, "vp_stage"))
        mask = batch.get("loss_mask")
        output = model(
            batch.get("tokens"),
            batch.get("position_ids"),
            batch.get("attention_mask"),
            labels=batch.get("labels"),
            loss_mask=mask,
        )
        return output, partial(language_model_loss, run, mask)

    return step


def language_model_loss(
    run: Run, mask: Any, output: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Sum of the losses of the tokens that count, their number, and both for the log."""
    loss, num_tokens = masked_sum(output, mask)
    loss = checked(run, loss)
    return loss, num_tokens, {"lm loss": torch.stack([loss.detach(), num_tokens.to(loss.dtype)])}

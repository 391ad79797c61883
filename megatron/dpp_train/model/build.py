"""Builds model chunks, gradient buffers, optimizer and learning rate with megatron-core.

The order is Megatron-LM's: parameters are initialised chunk by chunk, and nothing else draws random
numbers in between, so the same seed gives Megatron-LM's parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core import tensor_parallel
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import get_megatron_optimizer, get_standard_config_overrides
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.dpp.core.wgrad.te import delay_weight_gradients
from megatron.dpp.errors import render, setting
from megatron.dpp_train.model.configs import ddp_config, optimizer_config
from megatron.dpp_train.options.run_config import RunConfig
from megatron.dpp_train.state import Run, ends

ChunkBuilder = Callable[..., torch.nn.Module]
"""``(args, config, pre_process=..., post_process=..., vp_stage=...)`` to one bare model chunk."""


@dataclass
class Trainee:
    """This rank's wrapped chunks, their configuration, and their optimizer and its scheduler."""

    chunks: list[Any]
    config: TransformerConfig
    optimizer: Any
    scheduler: Any


def build_trainee(run: Run, config: TransformerConfig, build_chunk: ChunkBuilder) -> Trainee:
    """Builds everything; no gradient buffers and no optimizer with ``--skip-train``, nor with
    ``--deepspeed-zero-stage``, where ``zero_engine`` brings its own."""
    args = run.args
    _delay_weight_gradients(run, config)
    chunks = bare_chunks(args, config, build_chunk)
    count = sum(p.nelement() for chunk in chunks for p in chunk.parameters())
    if mpu.get_data_parallel_rank(with_context_parallel=True) == 0:
        place = (mpu.get_tensor_model_parallel_rank(), mpu.get_pipeline_model_parallel_rank())
        print(
            f" > number of parameters on (tensor, pipeline) model parallel rank {place}: {count}",
            flush=True,
        )
    for chunk in chunks:
        chunk.to(run.device)
    if args.fp16 or args.bf16:
        chunks = [Float16Module(config, chunk) for chunk in chunks]
    if args.skip_train or args.deepspeed_zero_stage:
        return Trainee(chunks, config, None, None)
    if args.use_torch_fsdp2:
        from megatron.dpp_train.model.fsdp import fully_sharded

        reshard = args.torch_fsdp2_reshard_after_forward
        chunks = [fully_sharded(config, chunk, reshard_after_forward=reshard) for chunk in chunks]
    else:
        chunks = _with_gradient_buffers(args, config, chunks, count)
    optimizer = _optimizer(run, chunks)
    return Trainee(chunks, config, optimizer, build_scheduler(args, optimizer))


def _delay_weight_gradients(run: Run, config: TransformerConfig) -> None:
    """Prepares a split backward of Transformer Engine's layers, before the model is built. Layers
    that are built so cannot fuse it, which ``auto`` may choose.
    """
    args = run.args
    asked = args.use_dpp and args.dpp_split_backward not in ("auto", "off")
    if not asked or args.transformer_impl == "local":
        return
    reason = delay_weight_gradients(config)
    if reason is not None:
        run.say(render(f"{setting('split_backward')}: the backward is fused: {reason}"))


def bare_chunks(args: RunConfig, config: TransformerConfig, build_chunk: ChunkBuilder) -> list[Any]:
    """Builds this rank's chunks, without gradient buffers."""
    num_chunks = args.virtual_pipeline_model_parallel_size
    chunks = []
    for vp_stage in range(num_chunks) if num_chunks else (None,):
        first, last = ends(vp_stage)
        chunk: Any = build_chunk(
            args, config, pre_process=first, post_process=last, vp_stage=vp_stage
        )
        chunk.vp_stage = vp_stage
        for parameter in chunk.parameters():
            tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
        chunks.append(chunk)
    return chunks


def _with_gradient_buffers(
    args: RunConfig, config: TransformerConfig, chunks: list[Any], count: int
) -> list[Any]:
    settings = ddp_config(args, count)
    settings.delay_wgrad_compute = config.delay_wgrad_compute
    wrapped = [
        DistributedDataParallel(
            config,
            settings,
            chunk,
            # The reduction of later chunks overlaps with the others' compute anyway.
            disable_bucketing=index > 0 or args.overlap_param_gather_with_optimizer_step,
        )
        for index, chunk in enumerate(chunks)
    ]
    if args.data_parallel_random_init:
        for chunk in wrapped:
            chunk.broadcast_params()
    return wrapped


def _optimizer(run: Run, chunks: list[Any]) -> Any:
    settings: OptimizerConfig = optimizer_config(run.args)
    settings.timers = run.timers
    return get_megatron_optimizer(
        settings,
        chunks,
        config_overrides=get_standard_config_overrides(config=settings),
        use_gloo_process_groups=run.args.enable_gloo_process_groups,
    )


def build_scheduler(args: RunConfig, optimizer: Any) -> Any:
    """Builds what sets learning rate and weight decay in the parameter groups of ``optimizer``.

    It counts samples; flags may count iterations.
    """
    by_iteration = args.train_samples is None
    unit = args.global_batch_size if by_iteration else 1
    suffix = "iters" if by_iteration else "samples"
    total = args.train_samples or args.train_iters
    decay = (getattr(args, f"lr_decay_{suffix}") or total) * unit
    wsd = getattr(args, f"lr_wsd_decay_{suffix}")
    if args.lr_warmup_fraction is not None:
        warmup = args.lr_warmup_fraction * decay
    else:
        warmup = getattr(args, f"lr_warmup_{suffix}") * unit
    return OptimizerParamScheduler(
        optimizer,
        init_lr=args.lr_warmup_init,
        max_lr=args.lr,
        min_lr=args.min_lr,
        lr_warmup_steps=warmup,
        lr_decay_steps=decay,
        lr_decay_style=args.lr_decay_style,
        start_wd=args.start_weight_decay,
        end_wd=args.end_weight_decay,
        wd_incr_steps=total * unit,
        wd_incr_style=args.weight_decay_incr_style,
        use_checkpoint_opt_param_scheduler=args.use_checkpoint_opt_param_scheduler,
        override_opt_param_scheduler=args.override_opt_param_scheduler,
        wsd_decay_steps=None if wsd is None else wsd * unit,
        lr_wsd_decay_style=args.lr_wsd_decay_style,
    )

"""The dynamic pipeline in your own megatron-core loop.

    torchrun --nproc_per_node 2 examples/gpt3/own_loop.py

Everything but the three lines marked DPP is plain megatron-core: a GPT in two pipeline stages of
two chunks each, trained to count. It runs on two GPUs, or without any on two CPU processes.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from megatron.dpp import DppConfig, DppSchedule  # DPP

if not torch.cuda.is_available():
    from megatron.dpp.core import cpu

    cpu.install()  # megatron-core names CUDA in many places; this answers from the CPU

from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallel as DDP
from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig

CHUNKS, LENGTH, BATCH, VOCABULARY = 2, 32, 4, 64


def build(config: TransformerConfig) -> list[DDP]:
    chunks = []
    for stage in range(CHUNKS):
        model = GPTModel(
            config,
            get_gpt_layer_local_spec(),
            VOCABULARY,
            LENGTH,
            pre_process=mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
            post_process=mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
            vp_stage=stage,
        ).to("cuda")
        chunks.append(DDP(config, DistributedDataParallelConfig(), model))
    return chunks


def forward_step(iterator: Any, model: Any) -> Any:
    tokens = torch.randint(0, VOCABULARY, (BATCH, 1), generator=iterator)
    tokens = ((tokens + torch.arange(LENGTH + 1)) % VOCABULARY).to("cuda")
    positions = torch.arange(LENGTH, device="cuda").expand(BATCH, -1)
    unseen = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device="cuda").triu(1)[None, None]
    losses = model(tokens[:, :-1], positions, unseen, labels=tokens[:, 1:])
    return losses, lambda output: (output.mean(), {"loss": output.mean().item()})


def main() -> None:
    torch.distributed.init_process_group("nccl" if torch.cuda.device_count() else "gloo")
    if torch.cuda.device_count():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    mpu.initialize_model_parallel(
        pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=CHUNKS
    )
    torch.manual_seed(1)
    model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=4,
        hidden_size=64,
        num_attention_heads=4,
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=CHUNKS,
        pipeline_dtype=torch.float32,
        deallocate_pipeline_outputs=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
        finalize_model_grads_func=finalize_model_grads,
    )
    model = build(config)
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=3e-3), model)
    iterators = [torch.Generator().manual_seed(2) for _ in model]
    with DppSchedule(DppConfig()) as forward_backward:  # DPP: get_forward_backward_func() before
        for step in range(20):
            for chunk in model:
                chunk.zero_grad_buffer()
            optimizer.zero_grad()
            losses = forward_backward(  # DPP: megatron-core's own keywords
                forward_step_func=forward_step,
                data_iterator=iterators,
                model=model,
                num_microbatches=8,
                seq_length=LENGTH,
                micro_batch_size=BATCH,
            )
            optimizer.step()
            if losses:
                mean = sum(entry["loss"] for entry in losses) / len(losses)
                print(f"step {step}: loss {mean:.3f}", flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()

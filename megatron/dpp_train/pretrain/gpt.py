"""Trains GPT models with Megatron's own loop.

torchrun starts it with Megatron-LM's flags. ``pretrain_gpt.py`` of the source tree runs it under
``megatron.dpp.run``, whose ``--use-dpp`` hands each step to the dynamic pipeline.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.utils import get_attr_wrapped_model, get_batch_on_this_cp_rank
from megatron.training import get_args
from megatron.training.argument_utils import gpt_config_from_args
from megatron.training.utils import is_first_or_last_pipeline_stage

from megatron.dpp_train.pretrain.loop import (
    checked,
    dataset_values,
    is_first_tensor_rank,
    masked_sum,
    next_batch,
    train,
)

LAYOUT = {
    "tokens": torch.int64,
    "position_ids": torch.int64,
    "labels": torch.int64,
    "loss_mask": torch.float32,
}
"""Tensors of a batch, [b, s] each."""


def datasets(num_samples: list[int], vp_stage: int | None = None) -> tuple[Any, Any, Any]:
    """Train, validation and test sets; None on ranks that read none."""
    args = get_args()
    config = GPTDatasetConfig(
        **dataset_values(args),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        object_storage_cache_path=args.object_storage_cache_path,
    )
    kind = MockGPTDataset if args.mock_data else GPTDataset
    reads = is_first_tensor_rank() and is_first_or_last_pipeline_stage(vp_stage)
    sets: tuple[Any, Any, Any] = BlendedMegatronDatasetBuilder(
        kind, num_samples, lambda: reads, config
    ).build()
    return sets


def get_batch(iterator: Any, vp_stage: int | None) -> dict[str, torch.Tensor]:
    """The tensors of a microbatch that this rank's chunk needs; none in the middle of a pipeline."""
    args = get_args()
    if not is_first_or_last_pipeline_stage(vp_stage):
        return {}
    layout = dict(LAYOUT)
    if args.create_attention_mask_in_dataloader:
        layout["attention_mask"] = torch.bool
    batch = next_batch(iterator, layout)
    group = mpu.get_context_parallel_group()
    return dict(get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=group))


def forward_step(iterator: Any, model: Any) -> tuple[torch.Tensor, Any]:
    """One chunk's forward on the next microbatch, and the function of its loss."""
    batch = get_batch(iterator, get_attr_wrapped_model(model, "vp_stage"))
    mask = batch.get("loss_mask")
    output = model(
        batch.get("tokens"),
        batch.get("position_ids"),
        batch.get("attention_mask"),
        labels=batch.get("labels"),
        loss_mask=mask,
    )
    return output, partial(loss_of, mask)


def loss_of(
    mask: torch.Tensor, losses: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Sum of the losses of the tokens that count, their number, and both for the log."""
    total, count = masked_sum(losses, mask)
    return checked(total), count, {"lm loss": torch.stack([total.detach(), count.to(total.dtype)])}


if __name__ == "__main__":
    train(
        datasets,
        forward_step,
        model_config=gpt_config_from_args,
        defaults={"tokenizer_type": "GPT2BPETokenizer"},
    )

"""Trains GPT models with Megatron's own loop.

torchrun starts it with Megatron-LM's flags and ``--rows`` (``megatron.dpp_train.data.datasets``).
``pretrain_gpt.py`` of the source tree runs it under ``megatron.dpp.run``, whose ``--use-dpp`` hands
each step to the dynamic pipeline.
"""

from __future__ import annotations

from collections.abc import Callable
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

from megatron.dpp.errors import ConfigError
from megatron.dpp_train.data import datasets as documents
from megatron.dpp_train.data.datasets import Batch
from megatron.dpp_train.data.packed_attention import for_local_layers
from megatron.dpp_train.hf import layers
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

_LEFT_TO_MEGATRON = (
    *("sft", "fim_data", "dataloader_inter_document_masking", "hybrid_context_parallel"),
    *("logits_load_dir", "modelopt_enabled", "perform_rl_step"),
)
"""Switches of Megatron-LM's own script that this one lacks."""


def model_config(args: Any) -> Any:
    """The configuration of the model, once the run's other settings agree.

    Raises:
        ConfigError: a switch asks for what Megatron-LM's own script does.
    """
    for name in _LEFT_TO_MEGATRON:
        if getattr(args, name, None):
            flag = "--" + name.replace("_", "-")
            raise ConfigError(
                f"{flag} is a switch of Megatron-LM's own pretrain_gpt.py: run that script with "
                "-m megatron.dpp.run before it, or leave the switch out (chats: --rows)"
            )
    documents.prepare(args)
    return layers.adjust(gpt_config_from_args(args), args)


def datasets(num_samples: list[int], vp_stage: int | None = None) -> tuple[Any, Any, Any]:
    """Train, validation and test sets; None on ranks that read none."""
    args = get_args()
    if documents.is_used(args):
        return documents.build(args, num_samples, vp_stage)
    config = GPTDatasetConfig(
        **dataset_values(args),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        object_storage_cache_path=args.object_storage_cache_path,
    )
    kind = MockGPTDataset if args.mock_data else GPTDataset
    reads = is_first_tensor_rank() and _reads(vp_stage)
    sets: tuple[Any, Any, Any] = BlendedMegatronDatasetBuilder(
        kind, num_samples, lambda: reads, config
    ).build()
    return sets


def _reads(vp_stage: int | None) -> bool:
    """True if this rank's chunk takes tokens or labels; layers of multi-token prediction take
    both, and may lie on any stage."""
    return bool(get_args().mtp_num_layers or is_first_or_last_pipeline_stage(vp_stage))


def get_batch(iterator: Any, vp_stage: int | None) -> Batch:
    """The tensors of a microbatch that this rank's chunk needs."""
    args = get_args()
    if documents.is_used(args):
        return documents.get_batch(iterator, vp_stage)
    if not _reads(vp_stage):
        return Batch()
    layout = dict(LAYOUT)
    if args.create_attention_mask_in_dataloader:
        layout["attention_mask"] = torch.bool
    batch = next_batch(iterator, layout)
    group = mpu.get_context_parallel_group()
    return Batch(**get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=group))


def forward_step(iterator: Any, model: Any) -> tuple[torch.Tensor, Any]:
    """One chunk's forward on the next microbatch, and the function of its loss."""
    batch = get_batch(iterator, get_attr_wrapped_model(model, "vp_stage"))
    more = {} if batch.padding_mask is None else {"padding_mask": batch.padding_mask}
    output = model(
        batch.tokens,
        batch.position_ids,
        batch.attention_mask,
        labels=batch.labels,
        loss_mask=batch.loss_mask,
        packed_seq_params=batch.packed_seq_params,
        **more,
    )
    return output, partial(loss_of, batch.loss_mask)


def loss_of(
    mask: torch.Tensor | None, losses: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Sum of the losses of the tokens that count, their number, and both for the log."""
    assert mask is not None  # the last stage asks, which has read it
    total, count = masked_sum(losses, mask)
    return checked(total), count, {"lm loss": torch.stack([total.detach(), count.to(total.dtype)])}


def main(add_more: Callable[[Any], Any] = lambda parser: parser) -> None:
    """Train GPT with the flags of the command line, and with those that ``add_more`` adds."""
    train(
        datasets,
        forward_step,
        model_config=model_config,
        add_arguments=lambda parser: add_more(
            layers.add_arguments(documents.add_arguments(parser))
        ),
        around=for_local_layers,
        defaults={"tokenizer_type": "GPT2BPETokenizer"},
    )


if __name__ == "__main__":
    main()

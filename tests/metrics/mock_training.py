"""A small GPT trained on mock data by ``megatron.training``: a script for ``megatron.dpp.run``."""

from __future__ import annotations

import itertools
import os
import resource
from functools import partial
from pathlib import Path
from typing import Any

import megatron.core.datasets.utils
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.training import get_args, get_tokenizer, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import core_transformer_config_from_args, parse_and_validate_args


def model_provider(
    pre_process: bool = True, post_process: bool = True, config: Any = None, **rest: Any
) -> GPTModel:
    args = get_args()
    return GPTModel(
        config=config or core_transformer_config_from_args(args),
        transformer_layer_spec=get_gpt_layer_local_spec(normalization=args.normalization),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        vp_stage=rest.get("vp_stage"),
        pg_collection=rest.get("pg_collection"),
    )


def loss_of(mask: torch.Tensor, output: torch.Tensor) -> tuple[torch.Tensor, Any, dict[str, Any]]:
    total, count = torch.sum(output.float() * mask), mask.sum().to(torch.int)
    return total, count, {"lm loss": torch.stack([total.detach(), count.detach()])}


forwards = itertools.count(1)


def fill_disk(number: int) -> None:
    """In the second step, of four forwards, the file FULL_DISK grows by 20 bytes at most."""
    file = os.environ.get("FULL_DISK")
    if file and number in (5, 9):
        most = Path(file).stat().st_size + 20 if number == 5 else resource.RLIM_INFINITY
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))


def forward_step(data_iterator: Any, model: Any, *_: Any) -> tuple[torch.Tensor, Any]:
    fill_disk(next(forwards))
    batch = next(data_iterator)
    names = ("tokens", "position_ids", "attention_mask")
    output = model(*(batch[name] for name in names), labels=batch["labels"])
    return output, partial(loss_of, batch["loss_mask"])


def datasets(counts: Any, **_: Any) -> Any:
    args = get_args()
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        split="98,1,1",
        tokenizer=get_tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
    )
    return BlendedMegatronDatasetBuilder(MockGPTDataset, counts, lambda: True, config).build()


datasets.is_distributed = True  # type: ignore[attr-defined]

if __name__ == "__main__":
    # Its helpers are compiled in a wheel, which lacks the Makefile.
    megatron.core.datasets.utils.compile_helpers = lambda: None
    args = parse_and_validate_args()
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(config, datasets, ModelType.encoder_or_decoder, forward_step)

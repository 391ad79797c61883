"""Trains BERT models with Megatron's own loop: masked tokens, and the order of two sentences.

torchrun starts it with Megatron-LM's flags. ``pretrain_bert.py`` of the source tree runs it under
``megatron.dpp.run``, whose ``--use-dpp`` hands each step to the dynamic pipeline.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.datasets.bert_dataset import (
    BERTMaskedWordPieceDataset,
    BERTMaskedWordPieceDatasetConfig,
)
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.models.bert.bert_layer_specs import (
    bert_layer_local_spec,
    get_bert_layer_with_transformer_engine_spec,
)
from megatron.core.models.bert.bert_model import BertModel
from megatron.training import get_args
from megatron.training.arguments import core_transformer_config_from_args

from megatron.dpp_train.pretrain.loop import (
    checked,
    dataset_values,
    is_first_tensor_rank,
    masked_sum,
    next_batch,
    train,
)

LAYOUT = dict.fromkeys(
    ("text", "types", "labels", "is_random", "loss_mask", "padding_mask"), torch.int64
)
"""Tensors of a batch: ``is_random`` is [b], the others are [b, s]."""


def model_provider(
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: Any = None,
    pg_collection: Any = None,
) -> BertModel:
    """Builds one chunk of a BERT model."""
    args = get_args()
    local = args.transformer_impl == "local"
    return BertModel(
        config=config or core_transformer_config_from_args(args),
        num_tokentypes=2 if args.bert_binary_head else 0,
        transformer_layer_spec=(
            bert_layer_local_spec if local else get_bert_layer_with_transformer_engine_spec()
        ),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        parallel_output=True,
        add_binary_head=args.bert_binary_head,
        pre_process=pre_process,
        post_process=post_process,
        vp_stage=vp_stage,
        pg_collection=pg_collection,
    )


def datasets(num_samples: list[int], vp_stage: int | None = None) -> tuple[Any, Any, Any]:
    """Train, validation and test sets. Whole words are masked, up to three together."""
    args = get_args()
    config = BERTMaskedWordPieceDatasetConfig(
        **dataset_values(args),
        masking_probability=args.mask_prob,
        short_sequence_probability=args.short_seq_prob,
        masking_max_ngram=3,
        masking_do_full_word=True,
        masking_do_permutation=False,
        masking_use_longer_ngrams=False,
        masking_use_geometric_distribution=False,
        classification_head=args.bert_binary_head,
    )
    sets: tuple[Any, Any, Any] = BlendedMegatronDatasetBuilder(
        BERTMaskedWordPieceDataset, num_samples, is_first_tensor_rank, config
    ).build()
    return sets


def forward_step(iterator: Any, model: Any) -> tuple[Any, Any]:
    """One chunk's forward on the next microbatch, and the function of its loss. Every stage reads
    the batch, as every layer needs the padding mask."""
    batch = next_batch(iterator, LAYOUT)
    output = model(
        batch["text"],
        batch["padding_mask"],
        tokentype_ids=batch["types"] if get_args().bert_binary_head else None,
        lm_labels=batch["labels"],
    )
    return output, partial(loss_of, batch["loss_mask"], batch["is_random"])


def loss_of(
    mask: torch.Tensor, is_random: torch.Tensor, output: Any
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Mean loss of the masked tokens, plus that of the sentence order with the binary head."""
    losses, order = output
    total, count = masked_sum(losses, mask)
    loss = lm_loss = total / count
    report = {"lm loss": lm_loss.detach().clone()}  # megatron-core divides the loss in place
    if order is not None:
        logits = order.view(-1, 2).float()
        order_loss = F.cross_entropy(logits, is_random.view(-1), ignore_index=-1)
        loss = lm_loss + order_loss
        report["sop loss"] = order_loss.detach()
    return checked(loss), report


if __name__ == "__main__":
    train(
        datasets,
        forward_step,
        model_provider=model_provider,
        defaults={"tokenizer_type": "BertWordPieceLowerCase"},
    )

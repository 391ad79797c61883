"""BERT: its chunks, its data, its forward step and losses, with and without the binary head.

``pretrain`` gets them as a :class:`~megatron.dpp.train.task.Task`. Unlike GPT's, every stage reads
batches: the padding mask is needed in all of them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.datasets.bert_dataset import (
    BERTMaskedWordPieceDataset,
    BERTMaskedWordPieceDatasetConfig,
)
from megatron.core.models.bert.bert_model import BertModel
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.dpp.train.configs import dataset_values
from megatron.dpp.train.data import tensor_parallel_batch
from megatron.dpp.train.gpt import layer_implementation
from megatron.dpp.train.initialize import Run
from megatron.dpp.train.losses import checked, masked_sum

Args = argparse.Namespace


@dataclass
class _BertBlock(TransformerBlockSubmodules):  # type: ignore[misc]
    """A block's spec that also answers as a layer's: ``BertModel`` looks into it to choose the
    shape of its mask.
    """

    @property
    def submodules(self) -> Any:
        """Of the first layer; all are alike."""
        return self.layer_specs[0].submodules


def build_chunk(
    args: Args,
    config: TransformerConfig,
    pre_process: bool,
    post_process: bool,
    vp_stage: int | None,
) -> BertModel:
    """One chunk of a BERT model."""
    from megatron.dpp.mcore.layers import bert_head_norm, block_spec

    block = block_spec(
        config, arch="bert", implementation=layer_implementation(args), vp_stage=vp_stage
    )
    with bert_head_norm():
        return BertModel(
            config=config,
            transformer_layer_spec=_BertBlock(block.layer_specs, block.layer_norm),
            vocab_size=args.padded_vocab_size,
            max_sequence_length=args.max_position_embeddings,
            num_tokentypes=2 if args.bert_binary_head else 0,
            add_binary_head=args.bert_binary_head,
            share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
            parallel_output=True,
            pre_process=pre_process,
            post_process=post_process,
            vp_stage=vp_stage,
        )


def datasets(run: Run) -> tuple[type, BERTMaskedWordPieceDatasetConfig]:
    """The data set class and its configuration; unless told otherwise whole words are masked, up to
    three together, as in Megatron-LM.
    """
    args = run.args
    config = BERTMaskedWordPieceDatasetConfig(
        **dataset_values(args, run.tokenizer),
        masking_probability=args.mask_prob,
        short_sequence_probability=args.short_seq_prob,
        masking_max_ngram=args.masking_max_ngram,
        masking_do_full_word=args.masking_do_full_word,
        masking_do_permutation=args.masking_do_permutation,
        masking_use_longer_ngrams=args.masking_use_longer_ngrams,
        masking_use_geometric_distribution=args.masking_use_geometric_distribution,
        classification_head=args.bert_binary_head,
    )
    return BERTMaskedWordPieceDataset, config


def get_batch(run: Run, iterator: Any) -> dict[str, torch.Tensor]:
    """The next batch: ``text``, ``types``, ``labels``, ``loss_mask``, ``padding_mask`` [b, s],
    ``is_random`` [b].
    """
    args = run.args
    flat = (args.micro_batch_size, args.seq_length)
    names = ("text", "types", "labels", "loss_mask", "padding_mask")
    layout: dict[str, Any] = dict.fromkeys(names, (flat, torch.int64))
    layout["is_random"] = (flat[:1], torch.int64)
    return tensor_parallel_batch(iterator, layout, run.device)


def forward_step(run: Run) -> Callable[..., Any]:
    """megatron-core's ``forward_step_func`` for BERT."""

    def step(iterator: Any, model: Any) -> tuple[Any, Callable[..., Any]]:
        with run.recorder.span("batch"), run.timed("batch-generator", level=2):
            batch = get_batch(run, iterator)
        output = model(
            batch["text"],
            batch["padding_mask"],
            tokentype_ids=batch["types"] if run.args.bert_binary_head else None,
            lm_labels=batch["labels"],
        )
        return output, partial(bert_loss, run, batch["loss_mask"], batch["is_random"])

    return step


def bert_loss(
    run: Run, mask: torch.Tensor, is_random: torch.Tensor, output: Any
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Mean masked-LM loss, plus the sentence-order loss where the binary head is there.

    The loop averages the reported values over microbatches and replicas.
    """
    token_losses, order_logits = output
    total, count = masked_sum(token_losses, mask)
    loss = lm_loss = total / count
    # A copy: megatron-core divides the loss by the number of microbatches in place.
    report = {"lm loss": lm_loss.detach().clone()}
    if order_logits is not None:
        logits = order_logits.view(-1, 2).float()
        order_loss = F.cross_entropy(logits, is_random.view(-1), ignore_index=-1)
        loss = lm_loss + order_loss
        report["sop loss"] = order_loss.detach()
    return checked(run, loss), report

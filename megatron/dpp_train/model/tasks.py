"""The pre-training tasks, GPT and BERT: chunks, data sets, forward steps and losses."""

from __future__ import annotations

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
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.models.bert.bert_model import BertModel
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_attr_wrapped_model, get_batch_on_this_cp_rank

from megatron.dpp.errors import ConfigError
from megatron.dpp_train.data.samples import next_of, tensor_parallel_batch
from megatron.dpp_train.data.sequences import Microbatch, SequenceConfig, SequenceDataset
from megatron.dpp_train.families import find_families
from megatron.dpp_train.model.configs import dataset_values, sequences_per_dataset
from megatron.dpp_train.model.forms import ScaledModel, form_layer
from megatron.dpp_train.model.layers import Change, bert_head_norm, block_spec, prediction_spec
from megatron.dpp_train.model.losses import masked_sum, require_finite
from megatron.dpp_train.model.packed import packed_params
from megatron.dpp_train.options.run_config import RunConfig
from megatron.dpp_train.state import Run, ends

Batch = dict[str, Any]
"""Tensors by name; empty on chunks that read nothing."""


@dataclass(frozen=True)
class PretrainingTask:
    """A model family.

    Args:
        build_chunk: builds one bare model chunk from arguments, configuration, and megatron-core's
            keywords ``pre_process``, ``post_process`` and ``vp_stage``.
        datasets: gives the data set class and its configuration.
        get_batch: gives a chunk's share of the next batch, from run, iterator and virtual stage.
        forward: gives the output and the loss function of a chunk for a batch.
        every_stage_reads: stages in the middle of the pipeline need batches too.
    """

    build_chunk: Callable[..., torch.nn.Module]
    datasets: Callable[[Run], tuple[type, Any]]
    get_batch: Callable[[Run, Any, int | None], Batch]
    forward: Callable[[Run, Any, Batch], tuple[Any, Callable[..., Any]]]
    every_stage_reads: bool = False

    def forward_step(self, run: Run) -> Callable[..., Any]:
        """megatron-core's ``forward_step_func``."""

        def step(iterator: Any, model: Any) -> tuple[Any, Callable[..., Any]]:
            with run.recorder.span("batch"), run.timed("batch-generator", level=2):
                batch = self.get_batch(run, iterator, get_attr_wrapped_model(model, "vp_stage"))
            return self.forward(run, model, batch)

        return step


def _layer_implementation(args: RunConfig) -> str:
    """The layer spec of ``--transformer-impl``.

    ``local`` is megatron-core's own on a CPU, for Megatron-LM's numbers to the last digits, and
    ours with PyTorch's attention on a GPU.
    """
    if args.transformer_impl != "local":
        return str(args.transformer_impl)
    return "torch" if args.device == "cuda" else "megatron"


def _model_values(args: RunConfig, config: TransformerConfig) -> dict[str, Any]:
    """Settings that GPT's and BERT's models share."""
    return {
        "config": config,
        "vocab_size": args.padded_vocab_size,
        "max_sequence_length": args.max_position_embeddings,
        "parallel_output": True,
        "share_embeddings_and_output_weights": not args.untie_embeddings_and_output_weights,
    }


# --- GPT ---


def _change(args: RunConfig, config: TransformerConfig) -> Change:
    """The function that gives the spec of a local layer the forms that flags and ``--family`` ask
    for.

    Raises:
        ConfigError: the family is not known here, or the layers are Transformer Engine's.
    """
    if args.family is None:
        return lambda layer: form_layer(layer, config, args)
    family = find_families(args.family_file).get(args.family)
    if family is None or family.layer is None:
        raise ConfigError(
            f"--family {args.family}: no family here has layers of this name; name the file that "
            "describes it (--family-file)"
        )
    if args.transformer_impl != "local":
        raise ConfigError(
            f"--family {args.family} needs --transformer-impl local, not {args.transformer_impl}"
        )
    own = family.layer
    return lambda layer: own(form_layer(layer, config, args), config, args)


def build_gpt(
    args: RunConfig, config: TransformerConfig, *, vp_stage: int | None, **place: bool
) -> GPTModel:
    """Builds one chunk of a GPT model."""
    layers: dict[str, Any] = {
        "implementation": _layer_implementation(args),
        "vp_stage": vp_stage,
        "own_masks": args.reset_attention_mask,
        "grouped_experts": args.moe_grouped_gemm,
        "change": _change(args, config),
    }
    count, rows = args.loss_vocab_size, args.padded_vocab_size
    kind: Callable[..., GPTModel] = GPTModel
    if args.embedding_scale != 1.0 or (count is not None and count < rows):
        kind = partial(ScaledModel, count, args.embedding_scale)
    return kind(
        **_model_values(args, config),
        transformer_layer_spec=block_spec(
            config, arch="gpt", output_scale=args.logit_scale, **layers
        ),
        fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        rope_scaling_factor=args.rope_scaling_factor,
        seq_len_interpolation_factor=args.rotary_seq_len_interpolation_factor,
        mtp_block_spec=prediction_spec(config, **layers),
        vp_stage=vp_stage,
        **place,
    )


def gpt_datasets(run: Run) -> tuple[type, GPTDatasetConfig]:
    """GPT's data set class and its configuration."""
    args = run.args
    own: dict[str, Any] = {}
    if args.variable_lengths:
        assert run.tokenizer is not None
        end = run.tokenizer.eod if args.eod_mask_loss else None
        own = {"chats": args.sft, "overlong": args.overlong, "end_of_document": end}
    config = (SequenceConfig if own else GPTDatasetConfig)(
        **own,
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
    if own:
        return SequenceDataset, config
    return (MockGPTDataset if args.mock_data else GPTDataset), config


def _gpt_batch(run: Run, iterator: Any, vp_stage: int | None) -> Batch:
    """Tokens and positions on the first stage, labels and loss mask on the last; multi-token
    prediction, on the last stage, embeds tokens too."""
    args = run.args
    first, last = ends(vp_stage)
    if args.variable_lengths:
        return _sequence_batch(run, next_of(iterator), first=first, last=last)
    if not (first or last):
        return {}
    flat = (args.micro_batch_size, args.seq_length)
    layout = _gpt_layout(args, flat, first=first, last=last)
    if args.create_attention_mask_in_dataloader:
        square = (args.micro_batch_size, 1, args.seq_length, args.seq_length)
        layout["attention_mask"] = (square, torch.bool)
    sample = None if iterator is None else next_of(iterator)
    batch = tensor_parallel_batch(sample, layout, run.device)
    sliced: Batch = get_batch_on_this_cp_rank(batch)
    return sliced


def _gpt_layout(
    args: RunConfig, flat: tuple[int, int], *, first: bool, last: bool
) -> dict[str, Any]:
    layout: dict[str, Any] = {}
    if first or args.mtp_num_layers:
        layout |= {"tokens": (flat, torch.int64), "position_ids": (flat, torch.int64)}
    if last:
        layout |= {"labels": (flat, torch.int64), "loss_mask": (flat, torch.float32)}
    return layout


def _sequence_batch(run: Run, microbatch: Microbatch, *, first: bool, last: bool) -> Batch:
    """The batch of a microbatch of sequences; ``cu_seqlens`` and ``max_seqlen`` on every stage
    where they are packed."""
    args = run.args
    batch: Batch = {}
    if first or last:
        layout = _gpt_layout(args, microbatch.shape, first=first, last=last)
        context = args.context_parallel_size  # megatron-core does not undo this average over ranks
        several = args.packing != "none" or args.micro_batch_size > 1 or context > 1
        several |= microbatch.is_weighted  # slices' losses add up to those of sequences
        if last and several and not args.calculate_per_token_loss:
            layout["loss_weights"] = layout["loss_mask"]
        batch = get_batch_on_this_cp_rank(
            tensor_parallel_batch(microbatch.sample, layout, run.device)
        )
        if "loss_weights" in batch:
            batch["loss_weights"] *= microbatch.share * context
    if args.packing == "none" or (microbatch.slice and microbatch.slice.is_cut):
        return batch
    return batch | microbatch.packed(run.device)


def _gpt_forward(run: Run, model: Any, batch: Batch) -> tuple[torch.Tensor, Callable[..., Any]]:
    mask, starts = batch.get("loss_mask"), batch.get("cu_seqlens")
    packed = None if starts is None else packed_params(starts, batch["max_seqlen"])
    output = model(
        batch.get("tokens"),
        batch.get("position_ids"),
        batch.get("attention_mask"),
        labels=batch.get("labels"),
        loss_mask=mask,
        packed_seq_params=packed,
    )
    return output, partial(gpt_loss, run, mask, weights=batch.get("loss_weights"))


def gpt_loss(
    run: Run, mask: Any, output: torch.Tensor, *, weights: Any = None
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Sum of the losses of the unmasked tokens, their number, and both for the log. With
    ``weights`` of the tokens their weighted sum is the loss, and counts as one."""
    loss, num_tokens = masked_sum(output, mask)
    loss = require_finite(run, loss)
    report = {"lm loss": torch.stack([loss.detach(), num_tokens.to(loss.dtype)])}
    if weights is not None:
        loss, _ = masked_sum(output, weights)
        num_tokens = torch.ones_like(num_tokens)
    return loss, num_tokens, report


# --- BERT ---


@dataclass
class _BertBlock(TransformerBlockSubmodules):  # type: ignore[misc]
    """A block's spec that also answers as a layer's: ``BertModel`` reads the shape of its mask from
    it."""

    @property
    def submodules(self) -> Any:
        """The modules of the first layer; all layers are alike."""
        return self.layer_specs[0].submodules


def build_bert(
    args: RunConfig, config: TransformerConfig, *, vp_stage: int | None, **place: bool
) -> BertModel:
    """Builds one chunk of a BERT model."""
    implementation = _layer_implementation(args)
    block = block_spec(config, arch="bert", implementation=implementation, vp_stage=vp_stage)
    with bert_head_norm():
        return BertModel(
            **_model_values(args, config),
            transformer_layer_spec=_BertBlock(block.layer_specs, block.layer_norm),
            num_tokentypes=2 if args.bert_binary_head else 0,
            add_binary_head=args.bert_binary_head,
            vp_stage=vp_stage,
            **place,
        )


def bert_datasets(run: Run) -> tuple[type, BERTMaskedWordPieceDatasetConfig]:
    """BERT's data set class and its configuration. By default whole words are masked, up to three
    together, as in Megatron-LM."""
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


def _bert_batch(run: Run, iterator: Any, vp_stage: int | None) -> Batch:
    """BERT's batch, of equal tensors on every stage: ``is_random`` is [b], the rest [b, s]."""
    flat = (run.args.micro_batch_size, run.args.seq_length)
    names = ("text", "types", "labels", "loss_mask", "padding_mask")
    layout: dict[str, Any] = dict.fromkeys(names, (flat, torch.int64))
    layout["is_random"] = (flat[:1], torch.int64)
    sample = None if iterator is None else next_of(iterator)
    return tensor_parallel_batch(sample, layout, run.device)


def _bert_forward(run: Run, model: Any, batch: Batch) -> tuple[Any, Callable[..., Any]]:
    output = model(
        batch["text"],
        batch["padding_mask"],
        tokentype_ids=batch["types"] if run.args.bert_binary_head else None,
        lm_labels=batch["labels"],
    )
    return output, partial(bert_loss, run, batch["loss_mask"], batch["is_random"])


def bert_loss(
    run: Run, mask: torch.Tensor, is_random: torch.Tensor, output: Any
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Mean masked-LM loss, plus the sentence-order loss with the binary head; the loop averages the
    reported values over microbatches and replicas."""
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
    return require_finite(run, loss), report


TASKS = {
    "gpt": PretrainingTask(build_gpt, gpt_datasets, _gpt_batch, _gpt_forward),
    "bert": PretrainingTask(
        build_bert, bert_datasets, _bert_batch, _bert_forward, every_stage_reads=True
    ),
}

"""Training on documents of unlike length with Megatron's loop: flags, data sets and batches.

``--rows`` takes each document of ``--data-path`` as one sample, in place of cutting a stream of
documents into rows of ``--seq-length``. Documents are texts, or chats that ``preprocess --sft`` has
marked. Every rank plans the same global batches and reads its own microbatches, without a message.
A training script calls, in this order: :func:`add_arguments`, :func:`prepare`, :func:`build` in the
place of Megatron's provider of data sets, and :func:`get_batch` in its forward step.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.num_microbatches_calculator import get_current_global_batch_size
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.training import get_args, get_tokenizer
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

from megatron.dpp import plugin
from megatron.dpp.errors import ConfigError
from megatron.dpp_train.data.documents import OVERLONG, DocumentDataset, DocumentsConfig
from megatron.dpp_train.data.loader import KINDS, BatchSettings, Row, RowLoader
from megatron.dpp_train.data.packed_attention import PackedRow

_UNSUPPORTED = "full_validation", "multiple_validation_sets", "hybrid_context_parallel"
"""Megatron's switches of its own loaders, which rows of unlike length do not pass through."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One microbatch on this rank; None for what its chunk does not need.

    Args:
        tokens, labels, position_ids: int64 [b, s / context-parallel size]; a packed row has b = 1.
        loss_mask: fp32 [b, s / context-parallel size], 1 for labels that have a loss.
        attention_mask: None: rows are causal.
        packed_seq_params: the documents of a packed row, on all ranks.
        padding_mask: bool [b, s / context-parallel size], True for padding, on all ranks of models
            with experts: routers leave padding out of their balance.
    """

    tokens: torch.Tensor | None = None
    labels: torch.Tensor | None = None
    loss_mask: torch.Tensor | None = None
    position_ids: torch.Tensor | None = None
    attention_mask: torch.Tensor | None = None
    packed_seq_params: PackedSeqParams | None = None
    padding_mask: torch.Tensor | None = None


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags of documents as rows to Megatron's parser, and return it."""
    group = parser.add_argument_group("documents as rows")
    group.add_argument(
        "--rows",
        choices=KINDS,
        help="each document is a sample: in rows of --seq-length (padded), rows as long as their "
        "documents (as-they-are), or rows that hold --micro-batch-size documents on average "
        "(packed)",
    )
    group.add_argument(
        "--overlong",
        choices=OVERLONG,
        default="error",
        help="documents above --seq-length: end the run, cut them, or leave them out",
    )
    return parser


def is_used(args: argparse.Namespace) -> bool:
    """True if a run takes documents as rows."""
    return getattr(args, "rows", None) is not None


def prepare(args: argparse.Namespace) -> None:
    """Set what ``--rows`` asks of Megatron's loop, between parsing and the model's configuration.

    Raises:
        ConfigError: a switch of Megatron's own loaders meets ``--rows``.
    """
    if not is_used(args):
        return
    for name in _UNSUPPORTED:
        if getattr(args, name, False):
            flag = "--" + name.replace("_", "-")
            raise ConfigError(
                f"{flag} with --rows {args.rows}: expected one of them; leave {flag} out"
            )
    args.dataloader_type = "external"
    args.variable_seq_lengths = args.rows != "padded"
    if args.variable_seq_lengths and args.moe_token_dispatcher_type == "allgather":
        args.moe_token_dispatcher_type = "alltoall"  # the other one takes one length alone


def build(
    args: argparse.Namespace, num_samples: list[int], vp_stage: int | None = None
) -> tuple[RowLoader | None, RowLoader | None, RowLoader | None]:
    """Loaders of training, validation and test, as Megatron's external data loaders; a collective.

    Args:
        num_samples: documents that a run takes of each split.

    Raises:
        DataError: a file is missing or broken, or documents exceed ``--seq-length``.
    """
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    config = DocumentsConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=get_tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=False,
        overlong=args.overlong,
    )
    builder = BlendedMegatronDatasetBuilder(DocumentDataset, num_samples, lambda: True, config)
    train, valid, test = builder.build()
    reads = reads_data(args, vp_stage)
    size = args.eval_global_batch_size
    return (
        RowLoader.of(
            train, _settings(args, args.micro_batch_size), get_current_global_batch_size,
            args.consumed_train_samples, reads=reads,
            announce=None if args.rampup_batch_size else plugin.announce,
        ),
        RowLoader.of(
            valid, _settings(args, args.eval_micro_batch_size), lambda: size,
            args.consumed_valid_samples, reads=reads,
        ),
        RowLoader.of(
            test, _settings(args, args.eval_micro_batch_size), lambda: size, 0, reads=reads
        ),
    )  # fmt: skip


def get_batch(data_iterator: Any, vp_stage: int | None = None) -> Batch:
    """The next microbatch of this rank's chunk, on its device; no collective."""
    args = get_args()
    row: Row = next(data_iterator)
    group = mpu.get_context_parallel_group()
    part = row.part(group.size(), group.rank())
    tensors = {name: _to_device(tensor[:, part]) for name, tensor in (row.tensors or {}).items()}
    if args.num_experts:
        tensors["padding_mask"] = _to_device(row.padding()[:, part])
    packed = None
    if args.rows == "packed":
        packed = PackedRow.of(_to_device(torch.tensor(row.bounds, dtype=torch.int32)), row.bounds)
    return Batch(**tensors, packed_seq_params=packed)


def _settings(args: argparse.Namespace, micro_batch_size: int) -> BatchSettings:
    context = args.context_parallel_size
    return BatchSettings(
        kind=args.rows,
        num_replicas=mpu.get_data_parallel_world_size(),
        replica=mpu.get_data_parallel_rank(),
        micro_batch_size=micro_batch_size,
        longest=args.seq_length,
        document_multiple=2 * context if context > 1 else 1,
        row_multiple=(2 * context if context > 1 else 1)
        * (args.tensor_model_parallel_size if args.sequence_parallel else 1),
        hidden_size=args.hidden_size,
    )


def reads_data(args: argparse.Namespace, vp_stage: int | None) -> bool:
    """True if this rank's chunk takes tokens or labels; MTP's layers take both."""
    return bool(args.mtp_num_layers) or bool(is_first_or_last_pipeline_stage(vp_stage))


def _to_device(tensor: torch.Tensor) -> torch.Tensor:
    if not torch.cuda.is_available():
        return tensor
    return tensor.pin_memory().to(torch.cuda.current_device(), non_blocking=True)

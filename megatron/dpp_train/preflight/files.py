"""Checks that the files of a run exist and are whole, before any process group exists."""

from __future__ import annotations

import math
import os
import re
import tempfile
from pathlib import Path

from megatron.dpp.errors import ConfigError, DataError
from megatron.dpp.index_files import MAGIC, TOKEN_BYTES, TOKEN_TYPES, check_index, read_lengths
from megatron.dpp.safe_files import open_to_read
from megatron.dpp_train.checkpoint.files import Found, check_engine, check_whole, find_start
from megatron.dpp_train.checkpoint.saved_args import check_model, check_optimizer, saved_args
from megatron.dpp_train.cost.flops import length_costs
from megatron.dpp_train.data.sequence_files import (
    answers_prefix,
    check_lengths,
    check_prefix,
    describe_overlong,
)
from megatron.dpp_train.data.words import data_words
from megatron.dpp_train.hf.files import check_hf
from megatron.dpp_train.options.run_config import RunConfig, Settings
from megatron.dpp_train.options.trace_layout import trace_layout
from megatron.dpp_train.text_files import read_mapping

_SETS = ("training", "validation", "test")
_LOOKED_AT_BYTES = 1 << 30
_BLOCK_BYTES = 1 << 22


def check_files(args: Settings, task_name: str) -> None:
    """Refuse missing or broken data files, and directories that cannot be written.

    Args:
        task_name: ``gpt`` or ``bert``; what ``--split`` divides differs.

    Raises:
        ConfigError: ``--split`` has no shares, or BERT's prefixes have no weights.
        DataError: the first broken file, and what is wrong with it.
    """
    check_start(args)
    _check_communicators(args.nccl_communicator_config_path)
    check_data(args, task_name)
    check_outputs(args)


def check_start(args: Settings) -> None:
    """Refuse a checkpoint that is missing, broken, or of another model or kind of optimizer.

    Raises:
        DataError, ConfigError: naming the file, and what differs.
    """
    found = find_start(args)
    if found is not None:
        if found.is_deepspeed:
            check_engine(found, args.deepspeed_zero_stage, args.data_parallel_size)
        else:
            check_whole(
                found,
                args.tensor_model_parallel_size,
                args.pipeline_model_parallel_size,
                args.expert_model_parallel_size,
                args.expert_tensor_parallel_size or args.tensor_model_parallel_size,
            )
            _check_saved(args, found)


def _check_communicators(given: str | None) -> None:
    if given is not None:
        settings = read_mapping(given, "--nccl-communicator-config-path")
        if not all(isinstance(each, dict) for each in settings.values()):
            raise DataError(
                f"--nccl-communicator-config-path {given}: expected settings for each process "
                "group, as in tp: {min_ctas: 8}"
            )


def _check_saved(args: Settings, found: Found) -> None:
    saved = saved_args(found)
    if saved is None or args.finetune or found.pretrained:
        return
    check_model(args, saved, found.path)
    if not getattr(saved, "no_save_optim", False):
        check_optimizer(args, saved, found.path)


def check_data(args: Settings, task_name: str) -> None:
    """Check the data files."""
    if not args.mock_data:
        words, per_split = data_words(args)
        for each in [words, *(per_split or [])]:
            prefixes = _prefixes(each or [])
            _check_weights(each or [])
            if task_name == "bert" and len(each or []) == len(prefixes) > 1:
                raise ConfigError(
                    f"data {' '.join(prefixes)}: BERT's data sets are made to a number of "
                    "samples; give every prefix a weight (1 PREFIX 1 PREFIX)"
                )
            for prefix in prefixes:
                sequences, documents = check_index(prefix)
                if args.sft or args.variable_length:
                    _check_sequences(prefix, args)
                else:
                    _check_cache(prefix, args)
                if words:  # GPT's data sets divide sequences, BERT's documents
                    check_split(
                        prefix, args.split or "", sequences if task_name == "gpt" else documents
                    )


def _check_weights(words: list[str]) -> None:
    """Refuse a blend of which a prefix has no share."""
    if words == _prefixes(words):
        return
    for weight, prefix in zip(words[::2], words[1::2], strict=True):
        if not 0 < float(weight) < math.inf:
            raise ConfigError(
                f"data {' '.join(map(str, words))}: the weight of {prefix} is {weight}; expected a "
                "number above 0 (leave a prefix out that has no share)"
            )


def _check_sequences(prefix: str, args: Settings) -> None:
    if args.sft:
        check_prefix(prefix)
        check_index(answers_prefix(prefix))
    check_lengths(prefix, args)
    if args.length_costs:
        length_costs(args)


def check_outputs(args: Settings) -> None:
    """Refuse directories that cannot be made or written, and a ``--dpp-record`` into none: a
    DataError names flag and directory."""
    if args.use_dpp and args.dpp_record:
        folder = Path(args.dpp_record).absolute().parent
        if not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
            raise DataError(
                f"--dpp-record {args.dpp_record}: {folder} is no directory that can be written to"
            )
    check_hf(args)
    trace = args.trace_dir if args.trace else None
    for flag, given in (
        ("--save", args.save),
        ("--save-hf", args.save_hf),
        ("--tensorboard-dir", args.tensorboard_dir),
        ("--trace-dir", trace),
        ("--metrics-file", args.metrics_file),
    ):
        if not given:
            continue
        path = Path(given).absolute()
        if flag == "--metrics-file":
            if path.is_dir() or (path.exists() and not os.access(path, os.W_OK)):
                raise DataError(f"{flag} {given}: not a file that can be written to")
            path = path.parent
        if flag == "--tensorboard-dir" and not _is_utf8(path):
            raise DataError(f"{flag} {path}: TensorBoard writes to names in UTF-8 only")
        if fault := _fault_of(path):
            raise DataError(f"{flag} {given}: {fault}")


def _is_utf8(path: Path) -> bool:
    try:
        return bool(str(path).encode())
    except UnicodeEncodeError:
        return False


def _check_cache(prefix: str, args: Settings) -> None:
    """Refuse indices of samples that can neither be there nor be written."""
    folder = Path(args.data_cache_path or f"{prefix}/cache").absolute()
    is_there = next(folder.rglob("*-description.txt"), None) is not None
    if not is_there and (fault := _fault_of(folder)):
        raise DataError(
            f"data {prefix}: indices of its samples are kept in {folder}, and {fault}: name "
            "another directory with --data-cache-path"
        )


def _fault_of(folder: Path) -> str:
    """The reason why a directory cannot be made or written; empty where it can."""
    there = next(each for each in (folder, *folder.parents) if each.exists())
    if not there.is_dir():
        return f"{there} is a file, a directory is expected"
    try:  # permissions alone do not tell: root, NFS
        tempfile.TemporaryFile(dir=there).close()
    except OSError as error:
        return f"{there} is not writable ({error.strerror})"
    return ""


def written_directories(args: Settings) -> list[tuple[str, Path]]:
    """Flags and directories that one run at a time may write: checkpoints and traces."""
    found = [("--save", Path(args.save))] if args.save else []
    if args.trace:
        found.append(("--trace-dir", trace_layout(args).path(args.trace_dir).parent))
    return found


def _all_prefixes(args: Settings) -> list[str]:
    words, per_split = data_words(args)
    groups = [_prefixes(group or []) for group in (words, *(per_split or []))]
    return list(dict.fromkeys(prefix for group in groups for prefix in group))


def _prefixes(words: list[str]) -> list[str]:
    """Without the weights, which stand before every prefix or before none."""
    try:
        weights = [float(word) for word in words[::2]]
    except ValueError:
        return words
    return words[1::2] if len(words) == 2 * len(weights) else words


def warnings_of_data(args: Settings, task_name: str) -> list[str]:
    """A line for each data set that holds fewer tokens than a sample of GPT, which has one more
    than a sequence (BERT fills up short samples), or documents that are cut or left out."""
    if task_name != "gpt" or args.mock_data:
        return []
    if args.variable_lengths:
        found = (describe_overlong(prefix, args) for prefix in _all_prefixes(args))
        return [line for line in found if line is not None]
    lines = []
    for prefix in _all_prefixes(args):
        if Path(f"{prefix}.bin").stat().st_size > args.seq_length * max(TOKEN_BYTES.values()):
            continue
        tokens = int(read_lengths(prefix).sum())
        if tokens <= args.seq_length:
            lines.append(
                f"{prefix}.bin holds {tokens} tokens, fewer than a sample of "
                f"{args.seq_length + 1} (--seq-length + 1): each sample repeats them"
            )
    return lines


def check_split(prefix: str, split: str, num_parts: int) -> None:
    """Check that every set with a share in ``--split`` gets some of ``prefix``'s ``num_parts``
    sequences or documents. megatron-core counts the epochs of an empty set for ever.

    Raises:
        ConfigError: ``split`` is not up to three numbers.
        DataError: a set would be empty.
    """
    words = re.split(r"\s*[,/]\s*|\s+", split.strip())  # as Megatron-LM divides them
    good = all(re.fullmatch(r"\d+\.?\d*|\.\d+", word) for word in words)
    shares = [float(word) for word in words] if good else []
    if len(shares) > len(_SETS) or not sum(shares):
        raise ConfigError(
            f"--split {split}: expected shares of training, validation and test, numbers from 0 "
            "on of which one is above 0, such as 969,30,1"
        )
    begin = 0.0
    for name, share in zip(_SETS, shares, strict=False):
        end = begin + share / sum(shares)
        if share and round(begin * num_parts) == round(end * num_parts):
            raise DataError(
                f"{prefix}.idx: --split {split} leaves none of its {num_parts} documents for "
                f"{name}; give {name} a larger share, or 0"
            )
        begin = end


def check_tokens(args: RunConfig) -> None:
    """Refuse token ids outside of the model's vocabulary: a DataError names file, id and size. Of
    files above 1 GiB it looks at blocks that are spread evenly."""
    if args.mock_data:
        return
    for prefix in _all_prefixes(args):
        _check_ids(prefix, args.loss_vocab_size or args.padded_vocab_size)


def _check_ids(prefix: str, vocab_size: int) -> None:
    import numpy

    with open_to_read(prefix + ".idx") as index:
        index.seek(len(MAGIC) + 8)  # behind the version
        kind = TOKEN_TYPES.get(index.read(1)[0])
    path = Path(prefix + ".bin")
    if kind is None or not path.stat().st_size:
        return
    tokens = numpy.memmap(path, dtype=kind, mode="r")
    block = _BLOCK_BYTES // tokens.itemsize
    step = block * max(1, -(-tokens.nbytes // _LOOKED_AT_BYTES))
    for start in range(0, len(tokens), step):
        part = tokens[start : start + block]
        found = int(part.max()) if part.max() >= vocab_size else int(part.min())
        if not 0 <= found < vocab_size:
            raise DataError(
                f"{path}: token id {found} is outside of the model's vocabulary of {vocab_size}; "
                "give the tokenizer that made the file, or text without this token"
            )

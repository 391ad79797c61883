"""Checks of a run's command line before any process starts: spelling, types, files, sizes.

Each error is one line that names the flag as it was typed. Whatever is not checked here, Megatron
itself refuses later.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.dpp.command_line import Parser
from megatron.dpp.errors import (
    BAD_USAGE,
    ConfigError,
    DataError,
    DppError,
    did_you_mean,
    print_error,
)
from megatron.dpp_train.presets.flag_table import Table, saved
from megatron.dpp_train.text_files import nearest_path

NOW = {
    "--trace": "--dpp-trace",
    "--trace-dir": "--dpp-trace-dir",
    "--trace-interval": "--dpp-trace-interval",
    "--trace-iterations": "--dpp-trace-iterations",
    "--continuous-trace-iterations": "--dpp-trace-iterations",
    "--benchmark-dir": "--dpp-trace-dir",
    "--benchmark_dir": "--dpp-trace-dir",
    "--trace-granularity": "",
    "--multi-node": "",
    "--forward-backward-disaggregating": "",
    "--ignore-forward-tensor-parallel": "",
}
"""Flags of earlier versions -> what they are now; an empty text: not needed any more."""
_REMOTE = ("s3://", "msc://", "http://", "https://", "hf://")


def parse(argv: Sequence[str], table: Table, also: Iterable[str] = ()) -> dict[str, Any]:
    """The values of a command line, typed, by the names that Megatron gives them.

    Args:
        also: further flags that a misspelt one may be nearer to.

    Raises:
        ConfigError: an unknown flag, a value of another type, or none of its choices.
    """
    parser = Parser(add_help=False, allow_abbrev=False)
    for name, flag in table.items():
        parser.add_argument(name, default=argparse.SUPPRESS, dest=flag.dest, **flag.reading(name))
    values, rest = parser.parse_known_args(argv)
    if rest:
        raise ConfigError(_unknown(rest[0], [*also, *table]))
    return vars(values)


def is_flag(word: str) -> bool:
    """True for a flag; False for a negative number."""
    return word.startswith("-") and not re.fullmatch(r"-[\d.]+(e[+-]?\d+)?", word)


def _unknown(word: str, known: Sequence[str]) -> str:
    name = word.partition("=")[0]
    if not word.startswith("-"):
        return f"unexpected argument {word!r}: flags start with --"
    if now := NOW.get(name):
        return f"{name} is {now} now"
    if name in NOW:
        return f"{name} is not needed any more"
    return f"unknown flag {name}{did_you_mean(name, known)}"


def check(argv: Sequence[str], table: Table, *, world_size: int, also: Iterable[str] = ()) -> None:
    """Refuse a command line of ``pretrain_gpt.py`` or ``pretrain_bert.py`` that cannot work.

    Raises:
        ConfigError: a flag, a value or a combination of sizes.
        DataError: a file that is not there, or cannot be read.
    """
    values = parse(argv, table, also)
    check_files(values)
    if values.get("yaml_cfg") or values.get("use_checkpoint_args") or values.get("spec"):
        return  # the sizes are elsewhere
    sizes = {flag.dest: flag.default for flag in table.values()} | values
    _check_values(sizes)
    for whole, parts in _divisions(sizes, world_size):
        _require_divides(whole, parts)
    learned = (sizes["position_embedding_type"] or "learned_absolute") == "learned_absolute"
    length, positions = sizes["seq_length"], sizes["max_position_embeddings"]
    if learned and length > positions:
        raise ConfigError(f"--seq-length {length} is above --max-position-embeddings {positions}")


def check_direct(argv: Sequence[str]) -> None:
    """Check the command line of a training script that was started without ``train``: the process
    ends with status 2 and one line where it cannot work. Does nothing for ``--help``, and where no
    table of flags was made yet."""
    table = saved()
    if table is None or {"--help", "-h"} & set(argv):
        return
    try:
        check(argv, table, world_size=int(os.environ.get("WORLD_SIZE") or 1))
    except DppError as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print_error(error)
        sys.exit(BAD_USAGE)


_NEEDED = (
    "num_layers", "hidden_size", "num_attention_heads", "seq_length", "micro_batch_size",
    "max_position_embeddings", "lr",
)  # fmt: skip
_POSITIVE = (
    *_NEEDED, "global_batch_size", "tensor_model_parallel_size", "pipeline_model_parallel_size",
    "context_parallel_size", "expert_model_parallel_size", "num_query_groups", "num_experts",
    "num_virtual_stages_per_pipeline_rank", "num_layers_per_virtual_pipeline_stage", "kv_channels",
    "ffn_hidden_size", "log_interval",
)  # fmt: skip
_UNEVEN = (
    "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers",
    "pipeline_model_parallel_layout", "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split", "hybrid_layer_pattern",
)  # fmt: skip


def flag_of(name: str) -> str:
    """A flag by the name of its value."""
    return f"--{name.replace('_', '-')}"


def _check_values(sizes: Mapping[str, Any]) -> None:
    """Sizes and rates are above 0, and none of the needed ones is missing."""
    for name in _POSITIVE:
        value = sizes[name]
        if value is not None and not 0 < value < math.inf:
            least = "at least 1" if isinstance(value, int) else "above 0"
            raise ConfigError(f"{flag_of(name)} {value:g}: must be {least}")
    missing = [flag_of(name) for name in _NEEDED if sizes[name] is None]
    if not (sizes["train_iters"] or sizes["train_samples"] or sizes["skip_train"]):
        missing.append("--train-iters")
    if missing and not sizes["hybrid_layer_pattern"]:
        raise ConfigError(f"{', '.join(missing)}: give a value")


Part = tuple[str, int]
"""A size, and the words for it."""


def _divisions(sizes: Mapping[str, Any], world_size: int) -> Iterator[tuple[Part, list[Part]]]:
    """Pairs of a number and those that must divide it."""

    def part(name: str) -> Part:
        return f"{flag_of(name)} {sizes[name]}", sizes[name] or 1

    tensor, pipeline = part("tensor_model_parallel_size"), part("pipeline_model_parallel_size")
    context = part("context_parallel_size")
    yield (f"{world_size} processes", world_size), [tensor, pipeline, context]
    heads = part("num_attention_heads")
    if sizes["kv_channels"] is None:
        yield part("hidden_size"), [heads]
    if sizes["group_query_attention"]:
        yield heads, [part("num_query_groups")]
    yield heads, [tensor]
    each = sizes["num_virtual_stages_per_pipeline_rank"] or 1
    chunks, per_chunk = (f"{each} chunks", each), part("num_layers_per_virtual_pipeline_stage")
    if not any(sizes[name] for name in _UNEVEN):
        yield part("num_layers"), [pipeline, chunks, per_chunk]
    if sizes["num_experts"]:
        yield part("num_experts"), [part("expert_model_parallel_size")]
    if context[1] > 1:
        yield part("seq_length"), [("2 halves", 2), context]
    if sizes["global_batch_size"] and not sizes["rampup_batch_size"]:
        replicas = world_size // (tensor[1] * pipeline[1] * context[1])
        parts = [part("micro_batch_size"), (f"{replicas} replicas", replicas)]
        static = (each > 1 or per_chunk[1] > 1) and not sizes["use_dpp"]
        yield part("global_batch_size"), [*parts, *([pipeline] if static else [])]


def _require_divides(whole: Part, parts: list[Part]) -> None:
    product = math.prod(size for _, size in parts)
    if whole[1] % product:
        names = [words for words, size in parts if size > 1]
        total = f" = {product}" if len(names) > 1 else ""
        near = f"; nearest: {nearest_multiple(whole[1], product)}" if whole[0][0] == "-" else ""
        raise ConfigError(f"{whole[0]} cannot be divided by {' x '.join(names)}{total}{near}")


def nearest_multiple(number: int, of: int) -> int:
    """The multiple of ``of`` (not 0) that is nearest to ``number``.

    >>> nearest_multiple(30, 8)
    32
    """
    return max(1, round(number / of)) * of


_FILES = ["vocab_file", "merge_file", "yaml_cfg", "data_args_path", "per_split_data_args_path"]
_PREFIXES = ("data_path", "train_data_path", "valid_data_path", "test_data_path")


def check_files(values: Mapping[str, Any]) -> None:
    """Refuse input files that are not there or cannot be read (DataError)."""
    for name in _FILES:
        path = values.get(name)
        if path and not Path(path).is_file():
            raise DataError(f"{flag_of(name)} {path}: no such file{nearest_path(Path(path))}")
    model = values.get("tokenizer_model")
    if model and os.path.isabs(model) and not Path(model).exists():
        raise DataError(f"--tokenizer-model {model}: no such file or directory")
    for name in _PREFIXES:
        for word in values.get(name) or ():
            if not re.fullmatch(r"[\d.]+", word) and not word.startswith(_REMOTE):
                _require_tokens(word, f"{flag_of(name)} {word}")
    needed = ("pretrained_checkpoint", *(["load"] if values.get("finetune") else ()))
    for name in needed:
        path = values.get(name)
        if path and not path.startswith(_REMOTE) and not Path(path).is_dir():
            raise DataError(f"{flag_of(name)} {path}: no such directory")


def _require_tokens(prefix: str, named: str) -> None:
    if Path(prefix).is_file():
        return  # rows of chats, say, which a data set reads as they are
    for suffix in (".idx", ".bin"):
        if not Path(prefix + suffix).is_file():
            near = nearest_path(Path(prefix + suffix))
            raise DataError(
                f"{named}: {prefix}{suffix} is missing{near}; megatron-dpp preprocess makes token "
                "files"
            )

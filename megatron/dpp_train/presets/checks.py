"""Checks of a run's command line before any process starts: spelling, types, files, sizes.

Each error is one line that names the flag as it was typed. Whatever is not checked here, Megatron
itself refuses later.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.dpp.errors import ConfigError, DataError, did_you_mean
from megatron.dpp_train.presets.flag_table import Flag, Table

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
_BOOL = ("true", "false", "1", "0", "yes", "no")
_REMOTE = ("s3://", "msc://", "http://", "https://", "hf://")


def parse(argv: Sequence[str], table: Table, also: Iterable[str] = ()) -> dict[str, Any]:
    """The values of a command line, typed, by the names that Megatron gives them.

    Args:
        also: further flags that a misspelt one may be nearer to.

    Raises:
        ConfigError: an unknown flag, a value of another type, or none of its choices.
    """
    values: dict[str, Any] = {}
    words = list(argv)
    while words:
        name, equals, value = words.pop(0).partition("=")
        flag = table.get(name)
        if flag is None:
            raise ConfigError(_unknown(name + equals + value, [*also, *table]))
        given = [value] if equals else []
        while words and not given_is_full(flag, given) and not is_flag(words[0]):
            given.append(words.pop(0))
        values[flag.dest] = _value(name, flag, given)
    return values


def is_flag(word: str) -> bool:
    """True for a flag; False for a negative number."""
    return word.startswith("-") and not re.fullmatch(r"-[\d.]+(e[+-]?\d+)?", word)


def given_is_full(flag: Flag, given: Sequence[str]) -> bool:
    """True where the flag takes no further word."""
    if flag.kind == "switch":
        return True
    most = {None: 1, "?": 1}.get(flag.nargs, flag.nargs)
    return isinstance(most, int) and len(given) >= most


def _unknown(word: str, known: Sequence[str]) -> str:
    name = word.partition("=")[0]
    if not word.startswith("-"):
        return f"unexpected argument {word!r}: flags start with --"
    if name in NOW:
        return f"{name} is {NOW[name]} now" if NOW[name] else f"{name} is not needed any more"
    return f"unknown flag {name}{did_you_mean(name, known)}"


def _value(name: str, flag: Flag, given: Sequence[str]) -> Any:
    if flag.kind == "switch":
        if given:
            raise ConfigError(f"{name} is a switch, and takes no value ({given[0]!r})")
        return not name.startswith("--no-") or flag.dest.startswith("no_")
    if not given and flag.nargs not in ("*", "?"):
        raise ConfigError(f"{name}: expected a value")
    typed = [_typed(name, flag, text) for text in given]
    return typed if flag.nargs not in (None, "?") else (typed or [None])[0]


def _typed(name: str, flag: Flag, text: str) -> Any:
    if flag.choices and text not in flag.choices:
        near = did_you_mean(text, flag.choices)
        raise ConfigError(f"{name} {text}: expected one of {', '.join(flag.choices)}{near}")
    try:
        if flag.kind == "int":
            return int(text)
        if flag.kind == "float":
            return float(text)
    except ValueError:
        kind = {"int": "a whole number", "float": "a number"}[flag.kind]
        raise ConfigError(f"{name} {text}: expected {kind}") from None
    return text


def check(
    argv: Sequence[str], table: Table, *, world_size: int, also: Iterable[str] = ()
) -> dict[str, Any]:
    """Refuse a command line of ``pretrain_gpt.py`` or ``pretrain_bert.py`` that cannot work.

    Returns:
        The given values, by the names that Megatron gives them.

    Raises:
        ConfigError: a flag, a value or a combination of sizes.
        DataError: a file that is not there, or cannot be read.
    """
    values = parse(argv, table, also)
    check_files(values)
    if values.get("yaml_cfg") or values.get("use_checkpoint_args"):
        return values  # the sizes are elsewhere
    sizes = Sizes(values, table)
    sizes.check_positive()
    sizes.check_model()
    sizes.check_layout(world_size)
    sizes.check_batch(world_size)
    sizes.check_length()
    return values


class Sizes:
    """The sizes of a run, and how they divide each other."""

    _POSITIVE = (
        "num_layers", "hidden_size", "num_attention_heads", "seq_length", "micro_batch_size",
        "global_batch_size", "tensor_model_parallel_size", "pipeline_model_parallel_size",
        "context_parallel_size", "expert_model_parallel_size", "max_position_embeddings",
        "num_query_groups", "num_experts", "ffn_hidden_size", "kv_channels", "log_interval",
    )  # fmt: skip
    _UNEVEN = (
        "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers",
        "pipeline_model_parallel_layout", "account_for_embedding_in_pipeline_split",
        "account_for_loss_in_pipeline_split", "hybrid_layer_pattern", "spec",
    )  # fmt: skip

    def __init__(self, values: Mapping[str, Any], table: Table) -> None:
        self._values = values
        self._defaults = {flag.dest: flag.default for flag in table.values()}

    def __getitem__(self, name: str) -> Any:
        return self._values.get(name, self._defaults.get(name))

    def _said(self, name: str) -> str:
        return f"--{name.replace('_', '-')} {self[name]}"

    def check_positive(self) -> None:
        """Sizes are at least 1, rates are numbers above 0, and none of the needed ones is missing."""
        for name in self._POSITIVE:
            if name in self._values and self[name] is not None and self[name] < 1:
                raise ConfigError(f"{self._said(name)}: must be at least 1")
        lr = self._values.get("lr")
        if lr is not None and not 0 < lr < math.inf:
            raise ConfigError(f"--lr {lr:g}: must be above 0")
        needed = ("num_layers", "hidden_size", "num_attention_heads", "seq_length",
                  "max_position_embeddings", "micro_batch_size", "lr")  # fmt: skip
        missing = [name for name in needed if self[name] is None]
        if self["train_iters"] is None and self["train_samples"] is None and not self["skip_train"]:
            missing.append("train_iters")
        if missing and not self["hybrid_layer_pattern"]:
            names = ", ".join(f"--{name.replace('_', '-')}" for name in missing)
            raise ConfigError(f"{names}: give a value")

    def check_model(self) -> None:
        """Heads divide the width, groups the heads."""
        hidden, heads = self["hidden_size"], self["num_attention_heads"]
        if self["kv_channels"] is None and heads and hidden % heads:
            raise ConfigError(
                f"--hidden-size {hidden} cannot be divided by --num-attention-heads {heads}; "
                f"nearest: {nearest_multiple(hidden, heads)}"
            )
        if self["group_query_attention"] and heads % self["num_query_groups"]:
            raise ConfigError(
                f"--num-attention-heads {heads} cannot be divided by {self._said('num_query_groups')}"
            )

    def check_layout(self, world_size: int) -> None:
        """The parallel sizes divide the ranks, the layers, the heads and the experts."""
        tensor, pipeline, context = self._parallel()
        if world_size % (tensor * pipeline * context):
            raise ConfigError(
                f"{world_size} processes cannot be divided by tensor x pipeline x context parallel "
                f"size {tensor} x {pipeline} x {context} = {tensor * pipeline * context}"
            )
        layers, stages = self["num_layers"], pipeline * self.chunks()
        if layers and not any(self[name] for name in self._UNEVEN) and layers % stages:
            what = f"{pipeline} pipeline stages" + (
                f" x {self.chunks()} chunks" if self.chunks() > 1 else ""
            )
            raise ConfigError(
                f"--num-layers {layers} cannot be divided by {what}; nearest: "
                f"{nearest_multiple(layers, stages)}"
            )
        heads, experts = self["num_attention_heads"], self["num_experts"]
        if heads and heads % tensor:
            raise ConfigError(
                f"--num-attention-heads {heads} cannot be divided by "
                f"--tensor-model-parallel-size {tensor}"
            )
        if experts and experts % self["expert_model_parallel_size"]:
            raise ConfigError(
                f"--num-experts {experts} cannot be divided by "
                f"{self._said('expert_model_parallel_size')}"
            )

    def _parallel(self) -> tuple[int, int, int]:
        return (
            self["tensor_model_parallel_size"] or 1,
            self["pipeline_model_parallel_size"] or 1,
            self["context_parallel_size"] or 1,
        )

    def chunks(self) -> int:
        """Model chunks of a pipeline rank."""
        per_chunk = self["num_layers_per_virtual_pipeline_stage"]
        if per_chunk:
            stage = (self["num_layers"] or 0) // (self["pipeline_model_parallel_size"] or 1)
            if stage % per_chunk:
                raise ConfigError(
                    f"--num-layers-per-virtual-pipeline-stage {per_chunk} does not divide the "
                    f"{stage} layers of a pipeline stage"
                )
            return max(1, stage // per_chunk)
        return self["num_virtual_stages_per_pipeline_rank"] or 1

    def check_batch(self, world_size: int) -> None:
        """The global batch is whole microbatches on every replica; Megatron's interleaved schedule
        needs a multiple of the pipeline's size."""
        batch, micro = self["global_batch_size"], self["micro_batch_size"]
        if batch is None or self["rampup_batch_size"] or not micro:
            return
        tensor, pipeline, context = self._parallel()
        replicas = world_size // (tensor * pipeline * context)
        unit = micro * replicas
        static = self.chunks() > 1 and not self["use_dpp"]
        why = f"--micro-batch-size {micro} x {replicas} replicas"
        if static:
            unit, why = unit * pipeline, f"{why} x {pipeline} pipeline stages"
        if batch % unit:
            raise ConfigError(
                f"--global-batch-size {batch} is not a multiple of {why} = {unit}; nearest: "
                f"{nearest_multiple(batch, unit)}"
            )

    def check_length(self) -> None:
        """Learned positions are as many as a sample's tokens; context ranks share them evenly."""
        length, positions = self["seq_length"], self["max_position_embeddings"]
        learned = (self["position_embedding_type"] or "learned_absolute") == "learned_absolute"
        if length and positions and learned and length > positions:
            raise ConfigError(
                f"--seq-length {length} is above --max-position-embeddings {positions}"
            )
        context = self["context_parallel_size"] or 1
        if length and context > 1 and length % (2 * context):
            raise ConfigError(
                f"--seq-length {length} cannot be divided by 2 x --context-parallel-size {context}"
            )


def nearest_multiple(number: int, of: int) -> int:
    """The multiple of ``of`` (not 0) that is nearest to ``number``.

    >>> nearest_multiple(30, 8)
    32
    """
    return max(1, round(number / of)) * of


_FILES = ("vocab_file", "merge_file", "yaml_cfg", "data_args_path", "per_split_data_args_path",
          "te_precision_config_file")  # fmt: skip
_PREFIXES = ("data_path", "train_data_path", "valid_data_path", "test_data_path")


def check_files(values: Mapping[str, Any]) -> None:
    """Refuse input files that are not there or cannot be read (DataError)."""
    for name in _FILES:
        if path := values.get(name):
            require_file(Path(path), f"--{name.replace('_', '-')} {path}")
    model = values.get("tokenizer_model")
    if model and os.path.isabs(model) and not Path(model).exists():
        raise DataError(f"--tokenizer-model {model}: no such file or directory")
    for name in _PREFIXES:
        for word in _prefixes(values.get(name) or ()):
            _require_tokens(word, f"--{name.replace('_', '-')} {word}")
    needed = ("pretrained_checkpoint", *(["load"] if values.get("finetune") else ()))
    for name in needed:
        path = values.get(name)
        if path and not path.startswith(_REMOTE) and not Path(path).is_dir():
            raise DataError(f"--{name.replace('_', '-')} {path}: no such directory")


def _prefixes(words: Iterable[str]) -> list[str]:
    """The prefixes among weights and prefixes."""
    return [word for word in words if not re.fullmatch(r"[\d.]+", word)
            and not word.startswith(_REMOTE)]  # fmt: skip


def _require_tokens(prefix: str, named: str) -> None:
    if Path(prefix).is_file():
        return  # rows of chats, say, which a data set reads as they are
    for suffix in (".idx", ".bin"):
        if not Path(prefix + suffix).is_file():
            near = _nearest(Path(prefix + suffix))
            raise DataError(
                f"{named}: {prefix}{suffix} is missing{near}; megatron-dpp preprocess makes token "
                "files"
            )


def require_file(path: Path, named: str) -> None:
    """Refuse a path that is no readable file (DataError); ``named`` is how the user wrote it."""
    if not path.is_file():
        raise DataError(f"{named}: no such file{_nearest(path)}")
    if not os.access(path, os.R_OK):
        raise DataError(f"{named}: this user may not read it")


def _nearest(path: Path) -> str:
    try:
        return did_you_mean(path.name, [each.name for each in path.parent.iterdir()])
    except OSError:
        return ""

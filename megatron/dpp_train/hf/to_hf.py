"""Turns a Megatron checkpoint of any layout into a folder that transformers loads."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megatron.dpp.errors import DataError
from megatron.dpp_train.checkpoint import checksums, durable
from megatron.dpp_train.checkpoint import files as checkpoint_files
from megatron.dpp_train.checkpoint.saved_args import saved_args
from megatron.dpp_train.families import Family, find_families
from megatron.dpp_train.hf import Entry, HfConfig, Part, entries, read_config, write_config
from megatron.dpp_train.hf.checkpoint import Stored
from megatron.dpp_train.hf.fields import CONFIG, parse_config
from megatron.dpp_train.hf.files import origin_of_checkpoint
from megatron.dpp_train.hf.folder import Shards, copy_files, one_dtype
from megatron.dpp_train.hf.model import check_same, completed
from megatron.dpp_train.hf.rules import cast, split
from megatron.dpp_train.hf.run_files import keep_run_files
from megatron.dpp_train.hf.to_megatron import Progress, unfinished

SHARD_BYTES = 5 * 10**9


def to_hf(
    source: Path,
    target: Path,
    *,
    like: Path | None = None,
    family: str | None = None,
    family_file: Path | None = None,
    step: int | None = None,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
    run_files: bool = True,
    progress: Progress,
) -> HfConfig:
    """Write the model of ``source``, a checkpoint or a directory of them, to ``target``, which must
    not exist.

    Args:
        like: a Hugging Face folder of the same model, whose ``config.json`` and tokenizer are
            copied. By default it is that beside the checkpoint, or from which training started.
        family: the kind of model, for a checkpoint that never was one of Hugging Face's.
        family_file: a Python file with a further family.
        step: iteration of the checkpoint; the latest by default.
        dtype: of the tensors; as they are in the checkpoint by default.
        run_files: tokenizer and chat template are those of the run, where they are still there.
        progress: called with the bytes of each tensor that is written.

    Raises:
        DataError: the checkpoint is missing, damaged, or of another model; the target exists.
    """
    found = checkpoint_files.find_named(source, step)
    if found is None:
        raise DataError(f"{source}: neither a Hugging Face model nor a checkpoint is there")
    args = saved_args(found)
    like = like or origin_of_checkpoint(found, args)
    if like is None and family is None:
        raise DataError(
            f"{source}: its config.json is not known; name the folder of the model that training "
            "started from (--like DIR), or the kind of model (--family NAME)"
        )
    _check_sums(found.path)
    stored = Stored(found.path)
    config = _config_of(like, family, family_file, args, source)
    tensors = _checked(stored, config)
    kinds = {each.key: stored.dtype(each) for each in tensors if not each.full}
    kind = dtype or one_dtype(kinds, found.path)
    full = frozenset(part.name for each in tensors if each.full for part in each.parts)
    shapes = {part.name: part.shape for each in tensors for part in each.parts}
    with unfinished(target) as scratch:
        with Shards(scratch, shapes, kind, shard_bytes, full) as shards:
            for entry in tensors:
                whole = cast(stored.read(entry), torch.float32 if entry.full else kind, entry.key)
                parts = split(entry.rule, whole, config.sizes)
                for part, tensor in zip(entry.parts, parts, strict=True):
                    shards.add(part.name, tensor)
                    progress(tensor.nbytes)
            shards.finish()
        _write_config(scratch / CONFIG, config.content | config.family.written, kind)
        notes = _copy_files(like, scratch, args if run_files else None)
    return replace(config, notes=config.notes + notes) if notes else config


def _check_sums(folder: Path) -> None:
    sums = checksums.read(folder) or {}
    checksums.check(folder, sums, list(sums))


def _config_of(
    like: Path | None, family: str | None, family_file: Path | None, args: Any, source: Path
) -> HfConfig:
    """The ``config.json`` of the model: that of a folder, or one made of the arguments."""
    families = find_families(family_file)
    if family is not None and family not in families:
        raise DataError(f"--family {family}: expected one of {', '.join(sorted(families))}")
    known = read_config(like, family_file) if like else None
    if like and known and family not in (None, str(known.family)):
        raise DataError(f"--family {family}: {like / CONFIG} is of {known.family}; leave it out")
    if args is None and known:
        return known
    if args is None:
        raise DataError(f"{source}: holds no arguments; name a folder of the same model (--like)")
    if like and known:
        config, where = known, str(like / CONFIG)
    else:
        config = _from_args(args, families[str(family)], family_file, source)
        where = f"--family {family}"
    check_same(completed(args), config, str(source), where, "give the model's own (--like DIR)")
    return _with_tokens(config, getattr(args, "loss_vocab_size", None), where, family_file)


def _from_args(args: Any, family: Family, family_file: Path | None, source: Path) -> HfConfig:
    content = write_config(family, completed(args))
    return parse_config(content, f"the arguments in {source}", family_file)


def _with_tokens(
    config: HfConfig, count: int | None, where: str, family_file: Path | None
) -> HfConfig:
    """``config`` with the tokens that a run counted; its tokenizer may have had more."""
    if count is None or count <= config.sizes.vocab:
        return config
    return parse_config({**config.content, "vocab_size": count}, where, family_file)


def _checked(stored: Stored, config: HfConfig) -> list[Entry]:
    """The entries to read: of twins that which is stored. All of the model must be there, and no
    more."""
    chosen: dict[tuple[Part, ...], Entry] = {}
    tensors = list(entries(config.family, config.sizes))
    for each in tensors:
        first = chosen.setdefault(each.parts, each)
        if each.twin and not stored.holds(first) and stored.holds(each):
            chosen[each.parts] = each
    for each in chosen.values():
        stored.check(each)
    stored.check_rest(tensors, str(config.family))
    return list(chosen.values())


def _copy_files(like: Path | None, target: Path, args: Any) -> tuple[str, ...]:
    """Copy tokenizer, template and settings of generation of a model, and then of the run, whose
    arguments are given; returns notes."""
    if like is None:
        return ()
    copy_files(like, target)
    return keep_run_files(args, target) if hasattr(args, "load_hf") else ()


def _write_config(path: Path, content: dict[str, Any], kind: torch.dtype) -> None:
    name = "dtype" if "dtype" in content else "torch_dtype"
    content = content | {name: str(kind).removeprefix("torch.")}
    durable.write_text(path, json.dumps(content, indent=2) + "\n")

"""Turns Hugging Face folders into checkpoints that any layout of Megatron loads, and back."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from megatron.dpp.errors import ConfigError, DataError, one_line
from megatron.dpp.files.locks import scratch_directory
from megatron.dpp_train.data.token_files import CHAT_SUFFIX
from megatron.dpp_train.hf import checkpoint
from megatron.dpp_train.hf.families import find_families
from megatron.dpp_train.hf.fields import CONFIG, HfConfig, parse_config
from megatron.dpp_train.hf.folder import (
    GENERATION,
    INDEX,
    TOKENIZER,
    WEIGHTS,
    Folder,
    copy_files,
    one_dtype,
    read_model,
)
from megatron.dpp_train.hf.rules import cast, join, split
from megatron.dpp_train.hf.saved import attributes, check_same, completed, write_config
from megatron.dpp_train.hf.tables import Entry, Part, entries
from megatron.dpp_train.text_files import read_object

ORIGIN = "hf"
"""Folder beside a converted checkpoint that keeps ``config.json`` and the tokenizer."""
Progress = Callable[[int], None]
"""Called with the bytes of each tensor that is written."""


def to_megatron(
    source: str | Path,
    target: str | Path,
    *,
    dtype: str | None = None,
    progress: Progress = lambda _: None,
) -> HfConfig:
    """Convert the Hugging Face model in a folder to a checkpoint, which must not exist.

    Args:
        dtype: type of the tensors, as ``bfloat16``; that of the source by default.
        progress: called with the bytes of each tensor that is written.

    Returns:
        The model; its notes name fields and tensors that were left out.

    Raises:
        DataError: the source cannot be converted, or the target exists.
    """
    source = Path(source)
    folder = Folder(source)
    config = replace(folder.config, notes=(*folder.config.notes, *folder.unused))
    kind = getattr(torch, dtype or one_dtype(folder.dtypes, source))

    def read(entry: Entry) -> torch.Tensor:
        whole = join(entry.rule, folder.read(entry), config.sizes)
        progress(whole.nbytes)
        return whole

    with unfinished(Path(target)) as scratch:
        release = scratch / "release"
        release.mkdir()
        args = argparse.Namespace(**attributes(config))
        checkpoint.write(release, folder.entries, config.sizes, kind, read, args)
        origin = scratch / ORIGIN
        origin.mkdir()
        _write_json(origin / CONFIG, config.content)
        copy_files(source, origin)
        (scratch / checkpoint.TRACKER).write_text("release", encoding="utf-8")
    return config


def to_hf(
    source: str | Path,
    target: str | Path,
    *,
    like: str | Path | None = None,
    family: str | None = None,
    step: int | None = None,
    dtype: str | None = None,
    shard_bytes: int = 5 * 10**9,
    progress: Progress = lambda _: None,
) -> HfConfig:
    """Write the model of a checkpoint, or of the last one in a directory, as a Hugging Face model.

    Args:
        target: its folder, which must not exist.
        like: a Hugging Face folder of the same model, whose ``config.json`` and tokenizer are
            copied. By default it is that beside the checkpoint, or from which training started.
        family: the kind of model, for a checkpoint that never was one of Hugging Face's; by default
            the first that has its arguments.
        step: iteration of the checkpoint; the latest by default.
        dtype: type of the tensors; as they are in the checkpoint by default.
        shard_bytes: largest file of weights.
        progress: called with the bytes of each tensor that is written.

    Returns:
        The model, with notes for the user.

    Raises:
        DataError: the checkpoint is missing, damaged, or of another model; the target exists.
    """
    found = checkpoint.find(Path(source), step)
    stored = checkpoint.Stored(found)
    origin = Path(like) if like else _origin(found, stored.args)
    config = _config_of(origin, family, stored.args, Path(source))
    tensors = _checked(stored, config)
    kinds = {each.key: _name(stored.dtype(each)) for each in tensors if not each.full}
    kind = getattr(torch, dtype or one_dtype(kinds, found))
    own = [(each, torch.float32 if each.full else kind) for each in tensors]

    def parts() -> Iterator[tuple[str, torch.Tensor]]:
        for entry, kind in own:
            whole = cast(stored.read(entry), kind, entry.key)
            halves = split(entry.rule, whole, config.sizes)
            for part, tensor in zip(entry.parts, halves, strict=True):
                progress(tensor.nbytes)
                yield part.name, tensor

    sizes = {p.name: math.prod(p.shape) * k.itemsize for each, k in own for p in each.parts}
    with unfinished(Path(target)) as scratch:
        write_shards(scratch, parts(), sizes, shard_bytes)
        content = config.content | config.family.written
        name = "dtype" if "dtype" in content else "torch_dtype"
        _write_json(scratch / CONFIG, content | {name: _name(kind)})
        if origin:
            copy_files(origin, scratch)
        notes = keep_tokenizer(stored.args, scratch)
    return replace(config, notes=(*config.notes, *notes))


def write_shards(
    folder: Path, tensors: Iterable[tuple[str, torch.Tensor]], sizes: dict[str, int], most: int
) -> None:
    """Write tensors as safetensors files, with an index of several. Memory holds one file.

    Args:
        tensors: names and values.
        sizes: bytes of all of them, in their order.
        most: bytes of a file; one tensor may have more.
    """
    groups: list[list[str]] = []
    room = 0
    for name, size in sizes.items():
        if not groups or size > room:
            groups.append([])
            room = most
        groups[-1].append(name)
        room -= size
    files = [f"model-{n:05d}-of-{len(groups):05d}.safetensors" for n in range(1, len(groups) + 1)]
    files = files if len(files) > 1 else [WEIGHTS]
    rest = iter(tensors)
    for file, group in zip(files, groups, strict=True):
        held = itertools.islice(rest, len(group))
        # a copy of each, as the parts of a tensor may not share their memory in a file
        content = {k: each.clone(memory_format=torch.contiguous_format) for k, each in held}
        try:
            save_file(content, folder / file, {"format": "pt"})
        except SafetensorError as error:
            raise OSError(None, one_line(error, 200), str(folder / file)) from error
    if len(groups) > 1:
        places = {name: file for file, group in zip(files, groups, strict=True) for name in group}
        total = {"total_size": sum(sizes.values())}
        _write_json(folder / INDEX, {"metadata": total, "weight_map": dict(sorted(places.items()))})


def _origin(found: Path, args: Any) -> Path | None:
    """The folder of the model from which a checkpoint came, or its training started."""
    places = [
        found.parent,
        *(getattr(args, name, None) for name in ("load", "pretrained_checkpoint")),
    ]
    folders = [Path(place) / ORIGIN for place in places if place]
    return next((each for each in folders if (each / CONFIG).is_file()), None)


def _config_of(like: Path | None, family: str | None, args: Any, source: Path) -> HfConfig:
    """The ``config.json`` of a checkpoint's model: that of ``like``, or one of its arguments."""
    families = find_families()
    if family is not None and family not in families:
        raise DataError(f"--family {family}: expected one of {', '.join(sorted(families))}")
    if like is not None:
        config, where = read_model(like), str(like / CONFIG)
        if family not in (None, str(config.family)):
            raise DataError(f"--family {family}: {where} is of {config.family}; leave it out")
        if args is not None:
            check_same(args, config, str(source), where)
        return config
    for name in [family] if family else families if args is not None else []:
        where = f"--family {name}"
        try:
            content = write_config(families[name], completed(args))
            config = parse_config(content, where)
            check_same(args, config, str(source), where)
        except DataError:
            if family:
                raise
        else:
            return config
    raise DataError(
        f"{source}: no family has this model; name the folder of the model that training started "
        "from (--like DIR)"
    )


def _checked(stored: checkpoint.Stored, config: HfConfig) -> list[Entry]:
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


def keep_tokenizer(args: Any, folder: Path) -> tuple[str, ...]:
    """Put the tokenizer of a run into a model's folder, in the place of that of the model that it
    started from. After training on chats, ``generation_config.json`` names the token that ends an
    answer, too, so that transformers and vLLM stop there.

    Returns:
        Notes for the user.
    """
    place = Path(str(getattr(args, "tokenizer_model", None) or ""))
    if place.name and any((place / name).is_file() for name in TOKENIZER):
        for name in TOKENIZER:
            (folder / name).unlink(missing_ok=True)
        copy_files(place, folder, TOKENIZER)
    data = getattr(args, "data_path", None) or ()
    if not any(str(path).endswith(CHAT_SUFFIX) for path in data):
        return ()
    from megatron.dpp_train.hf.prompts import encode

    try:
        _, end = encode(folder, [])
    except (ConfigError, DataError) as error:
        return (f"{GENERATION} names no token that ends an answer ({error})",)
    if end is None:
        return ("the chat template ends an answer by no special token",)
    path = folder / GENERATION
    content = read_object(path) or {
        name: value
        for name, value in read_object(folder / CONFIG).items()
        if name in ("bos_token_id", "eos_token_id", "pad_token_id") and value is not None
    }
    ends = content.get("eos_token_id")
    known = ends if isinstance(ends, list) else [] if ends is None else [ends]
    if end not in known:
        content.pop("_from_model_config", None)  # transformers may make such a file anew
        _write_json(path, content | {"eos_token_id": [*known, end] if known else end})
    return ()


def _name(kind: torch.dtype) -> str:
    return str(kind).removeprefix("torch.")


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


@contextmanager
def unfinished(target: Path) -> Iterator[Path]:
    """A directory beside ``target`` that gets its name at the end. Until then nothing takes it for
    a result; after a kill the next attempt removes it.

    Raises:
        DataError: ``target`` exists, or cannot be written.
    """
    target = target.absolute()
    scratch = f".{target.name}.unfinished-"
    try:
        if target.exists():
            raise DataError(f"{target}: exists; name another target, or remove it")
        target.parent.mkdir(parents=True, exist_ok=True)
        with scratch_directory(target.parent, scratch) as folder:
            new = folder / "new"
            new.mkdir()
            yield new
            new.rename(target)
    except (OSError, RuntimeError) as error:  # PyTorch's writer raises the latter at a full disk
        free = ""
        with suppress(OSError):
            free = f" ({shutil.disk_usage(target.parent).free} bytes are free there)"
        name = str(getattr(error, "filename", ""))
        where = f"{Path(name).name}: " if scratch in name else ""
        text = getattr(error, "strerror", None) or " ".join(str(error).split())[:200]
        raise DataError(f"{target}: {where}{text}{free}") from error

"""Files of a Hugging Face model, read without PyTorch: names, headers and bytes of its weights."""

from __future__ import annotations

import itertools
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeGuard

from megatron.dpp.errors import DataError, shown
from megatron.dpp.safe_files import FileState, open_to_read
from megatron.dpp_train.hf.fields import CONFIG, HfConfig, inside, parse_config, read_config
from megatron.dpp_train.text_files import parse_json, read_json

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
HEAD = "lm_head.weight"
"""The output layer of every family."""
_LONGEST_HEADER = 100_000_000
"""Bytes; the format's own limit."""
_LONGEST_NAME = 255
_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("BOOL", "I8", "U8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
}
_PIECE = 1 << 24
"""Bytes that are compared at once."""


def find_weights(folder: Path) -> dict[str, Path]:
    """Tensor -> its safetensors file.

    Raises:
        DataError: a file is missing, damaged or not whole, or lacks a tensor of the index.
    """
    index = folder / INDEX
    if not index.is_file():
        if not (folder / WEIGHTS).is_file():
            raise DataError(f"{folder}: neither {WEIGHTS} nor {INDEX} is there{_bins(folder)}")
        only = inside(folder, WEIGHTS)
        return dict.fromkeys(WeightFile(only).header, only)
    content = read_json(inside(folder, INDEX))
    weights = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weights, dict) or not weights:
        raise DataError(f"{index}: no index of weights (it has no weight_map)")
    for name, file in weights.items():
        if not isinstance(file, str) or Path(file).name != file or len(file) > _LONGEST_NAME:
            raise DataError(
                f"{index}: {shown(name)} is in {shown(file)}, expected the name of a file"
            )
    found = {file: inside(folder, file) for file in set(weights.values())}
    files = {name: found[file] for name, file in weights.items()}
    there = {file: WeightFile(file).header for file in sorted(set(files.values()))}
    for name, file in files.items():
        if name not in there[file]:
            raise DataError(
                f"{file}: lacks {name}, which {INDEX} says it holds; download both again"
            )
    return files


class WeightFile:
    """A safetensors file. It is read and not mapped: a reader of a mapped file ends by SIGBUS where
    the file gets shorter or its disk fails.

    Attributes:
        header: tensor -> its ``dtype``, ``shape`` and ``data_offsets``.

    Raises:
        DataError: the file is missing, damaged or not whole.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._state = path, FileState.of(path)
        try:
            with open_to_read(path) as file:
                self.header, self._begin = _read_header(file, path)
        except FileNotFoundError as error:
            raise DataError(f"{path}: missing; download it") from error
        except OSError as error:
            raise DataError(f"{path}: {error.strerror}") from error

    def read_into(self, name: str, content: memoryview, start: int = 0) -> None:
        """Fill ``content`` with the bytes of a tensor, from its byte ``start`` on.

        Raises:
            DataError: the file was changed since it was opened, or cannot be read.
        """
        try:
            with open_to_read(self._path) as file:
                file.seek(self._begin + self.header[name]["data_offsets"][0] + start)
                got = file.readinto(content)
        except OSError as error:
            raise DataError(f"{self._path}: {name}: {error.strerror}") from error
        found = FileState.of(self._path)
        if got != content.nbytes or found != self._state:
            raise DataError(
                f"{self._path}: changed while it was read ({self._state.size} bytes at first, then "
                f"{found.size}); start again when it is whole"
            )


def read_model(folder: Path, family_file: Path | None = None) -> HfConfig:
    """The ``config.json`` in a folder. A model whose weights hold an output layer of its own is not
    tied, whatever the file says; transformers sees it so, too.

    Raises:
        DataError: as :func:`read_config`; with weights, as :func:`find_weights`.
    """
    config = read_config(folder, family_file)
    if config.sizes.untied or not any((folder / name).is_file() for name in (INDEX, WEIGHTS)):
        return config
    files = find_weights(folder)
    embedding = next(row for row in config.family.rows if row.key.startswith("embedding.")).names[0]
    tied = next((n for n in (embedding, embedding.partition(".")[2]) if n in files), HEAD)
    if HEAD not in files or _same(files, HEAD, tied):
        return config
    where = str(folder / CONFIG)
    untied = parse_config(config.content | {"tie_word_embeddings": False}, where, family_file)
    note = f"{where}: tie_word_embeddings is true, but {HEAD} differs from {tied}: taken as untied"
    return replace(untied, notes=(*untied.notes, note))


def _same(files: dict[str, Path], one: str, other: str) -> bool:
    """True if two tensors have the same type, shape and bytes."""
    weights = [WeightFile(files[name]) for name in (one, other)]
    told = [file.header[name] for file, name in zip(weights, (one, other), strict=True)]
    if any(told[0][key] != told[1][key] for key in ("dtype", "shape")):
        return False
    size = told[0]["data_offsets"][1] - told[0]["data_offsets"][0]
    pieces = [bytearray(min(size, _PIECE)) for _ in weights]
    for start in range(0, size, _PIECE):
        for file, name, piece in zip(weights, (one, other), pieces, strict=True):
            file.read_into(name, memoryview(piece)[: size - start], start)
        if pieces[0] != pieces[1]:
            return False
    return True


def _bins(folder: Path) -> str:
    old = sorted(folder.glob("*.bin"))
    return f"; {old[0].name} is a pickle: save it as safetensors" if old else ""


def _read_header(opened: Any, file: Path) -> tuple[dict[str, Any], int]:
    """The header of a file, and where its tensors begin."""
    size = os.fstat(opened.fileno()).st_size
    begin = 8 + int.from_bytes(opened.read(8), "little")
    if begin > min(size, _LONGEST_HEADER):
        raise _not_whole(file, size, f"its header alone has {begin}")
    header = parse_json(opened.read(begin - 8), f"{file}: damaged or not whole, header")
    if not isinstance(header, dict):
        raise DataError(f"{file}: damaged or not whole (its header is no JSON object)")
    header.pop("__metadata__", None)
    for name, told in header.items():
        if not _is_entry(told):
            raise DataError(
                f"{file}: {shown(name)} is {shown(told)}, expected dtype, shape and data_offsets "
                "that agree"
            )
    places = sorted(told["data_offsets"] for told in header.values())
    told_size = begin + (places[-1][1] if places else 0)
    if told_size != size:
        raise _not_whole(file, size, f"its header says {told_size}")
    if any(one[1] != other[0] for one, other in itertools.pairwise([[0, 0], *places])):
        raise DataError(f"{file}: damaged (its tensors overlap, or leave gaps)")
    return header, begin


def _not_whole(file: Path, size: int, but: str) -> DataError:
    return DataError(f"{file}: damaged or not whole ({size} bytes, {but}); download it again")


def _is_entry(told: Any) -> bool:
    """True for a tensor's dtype, shape and place that fit each other."""
    if not isinstance(told, dict) or not isinstance(told.get("dtype"), str):
        return False
    shape, place = told.get("shape"), told.get("data_offsets")
    if not (_are_sizes(shape) and _are_sizes(place) and len(place) == 2 and place[0] <= place[1]):
        return False
    bits = _BITS.get(told["dtype"])  # others are newer than this program
    return bits is None or math.prod(shape) * bits == (place[1] - place[0]) * 8


def _are_sizes(values: Any) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(type(each) is int and each >= 0 for each in values)

"""Files of a Hugging Face model's weights: their names and headers, without the tensors."""

from __future__ import annotations

import itertools
import math
import os
from pathlib import Path
from typing import Any, TypeGuard

from megatron.dpp.errors import DataError, shown
from megatron.dpp.safe_files import open_to_read
from megatron.dpp_train.text_files import parse_json, read_json

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_LONGEST_HEADER = 100_000_000
"""Bytes; the format's own limit."""
_LONGEST_NAME = 255
_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("BOOL", "I8", "U8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
}
_FLOATS = ("F64", "F32", "F16", "BF16")


def find_weights(folder: Path) -> dict[str, Path]:
    """Tensor -> its safetensors file.

    Raises:
        DataError: a file is missing, damaged or not whole, or lacks a tensor of the index.
    """
    index = folder / INDEX
    if not index.is_file():
        if not (folder / WEIGHTS).is_file():
            raise DataError(f"{folder}: neither {WEIGHTS} nor {INDEX} is there{_bins(folder)}")
        return dict.fromkeys(_names(folder / WEIGHTS), folder / WEIGHTS)
    content = read_json(index)
    weights = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weights, dict) or not weights:
        raise DataError(f"{index}: no index of weights (it has no weight_map)")
    for name, file in weights.items():
        if not isinstance(file, str) or Path(file).name != file or len(file) > _LONGEST_NAME:
            raise DataError(
                f"{index}: {shown(name)} is in {shown(file)}, expected the name of a file"
            )
    files = {name: folder / file for name, file in weights.items()}
    there = {file: set(_names(file)) for file in sorted(set(files.values()))}
    for name, file in files.items():
        if name not in there[file]:
            raise DataError(f"{file}: lacks {name}, which {INDEX} says it holds")
    return files


def loaded_bytes(folder: Path, itemsize: int) -> int:
    """Bytes of a model's tensors, once those of floating point have ``itemsize`` bytes a number.

    Raises:
        DataError: as :func:`find_weights`.
    """
    files = find_weights(folder)
    headers = {file: _header(file) for file in set(files.values())}
    total = 0
    for name, file in files.items():
        told = headers[file][name]
        first, end = told["data_offsets"]
        is_float = told["dtype"] in _FLOATS
        total += math.prod(told["shape"]) * itemsize if is_float else end - first
    return total


def _bins(folder: Path) -> str:
    old = sorted(folder.glob("*.bin"))
    return f"; {old[0].name} is a pickle: save it as safetensors" if old else ""


def _names(file: Path) -> list[str]:
    return list(_header(file))


def _header(file: Path) -> dict[str, Any]:
    """Tensor -> its dtype, shape and place, of a file whose size is what its header says."""
    try:
        with open_to_read(file) as opened:
            size = os.fstat(opened.fileno()).st_size
            length = int.from_bytes(opened.read(8), "little")
            if length > min(size, _LONGEST_HEADER):
                raise DataError(f"{file}: damaged or not whole (a header of {length} bytes)")
            text = opened.read(length)
    except FileNotFoundError as error:
        raise DataError(f"{file}: missing") from error
    except OSError as error:
        raise DataError(f"{file}: {error.strerror}") from error
    header = parse_json(text, f"{file}: damaged or not whole, header")
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
    told_size = 8 + length + (places[-1][1] if places else 0)
    if told_size != size:
        raise DataError(f"{file}: damaged or not whole ({size} bytes, its header says {told_size})")
    if any(one[1] != other[0] for one, other in itertools.pairwise([[0, 0], *places])):
        raise DataError(f"{file}: damaged (its tensors overlap, or leave gaps)")
    return header


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

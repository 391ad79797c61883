"""Files of a Hugging Face model's weights: their names and headers, without the tensors."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from megatron.dpp.errors import DataError, one_line
from megatron.dpp.safe_files import open_to_read
from megatron.dpp_train.text_files import read_text

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
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
    try:
        weights: dict[str, Any] = dict(json.loads(read_text(index))["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{index}: no index of weights ({one_line(error)})") from error
    for name, file in weights.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise DataError(f"{index}: {name} is in {file!r}, expected the name of a file")
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
    if not file.is_file():
        raise DataError(f"{file}: missing")
    size = file.stat().st_size
    try:
        with open_to_read(file) as opened:
            length = int.from_bytes(opened.read(8), "little")
            if length > size:
                raise ValueError(f"a header of {length} bytes in {size}")
            header = dict(json.loads(opened.read(length)))
        header.pop("__metadata__", None)
        ends = [each["data_offsets"][1] for each in header.values()]
        told = 8 + length + max(ends, default=0)
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise DataError(f"{file}: damaged or not whole ({one_line(error)})") from error
    if told != size:
        raise DataError(f"{file}: damaged or not whole ({size} bytes, its header says {told})")
    return header

"""Folders of Hugging Face models: safetensors files of one or several shards, read lazily."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

import torch

from megatron.dpp.errors import DataError
from megatron.dpp_train.checkpoint import durable
from megatron.dpp_train.hf import Entry, HfConfig, entries, read_config
from megatron.dpp_train.hf.run_files import GENERATION, TOKENIZER_FILES, copy_file
from megatron.dpp_train.hf.tables import IGNORED
from megatron.dpp_train.hf.weights import INDEX, WEIGHTS, WeightFile, find_weights

COPIED = (*TOKENIZER_FILES, GENERATION, "chat_template.json", "LICENSE", "USE_POLICY.md")
"""Files that go with the weights from folder to folder."""
_FLOATS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_MOST_NAMED = 3


class Folder:
    """The tensors in a folder, checked against ``config.json``.

    Raises:
        DataError: a file is missing or damaged; names, shapes or types are not the model's.
    """

    def __init__(self, path: str | Path, family_file: str | Path | None = None) -> None:
        self.path = Path(path)
        self.config: HfConfig = read_config(path, family_file)
        self._files = find_weights(self.path)
        self._weights = {file: WeightFile(file) for file in sorted(set(self._files.values()))}
        self._prefix = self._own_prefix()
        self.dtypes = self._check()
        self.dtype = next(iter(self.dtypes.values()))

    def entries(self) -> Iterable[Entry]:
        """The tensors of the model."""
        return entries(self.config.family, self.config.sizes)

    def read(self, entry: Entry) -> list[torch.Tensor]:
        """The tensors that an entry is made of."""
        return [self._tensor(self._own(part.name)) for part in entry.parts]

    # --- names ---

    def _own_prefix(self) -> str:
        """The start of all names of the table that this folder leaves out, as GPT-2's files do."""
        first = next(iter(self.entries())).parts[0].name
        prefix = first.partition(".")[0] + "."
        return prefix if first not in self._files and first[len(prefix) :] in self._files else ""

    def _own(self, name: str) -> str:
        return name.removeprefix(self._prefix)

    def _tensor(self, name: str) -> torch.Tensor:
        file = self._weights[self._files[name]]
        told = file.header[name]
        tensor = torch.empty(told["shape"], dtype=_FLOATS[told["dtype"]])
        file.read_into(name, tensor.flatten().view(torch.uint8).numpy().data)
        return tensor

    # --- checks ---

    def _check(self) -> dict[str, torch.dtype]:
        """Compare names, shapes and types with the model's; tensor -> type."""
        parts = {self._own(part.name): part for each in self.entries() for part in each.parts}
        missing = [name for name in parts if name not in self._files]
        if missing:
            raise DataError(f"{self.path}: lacks {some(missing)}")
        extra = [name for name in self._files if name not in parts and not self._may_be(name)]
        if extra:
            raise DataError(
                f"{self.path}: holds {some(extra)}, which {self.config.family} does not have"
            )
        kinds = {name: _FLOATS[self._check_part(name, parts[name].shape)] for name in parts}
        full = {self._own(part.name) for each in self.entries() if each.full for part in each.parts}
        return {name: kind for name, kind in kinds.items() if name not in full}

    def _may_be(self, name: str) -> bool:
        """True for buffers of older files, and for tied output weights that were saved too."""
        known = name.endswith(IGNORED) or name == "lm_head.weight"
        return known or self.config.family.unread(name, self.config.sizes)

    def _check_part(self, name: str, shape: tuple[int, ...]) -> str:
        told = self._weights[self._files[name]].header[name]
        if told["shape"] != list(shape):
            raise DataError(
                f"{self._files[name]}: {name} has shape {told['shape']}, config.json says "
                f"{list(shape)}"
            )
        kind = str(told["dtype"])
        if kind not in _FLOATS:
            raise DataError(f"{self._files[name]}: {name} is {kind}; expected {', '.join(_FLOATS)}")
        return kind


def one_dtype(found: dict[str, torch.dtype], where: Path) -> torch.dtype:
    """The type of all tensors.

    Args:
        found: tensor -> type.

    Raises:
        DataError: they have several.
    """
    first, kind = next(iter(found.items()))
    for name, other in found.items():
        if other != kind:
            raise DataError(
                f"{where}: {first} is {_short(kind)}, {name} is {_short(other)}; say which type "
                "all are to have (--dtype)"
            )
    return kind


def _short(kind: torch.dtype) -> str:
    return str(kind).removeprefix("torch.")


def some(names: list[str]) -> str:
    """The first of many names, for errors."""
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more


def copy_files(source: Path, target: Path) -> None:
    """Copy the tokenizer, its template and the settings of generation, as far as they are there."""
    for name in COPIED:
        copy_file(source, target, name)


class Shards:
    """Writes tensors as safetensors files of at most ``shard_bytes`` each, with an index. It holds
    none of them: a file's header is known before its tensors come.

    Args:
        shapes: the shape of each tensor, in the order in which they come.
        dtype: of all tensors but those in ``full``, which are in 32 bit.
    """

    def __init__(
        self,
        folder: Path,
        shapes: dict[str, tuple[int, ...]],
        dtype: torch.dtype,
        shard_bytes: int,
        full: frozenset[str] = frozenset(),
    ) -> None:
        self._folder, self._shapes, self._dtype, self._full = folder, shapes, dtype, full
        self._groups: list[list[str]] = []
        room = 0
        for name in shapes:
            if not self._groups or self._bytes(name) > room:
                self._groups.append([])
                room = shard_bytes
            self._groups[-1].append(name)
            room -= self._bytes(name)
        self._coming = iter(enumerate(self._groups))
        self._left: list[str] = []
        self._file: BinaryIO | None = None

    def __enter__(self) -> Shards:
        return self

    def __exit__(self, *error: object) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # what was lost has been said
                self._file.close()

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Write the next tensor."""
        if not self._left:
            self._begin(*next(self._coming))
        assert self._file is not None
        assert name == self._left.pop(0)
        assert (tuple(tensor.shape), tensor.dtype) == (self._shapes[name], self._kind(name))
        with durable.naming(Path(self._file.name)):
            self._file.write(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
            if not self._left:
                self._file.close()

    def finish(self) -> None:
        """Write the index of several shards."""
        assert not self._left
        if len(self._groups) == 1:
            return
        files = {name: self._name(i) for i, group in enumerate(self._groups) for name in group}
        total = sum(map(self._bytes, self._shapes))
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(files.items()))}
        text = json.dumps(index, indent=2) + "\n"
        durable.write_text(self._folder / INDEX, text)

    def _begin(self, number: int, names: list[str]) -> None:
        """Open a file and write its header: its length in 8 bytes, then JSON to a multiple of 8."""
        kinds = {dtype: name for name, dtype in _FLOATS.items()}
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name in names:
            start, end = end, end + self._bytes(name)
            shape = list(self._shapes[name])
            header[name] = {
                "dtype": kinds[self._kind(name)],
                "shape": shape,
                "data_offsets": [start, end],
            }
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        self._left = list(names)
        self._file = (self._folder / self._name(number)).open("wb")
        self._file.write(len(text).to_bytes(8, "little") + text)

    def _bytes(self, name: str) -> int:
        return math.prod(self._shapes[name]) * self._kind(name).itemsize

    def _kind(self, name: str) -> torch.dtype:
        return torch.float32 if name in self._full else self._dtype

    def _name(self, number: int) -> str:
        if len(self._groups) == 1:
            return WEIGHTS
        return f"model-{number + 1:05d}-of-{len(self._groups):05d}.safetensors"

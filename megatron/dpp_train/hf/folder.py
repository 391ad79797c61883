"""Folders of Hugging Face models: safetensors files of one or several shards, read lazily."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

import torch

from megatron.dpp.errors import DataError
from megatron.dpp.safe_files import open_to_read
from megatron.dpp_train.hf.fields import HfConfig, inside
from megatron.dpp_train.hf.tables import IGNORED, Entry, entries
from megatron.dpp_train.hf.weights import (
    HEAD,
    INDEX,
    WEIGHTS,
    WeightFile,
    find_weights,
    read_model,
)

GENERATION = "generation_config.json"
TOKENIZER = (
    *("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "tokenizer_config.json"),
    *("special_tokens_map.json", "added_tokens.json", "spiece.model", "vocab.txt"),
    *("chat_template.jinja", "additional_chat_templates/tool_use.jinja", "chat_template.json"),
)
"""Files of a tokenizer, as far as it has them."""
COPIED = (*TOKENIZER, GENERATION, "LICENSE", "USE_POLICY.md")
"""Files that go with the weights from folder to folder."""
_FLOATS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_MOST_NAMED = 3


class Folder:
    """The tensors in a folder, checked against ``config.json``.

    Attributes:
        dtypes: tensor -> type, of all that a checkpoint takes as they are.
        unused: sentences about the tensors that a checkpoint does not take, each with the reason.

    Raises:
        DataError: a file is missing or damaged; names, shapes or types are not the model's.
    """

    def __init__(self, path: Path, family_file: Path | None = None) -> None:
        self.path = path
        self.config: HfConfig = read_model(path, family_file)
        self._files = find_weights(self.path)
        self._weights = {file: WeightFile(file) for file in sorted(set(self._files.values()))}
        self._prefix = self._own_prefix()
        self.dtypes = self._check()

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
        extra = {name: self._reason(name) for name in self._files if name not in parts}
        unknown = [name for name, reason in extra.items() if not reason]
        if unknown:
            raise DataError(
                f"{self.path}: holds {some(unknown)}, which {self.config.family} does not have"
            )
        self.unused = [
            f"{self.path}: left out {some([n for n in extra if extra[n] == reason])}: {reason}"
            for reason in dict.fromkeys(extra.values())
        ]
        kinds = {name: _FLOATS[self._check_part(name, parts[name].shape)] for name in parts}
        full = {self._own(part.name) for each in self.entries() if each.full for part in each.parts}
        return {name: kind for name, kind in kinds.items() if name not in full}

    def _reason(self, name: str) -> str:
        """The reason why a tensor has no place in a checkpoint; empty for an unknown one."""
        if name.endswith(IGNORED):
            return "a buffer that is computed"
        if name == HEAD:
            return "equal to the embedding, to which it is tied"
        return self.config.family.unread(name, self.config.sizes)

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


def copy_files(source: Path, target: Path, names: Iterable[str] = COPIED) -> None:
    """Copy files of a model's folder into another, as far as they are there.

    Raises:
        DataError: one is a link out of the folder, or no regular file.
    """
    for name in names:
        if not (source / name).exists():
            continue
        (target / name).parent.mkdir(exist_ok=True)
        try:
            with open_to_read(inside(source, name)) as file, (target / name).open("wb") as copy:
                shutil.copyfileobj(file, copy)
        except OSError as error:
            raise DataError(f"{source / name}: {error.strerror}") from error


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
        (self._folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

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

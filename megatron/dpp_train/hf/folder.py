"""Folders of Hugging Face models: their tensors, checked against ``config.json``, and new ones."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch

from megatron.dpp.errors import DataError, one_line
from megatron.dpp.files.safe_files import open_to_read
from megatron.dpp_train.hf.fields import HfConfig, inside
from megatron.dpp_train.hf.tables import IGNORED, Entry, entries
from megatron.dpp_train.hf.weights import HEAD, INDEX, WEIGHTS, Weights, read_model

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
    """The tensors in a folder.

    Attributes:
        dtypes: tensor -> type, of all that a checkpoint takes as they are.
        unused: sentences about the tensors that a checkpoint does not take, each with the reason.

    Raises:
        DataError: a file is missing or damaged; names, shapes or types are not the model's.
    """

    def __init__(self, path: Path, family_file: Path | None = None) -> None:
        self.path = path
        self.config: HfConfig = read_model(path, family_file)
        self._weights = Weights(path)
        self.entries: list[Entry] = list(entries(self.config.family, self.config.sizes))
        # the start of all names of the table that this folder leaves out, as GPT-2's files do
        first = self.entries[0].parts[0].name
        start, _, rest = first.partition(".")
        left_out = first not in self._weights.files and rest in self._weights.files
        self._prefix = f"{start}." if left_out else ""
        self.dtypes = self._check()

    def read(self, entry: Entry) -> list[torch.Tensor]:
        """The tensors that an entry is made of."""
        return [self._weights.tensor(self._own(part.name)) for part in entry.parts]

    def _own(self, name: str) -> str:
        return name.removeprefix(self._prefix)

    def _check(self) -> dict[str, torch.dtype]:
        """Compare names, shapes and types with the model's; tensor -> type."""
        parts = {self._own(part.name): part for each in self.entries for part in each.parts}
        missing = [name for name in parts if name not in self._weights.files]
        if missing:
            raise DataError(f"{self.path}: lacks {some(missing)}")
        extra = {name: self._reason(name) for name in self._weights.files if name not in parts}
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
        full = {self._own(part.name) for each in self.entries if each.full for part in each.parts}
        return {name: kind for name, kind in kinds.items() if name not in full}

    def _reason(self, name: str) -> str:
        """The reason why a tensor has no place in a checkpoint; empty for an unknown one."""
        if name.endswith(IGNORED):
            return "a buffer that is computed"
        if name == HEAD:
            return "equal to the embedding, to which it is tied"
        return self.config.family.unread(name, self.config.sizes)

    def _check_part(self, name: str, shape: tuple[int, ...]) -> str:
        file, found = self._weights.files[name], self._weights.shape(name)
        if found != shape:
            raise DataError(
                f"{file}: {name} has shape {list(found)}, config.json says {list(shape)}"
            )
        kind = self._weights.kind(name)
        if kind not in _FLOATS:
            raise DataError(f"{file}: {name} is {kind}; expected {', '.join(_FLOATS)}")
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
    the tensors of one file.

    Args:
        bytes_of: the size of each tensor, in the order in which they come.
    """

    def __init__(self, folder: Path, bytes_of: dict[str, int], shard_bytes: int) -> None:
        self._folder, self._bytes = folder, bytes_of
        self._groups: list[list[str]] = []
        room = 0
        for name, size in bytes_of.items():
            if not self._groups or size > room:
                self._groups.append([])
                room = shard_bytes
            self._groups[-1].append(name)
            room -= size
        self._held: dict[str, torch.Tensor] = {}
        self._files: dict[str, str] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Take the next tensor."""
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        self._held[name] = tensor.clone(memory_format=torch.contiguous_format)
        number = len(set(self._files.values()))
        if len(self._held) < len(self._groups[number]):
            return
        file = WEIGHTS
        if len(self._groups) > 1:
            file = f"model-{number + 1:05d}-of-{len(self._groups):05d}.safetensors"
        try:
            save_file(self._held, self._folder / file, {"format": "pt"})
        except SafetensorError as error:
            raise OSError(None, one_line(error, 200), str(self._folder / file)) from error
        self._files |= dict.fromkeys(self._held, file)
        self._held = {}

    def finish(self) -> None:
        """Write the index of several files."""
        if len(self._groups) > 1:
            total = {"total_size": sum(self._bytes.values())}
            index = {"metadata": total, "weight_map": dict(sorted(self._files.items()))}
            (self._folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

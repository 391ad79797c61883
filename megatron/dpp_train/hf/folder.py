"""Folders of Hugging Face models: their tensors, checked against ``config.json``.

PyTorch is loaded by the first tensor that is read.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron.dpp.errors import DataError, one_line, shown
from megatron.dpp.files.safe_files import open_to_read
from megatron.dpp_train.hf.fields import CONFIG, HfConfig, inside, parse_config, read_config
from megatron.dpp_train.hf.tables import Entry, entries
from megatron.dpp_train.text_files import read_json

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
GENERATION = "generation_config.json"
TOKENIZER = (
    *("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "tokenizer_config.json"),
    *("special_tokens_map.json", "added_tokens.json", "spiece.model", "vocab.txt"),
    *("chat_template.jinja", "additional_chat_templates/tool_use.jinja", "chat_template.json"),
)
"""Files of a tokenizer, as far as it has them."""
COPIED = (*TOKENIZER, GENERATION, "LICENSE", "USE_POLICY.md")
"""Files that go with the weights from folder to folder."""
_HEAD = "lm_head.weight"
"""The output layer of every family."""
_IGNORED = ("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")
"""Ends of the names of buffers in older files, which hold no parameter."""
_FLOATS = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_MOST_NAMED = 3


class Weights:
    """The tensors of the safetensors files in a folder, read one by one.

    Attributes:
        files: tensor -> its file.

    Raises:
        DataError: a file is missing, damaged or not whole, or lacks a tensor of the index.
    """

    def __init__(self, folder: Path) -> None:
        index, single = folder / INDEX, folder / WEIGHTS
        if index.exists():
            self.files = {name: folder / file for name, file in _read_index(index).items()}
        elif single.exists():
            self.files = dict.fromkeys(_opened(single).keys(), single)
        else:
            pickles = sorted(folder.glob("*.bin"))
            more = f"; {pickles[0].name} is a pickle: save it as safetensors" if pickles else ""
            raise DataError(f"{folder}: neither {WEIGHTS} nor {INDEX} is there{more}")
        self._headers = {file: _opened(file) for file in set(self.files.values())}
        there = {file: set(opened.keys()) for file, opened in self._headers.items()}
        lost = [name for name, file in self.files.items() if name not in there[file]]
        if lost:
            raise DataError(f"{index}: says that {self.files[lost[0]].name} holds {some(lost)}")
        self._tensors: dict[Path, Any] = {}

    def header(self, name: str) -> tuple[tuple[int, ...], str]:
        """Shape and type of a tensor, the latter in the words of the format: ``BF16``."""
        found = self._headers[self.files[name]].get_slice(name)
        return tuple(found.get_shape()), str(found.get_dtype())

    def tensor(self, name: str) -> Any:
        """A tensor of PyTorch."""
        file = self.files[name]
        if file not in self._tensors:
            self._tensors[file] = _opened(file, "pt")
        return self._tensors[file].get_tensor(name)


def _read_index(index: Path) -> dict[str, str]:
    """Tensor -> name of its file, by the index of several files."""
    content = read_json(index)
    weights = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weights, dict) or not weights:
        raise DataError(f"{index}: no index of weights (it has no weight_map)")
    for name, file in weights.items():
        if not isinstance(file, str) or Path(file).name != file:
            said = f"{shown(name)} is in {shown(file)}"
            raise DataError(f"{index}: {said}, expected the name of a file")
    return weights


def _opened(file: Path, framework: str = "numpy") -> Any:
    """A file of tensors, mapped into memory."""
    from safetensors import SafetensorError, safe_open

    try:
        open_to_read(file).close()
        return safe_open(file, framework)
    except FileNotFoundError as error:
        raise DataError(f"{file}: missing; download it") from error
    except OSError as error:
        raise DataError(f"{file}: {error.strerror or one_line(error, 200)}") from error
    except SafetensorError as error:
        why = one_line(error, 200)
        raise DataError(f"{file}: damaged or not whole ({why}); download it again") from error


def read_model(folder: Path) -> HfConfig:
    """The ``config.json`` in a folder. A model whose weights hold an output layer of its own is not
    tied, whatever the file says; transformers sees it so, too.

    Raises:
        DataError: as :func:`read_config`; with weights, as :class:`Weights`.
    """
    config = read_config(folder)
    if config.sizes.untied or not any((folder / name).exists() for name in (INDEX, WEIGHTS)):
        return config
    weights = Weights(folder)
    embedding = next(row for row in config.family.rows if row.key.startswith("embedding.")).names[0]
    names = (embedding, embedding.partition(".")[2])
    tied = next((name for name in names if name in weights.files), _HEAD)
    if _HEAD not in weights.files or weights.tensor(_HEAD).equal(weights.tensor(tied)):
        return config
    where = str(folder / CONFIG)
    untied = parse_config(config.content | {"tie_word_embeddings": False}, where)
    said = f"tie_word_embeddings is true, but {_HEAD} differs from {tied}: taken as untied"
    return replace(untied, notes=(*untied.notes, f"{where}: {said}"))


class Folder:
    """The tensors in a folder, as the entries of a checkpoint need them.

    Attributes:
        dtypes: tensor -> type, of all that a checkpoint takes as they are.
        unused: sentences about the tensors that a checkpoint does not take, each with the reason.

    Raises:
        DataError: a file is missing or damaged; names, shapes or types are not the model's.
    """

    def __init__(self, path: Path) -> None:
        self.config: HfConfig = read_model(path)
        self._weights = Weights(path)
        self.entries: list[Entry] = list(entries(self.config.family, self.config.sizes))
        # the start of all names of the table that this folder leaves out, as GPT-2's files do
        first = self.entries[0].parts[0].name
        start, _, rest = first.partition(".")
        left_out = first not in self._weights.files and rest in self._weights.files
        self._prefix = f"{start}." if left_out else ""
        parts = {self._own(part.name): part for each in self.entries for part in each.parts}
        self.unused = self._check_names(path, parts)
        full = {self._own(part.name) for each in self.entries if each.full for part in each.parts}
        kinds = {name: self._check_part(name, part.shape) for name, part in parts.items()}
        self.dtypes = {name: kind for name, kind in kinds.items() if name not in full}

    def read(self, entry: Entry) -> list[Any]:
        """The tensors that an entry is made of."""
        return [self._weights.tensor(self._own(part.name)) for part in entry.parts]

    def _own(self, name: str) -> str:
        return name.removeprefix(self._prefix)

    def _check_names(self, path: Path, known: Iterable[str]) -> list[str]:
        """Sentences about tensors without a place; refuses unknown and missing ones."""
        if missing := [name for name in known if name not in self._weights.files]:
            raise DataError(f"{path}: lacks {some(missing)}")
        extra = self._weights.files.keys() - set(known)
        reasons: dict[str, list[str]] = {}
        for name in sorted(extra):
            reasons.setdefault(self._reason(name), []).append(name)
        if unknown := reasons.get(""):
            said = f"holds {some(unknown)}, which {self.config.family} does not have"
            raise DataError(f"{path}: {said}")
        return [f"{path}: left out {some(names)}: {why}" for why, names in reasons.items()]

    def _reason(self, name: str) -> str:
        """The reason why a tensor has no place in a checkpoint; empty for an unknown one."""
        if name.endswith(_IGNORED):
            return "a buffer that is computed"
        if name == _HEAD:
            return "equal to the embedding, to which it is tied"
        return self.config.family.unread(name, self.config.sizes)

    def _check_part(self, name: str, shape: tuple[int, ...]) -> str:
        """The type of a tensor, which is one of training and has the model's shape."""
        named = f"{self._weights.files[name]}: {name}"
        found, kind = self._weights.header(name)
        if found != shape:
            raise DataError(f"{named} has shape {list(found)}, config.json says {list(shape)}")
        if kind not in _FLOATS:
            raise DataError(f"{named} is {kind}; expected {', '.join(_FLOATS)}")
        return _FLOATS[kind]


def one_dtype(found: dict[str, str], where: Path) -> str:
    """The type of all tensors.

    Args:
        found: tensor -> type.

    Raises:
        DataError: they have several.
    """
    kinds: dict[str, str] = {}
    for name, kind in found.items():
        kinds.setdefault(kind, name)
    if len(kinds) > 1:
        several = ", ".join(f"{name} is {kind}" for kind, name in kinds.items())
        raise DataError(f"{where}: {several}; say which type all are to have (--dtype)")
    return next(iter(kinds))


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
        if (source / name).exists():
            (target / name).parent.mkdir(exist_ok=True)
            try:
                with open_to_read(inside(source, name)) as file, (target / name).open("wb") as copy:
                    shutil.copyfileobj(file, copy)
            except OSError as error:
                raise DataError(f"{source / name}: {error.strerror}") from error

"""Safetensors files of a Hugging Face model, which are read lazily, tensor by tensor."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron.dpp.errors import DataError, one_line, shown
from megatron.dpp.files.safe_files import open_to_read
from megatron.dpp_train.hf.fields import CONFIG, HfConfig, inside, parse_config, read_config
from megatron.dpp_train.text_files import read_json

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
HEAD = "lm_head.weight"
"""The output layer of every family."""
_LONGEST_NAME = 255


class Weights:
    """The tensors in a folder.

    Attributes:
        files: tensor -> its file.

    Raises:
        DataError: a file is missing, damaged or not whole, or lacks a tensor of the index.
    """

    def __init__(self, folder: Path) -> None:
        if (folder / INDEX).exists():
            self.files = _indexed(folder)
        elif (folder / WEIGHTS).exists():
            self.files = dict.fromkeys(_opened(inside(folder, WEIGHTS)).keys(), folder / WEIGHTS)
        else:
            pickles = sorted(folder.glob("*.bin"))
            more = f"; {pickles[0].name} is a pickle: save it as safetensors" if pickles else ""
            raise DataError(f"{folder}: neither {WEIGHTS} nor {INDEX} is there{more}")
        files = set(self.files.values())
        self._headers = {file: _opened(file) for file in files}
        there = {file: set(opened.keys()) for file, opened in self._headers.items()}
        for name, file in self.files.items():
            if name not in there[file]:
                raise DataError(
                    f"{file}: lacks {name}, which {INDEX} says it holds; download both again"
                )
        self._tensors: dict[Path, Any] = {}

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        return tuple(self._headers[self.files[name]].get_slice(name).get_shape())

    def kind(self, name: str) -> str:
        """The type of a tensor, in the words of the format: ``BF16``."""
        return str(self._headers[self.files[name]].get_slice(name).get_dtype())

    def tensor(self, name: str) -> Any:
        """A tensor of PyTorch."""
        file = self.files[name]
        if file not in self._tensors:
            self._tensors[file] = _opened(file, "pt")
        return self._tensors[file].get_tensor(name)


def _indexed(folder: Path) -> dict[str, Path]:
    """Tensor -> file, by the index of several files."""
    index = inside(folder, INDEX)
    content = read_json(index)
    weights = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weights, dict) or not weights:
        raise DataError(f"{index}: no index of weights (it has no weight_map)")
    for name, file in weights.items():
        if (
            not isinstance(file, str)
            or Path(file).name != file
            or len(file) > _LONGEST_NAME
            or "\0" in file
        ):
            raise DataError(
                f"{index}: {shown(name)} is in {shown(file)}, expected the name of a file"
            )
    found = {file: inside(folder, file) for file in set(weights.values())}
    return {name: found[file] for name, file in weights.items()}


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


def read_model(folder: Path, family_file: Path | None = None) -> HfConfig:
    """The ``config.json`` in a folder. A model whose weights hold an output layer of its own is not
    tied, whatever the file says; transformers sees it so, too.

    Raises:
        DataError: as :func:`read_config`; with weights, as :class:`Weights`.
    """
    config = read_config(folder, family_file)
    if config.sizes.untied or not any((folder / name).exists() for name in (INDEX, WEIGHTS)):
        return config
    weights = Weights(folder)
    embedding = next(row for row in config.family.rows if row.key.startswith("embedding.")).names[0]
    names = (embedding, embedding.partition(".")[2])
    tied = next((name for name in names if name in weights.files), HEAD)
    if HEAD not in weights.files or weights.tensor(HEAD).equal(weights.tensor(tied)):
        return config
    where = str(folder / CONFIG)
    untied = parse_config(config.content | {"tie_word_embeddings": False}, where, family_file)
    note = f"{where}: tie_word_embeddings is true, but {HEAD} differs from {tied}: taken as untied"
    return replace(untied, notes=(*untied.notes, note))

"""Megatron's flags as a mapping, and the files of ``configs/`` that hold them."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.dpp.command_line import ROOT
from megatron.dpp.errors import ConfigError, DataError, one_line
from megatron.dpp_train.presets.checks import is_flag
from megatron.dpp_train.presets.flag_table import PACKAGE
from megatron.dpp_train.text_files import read_text

Flags = dict[str, Any]
"""Flag with its dashes -> its value: True for a switch, a list for several values."""


def shared(name: str) -> Path:
    """A folder of the source tree that wheels hold inside of the package."""
    own = ROOT / name
    return own if own.is_dir() else PACKAGE / name


def read_flags(path: Path) -> Flags:
    """The flags of a YAML file of lines ``flag: value``. ``false`` and an empty value leave a flag
    out.

    Raises:
        ConfigError: it holds something else.
        DataError: it cannot be read.
    """
    import yaml

    text = read_text(path)
    try:
        loaded = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: no YAML file ({one_line(error, 200)})") from None
    values = loaded.values() if isinstance(loaded, dict) else [{}]
    words = [each for value in values for each in (value if isinstance(value, list) else [value])]
    if not all(isinstance(each, str | int | float | None) for each in words):
        raise ConfigError(
            f"{path}: expected lines of `flag: value` (Megatron's grouped form: --yaml-cfg)"
        )
    named = {f"--{str(key).replace('_', '-')}": value for key, value in loaded.items()}
    return {
        name: value for name, value in named.items() if value is not None and value is not False
    }


def model_flags(name: str) -> Flags:
    """The flags of ``configs/models/NAME.yaml``, or of a Hugging Face model's folder.

    Raises:
        ConfigError: there is none.
        DataError: the folder's model cannot be trained.
    """
    folder = Path(name)
    if "/" in name or folder.is_dir():
        if not folder.is_dir():
            raise DataError(f"--model {name}: no such folder")
        return _of_folder(folder)
    models = shared("configs") / "models"
    names = sorted(path.stem for path in models.glob("*.yaml"))
    if name not in names:
        near = ", ".join(difflib.get_close_matches(name.lower(), names, n=4, cutoff=0.0))
        raise ConfigError(
            f"--model {name}: neither a folder nor in configs/models; nearest: {near}"
        )
    return read_flags(models / f"{name}.yaml")


def _of_folder(folder: Path) -> Flags:
    """The flags of a Hugging Face model, with those of fine-tuning where it names none."""
    from megatron.dpp_train.hf import flags_of

    flags = from_argv(flags_of(folder))
    length = min(4096, number(flags, "--max-position-embeddings", 4096))
    own = {"--micro-batch-size": 1, "--global-batch-size": 32, "--lr": 1e-5, "--weight-decay": 0.0}
    return own | {"--seq-length": length} | flags


def to_argv(flags: Mapping[str, Any]) -> list[str]:
    """The flags as the words of a command line."""
    words: list[str] = []
    for name, value in flags.items():
        if isinstance(value, list | tuple):
            words += [name, *map(str, value)]
        elif value is True:
            words.append(name)
        else:  # a path may begin like a flag
            words += [f"{name}={value}"] if is_flag(str(value)) else [name, str(value)]
    return words


def from_argv(words: Sequence[str]) -> Flags:
    """The mapping of a command line's flags.

    Raises:
        ConfigError: a word that belongs to no flag.
    """
    flags: Flags = {}
    last = ""
    for word in words:
        if is_flag(word):
            last, equals, value = word.partition("=")
            flags[last] = value if equals else True
        elif not last:
            raise ConfigError(f"unexpected argument {word!r}: options start with --")
        else:
            before = flags[last]
            several = before if isinstance(before, list) else []
            flags[last] = word if before is True else [*(several or [before]), word]
    return flags


def number(values: Mapping[str, Any], name: str, default: int = 1) -> int:
    """The value of a flag, or of a variable, as a number of things; an empty one counts as not set.

    Raises:
        ConfigError: it is no whole number, or below 1.
    """
    given = values.get(name)
    text = str(default if given in (None, "") else given)
    if not text.isdecimal() or int(text) < 1:
        joint = " " if name.startswith("-") else "="
        raise ConfigError(f"{name}{joint}{text}: expected a whole number of at least 1")
    return int(text)

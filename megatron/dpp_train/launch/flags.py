"""Flags of ``pretrain_gpt.py`` as a mapping, and the files of ``configs/`` that hold them."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.dpp.errors import ConfigError, DataError
from megatron.dpp_train.checkpoint.files import TRACKER
from megatron.dpp_train.hf import read_config
from megatron.dpp_train.hf.fields import ADAPTER, CONFIG
from megatron.dpp_train.options.arguments import build_parser
from megatron.dpp_train.text_files import read_mapping

ROOT = Path(__file__).resolve().parents[3]
MODELS = ROOT / "configs" / "models"

_OTHER_NAMES = {
    **dict.fromkeys(("117m", "124m"), "small"),
    **dict.fromkeys(("345m", "355m"), "medium"),
    **dict.fromkeys(("gpt3", "1.3b"), "gpt3-1.3b"),
}
"""Common names of models -> files of ``configs/models``, for hints."""

Flags = dict[str, Any]
"""Flag with its dashes to its value: True for a switch, a list for several values."""


def read_flags(path: Path) -> Flags:
    """The flags of a YAML file.

    Raises:
        ConfigError: a switch has another value than true and false.
        DataError: the file cannot be read, or is no plain mapping.
    """
    loaded = read_mapping(path)
    if any(isinstance(value, dict) for value in loaded.values()):
        raise DataError(
            f"{path}: expected lines of `flag: value`; Megatron-LM's grouped form goes with "
            "--mode megatron"
        )
    named = {f"--{str(key).replace('_', '-')}": value for key, value in loaded.items()}
    known = build_parser()._option_string_actions
    for name, value in named.items():
        if name in known and known[name].nargs == 0 and not isinstance(value, bool | None):
            raise ConfigError(f"{path}: {name[2:]} is a switch, not {value!r}")
    return {  # a 0 is a value, and equals False
        name: value for name, value in named.items() if value is not None and value is not False
    }


_FINE_TUNING: Flags = {
    "--micro-batch-size": 1,
    "--global-batch-size": 32,
    "--lr": 1.0e-5,
    "--weight-decay": 0.0,
}
"""Flags of a run that starts from a folder, where nothing else names them."""
_LONGEST = 4096
"""Tokens of a sample, for models that take more."""


def folder_flags(folder: str, family_file: str | None = None) -> Flags:
    """The flags of a Hugging Face model's ``config.json``; prints the fields that no flag stands
    for.

    Args:
        family_file: a Python file with a further family.

    Raises:
        DataError: the model cannot be trained here.
    """
    config = read_config(folder, family_file)
    for note in config.notes:
        print(f"note: {note}", file=sys.stderr)
    flags = {f"--{name}": value for name, value in config.flags.items()}
    return _FINE_TUNING | {"--seq-length": min(_LONGEST, config.sizes.positions)} | flags


def model_flags(name: str, family_file: str | None = None) -> Flags:
    """The flags of ``configs/models/NAME.yaml``, or of a folder with a ``config.json``.

    Args:
        family_file: a Python file with a further family, for a folder.

    Raises:
        ConfigError: there is none.
        DataError: the folder's model cannot be trained here.
    """
    folder = Path(name)
    if "/" in name or folder.is_file() or any((folder / n).is_file() for n in (CONFIG, ADAPTER)):
        return folder_flags(name, family_file)
    names = sorted(path.stem for path in MODELS.glob("*.yaml"))
    if name not in names:
        near = difflib.get_close_matches(name.lower(), [*names, *_OTHER_NAMES], n=1, cutoff=0.0)[0]
        near = _OTHER_NAMES.get(near, near)
        raise ConfigError(
            f"--model {name}: neither a folder here with a {CONFIG} nor a file of configs/models; "
            f"nearest: {near} (there are {', '.join(names)})"
        )
    return read_flags(MODELS / f"{name}.yaml")


def whole_flag(flags: Flags, name: str) -> int:
    """The flag's value as a number of things.

    Raises:
        ConfigError: it is no whole number, or below 1.
    """
    text = str(flags[name])
    if not text.lstrip("+-").isdecimal():
        raise ConfigError(f"{name} {text}: expected a whole number")
    if int(text) < 1:
        raise ConfigError(f"{name} {text}: nearest possible: 1")
    return int(text)


_NARROW, _WIDE = 64, 128
"""Widths of an attention head."""
_WIDE_FROM = 2048
"""Hidden size from which heads are wide, as in GPT-3."""


def heads(given: Flags) -> Flags:
    """Attention heads of a hidden size that is given without them. Small models keep those of the
    named model.

    >>> heads({"--hidden-size": 1024})
    {'--num-attention-heads': 16}
    """
    if "--hidden-size" not in given or {"--num-attention-heads", "--kv-channels"} & set(given):
        return {}
    hidden = whole_flag(given, "--hidden-size")
    width = _WIDE if hidden >= _WIDE_FROM and hidden % _WIDE == 0 else _NARROW
    return (
        {} if hidden % width or hidden < 4 * width else {"--num-attention-heads": hidden // width}
    )


def check_known(words: Sequence[str], own: Sequence[str]) -> None:
    """Refuse flags among ``words`` that the training scripts do not have.

    Args:
        own: options of ``train`` itself, to which a misspelt one may be nearer.

    Raises:
        ConfigError: one that is not known, with the nearest match.
    """
    known = build_parser()._option_string_actions
    for word in words:
        name = word.partition("=")[0]
        near = difflib.get_close_matches(name, own, n=1, cutoff=0.75)
        if name.startswith("--") and name not in known and near:
            raise ConfigError(f"unknown flag {name} (did you mean {near[0]}?)")


def to_argv(flags: Flags) -> list[str]:
    """The flags as the words of a command line."""
    words: list[str] = []
    for name, value in flags.items():
        words.append(name)
        if isinstance(value, (list, tuple)):
            words += [str(each) for each in value]
        elif value is not True:
            words.append(str(value))
    return words


def from_argv(words: Sequence[str]) -> Flags:
    """The mapping of a command line's flags.

    Raises:
        ConfigError: a word that belongs to no flag.
    """
    flags: Flags = {}
    last = ""
    for word in words:
        if word.startswith("--"):
            last, equals, value = word.partition("=")
            flags[last] = value if equals else True
        elif not last:
            raise ConfigError(f"unexpected argument {word!r}: options of train start with --")
        else:
            before = flags[last]
            several = before if isinstance(before, list) else []
            flags[last] = word if before is True else [*(several or [before]), word]
    return flags


_STEP = re.compile(r"(?:iter_|checkpoint-)(\d+)")
"""Directory of one iteration's checkpoint."""


def resume_flags(folder: str) -> Flags:
    """Flags of a resumed run. The folder holds checkpoints, or is that of one iteration:
    ``iter_0001000``, or ``checkpoint-1000`` in its place."""
    path, step = Path(folder), _STEP.fullmatch(Path(folder).name)
    own = path.parent / f"iter_{int(step[1]):07d}" if step else path
    if step and not (path / TRACKER).is_file() and own.is_dir():
        return resume_flags(str(path.parent)) | {"--ckpt-step": int(step[1])}
    if not (path / TRACKER).is_file():
        below, beside = sorted(path.glob(f"*/{TRACKER}")), sorted(path.parent.glob(f"*/{TRACKER}"))
        near = [each for each in (path.parent / TRACKER,) if each.is_file()] + below + beside
        hint = f" (nearest: {near[0].parent})" if near else ""
        raise DataError(f"--resume-from {folder}: no checkpoint is there{hint}")
    return {
        "--load": folder,
        "--exit-on-missing-checkpoint": True,
        "--override-opt_param-scheduler": True,
    }

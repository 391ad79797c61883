"""Token files and tokenizer of a run: named, found, or made of text before it starts."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.dpp.errors import ConfigError, DataError
from megatron.dpp.files.index_files import check_index
from megatron.dpp.processes import run_child
from megatron.dpp_train.data.rows import JSON, PARQUET
from megatron.dpp_train.data.templates import find_templates
from megatron.dpp_train.data.vocabulary import CHOICES, tokenizer_flags
from megatron.dpp_train.presets.flag_table import PACKAGE, user_cache
from megatron.dpp_train.presets.flags import Flags, shared, to_argv
from megatron.dpp_train.text_files import nearest_path

_LOADERS = (
    "--mock-data", "--data-path", "--train-data-path", "--data-args-path",
    "--per-split-data-args-path", "--yaml-cfg",
)  # fmt: skip
_TOKENIZERS = {"gpt": "GPT2BPETokenizer", "bert": "BertWordPieceLowerCase"}
_FILES = ("--vocab-file", "--merge-file", "--tokenizer-model")
_LEVELS = {"gpt": "text_document", "bert": "text_sentence"}
_HOW = {
    "gpt": ["--append-eod"],
    "bert": ["--split-sentences", "--sentence-splitter", "rules"],
}
_SPLIT, _FEW = "949,50,1", 100
_NO_TEST, _FOR_TEST = "95,5,0", 1000
"""The split of fewer documents than these; Megatron never ends to build a set without any."""


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """The origin of a run's tokens.

    Args:
        flags: those that name data and tokenizer.
        preparation: arguments of ``megatron-dpp`` that make the token files; empty where they are
            there.
        source: a few words for the reader.
    """

    flags: Flags
    preparation: list[str]
    source: str


def find_tokens(
    arch: str,
    path: str | None,
    flags: Mapping[str, Any],
    *,
    tokenizer: str | None = None,
    skip_bad_lines: bool = False,
) -> Tokens:
    """Find the token files, or the command that makes them.

    Args:
        path: text, a prefix of token files, or None for the sample corpus.
        flags: what is given already; Megatron's own data flags need nothing.
        tokenizer: what ``--tokenizer`` says.

    Raises:
        ConfigError: data or tokenizer are named twice, or text has no tokenizer.
        DataError: nothing is at ``path``, or it cannot be read.
    """
    loaders = [name for name in _LOADERS if name in flags]
    if path and loaders:
        raise ConfigError(f"--data and {loaders[0]} exclude each other")
    text = Path(path) if path else shared(f"datasets_{arch}") / "dataset.json"
    is_text = path is None or path.endswith((*JSON, PARQUET))
    if is_text and not loaders and not text.exists():
        raise DataError(f"--data {text}: no such file{nearest_path(text)}")
    given = {name: flags[name] for name in ("--tokenizer-type", *_FILES) if name in flags}
    if tokenizer and given:
        raise ConfigError(f"--tokenizer and {next(iter(given))} exclude each other")
    if tokenizer:
        corpus = text if path and is_text else None
        is_sample = tokenizer == "sample"
        given = sample_vocabulary(arch) if is_sample else tokenizer_flags(arch, tokenizer, corpus)
    if loaders:
        what = "mock data" if "--mock-data" in flags else str(flags[loaders[0]])
        return Tokens(flags=given, preparation=[], source=what)
    if path and is_text and not given:
        raise ConfigError(f"--data {path} needs a tokenizer: {CHOICES}")
    found = {"--tokenizer-type": _TOKENIZERS[arch], **(given or sample_vocabulary(arch))}
    if not is_text:
        prefix = _prefix(str(path))
        found |= {"--data-path": prefix} | _held_out(prefix)
        return Tokens(flags=found, preparation=[], source=prefix)
    return _of_text(arch, text, found, flags, own=path is not None, skip=skip_bad_lines)


def _of_text(
    arch: str, text: Path, found: Flags, flags: Mapping[str, Any], *, own: bool, skip: bool
) -> Tokens:
    chats = "--sft" in flags
    how = ["--sft"] if chats else list(_HOW[arch])
    templates: list[str] = []
    if chats:
        beside = found.get("--tokenizer-model") or found.get("--vocab-file")
        templates = [*find_templates("auto", beside).values()]
    prefix = _prefix_of(text, _digest(text, found, [*how, *templates]), own=own)
    tokens = f"{prefix}_{'chat_document' if chats else _LEVELS[arch]}"
    there = all(Path(tokens + suffix).is_file() for suffix in (".idx", ".bin"))
    words = ["preprocess", *to_argv({"--input": text, "--output-prefix": prefix} | found)]
    words += [*how, *(["--skip-bad-lines"] if skip else [])]
    found |= {"--data-path": tokens} | (_held_out(tokens) if there else {"--split": _SPLIT})
    source = str(text) if own else "sample corpus"
    return Tokens(flags=found, preparation=[] if there else words, source=source)


def prepare(tokens: Tokens) -> Flags:
    """Make the token files where they are missing; the flags that depend on what is in them.

    Raises:
        DataError: they cannot be made; what is wrong has been printed.
    """
    if tokens.preparation:
        words = [sys.executable, "-m", "megatron.dpp", *tokens.preparation]
        if run_child(words, stdout=subprocess.DEVNULL):
            raise DataError(f"the tokens of {tokens.source} could not be made: see above")
    prefix = tokens.flags.get("--data-path")
    return _held_out(prefix) if isinstance(prefix, str) else {}


def _prefix(path: str) -> str:
    """A prefix of token files, with or without one of their suffixes."""
    prefix = path.removesuffix(".bin").removesuffix(".idx")
    if not Path(prefix + ".idx").is_file():
        missing = Path(prefix + ".idx")
        raise DataError(
            f"--data {path}: neither rows ({', '.join((*JSON, PARQUET))}) nor a "
            f"prefix of token files: {missing} is missing{nearest_path(missing)}"
        )
    return prefix


def _digest(text: Path, found: Mapping[str, Any], how: Sequence[str]) -> str:
    """A hash of a text, its tokenizer and how it is cut: new text never meets old tokens."""
    digest = hashlib.sha256(
        " ".join([str(found["--tokenizer-type"]), *how]).encode("utf-8", "replace")
    )
    named = [Path(str(found[name])) for name in _FILES if name in found]
    folders = [
        each for folder in named if folder.is_dir() for each in sorted(folder.glob("*.json"))
    ]
    for path in [text, *(each for each in named if each.is_file()), *folders]:
        try:
            with path.open("rb") as file:
                while block := file.read(1 << 20):
                    digest.update(block)
        except OSError as error:
            raise DataError(f"{path}: {error.strerror}") from error
    return digest.hexdigest()[:12]


def _prefix_of(text: Path, digest: str, *, own: bool) -> Path:
    stem = text.name.split(".")[0] if own else "sample"
    folders = [text.parent, Path.cwd()] if own else [text.parent, user_cache()]
    if not own and text.is_relative_to(PACKAGE):
        folders = folders[1:]  # an installed package stays as it is
    for folder in folders:
        if os.access(folder, os.W_OK | os.X_OK):
            return folder / f"{stem}-{digest}"
    raise DataError(
        f"the token files of {text} go into {folders[0]} or {folders[-1]}, and neither can be "
        "written: start in another directory"
    )


def _held_out(prefix: str) -> Flags:
    """``--split`` of token files, of which no part is empty that is used: of fewer than a hundred
    documents all are trained on."""
    documents = check_index(prefix)[1]
    if documents < _FEW:
        return {"--split": "1,0,0", "--eval-iters": 0}
    return {"--split": _SPLIT if documents >= _FOR_TEST else _NO_TEST}


def sample_vocabulary(arch: str) -> Flags:
    """The flags of the sample corpus's vocabulary."""
    folder = shared(f"datasets_{arch}")
    if arch == "bert":
        return {"--vocab-file": str(folder / "vocab.txt")}
    return {"--vocab-file": str(folder / "vocab.json"), "--merge-file": str(folder / "merges.txt")}

"""Prepares a run: a Python that is set up, and token files."""

from __future__ import annotations

import hashlib
import os
import shlex
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.dpp.errors import ConfigError, DataError
from megatron.dpp.index_files import check_index, read_lengths
from megatron.dpp.processes import run_child
from megatron.dpp.safe_files import open_to_read
from megatron.dpp_train.data.rows import JSON, PARQUET, files_of, is_rows
from megatron.dpp_train.data.vocabulary import (
    CHOICES,
    sample_vocabulary,
    tokenizer_flags,
)
from megatron.dpp_train.launch.flags import ROOT, Flags, to_argv
from megatron.dpp_train.options.arguments import parse_args
from megatron.dpp_train.options.validate import TOKENIZERS
from megatron.dpp_train.text_files import nearest_path
from megatron.dpp_train.tokenizers import (
    CHAT_ENCODING,
    PIECE_TYPES,
    PIECES,
    Tokenizer,
    build_tokenizer,
    tokenizer_for,
)
from megatron.dpp_train.tokenizers.base import OLDER_FILES
from megatron.dpp_train.tokenizers.template_files import TEMPLATE_FILES

_LOADERS = ("--data-path", "--train-data-path", "--data-args-path", "--per-split-data-args-path")


@dataclass(frozen=True)
class Data:
    """The flags that name data and vocabulary, and Python's arguments to write the token files.

    ``preparation`` is None where the files exist.
    """

    flags: Flags
    preparation: list[str] | None


def prepare(
    arch: str,
    path: str | None,
    flags: Flags,
    *,
    skip_bad_lines: bool = False,
    tokenizer: str | None = None,
    build: Callable[..., Tokenizer] = build_tokenizer,
) -> Data:
    """Find the token files, or the command that makes them.

    Args:
        path: JSON lines, a prefix of token files, or None for the sample corpus.
        flags: what is given already; ``--mock-data`` and Megatron's own data flags need nothing.
        tokenizer: what ``--tokenizer`` says.
        build: as of :func:`tokenizer_for`.

    Raises:
        ConfigError: data or tokenizer are named twice.
        DataError: nothing is at ``path``, or it cannot be read.
    """
    if "--yaml-cfg" in flags:
        flags = {**_data_of_file(flags), **flags}
    others = [name for name in ("--mock-data", *_LOADERS) if name in flags]
    if path and others:
        raise ConfigError(f"--data and {others[0]} exclude each other")
    given = "--tokenizer-type" in flags or "--vocab-file" in flags
    if tokenizer and given:
        raise ConfigError("--tokenizer and --tokenizer-type or --vocab-file exclude each other")
    source = Path(path) if path and is_rows(path) else None
    if source and not source.exists():
        raise DataError(f"--data {source}: no such file{nearest_path(source)}")
    if tokenizer:
        flags = {**flags, **tokenizer_flags(arch, tokenizer, source)}
    vocabulary = _vocabulary(arch, flags)
    if "--mock-data" in flags or any(name in flags for name in _LOADERS):
        return Data(vocabulary, None)
    chats = bool(flags.get("--sft"))
    if chats and not path:
        raise ConfigError("--sft needs --data with JSON lines of chats (docs/data.md)")
    text = Path(path) if path else ROOT / f"datasets_{arch}" / "dataset.json"
    if path and source is None:
        return Data({**vocabulary, "--data-path": _prefix(path)}, None)
    if not text.exists():
        raise DataError(f"--data {text}: no such file{nearest_path(text)}")
    kind = _tokenizer(arch, flags)
    own = [] if kind == [TOKENIZERS[arch]] else kind
    files = [str(vocabulary[name]) for name in _FILES if name in vocabulary]
    more = _chat_words(flags) if chats else list(_PREPROCESSING[arch])
    sources = [*files, *_beside(flags, vocabulary, chats=chats)]
    words = [*own, *([*more, f"encoding {CHAT_ENCODING}"] if chats else [])]
    digest = _digest([*files_of(text), *map(Path, sources)], words)
    if "--tokenizer-model" in vocabulary:  # files that say more than one thing
        digest.update(_built(arch, {**flags, **vocabulary}, build).reading().encode())
    prefix = _prefix_of(text, digest.hexdigest()[:12], sample=path is None)
    tokens = f"{prefix}_{'chat_document' if chats else _LEVELS[arch]}"
    found = {**vocabulary, "--data-path": tokens}
    more += ["--skip-bad-lines"] if skip_bad_lines else []
    there = all(Path(tokens + suffix).is_file() for suffix in (".bin", ".idx"))
    return Data(found, None if there else _preprocessing(text, prefix, kind, vocabulary) + more)


def _preprocessing(text: Path, prefix: Path, kind: list[str], vocabulary: Flags) -> list[str]:
    """Python's arguments that make token files of a text."""
    command = [str(ROOT / "tools" / "preprocess_data.py"), "--input", str(text)]
    command += ["--output-prefix", str(prefix), "--tokenizer-type", *kind]
    for name in _FILES:
        command += [name, str(vocabulary[name])] if name in vocabulary else []
    return command


def require_tokenizer(path: str | None, flags: Flags, tokenizer: str | None) -> None:
    """Refuse text of one's own without a tokenizer (ConfigError): the sample's is a poor one."""
    if "--yaml-cfg" in flags:
        flags = {**_data_of_file(flags), **flags}
    given = tokenizer or {"--tokenizer-type", "--vocab-file"} & set(flags)
    if path and is_rows(path) and not given:
        raise ConfigError(f"--data {path} needs a tokenizer: {CHOICES}")


def describe_tokens(flags: Flags) -> str:
    """The number of tokens and unknown ones in token files, and the vocabulary's size."""
    import numpy

    from megatron.dpp_train.data.token_files import token_type

    tokenizer = _built("gpt" if "--merge-file" in flags else "bert", flags, build_tokenizer)
    path = Path(f"{flags['--data-path']}.bin")
    tokens = numpy.memmap(path, dtype=token_type(tokenizer.vocab_size), mode="r")
    unknown = tokenizer.__dict__.get("vocab", {}).get("[UNK]")
    count = 0 if unknown is None else int((tokens == unknown).sum())
    text = (
        f"data: {path}: {len(tokens)} tokens, {count} of them unknown; vocabulary of "
        f"{tokenizer.vocab_size}"
    )
    if {"--sft", "--variable-length"} & set(flags):
        lengths = numpy.sort(read_lengths(str(flags["--data-path"])))
        median, most = int(lengths[len(lengths) // 2]), int(lengths[-1])
        text += f"; {len(lengths)} documents, median {median} tokens, longest {most}"
    return text


def _built(arch: str, flags: Flags, build: Callable[..., Tokenizer]) -> Tokenizer:
    """The tokenizer that flags name."""
    values = {name[2:].replace("-", "_"): value for name, value in flags.items()}
    values |= {n: int(values[n]) for n in ("vocab_size", "vocab_extra_ids") if n in values}
    return tokenizer_for(Namespace(**{"tokenizer_type": TOKENIZERS[arch], **values}), build)


def data_notes(flags: Flags) -> list[str]:
    """Lines on documents of which none is held out, and on their lengths, where the estimate is for
    the longest."""
    path = flags.get("--data-path")
    if not (isinstance(path, str) and Path(path + ".idx").is_file()):
        return []
    if flags.get("--split") == "1,0,0":
        count = check_index(path)[1]
        return [f"all {count} documents are trained on; --split holds some out", *_lengths(flags)]
    return _lengths(flags)


def _lengths(flags: Flags) -> list[str]:
    path = flags["--data-path"]
    if not ({"--sft", "--variable-length"} & set(flags) and isinstance(path, str)):
        return []
    longest = int(flags["--seq-length"])
    lengths = (read_lengths(path) - 1).clip(0, longest)
    mean = float(lengths.mean())
    return [
        f"the estimate is for sequences of {longest} tokens; these have {mean:.0f} on average, so "
        f"a step takes about {mean / longest:.0%} of its time or less "
        f"(megatron-dpp sim --lengths {path}.idx --compare)"
    ]


_FILES = ("--vocab-file", "--merge-file", "--tokenizer-model")
_LEVELS = {"gpt": "text_document", "bert": "text_sentence"}
_PREPROCESSING = {
    "gpt": ["--append-eod"],
    "bert": ["--split-sentences", "--sentence-splitter", "rules"],
}


_FORMAT = "--sft-tokenizer-prompt-format"


def _chat_words(flags: Flags) -> list[str]:
    """The words that ask ``preprocess_data.py`` for chats."""
    return ["--sft", *([_FORMAT, str(flags[_FORMAT])] if _FORMAT in flags else [])]


def _beside(flags: Flags, vocabulary: Flags, *, chats: bool) -> list[str]:
    """Files that may hold the chat template and the names of tokens."""
    files = [str(vocabulary[name]) for name in _FILES if name in vocabulary]
    if not chats and "--tokenizer-model" not in vocabulary:
        return []
    named = Path(str(flags.get(_FORMAT, "")))
    folder = Path(files[0]).parent if files else Path()
    beside = [folder / name for name in (*TEMPLATE_FILES, *OLDER_FILES)]
    return [str(path) for path in [named, *beside] if path.is_file()]


def _data_of_file(flags: Flags) -> Flags:
    """Data and vocabulary in a ``--yaml-cfg`` file, as flags."""
    args = parse_args(to_argv(flags))
    names = (
        "--mock-data",
        *_LOADERS,
        "--tokenizer-type",
        "--vocab-size",
        *_FILES,
        "--sft",
        _FORMAT,
    )
    found = {name: getattr(args, name[2:].replace("-", "_")) for name in names}
    return {name: value for name, value in found.items() if value}


def _vocabulary(arch: str, flags: Flags) -> Flags:
    """The tokenizer's flags: those given, or the sample's vocabulary."""
    if "--tokenizer-type" in flags or "--vocab-file" in flags:
        names = ("--tokenizer-type", *_FILES)
        found = {name: flags[name] for name in names if name in flags}
        model = Path(str(found.get("--tokenizer-model", "")))
        if "--tokenizer-model" in found and model.is_dir():
            name = PIECES if found.get("--tokenizer-type") in PIECE_TYPES else "tokenizer.json"
            found["--tokenizer-model"] = str(model / name)
        return found
    return sample_vocabulary(arch)


def _tokenizer(arch: str, flags: Flags) -> list[str]:
    """The type that the run will have, and what else ``preprocess_data.py`` needs to build it."""
    kind = str(flags.get("--tokenizer-type", TOKENIZERS[arch]))
    size = flags.get("--vocab-size") if kind == "NullTokenizer" else None
    return [kind] if size is None else [kind, "--vocab-size", str(size)]


def _prefix(path: str) -> str:
    """A prefix of token files, with or without one of their suffixes."""
    prefix = path[:-4] if path.endswith((".bin", ".idx")) else path
    if not Path(prefix + ".idx").is_file():
        missing = Path(prefix + ".idx")
        raise DataError(
            f"--data {path}: neither rows ({', '.join((*JSON, PARQUET))}, a saved data set) nor a "
            "prefix of token files: "
            f"{missing} is missing{nearest_path(missing)}"
        )
    return prefix


def _digest(files: list[Path], words: list[str]) -> Any:
    """A hash of files and of words that ask for a tokenizer and chats."""
    digest = hashlib.sha256()
    for name in files:
        try:
            with open_to_read(name) as file:
                while block := file.read(1 << 20):
                    digest.update(block)
        except OSError as error:
            raise DataError(f"{name}: {error.strerror}{nearest_path(name)}") from error
    digest.update(" ".join(words).encode())
    return digest


def _prefix_of(text: Path, digest: str, *, sample: bool) -> Path:
    """A prefix whose name holds a hash of the sources, so that new text never meets old tokens."""
    stem = "sample" if sample else text.name.split(".")[0]
    folders = [each for each in (text.parent, Path.cwd()) if os.access(each, os.W_OK | os.X_OK)]
    if not folders:
        raise DataError(
            f"the token files of {text} go beside it or into the working directory, and neither "
            f"{text.parent} nor {Path.cwd()} can be written: start in another directory"
        )
    return folders[0] / f"{stem}-{digest}"


_SPLIT = "949,50,1"
_LEAST, _FEW = 1000, 100
"""Documents from which every set of ``_SPLIT`` gets one, and from which any are held out: a loss on
fewer than five tells little."""


def split_of(flags: Flags) -> Flags:
    """``--split`` where none is given. Few documents are split so that test gets one and validation
    five at least; too few for that are all for training.

    Raises:
        DataError: the index is broken.
    """
    path = flags.get("--data-path")
    if not isinstance(path, str) or not Path(path + ".idx").is_file():
        return {"--split": _SPLIT}
    _, documents = check_index(path)
    if documents < _FEW:
        return {"--split": "1,0,0", "--eval-iters": 0}
    valid = documents // 20
    few = f"{documents - valid - 1},{valid},1"
    return {"--split": few if documents < _LEAST else _SPLIT}


def find_python(words: Sequence[str], *, dry_run: bool) -> str:
    """The interpreter that training runs with: this one. Where set-up chooses another, this
    process becomes ``megatron-dpp train`` there. What is missing is installed; where that fails,
    the program ends.

    Args:
        words: options and flags of ``train``.
    """
    if dry_run:
        return sys.executable
    keep = ["--keep"] if os.environ.get("PYTHON") else []  # as tools/setup.sh does it
    setup = [sys.executable, str(ROOT / "tools" / "setup_environment.py"), *keep]
    return go_on(setup, ["megatron.dpp", "train", *words])


_CHOSEN = "DPP_TRAIN_PYTHON"
"""Set to ``set up`` for a Python that set-up has chosen: it looks for no other."""


def go_on(setup: Sequence[str], words: Sequence[str]) -> str:
    """The interpreter that set-up chooses, which is this one: this process becomes another by
    ``python -m WORDS``."""
    if os.environ.pop(_CHOSEN, "") == "set up":
        return sys.executable
    python = set_up(setup)
    own, other = Path(sys.executable), Path(python)
    if other.parent != own.parent or not (other.exists() and other.samefile(own)):
        sys.stdout.flush()
        env = {**os.environ, _CHOSEN: "set up", "PYTHONPATH": import_path(), "PYTHONSAFEPATH": "1"}
        os.execve(python, [python, "-m", *words], env)
    return sys.executable


def import_path() -> str:
    """``PYTHONPATH`` with the repository in front."""
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))


def set_up(command: Sequence[str]) -> str:
    """Install and build what is missing; the Python to use, which the command prints. Where that
    fails, the program ends."""
    sys.stdout.flush()
    result = subprocess.run(command, stdout=subprocess.PIPE)
    if result.returncode:
        sys.exit(result.returncode)
    return os.fsdecode(result.stdout).strip()


def run_preparation(command: list[str]) -> None:
    """Tokenise, with a progress bar. Where that fails, the program ends."""
    code = run_child(command)
    if code:
        sys.exit(code)


def show(words: list[str]) -> str:
    """Flags, one with its values a line."""
    lines: list[str] = []
    for word in words:
        quoted = shlex.quote(word)
        if word.startswith("--") or not lines:
            lines.append(f"  {quoted}")
        else:
            lines[-1] += f" {quoted}"
    return "\n".join(lines)

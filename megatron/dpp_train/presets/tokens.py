"""Token files and tokenizer of a run: named, found, or made of text before it starts."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.dpp.errors import ConfigError, DataError, require
from megatron.dpp.files.index_files import check_index
from megatron.dpp.files.locks import scratch_directory
from megatron.dpp.processes import run_child
from megatron.dpp_train.data.rows import JSON, PARQUET, open_rows
from megatron.dpp_train.data.tokenizer import END_OF_TEXT, PIECES
from megatron.dpp_train.presets.flag_table import PACKAGE, user_cache
from megatron.dpp_train.presets.flags import Flags, shared, to_argv
from megatron.dpp_train.text_files import nearest_path, read_json

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


CHOICES = (
    "--tokenizer gpt2 (GPT-2's vocab.json and merges.txt, found beside the data, here or in the "
    "hub's cache), --tokenizer DIR_OR_FILE (your own files), --tokenizer train:32000 (train one "
    "on this corpus) or --tokenizer sample (the sample's 1,409 tokens)"
)
_PAIRS = (("vocab.json", "merges.txt"), ("gpt2-vocab.json", "gpt2-merges.txt"))
_HUB = Path("~/.cache/huggingface/hub")
_MOST_TEXT = 1 << 30
"""Bytes of a corpus that a tokenizer is trained on; of a larger one it sees a part of the lines."""
_SMALLEST = 257
"""Tokens of a byte-level vocabulary without merges: each byte, and the end of a text."""


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
        given = tokenizer_flags(arch, tokenizer, text if path and is_text else None)
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
    prefix = _prefix_of(text, _digest(text, found, how), own=own)
    tokens = f"{prefix}_{'chat_document' if chats else _LEVELS[arch]}"
    there = all(Path(tokens + suffix).is_file() for suffix in (".idx", ".bin"))
    words = ["preprocess", "--input", str(text), "--output-prefix", str(prefix), *to_argv(found)]
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
    digest = hashlib.sha256(" ".join([str(found["--tokenizer-type"]), *how]).encode())
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
    """``--split`` of token files. Few documents are split so that validation gets one at least; of
    fewer than a hundred all are trained on."""
    documents = check_index(prefix)[1]
    if documents < _FEW:
        return {"--split": "1,0,0", "--eval-iters": 0}
    return {"--split": _SPLIT}


# --- the tokenizer ---


def sample_vocabulary(arch: str) -> Flags:
    """The flags of the sample corpus's vocabulary."""
    folder = shared(f"datasets_{arch}")
    if arch == "bert":
        return {"--vocab-file": str(folder / "vocab.txt")}
    return _pair_flags(folder / "vocab.json", folder / "merges.txt")


def tokenizer_flags(arch: str, choice: str, text: Path | None) -> Flags:
    """The flags that ``--tokenizer choice`` stands for.

    Args:
        arch: ``gpt`` or ``bert``.
        text: the corpus in JSON lines; None for token files and the sample.

    Raises:
        ConfigError: the choice means nothing for this run.
        DataError: files are missing or of another kind.
    """
    if choice == "sample":
        return sample_vocabulary(arch)
    kind, _, size = choice.partition(":")
    if arch == "bert":
        require(
            kind not in ("gpt2", "train"),
            f"--tokenizer {choice}: BERT needs a vocab.txt; name its file or directory",
        )
        path = Path(choice)
        return {"--vocab-file": str(_existing(path / "vocab.txt" if path.is_dir() else path))}
    if kind == "train":
        if text is None:
            raise ConfigError(f"--tokenizer {choice}: needs --data with JSON lines to train on")
        require(
            re.fullmatch(r"\d+", size) and int(size) >= _SMALLEST,
            f"--tokenizer {choice}: expected train:N with N of at least {_SMALLEST}",
        )
        return _pair_flags(*_trained(text, int(size)))
    if kind == "gpt2":
        return _pair_flags(*_gpt2(text))
    return _own(Path(choice))


def _pair_flags(vocab: Path, merges: Path) -> Flags:
    return {"--vocab-file": str(vocab), "--merge-file": str(merges)}


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise DataError(f"--tokenizer: {path} is missing")
    return path


def _pair_in(folder: Path) -> tuple[Path, Path] | None:
    for vocab, merges in _PAIRS:
        if (folder / vocab).is_file() and (folder / merges).is_file():
            return folder / vocab, folder / merges
    return None


def _gpt2(text: Path | None) -> tuple[Path, Path]:
    hub = sorted(_HUB.expanduser().glob("models--*gpt2/snapshots/*"))
    places = [*([text.absolute().parent] if text else []), Path.cwd(), *hub]
    for folder in places:
        found = _pair_in(folder)
        if found and len(read_json(found[0])) == 50257:
            return found
    raise DataError(
        "--tokenizer gpt2: GPT-2's vocab.json and merges.txt (50,257 tokens) are in none of "
        f"{', '.join(map(str, places))}; nothing is downloaded: put them there, or name their "
        "directory with --tokenizer DIR"
    )


def _own(path: Path) -> Flags:
    """The flags of a tokenizer's directory, or of one of its files."""
    if not path.exists():
        raise DataError(f"--tokenizer {path}: no such file or directory; choose {CHOICES}")
    folder = path if path.is_dir() else path.parent
    file = path if path.name == "tokenizer.json" else folder / "tokenizer.json"
    pair = _pair_in(folder)
    pieces = path if path.suffix == ".model" else folder / PIECES
    if pieces.is_file() and (path == pieces or (pair is None and not file.is_file())):
        return {"--tokenizer-type": "Llama2Tokenizer", "--tokenizer-model": str(pieces)}
    if file.is_file() and (path.is_dir() or path == file or pair is None):
        return {"--tokenizer-type": "HuggingFaceTokenizer", "--tokenizer-model": str(folder)}
    if pair is None:
        raise DataError(
            f"--tokenizer {path}: neither tokenizer.json, {PIECES} nor vocab.json with merges.txt "
            "is there"
        )
    return _pair_flags(*pair)


def _trained(text: Path, size: int) -> tuple[Path, Path]:
    """Train a byte-level BPE on a corpus, once; it is kept beside the corpus."""
    from tokenizers import ByteLevelBPETokenizer

    length, latest = text.stat().st_size, text.stat().st_mtime_ns
    key = hashlib.sha256(f"{text.absolute()} {length} {latest} {size}".encode()).hexdigest()[:12]
    parent = text.parent if os.access(text.parent, os.W_OK) else Path.cwd()
    folder = parent / f"{text.name.split('.')[0]}-bpe{size}-{key}"
    pair = _pair_in(folder)
    if pair is not None:
        return pair
    share = min(1.0, _MOST_TEXT / max(1, length))
    part = f"{share:.1%} of the lines of " if share < 1 else ""
    print(f"training a tokenizer of {size} tokens on {part}{text} ...", flush=True)
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(
        _texts(text, share), vocab_size=size, special_tokens=[END_OF_TEXT], show_progress=False
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with scratch_directory(folder, ".partial-") as scratch:
            vocab, merges = map(Path, trained.save_model(str(scratch)))
            pair = vocab.replace(folder / vocab.name), merges.replace(folder / merges.name)
    except Exception as error:  # the package raises plain Exception
        raise DataError(f"--tokenizer train:{size}: {folder} cannot be written: {error}") from error
    print(f"tokenizer: {trained.get_vocab_size()} tokens, {folder}", flush=True)
    return pair


def _texts(path: Path, share: float) -> Iterator[str]:
    """The texts of a share of the lines, the same ones each time."""
    draw = random.Random(0).random
    for line, _ in open_rows(path).lines:
        if share < 1 and draw() >= share:
            continue
        try:
            found = json.loads(line.decode("utf-8", errors="replace"))
        except ValueError:
            continue  # preprocessing names bad lines
        if isinstance(found, dict):
            yield from _texts_of(found)


_TEXTS = (
    *("text", "messages", "conversations", "prompt", "completion"),
    *("instruction", "input", "output", "system", "content", "value"),
)
"""Fields of a line, or of its messages, that hold text."""


def _texts_of(found: Any) -> Iterator[str]:
    """The text of a line, or all texts of a chat."""
    if isinstance(found, str):
        yield found
    for each in found if isinstance(found, list) else []:
        yield from _texts_of(each)
    for key in _TEXTS if isinstance(found, dict) else ():
        yield from _texts_of(found.get(key))

"""The tokenizer of ``train --data``: files that are named, found, or trained on the corpus."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron.dpp.errors import ConfigError, DataError, require
from megatron.dpp.files.locks import scratch_directory
from megatron.dpp_train.data.rows import open_rows
from megatron.dpp_train.data.tokenizer import END_OF_TEXT, PIECES
from megatron.dpp_train.text_files import read_object

Flags = dict[str, Any]
"""Flags with their values."""

CHOICES = (
    "--tokenizer gpt2 (GPT-2's vocab.json and merges.txt, found beside the data, here or in the "
    "hub's cache), --tokenizer DIR_OR_FILE (your own files), --tokenizer train:32000 (train one "
    "on this corpus) or --tokenizer sample (the sample's 1,409 tokens)"
)
_PAIRS = (("vocab.json", "merges.txt"), ("gpt2-vocab.json", "gpt2-merges.txt"))
_HUB = Path("~/.cache/huggingface/hub")
_MOST_TEXT = 1 << 30
"""Bytes of a corpus that a tokenizer is trained on; of a larger one it sees a part of the lines."""
_SMALLEST, _LARGEST = 257, 1 << 20
"""Tokens of a byte-level vocabulary without merges (each byte, and the end of a text); training
reserves memory for all that are asked for."""


def tokenizer_flags(arch: str, choice: str, text: Path | None) -> Flags:
    """The flags that ``--tokenizer choice`` stands for.

    Args:
        arch: ``gpt`` or ``bert``.
        text: the corpus in JSON lines; None for token files and the sample.

    Raises:
        ConfigError: the choice means nothing for this run.
        DataError: files are missing or of another kind.
    """
    kind, _, size = choice.partition(":")
    if arch == "bert":
        require(
            kind not in ("gpt2", "train"),
            f"--tokenizer {choice}: BERT needs a vocab.txt; name its file or directory",
        )
        path = Path(choice, "vocab.txt") if Path(choice).is_dir() else Path(choice)
        if not path.is_file():
            raise DataError(f"--tokenizer: {path} is missing")
        return {"--vocab-file": str(path)}
    if kind == "train":
        if text is None:
            raise ConfigError(f"--tokenizer {choice}: needs --data with JSON lines to train on")
        require(
            re.fullmatch(r"\d{3,7}", size) and _SMALLEST <= int(size) <= _LARGEST,
            f"--tokenizer {choice}: expected train:N with N from {_SMALLEST} to {_LARGEST}",
        )
        return _trained(text, int(size))
    return _gpt2(text) if kind == "gpt2" else _own(Path(choice))


def _pair_in(folder: Path) -> Flags:
    """The flags of the vocabulary and the merges in a folder; empty without them."""
    for vocab, merges in _PAIRS:
        if (folder / vocab).is_file() and (folder / merges).is_file():
            return {"--vocab-file": str(folder / vocab), "--merge-file": str(folder / merges)}
    return {}


def _gpt2(text: Path | None) -> Flags:
    hub = sorted(_HUB.expanduser().glob("models--*gpt2/snapshots/*"))
    places = [*([text.absolute().parent] if text else []), Path.cwd(), *hub]
    for folder in places:
        found = _pair_in(folder)
        if found and len(read_object(Path(found["--vocab-file"]))) == 50257:
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
    pair, pieces = _pair_in(folder), path if path.suffix == ".model" else folder / PIECES
    is_json = path.is_dir() or path.name == "tokenizer.json" or not pair
    if path != pieces and is_json and (folder / "tokenizer.json").is_file():
        return {"--tokenizer-type": "HuggingFaceTokenizer", "--tokenizer-model": str(folder)}
    if path != pieces and pair:
        return pair
    if pieces.is_file():
        return {"--tokenizer-type": "Llama2Tokenizer", "--tokenizer-model": str(pieces)}
    raise DataError(
        f"--tokenizer {path}: neither tokenizer.json, {PIECES} nor vocab.json with merges.txt is "
        "there"
    )


def _trained(text: Path, size: int) -> Flags:
    """Train a byte-level BPE on a corpus, once; it is kept beside the corpus."""
    from tokenizers import ByteLevelBPETokenizer

    length, latest = text.stat().st_size, text.stat().st_mtime_ns
    key = hashlib.sha256(f"{text.absolute()} {length} {latest} {size}".encode()).hexdigest()[:12]
    parent = text.parent if os.access(text.parent, os.W_OK) else Path.cwd()
    folder = parent / f"{text.name.split('.')[0]}-bpe{size}-{key}"
    if pair := _pair_in(folder):
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
            for file in map(Path, trained.save_model(str(scratch))):
                file.replace(folder / file.name)
    except Exception as error:  # the package raises plain Exception
        raise DataError(f"--tokenizer train:{size}: {folder} cannot be written: {error}") from error
    print(f"tokenizer: {trained.get_vocab_size()} tokens, {folder}", flush=True)
    return _pair_in(folder)


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

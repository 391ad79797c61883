"""Megatron-LM's tokenizers, from local files only.

megatron-core's wheel asks a hub for its vocabularies even when both files are given, so byte-level
BPE (GPT-2) and WordPiece (BERT) are built here on the ``tokenizers`` package. Ids, special tokens
and vocabulary sizes are Megatron-LM's, so a corpus preprocessed by either gives the same bytes.
A ``tokenizer.json`` is the package's own format. Nothing here imports torch.
"""

from __future__ import annotations

import math
import os
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron.dpp.errors import ConfigError, DataError, shown
from megatron.dpp_train.text_files import read_json, read_text
from megatron.dpp_train.tokenizers.base import (
    CHAT_ENCODING,
    END_OF_TEXT,
    Tokenizer,
    config_beside,
    named_in,
    template_tokens,
    tokens_to_add,
)
from megatron.dpp_train.tokenizers.pieces import PIECES, SentencePieceTokenizer

__all__ = [
    "CHAT_ENCODING",
    "PIECES",
    "PIECE_TYPES",
    "TOKENIZER_TYPES",
    "BertWordPieceTokenizer",
    "GPT2BPETokenizer",
    "HuggingFaceTokenizer",
    "NullTokenizer",
    "SentencePieceTokenizer",
    "Tokenizer",
    "build_tokenizer",
    "padded_vocab_size",
    "tokenizer_for",
]

_ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>")
"""Ends of a text in a ``tokenizer.json`` without a ``tokenizer_config.json``."""
_BERT_TOKENS = {"unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "pad": "[PAD]", "mask": "[MASK]"}
_PIECE = 1 << 18
"""Characters of a long text that are tokenized at a time, at least."""
_BETWEEN = re.compile("[a-z](?= [a-z])")
"""A place at which GPT-2's splitting rule always splits: behind this letter."""
_BERT_ADDED = {"bos": "[BOS]", "eos": "[EOS]"}


class _FastTokenizer(Tokenizer):
    """A tokenizer of the ``tokenizers`` package."""

    _tokenizer: Any

    def __init__(self, *args: Any, **options: Any) -> None:
        # One text at a time needs no threads, which a process may not have (ulimit -u).
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        super().__init__(*args, **options)

    def tokenize(self, text: str) -> list[int]:
        # encode() also finds each token's place in the text: in one of 8 MB that takes 2.7 times
        # as long. Older packages have no call without it.
        encode = getattr(self._tokenizer, "encode_batch_fast", self._tokenizer.encode_batch)
        ids: list[int] = encode([text], add_special_tokens=False)[0].ids
        return ids

    def detokenize(self, ids: Iterable[int]) -> str:
        text: str = self._tokenizer.decode([int(index) for index in ids], skip_special_tokens=False)
        return text


class GPT2BPETokenizer(_FastTokenizer):
    """Byte-level BPE with GPT-2's splitting rule.

    Args:
        vocab_file: JSON object, token text to id; it must hold ``<|endoftext|>``.
        merge_file: one merge per line; a first line that starts with ``#version`` is skipped.

    Raises:
        DataError: a file is missing or does not fit the other.
    """

    def __init__(self, vocab_file: str, merge_file: str) -> None:
        from tokenizers import Tokenizer as FastTokenizer
        from tokenizers import decoders, models, pre_tokenizers

        vocab = _read_json_vocab(vocab_file)
        super().__init__(vocab, {"eod": vocab[END_OF_TEXT]}, vocab_file, merge_file)
        try:
            model = models.BPE(vocab=vocab, merges=_read_merges(merge_file))
        except Exception as error:  # the package raises plain Exception
            raise DataError(
                f"--merge-file {merge_file} does not fit {vocab_file}: {error}"
            ) from error
        self._tokenizer = FastTokenizer(model)
        self._tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self._tokenizer.decoder = decoders.ByteLevel()

    def tokenize(self, text: str) -> list[int]:
        # The package keeps 200 bytes for a character of a text, and no signal ends its call.
        ids = []
        for piece in _pieces(text):
            ids += super().tokenize(piece)
        return ids


def _pieces(text: str) -> Iterator[str]:
    """Parts of a text that have the tokens together that the whole has."""
    start = 0
    while found := _BETWEEN.search(text, start + _PIECE):
        yield text[start : found.end()]
        start = found.end()
    yield text[start:]


class HuggingFaceTokenizer(_FastTokenizer):
    """The tokenizer of a ``tokenizer.json``, with its own normalizer, splitting rule and tokens.

    ``tokenizer_config.json`` beside it names the tokens that begin and end a text. ``eod`` is the
    latter. A document begins with the former where the file's post-processor adds it. No ``pad`` is
    set: it is often the same as ``eos``, and megatron-core leaves padding out of the loss.

    Args:
        path: the file or its directory.

    Raises:
        DataError: a file is missing or broken, or names no end of a text.
    """

    def __init__(self, path: str) -> None:
        from tokenizers import Tokenizer as FastTokenizer

        file = Path(path) / "tokenizer.json" if Path(path).is_dir() else Path(path)
        text = read_text(file, "--tokenizer-model")
        try:
            self._tokenizer = FastTokenizer.from_str(text)
        except Exception as error:  # the package raises plain Exception
            raise DataError(f"--tokenizer-model {file}: not a tokenizer ({error})") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        config = config_beside(file)
        self._add(config, file)
        vocab = self._tokenizer.get_vocab(with_added_tokens=True)
        self._special = {
            token.content: index
            for index, token in self._tokenizer.get_added_tokens_decoder().items()
            if token.special
        }
        self._named = _named_tokens(config, file, vocab)
        self._all_named = template_tokens(config)
        special = {name.removesuffix("_token"): vocab[token] for name, token in self._named.items()}
        super().__init__(vocab, {"eod": special["eos"], **special}, str(file))
        self.vocab_size = max(vocab.values()) + 1  # ids may have gaps
        first = self._tokenizer.encode("", add_special_tokens=True).ids[:1]
        if "bos" in special and first == [special["bos"]]:
            self.begin = (special["bos"],)

    def _add(self, config: dict[str, Any], file: Path) -> None:
        """Add what the files beside ``tokenizer.json`` add to it."""
        from tokenizers import AddedToken

        there = {token.content for token in self._tokenizer.get_added_tokens_decoder().values()}
        wanted = tokens_to_add(config, self._tokenizer.get_vocab(with_added_tokens=True), file)
        new = [AddedToken(**each) for each in wanted if each["content"] not in there]
        if new:
            self._tokenizer.add_tokens(new)

    def reading(self) -> str:
        added = self._tokenizer.get_added_tokens_decoder()
        return f"{super().reading()} {sorted((index, repr(added[index])) for index in added)}"

    def special_tokens(self) -> dict[str, int]:
        return self._special | {token: self.vocab[token] for token in self._named.values()}

    def template_tokens(self) -> dict[str, str]:
        return {"bos_token": "", **self._all_named, **self._named}

    def tokenize_chat(
        self, text: str, answers: Sequence[tuple[int, int]], special: dict[str, int]
    ) -> tuple[list[int], list[int]]:
        """Those of the whole text, as in transformers: a token that an answer shares is its own.
        The file says which tokens are special."""
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        marks = [0] * len(encoding.ids)
        places = iter(answers)
        answer = next(places, None)
        for number, (start, end) in enumerate(encoding.offsets):
            while answer is not None and answer[1] <= start:
                answer = next(places, None)
            if answer is None:
                break
            marks[number] = int(max(start + 1, end) > answer[0])
        return list(encoding.ids), marks


class BertWordPieceTokenizer(Tokenizer):
    """BERT's tokenizer: clean, split at white space, CJK and punctuation, then WordPiece.

    The ``tokenizers`` package does WordPiece. Cleaning and splitting are done here: the package
    drops private-use characters, lower-cases a final sigma differently, and has an older table of
    punctuation, which would change ids.

    Args:
        vocab_file: one token per line; ``[BOS]``, ``[EOS]`` and ``vocab_extra_ids`` tokens
            ``<extra_id_i>`` are added behind them, as Megatron does.
        lower_case: fold case and strip accents.

    Raises:
        DataError: the file is missing or lacks one of ``[UNK] [CLS] [SEP] [PAD] [MASK]``.
    """

    def __init__(
        self, vocab_file: str, *, lower_case: bool = True, vocab_extra_ids: int = 0
    ) -> None:
        from tokenizers import Tokenizer as FastTokenizer
        from tokenizers import models, pre_tokenizers

        vocab = _read_line_vocab(vocab_file)
        self._tokenizer = FastTokenizer(
            models.WordPiece(vocab=vocab, unk_token="[UNK]", max_input_chars_per_word=200)
        )
        self._tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        for token in (*_BERT_ADDED.values(), *(f"<extra_id_{i}>" for i in range(vocab_extra_ids))):
            vocab.setdefault(token, len(vocab))
        special = {name: vocab[token] for name, token in (_BERT_TOKENS | _BERT_ADDED).items()}
        special["eod"] = special["eos"]
        options = {"lower_case": lower_case, "vocab_extra_ids": vocab_extra_ids}
        super().__init__(vocab, special, vocab_file, **options)
        self._lower_case = lower_case
        self._cleaned = _Table(_clean)
        self._spaced = _Table(_space_without_accents if lower_case else _space)
        self._ids = _Table(self._word_ids)

    def tokenize(self, text: str) -> list[int]:
        return [i for word in text.translate(self._cleaned).split() for i in self._ids[word]]

    def _word_ids(self, word: str) -> list[int]:
        if self._lower_case:
            word = unicodedata.normalize("NFD", word.lower())
        spaced = word.translate(self._spaced)
        ids: list[int] = self._tokenizer.encode(spaced, add_special_tokens=False).ids
        return ids

    def detokenize(self, ids: Iterable[int]) -> str:
        return " ".join(self.inv_vocab[int(index)] for index in ids).replace(" ##", "").strip()


class NullTokenizer(Tokenizer):
    """Numbers as text, for mock data: ids 0..vocab_size-1, and an end-of-document id behind them.

    Its further special tokens are -1, as Megatron's.
    """

    def __init__(self, vocab_size: int) -> None:
        special = {"eod": vocab_size, "cls": -1, "sep": -1, "mask": -1}
        super().__init__({}, special, vocab_size=vocab_size)
        self.vocab_size = vocab_size + 1

    def tokenize(self, text: str) -> list[int]:
        return [int(word) for word in text.split(" ")]

    def detokenize(self, ids: Iterable[int]) -> str:
        return " ".join(str(index) for index in ids)

    def special_tokens(self) -> dict[str, int]:
        return {}


TOKENIZER_TYPES = (
    "GPT2BPETokenizer",
    "BertWordPieceLowerCase",
    "BertWordPieceCase",
    "NullTokenizer",
    "HuggingFaceTokenizer",
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
    "Llama2Tokenizer",
)
"""Names that ``--tokenizer-type`` accepts."""
PIECE_TYPES = TOKENIZER_TYPES[-3:]


def build_tokenizer(
    tokenizer_type: str | None,
    vocab_file: str | None = None,
    merge_file: str | None = None,
    *,
    tokenizer_model: str | None = None,
    vocab_size: int | None = None,
    vocab_extra_ids: int = 0,
) -> Tokenizer:
    """Builds the tokenizer that ``--tokenizer-type`` names.

    Args:
        tokenizer_model: a ``tokenizer.json`` of a ``HuggingFaceTokenizer``, a ``tokenizer.model``
            of the kinds with SentencePiece; or the directory.
        vocab_size: number of ids of a ``NullTokenizer``.
        vocab_extra_ids: further ``<extra_id_i>`` tokens of a BERT vocabulary.

    Raises:
        ConfigError: an unknown type, or one whose file flag is missing.
        DataError: a file that is missing or broken.
    """
    if tokenizer_type == "GPT2BPETokenizer":
        return GPT2BPETokenizer(
            _required(tokenizer_type, "--vocab-file", vocab_file),
            _required(tokenizer_type, "--merge-file", merge_file),
        )
    if tokenizer_type == "HuggingFaceTokenizer":
        return HuggingFaceTokenizer(_required(tokenizer_type, "--tokenizer-model", tokenizer_model))
    if tokenizer_type in PIECE_TYPES:
        return SentencePieceTokenizer(
            _required(tokenizer_type, "--tokenizer-model", tokenizer_model),
            begins=tokenizer_type == "Llama2Tokenizer",
        )
    if tokenizer_type in ("BertWordPieceLowerCase", "BertWordPieceCase"):
        return BertWordPieceTokenizer(
            _required(tokenizer_type, "--vocab-file", vocab_file),
            lower_case=tokenizer_type == "BertWordPieceLowerCase",
            vocab_extra_ids=vocab_extra_ids,
        )
    if tokenizer_type == "NullTokenizer":
        if vocab_size is None:
            raise ConfigError(f"--tokenizer-type {tokenizer_type} needs --vocab-size")
        return NullTokenizer(vocab_size)
    raise ConfigError(
        f"--tokenizer-type {tokenizer_type}: expected one of {', '.join(TOKENIZER_TYPES)}"
    )


def tokenizer_for(args: object, build: Callable[..., Tokenizer] = build_tokenizer) -> Tokenizer:
    """The tokenizer that the settings of a command or a run name.

    Args:
        args: an object with the settings as attributes: ``tokenizer_type`` and some of the others.
        build: :func:`build_tokenizer`, or what keeps its results.

    Raises:
        ConfigError, DataError: as :func:`build_tokenizer`.
    """
    names = ("vocab_file", "merge_file", "tokenizer_model", "vocab_size")
    values = {name: getattr(args, name, None) for name in names}
    extra = getattr(args, "vocab_extra_ids", 0)
    kind = getattr(args, "tokenizer_type")  # noqa: B009 - of any object
    return build(kind, **values, vocab_extra_ids=extra)


def padded_vocab_size(vocab_size: int, divisible_by: int, tensor_parallel: int) -> int:
    """Rounds a vocabulary up until each tensor-parallel rank holds a multiple of ``divisible_by``
    rows.

    >>> padded_vocab_size(50257, 128, 2)
    50432
    """
    multiple = divisible_by * tensor_parallel
    return math.ceil(vocab_size / multiple) * multiple


# Blocks that BERT treats as "Chinese characters": each is a word of its own.
_CJK_BLOCKS = (
    (0x4E00, 0x9FFF), (0x3400, 0x4DBF), (0x20000, 0x2A6DF), (0x2A700, 0x2B73F),
    (0x2B740, 0x2B81F), (0x2B820, 0x2CEAF), (0xF900, 0xFAFF), (0x2F800, 0x2FA1F),
)  # fmt: skip


class _Table(dict[Any, Any]):
    """Computes a value when it is first asked for; emptied when it holds 2**18."""

    def __init__(self, rule: Callable[[Any], Any]) -> None:
        super().__init__()
        self._rule = rule

    def __missing__(self, key: Any) -> Any:
        if len(self) >= 1 << 18:
            self.clear()
        value = self[key] = self._rule(key)
        return value


def _clean(code: int) -> str | None:
    char = chr(code)
    category = unicodedata.category(char)
    if char in "\t\n\r" or category == "Zs":
        return " "
    if char in "\0\ufffd" or category in ("Cc", "Cf"):
        return None
    return f" {char} " if any(first <= code <= last for first, last in _CJK_BLOCKS) else char


def _space(code: int) -> str:
    char = chr(code)
    symbol = char.isascii() and char.isprintable() and not char.isalnum() and char != " "
    return f" {char} " if symbol or unicodedata.category(char).startswith("P") else char


def _space_without_accents(code: int) -> str | None:
    return None if unicodedata.category(chr(code)) == "Mn" else _space(code)


def _required(tokenizer_type: str, flag: str, value: str | None) -> str:
    if not value:
        raise ConfigError(f"--tokenizer-type {tokenizer_type} needs {flag}")
    return value


def _named_tokens(config: dict[str, Any], file: Path, vocab: dict[str, int]) -> dict[str, str]:
    """``eos_token``, and ``bos_token`` where there is one, of the tokenizer in ``file``."""
    named = named_in(config, vocab, file)
    if "eos_token" not in named:
        end = next((token for token in _ENDS if token in vocab), None)
        if end is None:
            raise DataError(
                f"--tokenizer-model {file}: {', '.join(_ENDS)} are not in it; name the end of a "
                f'text in {file.with_name("tokenizer_config.json")}, as {{"eos_token": "..."}}'
            )
        named["eos_token"] = end
    return named


def _read_json_vocab(path: str) -> dict[str, int]:
    vocab = read_json(path, "--vocab-file")
    if not isinstance(vocab, dict) or END_OF_TEXT not in vocab:
        raise DataError(f"--vocab-file {path}: expected a JSON object that holds {END_OF_TEXT}")
    for token, number in vocab.items():
        if type(number) is not int or not 0 <= number < 1 << 31:
            raise DataError(
                f"--vocab-file {path}: {shown(token)} is {shown(number)}, expected the number of a "
                "token"
            )
    return vocab


def _read_merges(path: str) -> list[tuple[str, str]]:
    lines = read_text(path, "--merge-file").split("\n")
    if lines[0].startswith("#version"):
        lines = lines[1:]
    merges = [tuple(line.split()) for line in lines if line.strip()]
    for number, merge in enumerate(merges, 1):
        if len(merge) != 2:
            raise DataError(f"--merge-file {path}: merge {number} is {merge}, expected two tokens")
    return [(first, second) for first, second in merges]


def _read_line_vocab(path: str) -> dict[str, int]:
    lines = read_text(path, "--vocab-file").split("\n")
    if lines and not lines[-1]:
        lines.pop()
    vocab = {line.strip(): index for index, line in enumerate(lines)}
    missing = [t for t in _BERT_TOKENS.values() if t not in vocab]
    if missing:
        raise DataError(f"--vocab-file {path}: a BERT vocabulary needs {', '.join(missing)}")
    return vocab

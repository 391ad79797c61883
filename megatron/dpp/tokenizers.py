"""Megatron-LM's tokenizers, from local files only.

megatron-core's wheel asks a hub for its vocabularies even when both files are given, so the two
families that the scripts use are built here on the ``tokenizers`` package: byte-level BPE (GPT-2)
and WordPiece (BERT). Ids, special tokens and vocabulary sizes are Megatron-LM's, so a corpus
preprocessed by either gives the same bytes.

Training (``train.initialize``, ``train.data``) and ``tools/preprocess_data.py`` call
:func:`build_tokenizer`; reading documents and writing indices is left to them. Nothing here
imports torch.
"""

from __future__ import annotations

import json
import math
import unicodedata
from collections.abc import Iterable
from typing import Any

from megatron.dpp.errors import ConfigError, DataError
from megatron.dpp.text_files import read_text

TOKENIZER_TYPES = (
    "GPT2BPETokenizer",
    "BertWordPieceLowerCase",
    "BertWordPieceCase",
    "NullTokenizer",
)
"""Names that ``--tokenizer-type`` accepts."""

_END_OF_TEXT = "<|endoftext|>"
_WORD_CACHE_ENTRIES = 1 << 18


class Tokenizer:
    """What megatron-core's dataset classes and our tools ask of a tokenizer.

    ``unique_identifiers`` goes into the hash under which megatron-core caches its sample indices.
    Special tokens that a kind does not have raise :class:`NotImplementedError`, as megatron-core
    expects.
    """

    def __init__(self, *paths: str, **options: object) -> None:
        self.unique_identifiers: dict[str, Any] = {
            "class": type(self).__name__,
            "tokenizer_path": list(paths),
            **{name: str(value) for name, value in options.items()},
        }
        self.unique_description = json.dumps(self.unique_identifiers, indent=4)

    def __getattr__(self, name: str) -> Any:
        if name in ("cls", "sep", "mask", "pad", "bos", "eos"):
            raise NotImplementedError(f"{type(self).__name__} has no attribute '{name}'")
        raise AttributeError(f"{type(self).__name__} has no attribute '{name}'")

    @property
    def vocab_size(self) -> int:
        """Number of ids, special tokens included, padding to the model's size not included."""
        raise NotImplementedError

    @property
    def vocab(self) -> dict[str, int]:
        """Token text to id."""
        raise NotImplementedError

    @property
    def inv_vocab(self) -> dict[int, str]:
        """Id to token text, in the order of the vocabulary file (BERT draws replacements by that
        order)."""
        raise NotImplementedError

    @property
    def eod(self) -> int:
        """Id that ends a document."""
        raise NotImplementedError

    def tokenize(self, text: str) -> list[int]:
        """Ids of ``text``; no special token is added."""
        raise NotImplementedError

    def detokenize(self, ids: Iterable[int]) -> str:
        """Text of ``ids``, as near to the original as the kind allows."""
        raise NotImplementedError


class GPT2BPETokenizer(Tokenizer):
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

        super().__init__(vocab_file, merge_file)
        self._vocab = _read_json_vocab(vocab_file)
        self._inv_vocab = {index: token for token, index in self._vocab.items()}
        try:
            model = models.BPE(vocab=self._vocab, merges=_read_merges(merge_file))
        except Exception as error:  # the package raises plain Exception
            raise DataError(
                f"--merge-file {merge_file} does not fit {vocab_file}: {error}"
            ) from error
        self._tokenizer = FastTokenizer(model)
        self._tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self._tokenizer.decoder = decoders.ByteLevel()

    @property
    def vocab_size(self) -> int:
        return len(self._vocab)

    @property
    def vocab(self) -> dict[str, int]:
        return self._vocab

    @property
    def inv_vocab(self) -> dict[int, str]:
        return self._inv_vocab

    @property
    def eod(self) -> int:
        return self._vocab[_END_OF_TEXT]

    def tokenize(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def detokenize(self, ids: Iterable[int]) -> str:
        text: str = self._tokenizer.decode([int(index) for index in ids], skip_special_tokens=False)
        return text


class BertWordPieceTokenizer(Tokenizer):
    """BERT's own tokenizer: clean, split at white space, CJK and punctuation, then WordPiece.

    Cleaning is done here and not by the ``tokenizers`` package, whose normaliser drops private-use
    characters and lower-cases a final sigma in another way than BERT's reference does; ids would
    differ. Words are cached.

    Args:
        vocab_file: one token per line; ``[BOS]`` and ``[EOS]`` are added behind them, as Megatron
            does, then ``vocab_extra_ids`` tokens ``<extra_id_i>``.
        lower_case: fold case and strip accents.

    Raises:
        DataError: the file is missing or lacks one of ``[UNK] [CLS] [SEP] [PAD] [MASK]``.
    """

    def __init__(self, vocab_file: str, lower_case: bool = True, vocab_extra_ids: int = 0) -> None:
        from tokenizers import models

        super().__init__(vocab_file, lower_case=lower_case, vocab_extra_ids=vocab_extra_ids)
        self._lower_case = lower_case
        self._vocab = _read_line_vocab(vocab_file)
        self._model = models.WordPiece(
            vocab=self._vocab, unk_token="[UNK]", max_input_chars_per_word=200
        )
        extra = [f"<extra_id_{i}>" for i in range(vocab_extra_ids)]
        for token in ("[BOS]", "[EOS]", *extra):
            self._vocab.setdefault(token, len(self._vocab))
        self._inv_vocab = {index: token for token, index in self._vocab.items()}
        self.additional_special_tokens_ids = [self._vocab[token] for token in extra]
        self._cleaning = _CleaningTable()
        self._words: dict[str, list[int]] = {}

    @property
    def vocab_size(self) -> int:
        return len(self._vocab)

    @property
    def vocab(self) -> dict[str, int]:
        return self._vocab

    @property
    def inv_vocab(self) -> dict[int, str]:
        return self._inv_vocab

    @property
    def cls(self) -> int:
        """Id of ``[CLS]``, the first token of every sample."""
        return self._vocab["[CLS]"]

    @property
    def sep(self) -> int:
        """Id of ``[SEP]``, behind each segment."""
        return self._vocab["[SEP]"]

    @property
    def pad(self) -> int:
        """Id of ``[PAD]``."""
        return self._vocab["[PAD]"]

    @property
    def mask(self) -> int:
        """Id of ``[MASK]``."""
        return self._vocab["[MASK]"]

    @property
    def bos(self) -> int:
        """Id of ``[BOS]``."""
        return self._vocab["[BOS]"]

    @property
    def eos(self) -> int:
        """Id of ``[EOS]``."""
        return self._vocab["[EOS]"]

    @property
    def eod(self) -> int:
        return self.eos

    def tokenize(self, text: str) -> list[int]:
        ids: list[int] = []
        for word in text.translate(self._cleaning).split():
            ids.extend(self._word_ids(word))
        return ids

    def _word_ids(self, word: str) -> list[int]:
        ids = self._words.get(word)
        if ids is None:
            if len(self._words) >= _WORD_CACHE_ENTRIES:
                self._words.clear()
            pieces = _split_word(word, self._lower_case)
            ids = [token.id for piece in pieces for token in self._model.tokenize(piece)]
            self._words[word] = ids
        return ids

    def detokenize(self, ids: Iterable[int]) -> str:
        return " ".join(self._inv_vocab[int(index)] for index in ids).replace(" ##", "").strip()


class NullTokenizer(Tokenizer):
    """Numbers as text, for mock data: ids 0..vocab_size-1 and an end-of-document id behind them."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size=vocab_size)
        self._num_words = vocab_size

    @property
    def vocab_size(self) -> int:
        return self._num_words + 1

    @property
    def eod(self) -> int:
        return self._num_words

    @property
    def cls(self) -> int:
        """No such token; Megatron gives -1."""
        return -1

    @property
    def sep(self) -> int:
        """No such token; Megatron gives -1."""
        return -1

    @property
    def mask(self) -> int:
        """No such token; Megatron gives -1."""
        return -1

    def tokenize(self, text: str) -> list[int]:
        return [int(word) for word in text.split(" ")]

    def detokenize(self, ids: Iterable[int]) -> str:
        return " ".join(str(index) for index in ids)


def build_tokenizer(
    tokenizer_type: str | None,
    vocab_file: str | None = None,
    merge_file: str | None = None,
    *,
    vocab_size: int | None = None,
    vocab_extra_ids: int = 0,
) -> Tokenizer:
    """The tokenizer that ``--tokenizer-type`` names.

    Args:
        vocab_size: number of words of a ``NullTokenizer``.
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


def padded_vocab_size(vocab_size: int, divisible_by: int, tensor_parallel: int) -> int:
    """Vocabulary size rounded up so that each tensor-parallel rank holds a multiple of
    ``divisible_by`` rows.

    >>> padded_vocab_size(50257, 128, 2)
    50432
    """
    multiple = divisible_by * tensor_parallel
    return math.ceil(vocab_size / multiple) * multiple


class _CleaningTable(dict[int, int | str | None]):
    """``str.translate`` table of BERT's cleaning, filled as characters are met (at most one entry
    per character)."""

    def __missing__(self, code: int) -> int | str | None:
        value = _cleaned(code)
        self[code] = value
        return value


def _cleaned(code: int) -> int | str | None:
    char = chr(code)
    if char in " \t\n\r":
        return " "
    category = unicodedata.category(char)
    if code in (0, 0xFFFD) or category in ("Cc", "Cf"):
        return None
    if category == "Zs":
        return " "
    return f" {char} " if _is_cjk(code) else code


# Blocks that BERT treats as "Chinese characters": each is a word of its own.
_CJK_BLOCKS = (
    (0x4E00, 0x9FFF),
    (0x3400, 0x4DBF),
    (0x20000, 0x2A6DF),
    (0x2A700, 0x2B73F),
    (0x2B740, 0x2B81F),
    (0x2B820, 0x2CEAF),
    (0xF900, 0xFAFF),
    (0x2F800, 0x2FA1F),
)


def _is_cjk(code: int) -> bool:
    return any(first <= code <= last for first, last in _CJK_BLOCKS)


def _split_word(word: str, lower_case: bool) -> list[str]:
    """The pieces of a word between and at its punctuation marks, folded when asked."""
    if lower_case:
        decomposed = unicodedata.normalize("NFD", word.lower())
        word = "".join(char for char in decomposed if unicodedata.category(char) != "Mn")
    spaced = "".join(f" {char} " if _is_punctuation(char) else char for char in word)
    return spaced.split()


def _is_punctuation(char: str) -> bool:
    ascii_symbol = char.isascii() and char.isprintable() and not char.isalnum() and char != " "
    return ascii_symbol or unicodedata.category(char).startswith("P")


def _required(tokenizer_type: str, flag: str, value: str | None) -> str:
    if not value:
        raise ConfigError(f"--tokenizer-type {tokenizer_type} needs {flag}")
    return value


def _read_json_vocab(path: str) -> dict[str, int]:
    text = read_text(path, "--vocab-file")
    try:
        vocab = json.loads(text)
    except ValueError as error:
        raise DataError(f"--vocab-file {path}: not a JSON vocabulary ({error})") from error
    if not isinstance(vocab, dict) or _END_OF_TEXT not in vocab:
        raise DataError(f"--vocab-file {path}: expected a JSON object that holds {_END_OF_TEXT}")
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
    missing = [t for t in ("[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]") if t not in vocab]
    if missing:
        raise DataError(f"--vocab-file {path}: a BERT vocabulary needs {', '.join(missing)}")
    return vocab

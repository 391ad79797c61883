"""Lines to token ids: what a worker of ``preprocess`` does."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from megatron.dpp.errors import DataError, one_line
from megatron.dpp_train.data.chats import ANSWERS_KEY, CHAT_KEY, ChatEncoder
from megatron.dpp_train.data.child import limit_time
from megatron.dpp_train.data.rows import BadLine, parse_line, text_of
from megatron.dpp_train.data.sentences import make_splitter
from megatron.dpp_train.data.templates import find_templates
from megatron.dpp_train.data.token_files import Documents, token_type
from megatron.dpp_train.data.tokenizer import build

_SECONDS_PER_BYTE = 20e-6
"""Further processor time of a line."""
_Document = dict[str, tuple[list[int], list[int]]]
"""Key -> its token ids, and the length of each sentence."""


class Begun(NamedTuple):
    """An encoder's word before the first line: the type of stored ids, and notes on the chat
    template."""

    dtype: np.dtype[np.integer]
    notes: tuple[str, ...]


class EncodedBatch(NamedTuple):
    """The documents of a batch by key, what is to be said about its lines, and the numbers of bad
    lines, from 0, with the reasons."""

    documents: dict[str, Documents]
    notes: Counter[str]
    bad_lines: list[tuple[int, str]]


def keys_of(args: argparse.Namespace) -> tuple[str, ...]:
    """Fields of a line that hold texts; of chats the two that are written."""
    return (CHAT_KEY, ANSWERS_KEY) if args.sft else tuple(args.json_keys)


class Encoder:
    """Turns lines into token ids.

    Args:
        args: parsed arguments of ``preprocess``.
        seconds: processor time that a line may take, beside what its length allows.

    Raises:
        DppError: at construction, when vocabulary, template or sentence data are not usable.
    """

    def __init__(self, args: argparse.Namespace, seconds: float) -> None:
        self._keys, self._append_eod, self._seconds = keys_of(args), args.append_eod, seconds
        self._tokenizer = build(
            args.tokenizer_type,
            vocab_file=args.vocab_file,
            merge_file=args.merge_file,
            tokenizer_model=args.tokenizer_model,
            vocab_size=args.vocab_size,
        )
        self._dtype = token_type(self._tokenizer.vocab_size)
        self._chats = self._split = None
        if args.append_eod and self._tokenizer.eod is None:
            raise DataError(f"--append-eod: {args.tokenizer_type} has no end of a document")
        if args.sft:
            beside = args.tokenizer_model or args.vocab_file
            templates = find_templates(args.sft_tokenizer_prompt_format, beside)
            self._chats = ChatEncoder(self._tokenizer, templates)
        if args.split_sentences:
            self._split = make_splitter(
                args.sentence_splitter, args.lang, keep_newlines=args.keep_newlines
            )

    def __call__(self, lines: Sequence[bytes] | None) -> EncodedBatch | Begun:
        """The token ids of lines; without lines, what is known before."""
        if lines is None:
            return Begun(self._dtype, self._chats.notes() if self._chats else ())
        parts: dict[str, tuple[list[int], list[int], list[int]]]
        parts = {key: ([], [], []) for key in self._keys}
        notes, bad_lines = Counter[str](), []
        for number, line in enumerate(lines):
            limit_time(self._seconds + _SECONDS_PER_BYTE * len(line))
            try:
                documents, more = self._encode_line(line)
            except BadLine as error:
                bad_lines.append((number, str(error)))
                continue
            except BaseException as error:  # Rust's panics are no Exception
                bad_lines.append((number, f"cannot be tokenized: {one_line(error, 300)}"))
                continue
            notes.update(more)
            for document in documents:
                for key, (ids, lengths, counts) in parts.items():
                    ids += document[key][0]
                    lengths += document[key][1]
                    counts.append(len(document[key][1]))
        documents_of = {key: Documents.of(*part, self._dtype) for key, part in parts.items()}
        return EncodedBatch(documents_of, notes, bad_lines)

    def _encode_line(self, line: bytes) -> tuple[list[_Document], Iterable[str]]:
        """The documents of a line, and what a user should know about them."""
        document = parse_line(line)
        if self._chats is None:
            return [{key: self._encode(text_of(document, key)) for key in self._keys}], ()
        samples, notes = self._chats.encode(document)
        for sample in samples:
            self._check(sample.ids)
        pairs = [{CHAT_KEY: sample.ids, ANSWERS_KEY: sample.marks} for sample in samples]
        return [{key: (ids, [len(ids)]) for key, ids in pair.items()} for pair in pairs], notes

    def _encode(self, text: str | list[str]) -> tuple[list[int], list[int]]:
        ids: list[int] = []
        lengths: list[int] = []
        for sentence in self._sentences(text):
            new = self._tokenizer.encode(sentence) if sentence else []
            if new:
                ids.extend(new)
                lengths.append(len(new))
        if ids and self._append_eod:
            ids.append(self._tokenizer.eod or 0)
            lengths[-1] += 1
        self._check(ids)
        return ids, lengths

    def _check(self, ids: list[int]) -> None:
        size = min(self._tokenizer.vocab_size, 1 << 31)  # ids are stored in 32 bits
        if ids and not 0 <= min(ids) <= max(ids) < size:
            outside = min(ids) if min(ids) < 0 else max(ids)
            raise BadLine(f"token {outside} is outside a vocabulary of {size}")

    def _sentences(self, text: str | list[str]) -> list[str]:
        if isinstance(text, list):
            return text
        return self._split(text) if self._split else [text]

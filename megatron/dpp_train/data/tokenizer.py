"""The tokenizers of ``--tokenizer-type``, from local files, with Megatron's ids.

They are those of the packages on which Megatron's classes stand: ``tokenizers``, ``transformers``
and ``sentencepiece``. Megatron's own classes import its training stack, and ask a hub for GPT-2's
and BERT's even where the files are given.
"""

from __future__ import annotations

import importlib
import itertools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.dpp.errors import ConfigError, DataError, one_line
from megatron.dpp_train.text_files import read_json, read_text

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
PIECES = "tokenizer.model"
"""File of a tokenizer of SentencePiece."""
END_OF_TEXT = "<|endoftext|>"
Span = tuple[int, int]
"""First character, and the one behind the last."""
_SPECIAL = re.compile(r"<\|[^|\s]+\|>")
_BERT_TOKENS = ("[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]")
_LONG = 1 << 18
"""Characters of a long text that are tokenized at a time, at least."""
_BETWEEN = re.compile("[a-z](?= [a-z])")
"""A place at which GPT-2's splitting rule and BERT's always split: behind this letter."""


class Tokenizer:
    """A tokenizer's text to ids.

    Args:
        vocab_size: number of ids, without padding to a model's size.
        eod: the id that ends a document; None where there is none.
        special: tokens that only a chat template may write, with their ids.
        named: tokens that chat templates name, such as ``eos_token``.
    """

    def __init__(
        self,
        vocab_size: int,
        eod: int | None,
        special: Mapping[str, int] | None = None,
        named: Mapping[str, str] | None = None,
    ) -> None:
        self.vocab_size, self.eod = vocab_size, eod
        self.special = dict(special or {})
        self.named = {"bos_token": "", **(named or {})}

    def encode(self, text: str) -> list[int]:
        """Ids of a text, as Megatron's class of this kind gives them."""
        return [int(word) for word in text.split(" ")]

    def encode_part(self, text: str) -> list[int]:
        """Ids of a part of a chat without special tokens; no space is put in front of it."""
        return self.encode(text)

    def encode_chat(self, text: str, answers: Sequence[Span]) -> tuple[list[int], list[int]]:
        """Ids of a chat's text, and 1 for each of an answer, else 0.

        Args:
            answers: in their order.
        """
        ids: list[int] = []
        marks: list[int] = []
        ends = [0, *(place for answer in answers for place in answer), len(text)]
        names = sorted(map(re.escape, self.special), key=len, reverse=True)
        split = re.compile(f"({'|'.join(names)})" if names else r"(?!)")
        for number, (start, end) in enumerate(itertools.pairwise(ends)):
            before = len(ids)
            for part in split.split(text[start:end]):
                ids += [self.special[part]] if part in self.special else self.encode_part(part)
            marks += [number % 2] * (len(ids) - before)
        return ids, marks


class _Rust(Tokenizer):
    """GPT-2's byte-level BPE and BERT's WordPiece, of the ``tokenizers`` package."""

    def __init__(self, tokenizer: Any, *given: Any) -> None:
        super().__init__(tokenizer.get_vocab_size(with_added_tokens=True), *given)
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        return [
            index
            for piece in _pieces(text)  # the package keeps 200 bytes for a character of a text
            for index in self._tokenizer.encode_batch_fast([piece], add_special_tokens=False)[0].ids
        ]


class _HuggingFace(Tokenizer):
    """A tokenizer of transformers, as its folder says."""

    def __init__(self, tokenizer: Any, path: str) -> None:
        if not tokenizer.is_fast:
            raise DataError(f"--tokenizer-model {path}: no fast tokenizer of transformers")
        end = tokenizer.eos_token_id if tokenizer.eos_token else tokenizer.sep_token_id
        if end is None:
            raise DataError(
                f"--tokenizer-model {path}: names no end of a text; name it in "
                'tokenizer_config.json, as {"eos_token": "..."}'
            )
        vocab = tokenizer.get_vocab()
        super().__init__(
            max(len(tokenizer), max(vocab.values()) + 1),
            end,
            {token: vocab[token] for token in tokenizer.all_special_tokens if token in vocab}
            | {
                each.content: index
                for index, each in tokenizer.added_tokens_decoder.items()
                if each.special
            },
            {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        )
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer(text, verbose=False).input_ids)

    def encode_chat(self, text: str, answers: Sequence[Span]) -> tuple[list[int], list[int]]:
        """Those of the whole text, as in transformers: a token that an answer shares is its own."""
        found = self._tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        marks = [0] * len(found.input_ids)
        places = iter(answers)
        answer = next(places, None)
        for number, (start, end) in enumerate(found.offset_mapping):
            while answer is not None and answer[1] <= start:
                answer = next(places, None)
            if answer is None:
                break
            marks[number] = int(end > answer[0])
        return list(found.input_ids), marks


class _Pieces(Tokenizer):
    """A model of SentencePiece."""

    def __init__(self, pieces: Any, within: Any) -> None:
        count = range(pieces.get_piece_size())
        ends = {"bos_token": pieces.bos_id(), "eos_token": pieces.eos_id()}
        named = {name: pieces.id_to_piece(index) for name, index in ends.items() if index >= 0}
        special = {pieces.id_to_piece(i): i for i in count if pieces.is_control(i)}
        super().__init__(len(count), pieces.eos_id(), special, named)
        self._pieces, self._within = pieces, within

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._pieces.encode(text)
        return ids

    def encode_part(self, text: str) -> list[int]:
        ids: list[int] = self._within.encode(text)
        return ids


def build(
    kind: str,
    *,
    vocab_file: str | None = None,
    merge_file: str | None = None,
    tokenizer_model: str | None = None,
    vocab_size: int | None = None,
) -> Tokenizer:
    """The tokenizer of ``--tokenizer-type`` ``kind`` and the flags of the same names.

    Raises:
        ConfigError: a flag is missing.
        DataError: a file is missing or broken.
    """

    def required(value: str | None, flag: str) -> str:
        if not value:
            raise ConfigError(f"--tokenizer-type {kind} needs {flag}")
        return value

    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one text at a time needs no threads
    if kind == "NullTokenizer":
        if (vocab_size or 0) < 1:
            raise ConfigError(f"--vocab-size {vocab_size or 0}: NullTokenizer needs at least 1")
        return Tokenizer(vocab_size or 0, (vocab_size or 0) - 1)
    if kind == "GPT2BPETokenizer":
        vocab = required(vocab_file, "--vocab-file")
        return _gpt2(vocab, required(merge_file, "--merge-file"))
    if kind.startswith("BertWordPiece"):
        return _bert(required(vocab_file, "--vocab-file"), lower=kind.endswith("LowerCase"))
    path = Path(required(tokenizer_model, "--tokenizer-model"))
    return _pieces_of(path) if kind in PIECE_TYPES else _hugging_face(path)


def _gpt2(vocab_file: str, merge_file: str) -> Tokenizer:
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Rust

    vocab = read_json(vocab_file, "--vocab-file")
    if not isinstance(vocab, dict) or END_OF_TEXT not in vocab:
        raise DataError(f"--vocab-file {vocab_file}: expected a JSON object with {END_OF_TEXT}")
    lines = read_text(merge_file, "--merge-file").split("\n")
    merges: Any = [tuple(line.split()) for line in lines if line.strip() and line[:8] != "#version"]
    try:
        tokenizer = Rust(models.BPE(vocab=vocab, merges=merges))
    except Exception as error:  # the package raises plain Exception
        raise DataError(
            f"--merge-file {merge_file} does not fit {vocab_file}: {one_line(error, 200)}"
        ) from error
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END_OF_TEXT, normalized=False)])
    special = {text: index for text, index in vocab.items() if _SPECIAL.fullmatch(text)}
    return _Rust(tokenizer, vocab[END_OF_TEXT], special, {"eos_token": END_OF_TEXT})


def _bert(vocab_file: str, *, lower: bool) -> Tokenizer:
    from tokenizers import BertWordPieceTokenizer

    lines = read_text(vocab_file, "--vocab-file").rstrip("\n").split("\n")
    vocab = {line.strip(): index for index, line in enumerate(lines)}
    if missing := [token for token in _BERT_TOKENS if token not in vocab]:
        raise DataError(f"--vocab-file {vocab_file}: a BERT vocabulary needs {', '.join(missing)}")
    tokenizer = BertWordPieceTokenizer(vocab, lowercase=lower)
    return _Rust(tokenizer._tokenizer, vocab["[SEP]"], {t: vocab[t] for t in _BERT_TOKENS})


def _hugging_face(path: Path) -> Tokenizer:
    if not path.exists():
        raise DataError(f"--tokenizer-model {path}: no such file or directory")
    return _HuggingFace(of_transformers(path if path.is_dir() else path.parent), str(path))


def of_transformers(folder: Path) -> Any:
    """transformers' tokenizer of a folder; nothing is downloaded, and no code of the folder runs.

    Raises:
        ConfigError: transformers is not installed.
        DataError: it cannot load the folder.
    """
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError as error:
        raise ConfigError("transformers is not installed: pip install transformers") from error
    for each in folder.iterdir() if folder.is_dir() else ():
        if each.exists() and not (each.is_file() or each.is_dir()):  # a pipe blocks for ever
            raise DataError(f"{each}: no regular file")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        return transformers.AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # a broken file raises anything
        raise DataError(f"{folder}: no tokenizer ({one_line(error, 300)})") from error


def _pieces_of(path: Path) -> Tokenizer:
    file = path / PIECES if path.is_dir() else path
    try:
        from sentencepiece import SentencePieceProcessor, sentencepiece_model_pb2
    except ImportError as error:
        raise DataError(
            f"--tokenizer-model {file}: needs SentencePiece ({error}); "
            "pip install sentencepiece protobuf"
        ) from error
    try:
        content = file.read_bytes()
        model = sentencepiece_model_pb2.ModelProto.FromString(content)
        model.normalizer_spec.add_dummy_prefix = False
        within = SentencePieceProcessor(model_proto=model.SerializeToString())
        return _Pieces(SentencePieceProcessor(model_proto=content), within)
    except OSError as error:
        raise DataError(f"--tokenizer-model {file}: {error.strerror}") from error
    except Exception as error:  # protobuf and the package raise kinds of their own
        raise DataError(
            f"--tokenizer-model {file}: no model of SentencePiece ({one_line(error, 200)})"
        ) from error


def _pieces(text: str) -> Iterator[str]:
    """Parts of a text that have the tokens together that the whole has."""
    start = 0
    while found := _BETWEEN.search(text, start + _LONG):
        yield text[start : found.end()]
        start = found.end()
    yield text[start:]

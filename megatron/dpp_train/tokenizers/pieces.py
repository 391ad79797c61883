"""Tokenizers of the ``sentencepiece`` package."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

from megatron.dpp.errors import DataError
from megatron.dpp.safe_files import read_bytes
from megatron.dpp_train.tokenizers.base import (
    Tokenizer,
    added_tokens,
    config_beside,
    named_in,
    template_tokens,
    tokens_to_add,
)

PIECES = "tokenizer.model"


class SentencePieceTokenizer(Tokenizer):
    """The pieces of a ``tokenizer.model``, as Llama 2 and Mistral have it.

    ``tokenizer_config.json`` beside it may name the tokens that begin and end a text, and tokens
    behind the pieces (``added_tokens_decoder``).

    Args:
        path: the file or its directory.
        begins: a document begins with ``bos``; ``add_bos_token`` of the configuration wins.

    Raises:
        DataError: the file is missing or broken, or the ``sentencepiece`` package is.
    """

    def __init__(self, path: str, *, begins: bool) -> None:
        file = Path(path) / PIECES if Path(path).is_dir() else Path(path)
        self._pieces, self._within = _load_pieces(file)
        config = config_beside(file)
        pieces = range(self._pieces.get_piece_size())
        names = {i: self._pieces.id_to_piece(i) for i in pieces}
        added = {i: token["content"] for i, token in added_tokens(config, file).items()}
        names |= added
        vocab = {name: index for index, name in names.items()}
        wanted = [each["content"] for each in tokens_to_add(config, vocab, file)]
        names |= dict(enumerate((each for each in wanted if each not in vocab), max(names) + 1))
        vocab = {name: index for index, name in names.items()}
        single = {
            *added,
            *(vocab[each] for each in wanted),
            *filter(self._pieces.is_control, pieces),
        }
        self._special = {name: index for index, name in names.items() if index in single}
        usual = {
            f"{n}_token": names.get(getattr(self._pieces, f"{n}_id")()) for n in ("bos", "eos")
        }
        self._named = {k: v for k, v in usual.items() if v} | named_in(config, vocab, file)
        self._all_named = template_tokens(config)
        if "eos_token" not in self._named:
            raise DataError(f"--tokenizer-model {file}: has no piece that ends a text")
        special = {name.removesuffix("_token"): vocab[token] for name, token in self._named.items()}
        super().__init__(vocab, {"eod": special["eos"], **special}, str(file), begins=begins)
        self.vocab_size = max(names) + 1
        self._split = re.compile(f"({'|'.join(map(re.escape, self._special))})")
        if "bos" in special and config.get("add_bos_token", begins):
            self.begin = (special["bos"],)

    def tokenize(self, text: str) -> list[int]:
        ids: list[int] = self._pieces.encode(text)
        return ids

    def detokenize(self, ids: Iterable[int]) -> str:
        known = self._pieces.get_piece_size()
        groups = groupby(
            map(int, ids), lambda index: index in self._special.values() or index >= known
        )
        return "".join(
            "".join(self.inv_vocab.get(each, "") for each in group)
            if own
            else self._pieces.decode(list(group))
            for own, group in groups
        )

    def special_tokens(self) -> dict[str, int]:
        return self._special

    def template_tokens(self) -> dict[str, str]:
        return {"bos_token": "", **self._all_named, **self._named}

    def tokenize_part(self, text: str, special: dict[str, int]) -> list[int]:
        """Ids of a part of a chat's text. No space is put in front of what follows a token."""
        ids: list[int] = []
        for part in self._split.split(text):
            ids += [special[part]] if part in special else self._within.encode(part)
        return ids


def _load_pieces(file: Path) -> tuple[Any, Any]:
    """The processor of a ``tokenizer.model``, and one that puts no space in front of a text."""
    try:
        from sentencepiece import SentencePieceProcessor, sentencepiece_model_pb2
    except ImportError as error:
        raise DataError(
            f"--tokenizer-model {file}: needs SentencePiece ({error}); "
            "pip install sentencepiece protobuf"
        ) from error
    try:
        content = read_bytes(file)
        model = sentencepiece_model_pb2.ModelProto.FromString(content)
        model.normalizer_spec.add_dummy_prefix = False
        within = SentencePieceProcessor(model_proto=model.SerializeToString())
        return SentencePieceProcessor(model_proto=content), within
    except OSError as error:
        raise DataError(f"--tokenizer-model {file}: {error.strerror}") from error
    except Exception as error:  # protobuf and the package raise kinds of their own
        raise DataError(f"--tokenizer-model {file}: no model of SentencePiece ({error})") from error

"""Base class of the tokenizers, and the configuration beside their files."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron.dpp.errors import DataError
from megatron.dpp_train.text_files import read_object

END_OF_TEXT = "<|endoftext|>"
CHAT_ENCODING = 4
"""Version of the ids and marks that a chat becomes. Raise it with any change of them: names of
token files depend on it, so that old ones are not taken for new."""
OLDER_FILES = ("special_tokens_map.json", "added_tokens.json")
"""Files beside a tokenizer that count where its ``tokenizer_config.json`` has no
``added_tokens_decoder``."""
_NAMED = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_LISTS = ("extra_special_tokens", "additional_special_tokens")
_SPECIAL = re.compile(r"<\|[^|\s]+\|>")


class Tokenizer:
    """The attributes that megatron-core's dataset classes and our tools use.

    ``unique_identifiers`` goes into the hash under which megatron-core caches its sample indices.
    A special token that a kind lacks raises :class:`NotImplementedError`, as megatron-core expects.

    Args:
        vocab: token text to id, in the order of the file (BERT draws replacements by that order).
        special: attribute to id, for example ``eod``, which ends a document.
        paths, options: identify the tokenizer.
    """

    vocab: dict[str, int]
    inv_vocab: dict[int, str]
    vocab_size: int
    """Number of ids with special tokens, without the padding to the model's size."""
    eod: int
    cls: int
    sep: int
    pad: int
    mask: int
    bos: int
    eos: int
    begin: tuple[int, ...] = ()
    """Ids that start a document."""

    def __init__(
        self, vocab: dict[str, int], special: dict[str, int], *paths: str, **options: object
    ) -> None:
        if vocab:
            self.vocab, self.vocab_size = vocab, len(vocab)
            self.inv_vocab = {index: token for token, index in vocab.items()}
        self.__dict__.update(special)
        self._hashes: dict[int, str] = {}
        self.unique_identifiers: dict[str, Any] = {
            "class": type(self).__name__,
            "tokenizer_path": list(paths),
            **{name: str(value) for name, value in options.items()},
        }

    def __getattr__(self, name: str) -> Any:
        kind = NotImplementedError if name in Tokenizer.__annotations__ else AttributeError
        raise kind(f"{type(self).__name__} has no attribute '{name}'")

    def tokenize(self, text: str) -> list[int]:
        """Ids of ``text``, without special tokens."""
        raise NotImplementedError

    def detokenize(self, ids: Iterable[int]) -> str:
        """Text of ``ids``, as near to the original as the kind allows."""
        raise NotImplementedError

    def tokens(self, count: int | None = None) -> str | None:
        """The number of tokens and a hash of their texts, in the order of their ids: two models
        with equal ones mean the same by an id. None where a tokenizer has no texts.

        Args:
            count: ids from here on do not count; they may be added later.
        """
        vocab = self.__dict__.get("vocab")
        if not vocab:
            return None
        count = self.vocab_size if count is None else min(count, self.vocab_size)
        if count not in self._hashes:
            known = sorted((index, text) for text, index in vocab.items() if index < count)
            text = "\n".join(f"{index} {text}" for index, text in known)
            digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
            self._hashes[count] = f"{count}:{digest[:16]}"
        return self._hashes[count]

    def keeps(self, tokens: object) -> bool:
        """Tell whether ids mean here what they mean to a model that learned ``tokens``, of
        :meth:`tokens`, as far as that is known; there may be more of them here."""
        count = re.match(r"(\d{1,9}):", tokens) if isinstance(tokens, str) else None
        here = self.tokens(int(count[1])) if count else None
        return here is None or here == tokens

    def reading(self) -> str:
        """The outcome of reading the tokenizer's files: texts and ids of all tokens, and those
        that a document begins and ends with or that are one id each. Names of token files depend on
        it, so that those of another reading are not taken for new."""
        ends = (self.__dict__.get("eod"), self.begin)
        return repr((self.tokens(), ends, sorted(self.special_tokens().items())))

    def special_tokens(self) -> dict[str, int]:
        """Tokens that only a chat template may write, with their ids."""
        return {text: index for text, index in self.vocab.items() if _SPECIAL.fullmatch(text)}

    def template_tokens(self) -> dict[str, str]:
        """Tokens that chat templates name."""
        return {"bos_token": "", "eos_token": END_OF_TEXT}

    def tokenize_chat(
        self, text: str, answers: Sequence[tuple[int, int]], special: dict[str, int]
    ) -> tuple[list[int], list[int]]:
        """Ids of a chat's text, and 1 for each of an answer, else 0.

        Args:
            answers: first character and the one behind the last, in order.
            special: tokens that are one id each.
        """
        ids: list[int] = []
        marks: list[int] = []
        ends = [0, *(place for answer in answers for place in answer), len(text)]
        for number, (start, end) in enumerate(itertools.pairwise(ends)):
            new = self.tokenize_part(text[start:end], special)
            ids += new
            marks += [number % 2] * len(new)
        return ids, marks

    def tokenize_part(self, text: str, special: dict[str, int]) -> list[int]:
        """Ids of a part of a chat's text, whose ``special`` tokens are one each."""
        ids: list[int] = []
        end = 0
        for match in _SPECIAL.finditer(text):
            if match.group() in special:
                ids += self.tokenize(text[end : match.start()])
                ids.append(special[match.group()])
                end = match.end()
        return ids + self.tokenize(text[end:])


def config_beside(file: Path) -> dict[str, Any]:
    """The ``tokenizer_config.json`` of a tokenizer; empty where there is none. As in transformers,
    older files beside it count where it has no ``added_tokens_decoder``.

    Raises:
        DataError: a file is broken.
    """
    config = read_object(file.with_name("tokenizer_config.json"))
    if "added_tokens_decoder" in config:
        return config
    older = read_object(file.with_name(OLDER_FILES[0]))
    config |= {name: value for name, value in older.items() if name in (*_NAMED, *_LISTS)}
    beside = file.with_name(OLDER_FILES[1])
    added = read_object(beside)
    if not all(type(index) is int for index in added.values()):
        raise DataError(f"{beside}: expected numbers of tokens")
    if added:
        special = set(template_tokens(config).values())
        config["added_tokens_decoder"] = {
            str(index): {"content": token, "special": token in special}
            for token, index in added.items()
        }
    return config


def added_tokens(config: dict[str, Any], file: Path) -> dict[int, dict[str, Any]]:
    """The tokens of ``added_tokens_decoder`` by number, with their options.

    Raises:
        DataError: the field is of another form.
    """
    with _reading_tokens(file):
        found = config.get("added_tokens_decoder") or {}
        return {int(n): _options(found[n]) for n in sorted(found, key=int) if found[n]}


def tokens_to_add(
    config: dict[str, Any], vocab: dict[str, int], file: Path
) -> list[dict[str, Any]]:
    """The tokens that transformers makes one id each, with their options, in the order in which it
    adds those that ``vocab``, that of ``file``, lacks. Named ones that it lacks, such as padding,
    are in no text: they are left out where no other is lacking.

    Raises:
        DataError: a field of the configuration is of another form.
    """
    listed = added_tokens(config, file).values()
    with _reading_tokens(file):
        lists: list[Any] = []
        for name in _LISTS:
            found = config.get(name) or []
            lists += found.values() if isinstance(found, dict) else found
        named = [_options(config[name]) for name in _NAMED if config.get(name)]
        every = [*listed, *named, *(_options(token) for token in lists if token)]
    tokens = {each["content"]: each for each in reversed(every)}  # the first of a name counts
    order = dict.fromkeys(each["content"] for each in every)
    lacking = {token for token in order if token not in vocab}
    left_out = lacking if lacking <= {each["content"] for each in named} else set()
    return [tokens[token] for token in order if token not in left_out]


@contextlib.contextmanager
def _reading_tokens(file: Path) -> Iterator[None]:
    """Turns what a field of another form raises into a DataError."""
    try:
        yield
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        beside = file.with_name("tokenizer_config.json")
        raise DataError(f"{beside}: its added tokens cannot be read ({error!r})") from error


def _options(token: Any) -> dict[str, Any]:
    """Content and options of a token in a configuration."""
    if isinstance(token, str):
        return {"content": token, "special": True}
    names = ("content", "lstrip", "rstrip", "normalized", "single_word", "special")
    options = {name: token[name] for name in names if name in token}
    if not isinstance(options["content"], str):
        raise TypeError(f"a token is {options['content']!r}")
    return {"special": True, **options}


def template_tokens(config: dict[str, Any]) -> dict[str, str]:
    """The tokens that a configuration names, such as ``eos_token``."""
    more = config.get("extra_special_tokens")
    named = {**(more if isinstance(more, dict) else {}), **{n: config.get(n) for n in _NAMED}}
    tokens = {n: t.get("content") if isinstance(t, dict) else t for n, t in named.items()}
    return {name: token for name, token in tokens.items() if isinstance(token, str)}


def named_in(config: dict[str, Any], vocab: dict[str, int], file: Path) -> dict[str, str]:
    """``bos_token`` and ``eos_token``, as far as the configuration names them."""
    named: dict[str, str] = {}
    found = template_tokens(config)
    for name in ("bos_token", "eos_token"):
        token = found.get(name)
        if token is None:
            continue
        if token not in vocab:
            beside = file.with_name("tokenizer_config.json")
            raise DataError(f"{beside}: {name} is {token!r}, which {file.name} lacks")
        named[name] = token
    return named

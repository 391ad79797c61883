"""Prompts of ``generate``: texts and chats as token ids."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.dpp.errors import DataError
from megatron.dpp_train.data.chats import ChatEncoder
from megatron.dpp_train.data.json_lines import BadLine, parse_line, text_of
from megatron.dpp_train.data.rows import PARQUET, open_rows
from megatron.dpp_train.text_files import nearest_path, read_text
from megatron.dpp_train.tokenizers import Tokenizer

LINES = (".jsonl", ".json", PARQUET)
"""Endings of files with a JSON object on each line, or in each row."""


@dataclass(frozen=True)
class Prompt:
    """Token ids, and the text or the messages that they stand for."""

    ids: list[int]
    said: str | list[dict[str, str]]

    def answered(self, text: str) -> dict[str, Any]:
        """The prompt with an answer, as a line of the output."""
        if isinstance(self.said, str):
            return {"prompt": self.said, "completion": text}
        return {"messages": [*self.said, {"role": "assistant", "content": text}]}


def text_prompts(texts: Sequence[str], tokenizer: Tokenizer, where: str) -> list[Prompt]:
    """Prompts that a model continues.

    Args:
        where: the flag or file that they come from, for errors.

    Raises:
        DataError: a text is empty or cannot be tokenized.
    """
    found = []
    for number, text in enumerate(texts, 1):
        name = where if len(texts) == 1 else f"{where}, prompt {number}"
        if not text.strip():
            raise DataError(f"{name}: empty")
        found.append(Prompt([*tokenizer.begin, *encode(text, tokenizer, name)], text))
    return found


def encode(text: str, tokenizer: Tokenizer, where: str) -> list[int]:
    """Ids of a text; raises DataError where it cannot be tokenized."""
    try:
        return tokenizer.tokenize(text)
    except (ValueError, TypeError) as error:
        raise DataError(f"{where}: cannot be tokenized ({error})") from error


def read_texts(path: Path) -> list[str]:
    """A prompt per line: the line, or the text of ``prompt`` or ``text`` in its JSON object.

    Raises:
        DataError: the file cannot be read, or a line is bad; empty lines of a text are left out.
    """
    if path.suffix not in LINES:
        lines = read_text(path, "--prompts").split("\n")
        return [line.removesuffix("\r") for line in lines if line.strip()]
    found = []
    for number, document in json_lines(path, "--prompts"):
        key = "prompt" if "prompt" in document else "text"
        try:
            text = text_of(document, key)
        except BadLine as error:
            raise DataError(f"{path}, line {number}: {error}") from error
        found.append(text if isinstance(text, str) else "".join(text))
    return found


def json_lines(path: Path, flag: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Number and object of each line, or row of another format.

    Raises:
        DataError: the file cannot be read, holds no line, or a line is no object.
    """
    if not path.is_file():
        raise DataError(f"{flag} {path}: no such file{nearest_path(path)}")
    empty, rows = True, open_rows(path)
    for number, (line, _) in enumerate(rows.lines, 1):
        if not line.strip():
            continue
        empty = False
        try:
            yield number, parse_line(line)
        except BadLine as error:
            raise DataError(f"{path}, {rows.unit} {number}: {error}") from error
    if empty:
        raise DataError(f"{flag} {path}: holds no line")


def chat_prompts(given: str, encoder: ChatEncoder) -> list[Prompt]:
    """Questions for a chat model: those of a file of chats, or one message of a user. An answer at
    the end of a chat is left out, so that files of training can be asked again.

    Raises:
        DataError: the text is empty, the file cannot be read, or a chat is bad.
    """
    path = Path(given)
    if path.suffix in LINES:
        if not path.is_file():
            raise DataError(f"--chat {given}: no such file{nearest_path(path)}")
        documents: Any = ((f"{path}, line {n}", each) for n, each in json_lines(path, "--chat"))
    elif not given.strip():
        raise DataError("--chat: empty")
    else:
        documents = [("--chat", {"messages": [{"role": "user", "content": given}]})]
    found = []
    for name, document in documents:
        try:
            found.append(Prompt(*encoder.ask(document)))
        except BadLine as error:
            raise DataError(f"{name}: {error}") from error
    return found

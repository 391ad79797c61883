"""Chats for ``preprocess --sft``, ``generate`` and ``evaluate``: a template turns messages into
text, whose answers are marked.

A line holds ``messages`` (a list of objects with ``role`` and ``content``), or ``prompt`` and
``completion``. The text of an answer is what the template adds to that of the messages before it
with ``add_generation_prompt``. Text and answers are tokenised apart, as at generation.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

from megatron.dpp.commands.json_lines import BadLine
from megatron.dpp.errors import DataError
from megatron.dpp.text_files import nearest_path, read_text
from megatron.dpp.tokenizers import Tokenizer

CHAT_KEY, ANSWERS_KEY = "chat", "answers"
"""Keys of the output: token ids, and 1 for each token of an answer."""

PLAIN = (
    "{% for message in messages %}"
    "{% if message.role == 'assistant' %}Assistant: {{ message.content }}{{ eos_token }}"
    "{% else %}{{ message.role | capitalize }}: {{ message.content }}\n{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
"""The template of a tokenizer without one: a line per message, which its role begins. The end of
text closes an answer."""

_ROLES = "role", "content"


def template_beside(folder: Path) -> str | None:
    """The chat template among a tokenizer's files, None without one.

    Raises:
        DataError: a file is unreadable.
    """
    file = folder / "chat_template.jinja"
    if file.is_file():
        return read_text(file)
    file = folder / "tokenizer_config.json"
    if not file.is_file():
        return None
    try:
        found: Any = json.loads(read_text(file))["chat_template"]
    except KeyError:
        return None
    except (ValueError, TypeError) as error:
        raise DataError(f"{file}: not a JSON object ({error})") from error
    if isinstance(found, list):  # several, by name
        found = next((each["template"] for each in found if each["name"] == "default"), None)
    return None if found is None else str(found)


def find_template(
    name: str, vocabulary: str | None, *, flag: str = "--sft-tokenizer-prompt-format"
) -> str:
    """The template that a flag names: ``default`` is the one beside the vocabulary (a file or a
    directory), ``auto`` that or else ``plain``, any other a file.

    Raises:
        DataError: there is none.
    """
    if name == "plain":
        return PLAIN
    flag = f"{flag} {name}"
    if name in ("auto", "default"):
        folder = Path(vocabulary or ".")
        folder = folder if folder.is_dir() else folder.parent
        found = template_beside(folder)
        if found is None and name == "default":
            raise DataError(
                f"{flag}: neither chat_template.jinja nor a chat_template in "
                f"tokenizer_config.json is in {folder}; name a file, or plain"
            )
        return PLAIN if found is None else found
    path = Path(name)
    if not path.is_file():
        raise DataError(
            f"{flag}: expected auto, default, plain, or a file with a template{nearest_path(path)}"
        )
    if path.name == "tokenizer_config.json":
        found = template_beside(path.parent)
        if found is None:
            raise DataError(f"{flag}: it has no chat_template")
        return found
    return read_text(path)


class ChatEncoder:
    """Turns a line's messages into token ids and the marks of the answers.

    Args:
        flag: names a template, for errors.

    Raises:
        DataError: the template is no template, or names a token that the vocabulary lacks; Jinja
            is not installed.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: str,
        *,
        flag: str = "--sft-tokenizer-prompt-format",
    ) -> None:
        try:
            import jinja2
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ModuleNotFoundError:
            raise DataError("chats need Jinja; pip install jinja2") from None
        self._tokenizer, self._errors = tokenizer, jinja2.TemplateError
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        named = tokenizer.template_tokens()
        environment.globals["raise_exception"] = _refuse
        try:
            self._template = environment.from_string(template, globals=named)
        except jinja2.TemplateError as error:
            raise DataError(f"the chat template is not valid: {error}") from error
        self._special = tokenizer.special_tokens()
        end = named["eos_token"]
        if end not in self._special and (end in template or "eos_token" in template):
            raise DataError(
                f"the chat template ends answers with {end}, which the vocabulary lacks; name the "
                f"vocabulary's own token in a template of yours ({flag} FILE)"
            )

    def encode(self, document: dict[str, Any]) -> tuple[list[int], list[int]]:
        """Token ids of a chat, and 1 for each token of an answer, 0 for all others.

        Raises:
            BadLine: the line holds no chat, or an empty answer.
        """
        messages = _messages(document)
        if not any(message["role"] == "assistant" for message in messages):
            raise BadLine("no message has the role assistant")
        self._refuse_special(messages)
        ids: list[int] = []
        marks: list[int] = []
        done = ""
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._render(messages[:number], ask=True)
            after = self._render(messages[: number + 1], ask=False)
            if not (before.startswith(done) and after.startswith(before)):
                raise BadLine(f"the template changes what comes before message {number + 1}")
            for text, mark in ((before[len(done) :], 0), (after[len(before) :], 1)):
                new = self._tokenizer.tokenize_chat(text, self._special)
                ids += new
                marks += [mark] * len(new)
            done = after
        return ids, marks

    def ask(self, document: dict[str, Any]) -> tuple[list[int], list[dict[str, str]]]:
        """Token ids behind which a model answers, and the messages that they stand for: those of
        the document without an answer at its end.

        Raises:
            BadLine: the document holds no chat, or no message to answer.
        """
        messages = _messages(document)
        if messages[-1]["role"] == "assistant":
            messages = messages[:-1]
        if not messages:
            raise BadLine("no message to answer")
        self._refuse_special(messages)
        text = self._render(messages, ask=True)
        return self._tokenizer.tokenize_chat(text, self._special), messages

    def _refuse_special(self, messages: list[dict[str, str]]) -> None:
        for message in messages:
            held = [text for text in self._special if text in message["content"]]
            if held:
                raise BadLine(f"a message holds the special token {held[0]}")

    def _render(self, messages: list[dict[str, str]], *, ask: bool) -> str:
        try:
            return str(self._template.render(messages=messages, add_generation_prompt=ask))
        except (self._errors, TypeError, ValueError) as error:
            raise BadLine(f"the chat template refuses it: {error}") from error


def _refuse(message: str) -> NoReturn:
    raise ValueError(message)


def _messages(document: dict[str, Any]) -> list[dict[str, str]]:
    """The messages of a line; ``prompt`` and ``completion`` are two."""
    if "messages" in document:
        found = document["messages"]
    elif {"prompt", "completion"} <= document.keys():
        parts = [document["prompt"], document["completion"]]
        roles = ("user", "assistant")
        found = []
        for role, part in zip(roles, parts, strict=True):
            found += part if isinstance(part, list) else [{"role": role, "content": part}]
    else:
        keys = ", ".join(sorted(document)) or "none"
        raise BadLine(f'neither "messages" nor "prompt" and "completion" (its keys: {keys})')
    if not isinstance(found, list) or not found:
        raise BadLine('"messages" is no list of messages')
    for number, message in enumerate(found, 1):
        if not isinstance(message, dict) or not all(
            isinstance(message.get(name), str) for name in _ROLES
        ):
            raise BadLine(f"message {number} lacks a text for role or content")
        if message["role"] == "assistant" and not message["content"].strip():
            raise BadLine(f"the answer in message {number} is empty")
        try:
            message["content"].encode("utf-8")
        except UnicodeEncodeError as error:
            raise BadLine(f"message {number} holds half a surrogate pair") from error
    return found

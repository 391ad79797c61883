"""Chats for ``preprocess --sft``: a template turns messages into text, whose answers are marked.

A template with ``{% generation %}`` blocks says itself what an answer is. With any other, it is the
text that the template adds to that of the messages before it with ``add_generation_prompt``.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from jinja2 import TemplateSyntaxError

from megatron.dpp.errors import DataError
from megatron.dpp.files import strict_json
from megatron.dpp_train.data.chat_lines import Chat, Message, plain_text, read_chat, texts_of
from megatron.dpp_train.data.rows import BadLine
from megatron.dpp_train.data.templates import TOOL_USE, ChatTemplate, Rendered, TemplateRefusal
from megatron.dpp_train.data.tokenizer import Span, Tokenizer

CHAT_KEY, ANSWERS_KEY = "chat", "answers"
"""Keys of the output: token ids, and 1 for each token of an answer."""

_LEFT_OUT = (
    "the template leaves out a part of the messages (reasoning of earlier turns, for example)"
)
_PART = "'type': 'text'"
"""What a template writes that prints a list of parts as it is."""
_CONTENTS = "tools", "tool_calls", "documents"
"""Fields without which a chat is another one: a template must use them."""
_READ = "role", "content", "tool_calls", "name"
"""Fields of an answer that need no note where a template does not name them."""
_REASONING = "reasoning_content", "thinking", "reasoning"
"""Names of an answer's reasoning: transformers gives it to templates under all of them."""
ANSWER = "\ue000"
"""An answer that no chat has, to find where answers begin and end."""
_USUAL_ROLES = "system", "developer", "user", "assistant", "tool"
_DATED = "the chat template may write today's date (strftime_now), which the data then keeps"
_ENDED = (
    "the chat template ends an answer by the token of the next message: it is marked as its end"
)
_ENDLESS = (
    "WARNING: the chat template marks no end of an answer (no special token follows it): a model "
    "that is trained on it does not learn to stop"
)


class Sample(NamedTuple):
    """A chat to train on: token ids, and 1 for each token of an answer, 0 for all others."""

    ids: list[int]
    marks: list[int]


class ChatEncoder:
    """Turns a line's messages into token ids and the marks of the answers.

    Args:
        templates: ``default``, and where there is one ``tool_use`` for chats with tools.

    Raises:
        DataError: a template is no template, or names a token that the vocabulary lacks.
    """

    def __init__(self, tokenizer: Tokenizer, templates: Mapping[str, str]) -> None:
        self._tokenizer = tokenizer
        names = {name for name in ("default", TOOL_USE) if name in templates}
        self._templates = {name: ChatTemplate(templates[name], tokenizer.named) for name in names}
        end = tokenizer.named.get("eos_token", "")
        texts = [template.text for template in self._templates.values()]
        if end not in tokenizer.special and any(
            "eos_token" in text or (end and end in text) for text in texts
        ):
            raise DataError(
                f"the chat template ends answers with {end or 'eos_token'}, which the vocabulary "
                "lacks; name the vocabulary's own token in a template of yours "
                "(--sft-tokenizer-prompt-format FILE)"
            )
        self._end = self._find_end()

    def notes(self) -> tuple[str, ...]:
        """Lines that a user should read about the template."""
        notes = [_DATED] * any("strftime_now" in each.text for each in self._templates.values())
        if self._end != "":
            notes.append(_ENDED if self._end else _ENDLESS)
        return tuple(notes)

    def _find_end(self) -> str | None:
        """The text that ends an answer behind the template's own: the token of a next user's
        message; empty where that text has an end, None where there is no end at all."""
        chat: list[Message] = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": ANSWER},
        ]
        template = self._templates["default"]
        try:
            whole = template.render(chat, ask=False)
        except TemplateRefusal as error:
            if isinstance(error.__cause__, TemplateSyntaxError | SyntaxError | RecursionError):
                raise DataError(f"the chat template is not valid: {error}") from error
            return ""
        text = whole.text[: whole.answers[-1][1]] if whole.answers else whole.text
        answer = text.rpartition(ANSWER)[2]
        if not text.endswith(answer) or any(token in answer for token in self._tokenizer.special):
            return ""
        if template.marks_answers:
            return None
        return self._end_of(chat, whole.text)

    def _end_of(self, messages: list[Message], done: str, **more: Any) -> str | None:
        """The token of the next message behind the text of an answer, with white space before it;
        None where there is none."""
        called = messages[-1].get("tool_calls")
        following = {"role": "tool" if called else "user", "content": "?"}
        try:
            after = self._templates["default"].render([*messages, following], ask=False, **more)
        except TemplateRefusal:
            return None
        return self._token_at(after.text, len(done)) if after.text.startswith(done) else None

    def _token_at(self, text: str, place: int) -> str | None:
        """The special token at a place of a text, with white space before it."""
        names = "|".join(sorted(map(re.escape, self._tokenizer.special), key=len, reverse=True))
        found = re.compile(rf"\s*(?:{names})").match(text, place) if names else None
        return found and found.group()

    def encode(self, document: dict[str, Any]) -> tuple[list[Sample], tuple[str, ...]]:
        """The samples of a chat, and notes on what was done: one sample, or several where the
        template changes earlier turns once others follow.

        Raises:
            BadLine: the line holds no chat, an empty answer, or none that has a loss.
        """
        chat = self._fit(read_chat(document))
        if not any(message["role"] == "assistant" for message in chat.messages):
            raise BadLine("no message has the role assistant")
        if not any(chat.trained):
            raise BadLine("none of its answers has a loss")
        notes: list[str] = list(chat.notes)
        if self._template_of(chat).marks_answers:
            texts = [self._marked(chat)]
        else:
            texts = self._compared(chat, notes)
        notes += self._unread(chat)
        return [self._sample(text, spans) for text, spans in texts], tuple(dict.fromkeys(notes))

    def _sample(self, text: str, spans: tuple[Span, ...]) -> Sample:
        """The tokens up to the last of an answer."""
        ids, marks = self._tokenizer.encode_chat(text, spans)
        end = max((place for place, mark in enumerate(marks, 1) if mark), default=0)
        if not end:
            raise BadLine("its answers have no token")
        return Sample(ids[:end], marks[:end])

    # --- what the template takes ---

    def _fit(self, chat: Chat) -> Chat:
        """The chat in the form that the template takes, told by what it renders of it."""
        self._refuse_special(chat)
        self._refuse_unused(chat)
        problem: BadLine | None = None
        usable: tuple[Chat, str] | None = None
        for each in _variants(chat):
            try:
                text = self._render(each, len(each.messages), ask=False).text
            except BadLine as error:
                problem = problem or error
                continue
            if _is_whole(each, text):
                return each
            usable = usable or (each, text)
        if usable is None:
            raise problem or BadLine("the chat template takes no form of it")
        found, text = usable
        return replace(found, notes=(*found.notes, *self._left_out(found, text)))

    def _left_out(self, chat: Chat, text: str) -> list[str]:
        """Notes on messages that do not stand in the template's text.

        Raises:
            BadLine: one of them has a role that the template may not know.
        """
        said = [(number, each) for number, each in enumerate(chat.messages, 1) if _says(each)]
        missing = [(number, each) for number, each in said if not _stands(each, text)]
        for number, message in missing:
            if message["role"] not in _USUAL_ROLES:
                raise BadLine(
                    f"the template leaves out message {number}, whose role is "
                    f"{message['role']!r}; usual ones are {', '.join(_USUAL_ROLES)}"
                )
        there = {each["role"] for _, each in said if _stands(each, text)}
        roles = dict.fromkeys(each["role"] for _, each in missing if each["role"] not in there)
        whole = [f'the template leaves out or changes messages of the role "{r}"' for r in roles]
        return whole or [_LEFT_OUT]

    def _template_of(self, chat: Chat) -> ChatTemplate:
        tools = chat.more.get("tools") and self._templates.get(TOOL_USE)
        return tools or self._templates["default"]

    def _refuse_special(self, chat: Chat) -> None:
        for text in texts_of([chat.messages, chat.more]):
            held = [token for token in self._tokenizer.special if token and token in text]
            if held:
                raise BadLine(f"a message holds the special token {held[0]}")

    def _refuse_unused(self, chat: Chat) -> None:
        names = {
            name for each in (chat.more, *chat.messages) for name, value in each.items() if value
        }
        for name in _CONTENTS:
            if name in names and name not in self._template_of(chat).text:
                raise BadLine(f'the chat template has no place for "{name}"')

    def _unread(self, chat: Chat) -> list[str]:
        """Notes on fields of answers that neither the template reads nor this module."""
        text = self._template_of(chat).text
        known = {*_READ, *(_REASONING if any(name in text for name in _REASONING) else ())}
        names = {
            name
            for message in chat.messages
            if message["role"] == "assistant"
            for name, value in message.items()
            if value not in (None, "", [], {}) and name not in text
        }
        return [f'field "{name}" of answers is not used' for name in sorted(names - known)]

    def _render(
        self, chat: Chat, count: int, *, ask: bool, answer: Message | None = None
    ) -> Rendered:
        """The text of the first messages, and of one more."""
        messages = [*chat.messages[:count], *([] if answer is None else [answer])]
        try:
            return self._template_of(chat).render(messages, ask=ask, **chat.more)
        except TemplateRefusal as error:
            raise BadLine(f"the chat template refuses it: {error}") from error

    # --- answers ---

    def _marked(self, chat: Chat) -> tuple[str, tuple[Span, ...]]:
        """A chat whose template marks its answers."""
        whole = self._render(chat, len(chat.messages), ask=False)
        answers = [
            t for m, t in zip(chat.messages, chat.trained, strict=True) if m["role"] == "assistant"
        ]
        spans = whole.answers
        if not all(answers):
            if len(answers) != len(spans):
                raise BadLine(
                    f"the template marks {len(spans)} answers of {len(answers)}, so those without "
                    "a loss cannot be told"
                )
            spans = tuple(span for span, trained in zip(spans, answers, strict=True) if trained)
        spans = tuple(span for span in spans if span[0] < span[1])
        if not spans:
            raise BadLine("the template marks no answer ({% generation %})")
        return whole.text, spans

    def _compared(self, chat: Chat, notes: list[str]) -> list[tuple[str, tuple[Span, ...]]]:
        """A chat whose answers are what the template adds: one text as long as earlier turns stay
        as they are, else several."""
        numbers = [number for number, trained in enumerate(chat.trained) if trained]
        texts: list[tuple[str, tuple[Span, ...]]] = []
        done, spans = "", list[Span]()
        for number in numbers:
            before = self._render(chat, number, ask=True).text
            after = self._render(chat, number + 1, ask=False).text
            start = len(before)
            if not after.startswith(before):
                after, start = self._changed(chat, number, before, after, notes)
            if spans and not (len(done) <= start and after.startswith(done)):
                texts.append((done, tuple(spans)))
                spans = []
            end = self._ended(chat, number, after)
            done = after + end
            spans.append((start, len(done)))
        if texts:
            notes.append("made one sample per answer: the template changes earlier turns")
        return [*texts, (done, tuple(spans))]

    def _ended(self, chat: Chat, number: int, done: str) -> str:
        """The text that follows an answer and ends it; empty where the answer has an end."""
        if not self._end:
            return ""
        messages = chat.messages[: number + 1]
        if number + 1 < len(chat.messages):
            with contextlib.suppress(BadLine):
                text = self._render(chat, number + 2, ask=False).text
                if text.startswith(done):
                    return self._token_at(text, len(done)) or ""
        return self._end_of(messages, done, **chat.more) or self._end

    def _changed(
        self, chat: Chat, number: int, before: str, after: str, notes: list[str]
    ) -> tuple[str, int]:
        """The text of a chat up to an answer's end, and where the answer begins, where the prompt
        of generation is not what precedes the answer."""
        base = self._render(chat, number, ask=False).text
        other = self._render(chat, number, ask=False, answer=_other(chat.messages[number])).text
        start = _shared(before, after, other)
        if start >= _shared(before, base):
            notes.append(f"trained answers as chats hold them, not behind {before[start:]!r}")
            return after, start
        header = before[len(base) :] if before.startswith(base) else ""
        place = after.rfind(header, 0, _shared(after, other)) if header else -1
        if place < 0:
            raise BadLine(f"the template changes what comes before message {number + 1}")
        notes.append(
            "put answers behind the prompt of generation, which the template changes later"
        )
        return before + after[place + len(header) :], len(before)


def _says(message: Message) -> bool:
    """True for a message that is a text alone."""
    return not message.get("tool_calls") and bool(plain_text(message.get("content")).strip())


def _other(answer: Mapping[str, Any]) -> Message:
    """An answer in the same form, with another text."""
    parts = isinstance(answer.get("content"), list)
    return {
        "role": "assistant",
        "content": [{"type": "text", "text": ANSWER}] if parts else ANSWER,
    }


def _shared(*texts: str) -> int:
    """Characters with which all texts begin."""
    return len(os.path.commonprefix(texts))  # noqa: RUF071, characters are meant


# --- forms of messages ---


def _variants(chat: Chat) -> Iterator[Chat]:
    """The chat in each form, the likeliest first: texts, and arguments as they are given."""
    given = chat.messages
    for content, note in (
        (_as_text, "put the parts of contents together"),
        (_as_parts, "gave contents as lists of parts"),
    ):
        messages = [content(message) for message in given]
        notes = (*chat.notes, *([note] if messages != given else []))
        yield replace(chat, messages=messages, notes=notes)
        turned = [_turned(message) for message in messages]
        if turned != messages:
            more = "turned arguments of calls"
            yield replace(chat, messages=turned, notes=(*notes, more))


def _stands(message: Message, text: str) -> bool:
    """True if the text of a message is in a rendered text, as it is or within JSON."""
    said = plain_text(message.get("content")).strip()
    return said in text or _quoted(said)[1:-1] in text


def _is_whole(chat: Chat, text: str) -> bool:
    """True where a rendered text holds every message, none as a list of parts, and no arguments as
    a text within JSON."""
    if not all(_stands(message, text) for message in chat.messages):
        return False
    said = (plain_text(message.get("content")) for message in chat.messages)
    if _PART in text and not all(_PART in each for each in said):
        return False
    return not any(
        isinstance(arguments, str)
        and isinstance(_parsed(arguments), dict)
        and _quoted(arguments) in text
        for arguments in _arguments(chat.messages)
    )


def _as_text(message: Message) -> Message:
    content = message.get("content")
    return {**message, "content": plain_text(content)} if isinstance(content, list) else message


def _as_parts(message: Message) -> Message:
    content = message.get("content")
    if not isinstance(content, str):
        return message
    return {**message, "content": [{"type": "text", "text": content}]}


def _turned(message: Message) -> Message:
    """Arguments of calls that are text as objects, and objects as text."""
    calls = message.get("tool_calls")
    return {**message, "tool_calls": [_turned_call(call) for call in calls]} if calls else message


def _turned_call(call: dict[str, Any]) -> dict[str, Any]:
    if isinstance(call.get("function"), dict):
        return {**call, "function": _turned_call(call["function"])}
    given = call.get("arguments")
    if given is None:
        return call
    other = _parsed(given) if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
    return {**call, "arguments": other}


def _arguments(messages: list[Message]) -> Iterator[Any]:
    for message in messages:
        for call in message.get("tool_calls") or []:
            function = call.get("function", call)
            yield function.get("arguments") if isinstance(function, dict) else None


def _parsed(text: str) -> Any:
    try:
        return strict_json.loads(text)
    except strict_json.RepeatedKey as error:
        raise BadLine(f"arguments of a call: {error}") from error
    except (ValueError, RecursionError):
        return text


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)

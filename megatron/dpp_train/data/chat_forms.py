"""The forms in which a template may take a chat: contents as text or as parts, arguments of calls
as objects or as the text of their JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from megatron.dpp.files import strict_json
from megatron.dpp_train.data.chat_lines import Chat, Message, plain_text
from megatron.dpp_train.data.json_lines import BadLine

_PART = "'type': 'text'"
"""What a template writes that prints a list of parts as it is."""


def variants(chat: Chat) -> Iterator[Chat]:
    """The chat in each form, the likeliest first: texts, and arguments as they are given."""
    lists = any(isinstance(message.get("content"), list) for message in chat.messages)
    joined = ("put the parts of contents together",) if lists else ()
    split = () if lists else ("gave contents as lists of parts",)
    for content, note in ((_as_text, joined), (_as_parts, split)):
        for arguments, more in ((_as_given, ()), (_turned, ("turned arguments of calls",))):
            messages = [arguments(content(message)) for message in chat.messages]
            if arguments is _turned and messages == [content(m) for m in chat.messages]:
                continue
            yield replace(chat, messages=messages, notes=(*chat.notes, *note, *more))


def stands(message: Message, text: str) -> bool:
    """True if the text of a message is in a rendered text, as it is or within JSON."""
    said = plain_text(message.get("content")).strip()
    return said in text or _inner(said) in text


def is_whole(chat: Chat, text: str) -> bool:
    """True where a rendered text holds every message, none as a list of parts, and no arguments as
    a text within JSON."""
    said = [plain_text(message.get("content")).strip() for message in chat.messages]
    place = 0
    for each in said:  # most stand in their order: no search begins at the first message again
        found = text.find(each, place)
        if found < 0 and not (each in text or _inner(each) in text):
            return False
        place = max(found, place)
    if _PART in text and any(_PART not in each for each in said):
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


def _as_given(message: Message) -> Message:
    return message


def _turned(message: Message) -> Message:
    """Arguments of calls that are text as objects, and objects as text."""
    if not message.get("tool_calls"):
        return message
    return {**message, "tool_calls": [_each_call(call, _other) for call in message["tool_calls"]]}


def _each_call(call: dict[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    if isinstance(call.get("function"), dict):
        return {**call, "function": _each_call(call["function"], change)}
    return {**call, "arguments": change(call["arguments"])} if "arguments" in call else call


def _other(arguments: Any) -> Any:
    if isinstance(arguments, str):
        return _parsed(arguments)
    return json.dumps(arguments, ensure_ascii=False)


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


def _inner(text: str) -> str:
    return _quoted(text)[1:-1]

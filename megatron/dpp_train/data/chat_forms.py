"""The forms in which a template may take a chat: contents as text or as parts, arguments of calls
as objects or as the text of their JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from megatron.dpp.files import strict_json
from megatron.dpp_train.data.chat_lines import Chat, Message, plain_text
from megatron.dpp_train.data.rows import BadLine

_PART = "'type': 'text'"
"""What a template writes that prints a list of parts as it is."""


def variants(chat: Chat) -> Iterator[Chat]:
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


def stands(message: Message, text: str) -> bool:
    """True if the text of a message is in a rendered text, as it is or within JSON."""
    said = plain_text(message.get("content")).strip()
    return said in text or _quoted(said)[1:-1] in text


def is_whole(chat: Chat, text: str) -> bool:
    """True where a rendered text holds every message, none as a list of parts, and no arguments as
    a text within JSON."""
    if not all(stands(message, text) for message in chat.messages):
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

"""Reads a line of chats: its form, messages, tools, and which answers have a loss.

Every field of the usual forms (OpenAI's, TRL's, axolotl's, ShareGPT, Alpaca) is honoured or refused
by its name. Other fields are named in a note.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from megatron.dpp.files import strict_json
from megatron.dpp_train.data.rows import BadLine, without_null

Message = dict[str, Any]

_SETTINGS = "chat_template_kwargs"
_ABOUT_ALL = "tools", "documents", _SETTINGS
"""Fields beside the messages of every form."""
_REFUSED = {
    **dict.fromkeys(("chosen", "rejected"), "pairs of preferences are not trained on"),
    **dict.fromkeys(("images", "image", "videos", "audios", "audio"), "only text is trained on"),
    **dict.fromkeys(("train_detail", "training_detail"), "an answer is trained on as a whole"),
    "functions": 'give them as "tools"',
    "function_call": 'give it as "tool_calls"',
    "refusal": 'give it as "content"',
}
"""Fields of a line or a message that change what is trained on, and are not supported."""
LOSS = "weight", "train", "training", "loss"
"""Fields of a line, of an answer or of its parts that say whether it has a loss: those of OpenAI,
axolotl and ms-swift."""
_CALLS = "function_call", "tool_call"
_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model", "assistant", *_CALLS), "assistant"),
    **dict.fromkeys(("tool", "observation", "function_response", "tool_response"), "tool"),
    "system": "system",
    "developer": "developer",
}
"""ShareGPT's names of roles, and the usual ones."""


@dataclass(frozen=True)
class Chat:
    """A line's chat.

    Args:
        messages: as templates read them.
        trained: for each message, whether it is an answer with a loss.
        more: further variables of the template, such as ``tools``.
        notes: what a user should know about the line.
    """

    messages: list[Message]
    trained: list[bool]
    more: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def read_chat(document: dict[str, Any]) -> Chat:
    """The chat of a line, whatever its form.

    Raises:
        BadLine: the line has none of the forms, or a field that cannot be honoured.
    """
    given = {name: value for name, value in document.items() if value is not None}
    form = next((each for each in _FORMS if each.needed <= given.keys()), None)
    if form is None:
        keys = ", ".join(sorted(document)) or "none"
        raise BadLine(
            'neither "messages", "conversations", "prompt" and "completion", nor "instruction" and '
            f'"output" (its keys: {keys})'
        )
    _refuse_fields(given, "the line")
    messages = form.read(given)
    more = {key: _read_json(given[key], key) for key in _ABOUT_ALL if given.get(key)}
    settings = more.pop(_SETTINGS, {})
    if not isinstance(settings, dict) or {"messages", "add_generation_prompt"} & settings.keys():
        raise BadLine(f'"{_SETTINGS}" is no object of further variables of the template')
    more |= settings
    notes = [f"read as {form.name}"]
    if _has_fields_of_a_table(more.get("tools")):
        messages, more = without_null(messages), without_null(more)
        notes.append('left out fields of "null", which a table has added to "tools" and calls')
    trained = [_checked(number, message) for number, message in enumerate(messages, 1)]
    if not _has_loss(given, "the line"):
        trained = [False] * len(trained)
    used = form.needed | form.more | {*_ABOUT_ALL, *LOSS}
    notes += [f'field "{key}" is not used' for key in sorted(given.keys() - used)]
    return Chat([_without_loss(m) for m in messages], trained, more, tuple(notes))


def _has_fields_of_a_table(tools: Any) -> bool:
    """True if a parameter of a tool is ``null``, which no schema has: the line was written from a
    table, as ``datasets.Dataset.to_json`` does."""
    if isinstance(tools, list):
        return any(map(_has_fields_of_a_table, tools))
    if not isinstance(tools, dict):
        return False
    known = tools.get("properties")
    return (isinstance(known, dict) and None in known.values()) or any(
        map(_has_fields_of_a_table, tools.values())
    )


# Forms


def _messages(given: dict[str, Any]) -> list[Message]:
    return _system(given) + _list(given["messages"], "messages")


def _conversations(given: dict[str, Any]) -> list[Message]:
    found = _list(given["conversations"], "conversations")
    return _system(given) + [_of_share_gpt(n, each) for n, each in enumerate(found, 1)]


def _prompt_and_completion(given: dict[str, Any]) -> list[Message]:
    prompt = _side(given["prompt"], "prompt", "user")
    without_a_loss = [{**message, LOSS[0]: 0} for message in prompt]
    return without_a_loss + _side(given["completion"], "completion", "assistant")


def _instruction_and_output(given: dict[str, Any]) -> list[Message]:
    found, history = _system(given), given.get("history", [])
    for turn in history if isinstance(history, list) else [history]:
        if not isinstance(turn, list) or len(turn) != 2:
            raise BadLine('"history" is no list of questions with their answers')
        found += _pair(*turn)
    question, more = given["instruction"], given.get("input", "")
    if not isinstance(question, str) or not isinstance(more, str):
        raise BadLine('"instruction" or "input" is no text')
    return found + _pair(f"{question}\n{more}" if more.strip() else question, given["output"])


class _Form(NamedTuple):
    """A form: its name, the fields that tell it, others that it knows, and what reads it."""

    name: str
    needed: set[str]
    more: set[str]
    read: Callable[[dict[str, Any]], list[Message]]


_SYSTEM = {"system", "system_prompt"}
_FORMS = (
    _Form("messages", {"messages"}, _SYSTEM, _messages),
    _Form("ShareGPT (conversations)", {"conversations"}, _SYSTEM, _conversations),
    _Form("prompt and completion", {"prompt", "completion"}, set(), _prompt_and_completion),
    _Form(
        "Alpaca (instruction, input, output)",
        {"instruction", "output"},
        {"input", "history", *_SYSTEM},
        _instruction_and_output,
    ),
)


def _system(given: dict[str, Any]) -> list[Message]:
    text = given.get("system") or given.get("system_prompt")
    return [{"role": "system", "content": text}] if text else []


def _pair(question: Any, answer: Any) -> list[Message]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _side(value: Any, name: str, role: str) -> list[Message]:
    return _list(value, name) if isinstance(value, list) else [{"role": role, "content": value}]


def _list(value: Any, name: str) -> list[Message]:
    value = _read_json(value, name)
    if not isinstance(value, list) or not value:
        raise BadLine(f'"{name}" is no list of messages')
    for number, message in enumerate(value, 1):
        if not isinstance(message, dict):
            raise BadLine(f'message {number} of "{name}" is no object')
    return value


def _of_share_gpt(number: int, given: Message) -> Message:
    """A message with ``role`` and ``content``, from ``from`` and ``value``."""
    if "role" in given:
        return given
    more = {key: value for key, value in given.items() if key not in ("from", "value")}
    named, value = given.get("from"), given.get("value")
    if not isinstance(named, str) or named not in _ROLES:
        raise BadLine(f"message {number} is from {named!r}; expected one of {', '.join(_ROLES)}")
    if named not in _CALLS:
        return {"role": _ROLES[named], "content": value, **more}
    calls = _read_json(value, f"value of message {number}")
    calls = calls if isinstance(calls, list) else [calls]
    if not all(isinstance(each, dict) and "name" in each for each in calls):
        raise BadLine(f"message {number} is a call without a name")
    functions = [{"type": "function", "function": each} for each in calls]
    return {"role": "assistant", "content": "", "tool_calls": functions, **more}


def _read_json(value: Any, name: str) -> Any:
    """A value that tables often hold as the text of its JSON."""
    if not isinstance(value, str):
        return value
    try:
        return strict_json.loads(value)
    except (ValueError, RecursionError) as error:
        raise BadLine(f'"{name}" is a text, but no JSON ({error})') from error


# Checks


def _refuse_fields(given: Mapping[str, Any], where: str) -> None:
    for name, why in _REFUSED.items():
        if given.get(name):
            raise BadLine(f'{where} has "{name}": {why}')
    if isinstance(given.get("label"), bool):
        raise BadLine(f'{where} has "label": judged answers are not trained on')


def _checked(number: int, message: Message) -> bool:
    """True for an answer with a loss; refuses a message that is broken."""
    where = f"message {number}"
    role, content, calls = (message.get(name) for name in ("role", "content", "tool_calls"))
    if not isinstance(role, str) or role.splitlines() != [role]:
        raise BadLine(f"{where} lacks a line of text for role")
    _refuse_fields(message, where)
    if calls is not None and (
        not isinstance(calls, list) or not all(isinstance(each, dict) for each in calls)
    ):
        raise BadLine(f'{where}: "tool_calls" is no list of objects')
    if not isinstance(content, (str, list)) and not (content is None and calls):
        raise BadLine(f"{where} lacks a text for content")
    parts = content if isinstance(content, list) else []
    for part in parts:
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else part
            raise BadLine(f"{where} has a part that is no text ({kind}): only text is trained on")
    try:
        "".join(texts_of(message)).encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadLine(f"{where} holds half a surrogate pair") from error
    if role != "assistant":
        return False
    if not calls and not plain_text(content).strip():
        raise BadLine(f"the answer in {where} is empty")
    of_parts = [_has_loss(part, f"a part of {where}") for part in parts] or [True]
    if any(of_parts) != all(of_parts):
        raise BadLine(f"{where} has parts with and without a loss: an answer has one as a whole")
    return of_parts[0] and _has_loss(message, where)


def _has_loss(holder: dict[str, Any], where: str) -> bool:
    """False if a field switches the loss off."""
    found = [(name, holder[name]) for name in LOSS if holder.get(name) is not None]
    for name, value in found:
        if not isinstance(value, int | float) or value not in (0, 1):
            raise BadLine(f'{where}: "{name}" is {value!r}; an answer has a loss (1) or none (0)')
    return all(value for _, value in found)


def _without_loss(holder: Message) -> Message:
    """A message, or a part of one, without the fields of its loss."""
    found = {name: value for name, value in holder.items() if name not in LOSS}
    if isinstance(found.get("content"), list):
        found["content"] = [_without_loss(part) for part in found["content"]]
    return found


def plain_text(content: Any) -> str:
    """The text of a message, whose parts are put together."""
    if isinstance(content, list):
        return "".join(part["text"] for part in content)
    return content or ""


def texts_of(value: Any) -> Iterator[str]:
    """All texts in a message or its tools, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from texts_of(key)
            yield from texts_of(each)
    elif isinstance(value, list):
        for each in value:
            yield from texts_of(each)

"""Chat templates: where they lie, and their text as transformers renders it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatron.dpp.errors import DataError, one_line, shown
from megatron.dpp_train.data.tokenizer import Span
from megatron.dpp_train.text_files import nearest_path, read_json, read_text

TOOL_USE = "tool_use"
"""Name of the template that chats with tools take."""
FILE = "chat_template.jinja"
TOOL_FILE = f"additional_chat_templates/{TOOL_USE}.jinja"
CONFIG = "tokenizer_config.json"
PLAIN = (
    "{% for message in messages %}"
    "{% if message.role == 'assistant' %}Assistant: {{ message.content }}{{ eos_token }}"
    "{% else %}{{ message.role | capitalize }}: {{ message.content }}\n{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
"""The template of a tokenizer without one: a line per message, which its role begins. The end of
text closes an answer."""
_MOST_CHARACTERS = 1 << 27
"""Of a rendered text."""
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


class TemplateRefusal(Exception):
    """The template cannot render a chat; the text says why."""


class Rendered(NamedTuple):
    """A chat's text, and where ``{% generation %}`` blocks lie in it."""

    text: str
    answers: tuple[Span, ...]


class ChatTemplate:
    """A template.

    Args:
        text: of the template.
        tokens: what the template may name, such as ``bos_token``.
    """

    def __init__(self, text: str, tokens: Mapping[str, str]) -> None:
        self.text, self._tokens = text, dict(tokens)
        self.marks_answers = _GENERATION.search(text) is not None

    def render(self, messages: Sequence[Mapping[str, Any]], *, ask: bool, **more: Any) -> Rendered:
        """The text of a chat.

        Args:
            ask: end with what precedes an answer (``add_generation_prompt``).
            more: further variables, such as ``tools``.

        Raises:
            TemplateRefusal: the template does not take it.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        chat = [{k: v for k, v in message.items() if v is not None} for message in messages]
        try:
            found: Any = render_jinja_template(
                [chat],
                chat_template=self.text,
                add_generation_prompt=ask,
                return_assistant_tokens_mask=self.marks_answers,
                **{"tools": None, "documents": None, **more, **self._tokens},
            )
            text: str = found[0][0]
            text.encode("utf-8")
        except Exception as error:  # a template computes what it wants
            raise TemplateRefusal(_reason(error)) from error
        if len(text) > _MOST_CHARACTERS:
            raise TemplateRefusal(f"its text has more than {_MOST_CHARACTERS} characters")
        return Rendered(text, tuple(found[1][0]) if self.marks_answers else ())


def _reason(error: Exception) -> str:
    if isinstance(error, MemoryError):
        return "it takes too much memory"
    if isinstance(error, UnicodeEncodeError):
        return "it writes half a surrogate pair"
    return one_line(error, 300)


def templates_beside(folder: Path) -> dict[str, str]:
    """The chat templates among a tokenizer's files, by name: ``default``, and where there is one
    ``tool_use``, which chats with tools take.

    Raises:
        DataError: a file is unreadable.
    """
    file = folder / FILE
    if file.is_file():
        more = folder / TOOL_FILE
        tools = {TOOL_USE: read_text(more, marked=True)} if more.is_file() else {}
        return {"default": read_text(file, marked=True), **tools}
    file = folder / CONFIG
    if not file.is_file():
        return {}
    try:
        found: Any = read_json(file).get("chat_template")
        if isinstance(found, list):  # several, by name
            found = {each["name"]: each["template"] for each in found}
            if not all(isinstance(text, str) for pair in found.items() for text in pair):
                raise TypeError("a name or a template is no text")
            return found if "default" in found else {}
        if not isinstance(found, str | None):
            raise TypeError(f"a template is {shown(found)}")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(f"{file}: holds no chat template ({error!r})") from error
    return {} if found is None else {"default": found}


def find_templates(name: str, vocabulary: str | None) -> dict[str, str]:
    """The templates that ``--sft-tokenizer-prompt-format`` names: ``default`` are those beside the
    vocabulary (a file or a directory), ``auto`` these or else ``plain``, any other a file.

    Returns:
        As :func:`templates_beside`, with ``default`` at least.

    Raises:
        DataError: there is none.
    """
    if name == "plain":
        return {"default": PLAIN}
    flag = f"--sft-tokenizer-prompt-format {name}"
    if name in ("auto", "default"):
        folder = Path(vocabulary or ".")
        folder = folder if folder.is_dir() else folder.parent
        found = templates_beside(folder)
        if not found and name == "default":
            raise DataError(
                f"{flag}: neither {FILE} nor a chat_template in {CONFIG} is in {folder}; name a "
                "file, or plain"
            )
        return found or {"default": PLAIN}
    path = Path(name)
    if not path.is_file():
        raise DataError(
            f"{flag}: expected auto, default, plain, or a file with a template{nearest_path(path)}"
        )
    if path.name == CONFIG:
        found = templates_beside(path.parent)
        if not found:
            raise DataError(f"{flag}: it has no chat_template")
        return found
    return {"default": read_text(path, marked=True)}

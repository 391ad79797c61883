"""Chat templates in files: beside a tokenizer, named by a flag, written into a model's folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron.dpp.errors import DataError, shown
from megatron.dpp_train.text_files import nearest_path, read_json, read_text

TOOL_USE = "tool_use"
"""Name of the template that chats with tools take."""
FILE = "chat_template.jinja"
TOOL_FILE = f"additional_chat_templates/{TOOL_USE}.jinja"
CONFIG = "tokenizer_config.json"
TEMPLATE_FILES = (FILE, TOOL_FILE, CONFIG)
"""Files of a tokenizer that hold its chat template and the names of its tokens."""
PLAIN = (
    "{% for message in messages %}"
    "{% if message.role == 'assistant' %}Assistant: {{ message.content }}{{ eos_token }}"
    "{% else %}{{ message.role | capitalize }}: {{ message.content }}\n{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
"""The template of a tokenizer without one: a line per message, which its role begins. The end of
text closes an answer."""


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


def find_templates(
    name: str, vocabulary: str | None, *, flag: str = "--sft-tokenizer-prompt-format"
) -> dict[str, str]:
    """The templates that a flag names: ``default`` are those beside the vocabulary (a file or a
    directory), ``auto`` these or else ``plain``, any other a file.

    Returns:
        As :func:`templates_beside`, with ``default`` at least.

    Raises:
        DataError: there is none.
    """
    if name == "plain":
        return {"default": PLAIN}
    flag = f"{flag} {name}"
    if name in ("auto", "default"):
        folder = Path(vocabulary or ".")
        folder = folder if folder.is_dir() else folder.parent
        found = templates_beside(folder)
        if not found and name == "default":
            raise DataError(
                f"{flag}: neither chat_template.jinja nor a chat_template in "
                f"tokenizer_config.json is in {folder}; name a file, or plain"
            )
        return found or {"default": PLAIN}
    path = Path(name)
    if not path.is_file():
        raise DataError(
            f"{flag}: expected auto, default, plain, or a file with a template{nearest_path(path)}"
        )
    if path.name == "tokenizer_config.json":
        found = templates_beside(path.parent)
        if not found:
            raise DataError(f"{flag}: it has no chat_template")
        return found
    return {"default": read_text(path, marked=True)}

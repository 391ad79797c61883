"""Lines of JSON: an object each, or the reason why a line cannot be used."""

from __future__ import annotations

from typing import Any

from megatron.dpp.files import strict_json


class BadLine(Exception):
    """A line cannot be used; the text says why."""


def parse_line(line: bytes) -> dict[str, Any]:
    """The object of a line; raises :class:`BadLine`."""
    if not line.strip():
        raise BadLine("empty line")
    try:
        document = strict_json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise BadLine(f"not UTF-8: {error.reason} at byte {error.start}") from error
    except strict_json.RepeatedKey as error:
        raise BadLine(str(error)) from error
    except (ValueError, RecursionError) as error:
        raise BadLine(f"not JSON: {error}") from error
    if not isinstance(document, dict):
        raise BadLine(f"expected a JSON object, found {type(document).__name__}")
    return document


def text_of(document: dict[str, Any], key: str) -> str | list[str]:
    """The text of a key, or its list of texts; raises :class:`BadLine`."""
    if key not in document:
        raise BadLine(f'no key "{key}" (it has {", ".join(sorted(document)) or "none"})')
    text = document[key]
    parts = text if isinstance(text, list) else [text]
    if not all(isinstance(part, str) for part in parts):
        raise BadLine(f'"{key}" holds neither a text nor a list of texts')
    try:
        "".join(parts).encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadLine(f'"{key}" holds half a surrogate pair at {error.start}') from error
    return parts if isinstance(text, list) else str(text)


def without_null(value: Any) -> Any:
    """A value without the fields that a table adds to it: all its rows have the same ones."""
    if isinstance(value, dict):
        return {key: without_null(each) for key, each in value.items() if each is not None}
    if isinstance(value, list):
        return [without_null(each) for each in value]
    return value

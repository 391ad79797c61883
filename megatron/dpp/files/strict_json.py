"""Reads JSON that people write: an object whose key stands twice is refused, since the last of its
values would win in silence.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from megatron.dpp.errors import shown


class RepeatedKey(ValueError):
    """A key stands twice in an object of a JSON text; the text names the key."""


def distinct(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    """The pairs as a dict; raises :class:`RepeatedKey`."""
    found = dict(pairs)
    if len(found) != len(pairs):
        left = dict(found)
        key = next(key for key, _ in pairs if left.pop(key, pairs) is pairs)
        raise RepeatedKey(f"the key {shown(key)} stands twice in an object")
    return found


def loads(text: str | bytes, *, parse_int: Callable[[str], int] | None = None) -> Any:
    """The value of a JSON text; ``parse_int`` makes a whole number of its digits.

    Raises:
        RepeatedKey: a key stands twice in an object.
        ValueError: it is no JSON.
        RecursionError: it is nested too deeply.
    """
    return json.loads(text, object_pairs_hook=distinct, parse_int=parse_int)

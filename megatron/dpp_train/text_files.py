"""Reads text and JSON files, which may be broken or hostile, with errors that name the file.

A file's size, the depth of its structures and the digits of its numbers are bounded.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron.dpp.errors import DataError, one_line
from megatron.dpp.files import strict_json
from megatron.dpp.files.safe_files import read_bytes

_STRUCTURES = (dict, list, tuple, set)
_DEEPEST = 64
_MOST_DIGITS = 100
"""transformers writes a number of 31 where a tokenizer has no ``model_max_length``."""


def read_text(
    path: str | Path, flag: str = "", *, most: int = 1 << 30, marked: bool = False
) -> str:
    """The file's text, without a mark of UTF-8 in front (BOM).

    Args:
        flag: the flag that names the file, for errors.
        most: bytes that the file may have.
        marked: keep the mark, as programs do that read the file, too.

    Raises:
        DataError: the file cannot be read, is too large, or is no UTF-8 text.
    """
    named = f"{flag} {path}".strip()
    try:
        text = read_bytes(path, most).decode("utf-8" if marked else "utf-8-sig")
        return text.replace("\r\n", "\n").replace("\r", "\n")
    except OSError as error:
        raise DataError(f"{named}: {error.strerror}{nearest_path(Path(path))}") from error
    except ValueError as error:
        why: str = one_line(error)  # of a path with a zero byte
        if isinstance(error, UnicodeDecodeError):
            why = f"not UTF-8 text ({error.reason} at byte {error.start})"
        raise DataError(f"{named}: {why}") from error


def read_json(path: str | Path, flag: str = "", *, most: int = 1 << 28) -> Any:
    """The value in a JSON file.

    Raises:
        DataError: as :func:`read_text` and :func:`parse_json`.
    """
    return parse_json(read_text(path, flag, most=most), f"{flag} {path}".strip())


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty where there is no file.

    Raises:
        DataError: as :func:`read_json`, or the file holds another value.
    """
    value = read_json(path) if path.is_file() else {}
    if not isinstance(value, dict):
        raise DataError(f"{path}: not a JSON object")
    return value


def parse_json(text: str | bytes, where: object) -> Any:
    """The value of a JSON text.

    Args:
        where: its name, for errors.

    Raises:
        DataError: it is no JSON, is nested too deeply, has a key twice in an object, or a whole
            number of too many digits.
    """
    try:
        value = strict_json.loads(text, parse_int=_whole)
    except strict_json.RepeatedKey as error:
        raise DataError(f"{where}: {error}") from error
    except RecursionError as error:
        raise DataError(f"{where}: nested more than {_DEEPEST} deep") from error
    except ValueError as error:
        raise DataError(f"{where}: not JSON ({one_line(error, 200)})") from error
    if any(depth > _DEEPEST for depth, _ in enumerate(_levels(value))):
        raise DataError(f"{where}: nested more than {_DEEPEST} deep")
    return value


def nearest_path(path: Path) -> str:
    """`` (nearest: ...)``: a file beside a missing ``path`` with a similar name, of token files
    another ``.idx``; empty without any."""
    try:
        if path.exists() or not path.parent.is_dir():
            return ""
        names = [each.name for each in path.parent.iterdir()]
    except (OSError, ValueError):  # a name that no file can have
        return ""
    if path.suffix == ".idx":
        names = [name for name in names if name.endswith(".idx")]
    near = difflib.get_close_matches(path.name, names, n=1, cutoff=0.6)
    return f" (nearest: {path.parent / near[0]})" if near else ""


def _whole(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits, at most {_MOST_DIGITS} are read")
    return int(digits)


def _levels(value: Any) -> Iterator[list[Any]]:
    """The structures of a value: itself, those directly inside, and so on."""
    level = [value] if isinstance(value, _STRUCTURES) else []
    while level:
        yield level
        values = [each.values() if isinstance(each, dict) else each for each in level]
        level = [each for inner in values for each in inner if isinstance(each, _STRUCTURES)]

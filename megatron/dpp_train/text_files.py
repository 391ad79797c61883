"""Reads text and YAML files that a user names, with errors that name the file."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

from megatron.dpp.errors import DataError, one_line
from megatron.dpp.safe_files import read_bytes


def read_text(path: str | Path, flag: str = "") -> str:
    """The file's text.

    Args:
        flag: the flag that names the file, for errors.

    Raises:
        DataError: the file cannot be read, or is no UTF-8 text.
    """
    named = f"{flag} {path}".strip()
    try:
        return read_bytes(path).decode().replace("\r\n", "\n").replace("\r", "\n")
    except OSError as error:
        raise DataError(f"{named}: {error.strerror}{nearest_path(Path(path))}") from error
    except UnicodeDecodeError as error:
        raise DataError(
            f"{named}: not UTF-8 text ({error.reason} at byte {error.start})"
        ) from error


def read_mapping(path: str | Path, flag: str = "") -> dict[str, Any]:
    """The mapping in a YAML file.

    Raises:
        DataError: the file cannot be read, or is no YAML mapping.
    """
    import yaml

    named = f"{flag} {path}".strip()
    try:
        loaded = yaml.safe_load(read_text(path, flag))
    except yaml.YAMLError as error:
        raise DataError(f"{named}: not YAML ({one_line(error)})") from error
    if not isinstance(loaded, dict):
        raise DataError(f"{named}: expected a mapping of settings, as in lr: 1.0e-4")
    return loaded


def nearest_path(path: Path) -> str:
    """`` (nearest: ...)``: a file beside a missing ``path`` with a similar name, of token files
    another ``.idx``; empty without any."""
    if path.exists() or not path.parent.is_dir():
        return ""
    names = [each.name for each in path.parent.iterdir()]
    if path.suffix == ".idx":
        names = [name for name in names if name.endswith(".idx")]
    near = difflib.get_close_matches(path.name, names, n=1, cutoff=0.6)
    return f" (nearest: {path.parent / near[0]})" if near else ""

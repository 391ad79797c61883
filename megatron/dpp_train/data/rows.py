"""Rows of data files, whatever their format, as lines of JSON: JSON lines, a JSON array, Parquet,
which needs pyarrow. A line is an object, or a bad one."""

from __future__ import annotations

import contextlib
import functools
import gzip
import importlib
import itertools
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from megatron.dpp.errors import DataError, one_line
from megatron.dpp.files import strict_json
from megatron.dpp.files.safe_files import open_to_read
from megatron.dpp_train.data.child import Child, Died, limit_time

JSON = (".json", ".jsonl", ".json.gz", ".jsonl.gz")
"""Endings of files of JSON lines, or of a JSON array."""
PARQUET = ".parquet"
_MARK = b"\xef\xbb\xbf"
"""What some editors put in front of UTF-8."""
_GZIP = b"\x1f\x8b"
_ROWS = 256
"""Rows of a table that are read at a time."""
_SECONDS = 120.0
"""Processor time for that many rows."""
_MEMORY_BYTES = 32 << 30
_LONGEST_LINE = 1 << 30


class Rows(NamedTuple):
    """The rows of a file.

    Args:
        lines: the JSON of each row, and the bytes of the file that were read until then.
        unit: ``line`` or ``row``, which is counted from 1.
    """

    lines: Iterator[tuple[bytes, int]]
    unit: str


def open_rows(path: Path) -> Rows:
    """The rows of a file.

    Raises:
        DataError: now or while rows are read, it is broken or of another format, or pyarrow is not
            installed.
    """
    if path.name.endswith(PARQUET):
        return Rows(_in_child(path), "row")
    array = _array(path)
    if array is not None:
        return Rows(_spread(array, path.stat().st_size), "row")
    return Rows(_json_lines(path), "line")


# --- JSON ---


def _json_lines(path: Path) -> Iterator[tuple[bytes, int]]:
    number = 0
    with open_to_read(path) as raw:
        stream = _opened(raw, path)
        while True:
            try:
                line = stream.readline(_LONGEST_LINE)
            except (OSError, EOFError, zlib.error) as error:
                raise DataError(f"{path}, behind line {number}: {one_line(error)}") from error
            if not line:
                return
            number += 1
            if len(line) == _LONGEST_LINE:
                raise DataError(f"{path}, line {number}: has {_LONGEST_LINE} bytes or more")
            yield line.removeprefix(_MARK) if number == 1 else line, raw.tell()


def _opened(raw: Any, path: Path) -> Any:
    packed = path.name.endswith(".gz") or raw.peek(2).startswith(_GZIP)
    return gzip.GzipFile(fileobj=raw) if packed else raw


def _array(path: Path) -> list[str] | None:
    """The JSON of each element of a file that is one array; None for lines."""
    with open_to_read(path) as raw:
        stream = _opened(raw, path)
        try:
            first = next((line for line in stream if line.strip()), b"").removeprefix(_MARK)
            if not first.lstrip().startswith(b"["):
                return None
            content = first + stream.read(_LONGEST_LINE)
            if len(content) >= _LONGEST_LINE:
                raise DataError(
                    f"{path}: an array of {_LONGEST_LINE} bytes or more; write JSON lines"
                )
            text = content.decode()
        except (OSError, EOFError, UnicodeDecodeError, zlib.error):
            return None  # which reading its lines names
    try:
        return [json.dumps(element) for element in strict_json.loads(text)]
    except strict_json.RepeatedKey as error:
        raise DataError(f"{path}: {error}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: begins as a JSON array, but is none ({error})") from error


def _spread(rows: list[str], size: int) -> Iterator[tuple[bytes, int]]:
    for number, row in enumerate(rows, 1):
        yield row.encode(), size * number // len(rows)


# --- tables ---


class _Reader:
    """Reads a table in a child, some rows for each request."""

    def __init__(self, path: Path) -> None:
        self._rows = _parquet(path)

    def __call__(self, _: None) -> list[tuple[bytes, int]]:
        limit_time(_SECONDS)
        return list(itertools.islice(self._rows, _ROWS))


def _in_child(path: Path) -> Iterator[tuple[bytes, int]]:
    """The rows of a table, read in a process of its own."""
    try:
        reader = Child(functools.partial(_Reader, path), memory=_MEMORY_BYTES)
        with contextlib.closing(reader):
            reader.send(None)
            while rows := reader.receive():
                yield from rows
                reader.send(None)
    except Died as died:
        raise DataError(f"{path}: cannot be read: {died}") from died


def _parquet(path: Path) -> Iterator[tuple[bytes, int]]:
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ModuleNotFoundError:
        raise DataError(f"{path}: needs pyarrow; pip install pyarrow") from None
    size = path.stat().st_size
    with open_to_read(path) as raw:
        try:
            file = parquet.ParquetFile(raw)
            number, count = 0, file.metadata.num_rows
            for batch in file.iter_batches(_ROWS):
                _check(batch, path)
                for row in batch.to_pylist():
                    number += 1
                    yield _line(row), size * number // count
        except DataError:
            raise
        except Exception as error:  # a broken file raises anything
            raise DataError(f"{path}: not a Parquet file ({one_line(error)})") from error


def _check(batch: Any, path: Path) -> None:
    """Refuse what pyarrow would read beyond its buffers, and a column that hides another one."""
    batch.validate(full=True)
    try:
        strict_json.distinct([(name, None) for name in batch.schema.names])
    except strict_json.RepeatedKey as error:
        raise DataError(f"{path}: {error}") from error


def _line(row: dict[str, Any]) -> bytes:
    return json.dumps(without_null(row), default=_text).encode()


def _text(value: Any) -> str:
    """The text of a value that JSON does not have. Tables of some programs hold texts as bytes; of
    bytes that are no UTF-8 the text holds half a surrogate pair, which makes the row a bad one."""
    return value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else str(value)


# --- lines ---


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

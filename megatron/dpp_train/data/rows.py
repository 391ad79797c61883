"""Rows of data files, whatever their format, as lines of JSON: JSON lines, a JSON array, Parquet,
and data sets of Hugging Face that were saved to disk. The last two need pyarrow."""

from __future__ import annotations

import functools
import gzip
import importlib
import itertools
import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.dpp.errors import DataError, one_line, shown
from megatron.dpp.files import strict_json
from megatron.dpp.files.safe_files import open_to_read
from megatron.dpp_train.data.child import Child, Died, limit_time
from megatron.dpp_train.data.json_lines import without_null
from megatron.dpp_train.text_files import read_object

JSON = (".json", ".jsonl", ".json.gz", ".jsonl.gz")
"""Endings of files of JSON lines, or of a JSON array."""
PARQUET = ".parquet"
LINES = "JSON lines"
"""Name of the usual format."""
_STATE, _SPLITS = "state.json", "dataset_dict.json"
_MARK = b"\xef\xbb\xbf"
"""What some editors put in front of UTF-8."""
_GZIP = b"\x1f\x8b"
_UNPACK = "is packed by {0}, and can be read unpacked or by gzip: {1} first"
_FOREIGN = {
    b"\x28\xb5\x2f\xfd": _UNPACK.format("Zstandard", "zstd -d"),
    b"\xfd7zXZ": _UNPACK.format("xz", "xz -d"),
    b"BZh": _UNPACK.format("bzip2", "bzip2 -d"),
    b"PK\x03\x04": _UNPACK.format("zip", "unzip"),
    b"\xff\xfe": "is UTF-16, expected UTF-8: iconv -f UTF-16 -t UTF-8 first",
    b"\xfe\xff": "is UTF-16, expected UTF-8: iconv -f UTF-16 -t UTF-8 first",
}
"""The first bytes of files of other formats, and their text."""
_ROWS = 256
"""Rows of a table that are read at a time."""
_SECONDS = 120.0
"""Processor time for that many rows."""
_MEMORY_BYTES = 32 << 30
_LONGEST_LINE = 1 << 30


@dataclass(frozen=True)
class Rows:
    """The rows of a file or a folder.

    Args:
        lines: the JSON of each row, and the bytes of the input that were read until then.
        name: of the format, for people.
        unit: ``line`` or ``row``, which is counted from 1.
    """

    lines: Iterator[tuple[bytes, int]]
    name: str
    unit: str


def is_rows(path: str) -> bool:
    """``path`` has the ending of such a file, or is a data set's folder."""
    folder = Path(path)
    return path.endswith((*JSON, PARQUET)) or any(
        (folder / name).is_file() for name in (_STATE, _SPLITS)
    )


def files_of(path: Path) -> list[Path]:
    """The files that hold the rows at ``path``.

    Raises:
        DataError: nothing is there, or a folder that is no data set.
    """
    if not path.is_dir():
        return [path]
    if (path / _SPLITS).is_file():
        path = _split_of(path)
    if not (path / _STATE).is_file():
        raise DataError(
            f"{path}: neither a file nor a data set saved to disk (it has no {_STATE}); name files "
            "in it"
        )
    state = read_object(path / _STATE)
    if state.get("_indices_data_files"):
        raise DataError(f"{path}: its rows are chosen by indices; save it after flatten_indices()")
    try:
        names = [str(each["filename"]) for each in state["_data_files"]]
    except (KeyError, TypeError) as error:
        raise DataError(f"{path / _STATE}: names no data files ({error!r})") from error
    if not names:
        raise DataError(f"{path / _STATE}: names no data files")
    for name in names:  # the folder may be a stranger's, whose rows are trained on
        if Path(name).name != name or name in ("", "..") or "\0" in name:
            raise DataError(f"{path / _STATE}: names {shown(name)}, expected a file beside it")
    return [path / name for name in names]


def size_of(path: Path) -> int:
    """Bytes of the files at ``path``."""
    return sum(file.stat().st_size for file in files_of(path))


def open_rows(path: Path) -> Rows:
    """The rows at ``path``.

    Raises:
        DataError: now or while rows are read, a file is broken or of another format, or pyarrow is
            not installed.
    """
    if path.is_dir():
        files = files_of(path)
        name = "a data set of Hugging Face"
        if files[0].parent != path:
            name += f", its split {files[0].parent.name}"
        return Rows(_in_child(path, _arrow, files), name, "row")
    if path.name.endswith(PARQUET):
        return Rows(_in_child(path, _parquet, path), "Parquet", "row")
    array = _array(path)
    if array is not None:
        return Rows(_spread(array, path.stat().st_size), "a JSON array", "row")
    return Rows(_json_lines(path), LINES, "line")


def _split_of(path: Path) -> Path:
    splits = read_object(path / _SPLITS).get("splits")
    names = [str(each) for each in splits] if isinstance(splits, list) else []
    if "train" in names or len(names) == 1:
        return path / ("train" if "train" in names else names[0])
    raise DataError(f"{path}: holds the splits {', '.join(names) or 'none'}; name one, as {path}/x")


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
    begin = raw.peek(4)
    for mark, what in _FOREIGN.items():
        if begin.startswith(mark):
            raise DataError(f"{path}: {what}")
    packed = path.name.endswith(".gz") or begin.startswith(_GZIP)
    return gzip.GzipFile(fileobj=raw) if packed else raw


def _array(path: Path) -> list[str] | None:
    """The JSON of each element of a file that is one array; None for lines."""
    with open_to_read(path) as raw:
        stream = _opened(raw, path)
        try:
            first = next((line for line in stream if line.strip()), b"").removeprefix(_MARK)
            if not first.lstrip().startswith(b"["):
                return None
            text = (first + stream.read()).decode()
        except (OSError, EOFError, UnicodeDecodeError, zlib.error):
            return None  # which reading its lines names
    try:
        json.loads(text)
        return _elements(text)
    except (ValueError, RecursionError) as error:
        if _is_json(first):
            return None
        raise DataError(f"{path}: begins as a JSON array, but is none ({error})") from error


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _elements(array: str) -> list[str]:
    """The texts of the elements of a JSON array, as they stand there."""
    decoder, found = json.JSONDecoder(), []
    start = _next(array, array.index("[") + 1)
    while array[start] != "]":
        end = decoder.raw_decode(array, start)[1]
        found.append(array[start:end])
        start = _next(array, end)
    return found


def _next(text: str, start: int) -> int:
    """The index of the next value in a JSON array, or of the array's end."""
    while text[start] in " \t\r\n,":
        start += 1
    return start


def _spread(rows: list[str], size: int) -> Iterator[tuple[bytes, int]]:
    for number, row in enumerate(rows, 1):
        yield row.encode(), size * number // len(rows)


# --- tables ---


class _Reader:
    """Reads a table in a child, some rows for each request."""

    def __init__(self, read: Callable[[Any], Iterator[tuple[bytes, int]]], source: Any) -> None:
        self._rows = read(source)

    def __call__(self, _: None) -> list[tuple[bytes, int]]:
        limit_time(_SECONDS)
        return list(itertools.islice(self._rows, _ROWS))


def _in_child(
    path: Path, read: Callable[[Any], Iterator[tuple[bytes, int]]], source: Any
) -> Iterator[tuple[bytes, int]]:
    """The rows of a table, read in a process of its own."""
    reader: Child | None = None
    try:
        reader = Child(functools.partial(_Reader, read, source), memory=_MEMORY_BYTES)
        while True:
            reader.send(None)
            rows = reader.receive()
            if not rows:
                return
            yield from rows
    except Died as died:
        raise DataError(f"{path}: cannot be read: {died}") from died
    finally:
        if reader is not None:
            reader.close()


def _parquet(path: Path) -> Iterator[tuple[bytes, int]]:
    size = path.stat().st_size
    parquet = _arrow_module("pyarrow.parquet", path)
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


def _arrow(files: list[Path]) -> Iterator[tuple[bytes, int]]:
    done = 0
    for path in files:
        ipc = _arrow_module("pyarrow.ipc", path)
        try:
            with open_to_read(path) as raw:
                for batch in ipc.open_stream(raw):
                    _check(batch, path)
                    for start in range(0, batch.num_rows, _ROWS):
                        for row in batch.slice(start, _ROWS).to_pylist():
                            yield _line(row), done + raw.tell()
        except DataError:
            raise
        except Exception as error:  # a broken file raises anything
            raise DataError(f"{path}: not an Arrow file ({one_line(error)})") from error
        done += path.stat().st_size


def _check(batch: Any, path: Path) -> None:
    """Refuse what pyarrow would read beyond its buffers, and a column that hides another one."""
    batch.validate(full=True)
    try:
        strict_json.distinct([(name, None) for name in batch.schema.names])
    except strict_json.RepeatedKey as error:
        raise DataError(f"{path}: {error}") from error


def _arrow_module(name: str, path: Path) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        raise DataError(f"{path}: needs pyarrow; pip install pyarrow") from None


def _line(row: dict[str, Any]) -> bytes:
    return json.dumps(without_null(row), default=_text).encode()


def _text(value: Any) -> str:
    """The text of a value that JSON does not have. Tables of some programs hold texts as bytes; of
    bytes that are no UTF-8 the text holds half a surrogate pair, which makes the row a bad one."""
    return value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else str(value)

"""Checksums of a checkpoint's files: ``checksums.json``, written before a checkpoint is committed.

Each rank notes the CRC-32 of the files that it wrote; rank 0 merges the notes and adds what nobody
noted. A load compares: a file whose bits changed on disk is refused by name.
"""

from __future__ import annotations

import contextlib
import json
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path

from megatron.dpp.errors import DataError
from megatron.dpp.safe_files import open_text_to_write, open_to_read, read_bytes
from megatron.dpp_train.checkpoint import durable
from megatron.dpp_train.text_files import parse_json

NAME = "checksums.json"
_NOTES = ".checksums-"
_BLOCK_BYTES = 1 << 20
Sums = dict[str, str]
"""File, relative to the checkpoint's directory -> CRC-32 in hexadecimal and size in bytes."""


def note(target: Path, paths: Iterable[Path], rank: int) -> None:
    """Leave the checksums of files that this rank wrote in ``target`` for :func:`write`."""
    sums = {str(path.relative_to(target)): _sum(path) for path in paths}
    path = target / f"{_NOTES}{rank}"
    with durable.naming(path), open_text_to_write(path) as file:
        file.write(json.dumps(sums))


def write(target: Path) -> None:
    """Write the checksums of all files below ``target``; when all ranks are done, on one.

    A note that is torn counts as none: a background writer may fail in the middle of it.
    """
    sums: Sums = {}
    for path in target.glob(f"{_NOTES}*"):
        with durable.naming(path), contextlib.suppress(ValueError):
            sums |= parse_json(read_bytes(path), path)
        path.unlink()
    for path in sorted(each for each in target.rglob("*") if each.is_file()):
        name = str(path.relative_to(target))
        if name not in sums and name != NAME:
            sums[name] = _sum(path)
    sums = dict(sorted(sums.items()))
    text = json.dumps({"crc32": sums, "own": _own(sums)}, indent=0)
    durable.write_text(target / NAME, text)


def read(path: Path) -> Sums | None:
    """The checksums of the checkpoint in ``path``; None where it has none.

    Raises:
        DataError: the file of checksums is damaged itself.
    """
    file = path / NAME
    try:
        text = read_bytes(file)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DataError(f"{file}: unreadable ({error}); the checkpoint is damaged") from error
    content = parse_json(text, f"{file}: damaged")
    sums = content.get("crc32") if isinstance(content, dict) else None
    if not isinstance(sums, dict) or not all(_is_sum(*each) for each in sums.items()):
        raise DataError(f"{file}: holds no checksums of files; the checkpoint is damaged")
    if content.get("own") != _own(sums):
        raise DataError(f"{file}: its own checksum does not match; the checkpoint is damaged")
    return sums


_ADVICE = "load the checkpoint of another iteration"


def check(path: Path, sums: Sums, names: Sequence[str], advice: str = _ADVICE) -> None:
    """Compare files of the checkpoint in ``path`` with their checksums.

    Args:
        names: those to compare, of ``sums``.
        advice: what to do about a file that differs, for errors.

    Raises:
        DataError: naming the first file that is missing or differs.
    """
    for name in names:
        try:
            found = _sum(path / name)
        except OSError as error:
            raise DataError(
                f"{path / name}: {error.strerror}; the checkpoint is damaged"
            ) from error
        if found != sums[name]:
            raise DataError(
                f"{path / name}: damaged since it was saved (CRC-32 and size are {found}, "
                f"{NAME} has {sums[name]}); {advice}"
            )


def _sum(path: Path) -> str:
    crc = size = 0
    with durable.naming(path), open_to_read(path) as file:
        while block := file.read(_BLOCK_BYTES):
            crc, size = zlib.crc32(block, crc), size + len(block)
    return f"{crc:08x} {size}"


def _is_sum(name: str, value: object) -> bool:
    """True for a file below the checkpoint's directory, with its checksum."""
    inside = not Path(name).is_absolute() and ".." not in Path(name).parts and "\0" not in name
    return inside and isinstance(value, str)


def _own(sums: Sums) -> str:
    return f"{zlib.crc32(json.dumps(sums, sort_keys=True).encode()):08x}"

"""Small files of a checkpoint that outlive a power cut, and errors that name their file."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from megatron.dpp.safe_files import open_text_to_write

_ROOM = 1 << 20
"""Bytes. With less free space a failed write is taken for one to a full disk."""


def no_room(folder: Path, named: str) -> str:
    """Text about a full disk, which errors of PyTorch do not mention; else empty.

    Args:
        folder: that was to be written, or made.
        named: what the user calls it.
    """
    try:
        while not folder.exists():
            folder = folder.parent
        usage = shutil.disk_usage(folder)
    except OSError:  # the disk does not even tell
        return ""
    if usage.free >= _ROOM:
        return ""
    return (
        f" (no space left on device: {usage.free} of {usage.total} bytes are free; make room, or "
        f"choose another {named})"
    )


@contextlib.contextmanager
def naming(path: Path, *others: type[Exception]) -> Iterator[None]:
    """Around work on a file: gives an error without a file's name this one.

    The kernel names no file when a write, a read or an ``fsync`` fails.

    Args:
        others: errors beside OSError that the work raises for the file; they become one.

    Raises:
        OSError: with ``path``.
    """
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
    except others as error:
        raise OSError(f"{path}: {error}") from error


def write_text(path: Path, text: str) -> None:
    """Write a file of UTF-8 text that is on the disk when this returns.

    Raises:
        OSError: with the file's name.
    """
    with naming(path), open_text_to_write(path) as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())

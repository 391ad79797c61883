"""Opens files in directories where others may write too.

Whoever may write into a directory can put a link, a named pipe or a device where a run expects a
file of its own. Through a link the run would overwrite another file of its user; at a pipe it would
wait for ever.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TextIO

_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFLNK: "a link",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
_FLAGS = os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
"""Without the first, ``open`` waits for the other end of a named pipe."""
_POINTER = b"version https://git-lfs.github.com/spec/"
"""The start of what Git LFS leaves in the place of a file that it has not fetched."""


def open_to_read(path: str | Path) -> io.BufferedReader:
    """Open a regular file for reading; links are followed.

    Raises:
        OSError: it cannot be opened, is a pipe, a device or a directory, or a pointer of Git LFS.
    """
    check_name(path)
    return open(path, "rb", opener=_open_regular)


def read_bytes(path: str | Path, most: int = 1 << 30) -> bytes:
    """The content of a regular file of at most ``most`` bytes; raises as :func:`open_to_read`."""
    with open_to_read(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"has more than {most} bytes", str(path))
    return content


def open_to_write(
    path: str | Path, *, append: bool = False, private: bool = False, buffered: bool = True
) -> IO[bytes]:
    """Open a regular file of this user for writing; a missing one is made.

    Args:
        append: keeps the content, where the file is emptied otherwise.
        private: gives it mode 0600.

    Raises:
        OSError: it cannot be opened, is no regular file but a link, say, has a second name, or
            belongs to another user. It is left as it is then.
    """

    check_name(path)

    def opened(path: str, _: int) -> int:
        return _open_own(path, append=append, private=private)

    return open(path, "ab" if append else "wb", -1 if buffered else 0, opener=opened)


@contextlib.contextmanager
def replacing(path: str) -> Iterator[IO[bytes]]:
    """Write a file that takes the place of ``path`` when it is whole. Who has the earlier one open
    or mapped keeps it.

    Raises:
        OSError: as :func:`open_to_write`.
    """
    with contextlib.suppress(FileNotFoundError):
        if reason := _strange(os.lstat(path)):
            raise _refusal(reason, path)
    scratch = f"{path}.{secrets.token_hex(4)}.new"
    try:
        with open_to_write(scratch) as file:
            yield file
        os.replace(scratch, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(scratch)
        if isinstance(error, OSError) and error.filename in (None, scratch):
            error.filename = path  # a full disk does not say whose
        raise


def open_text_to_write(path: str | Path, *, append: bool = False) -> TextIO:
    """:func:`open_to_write` for UTF-8 text. What UTF-8 does not have, as some bytes of a file's
    name, is written as an escape."""
    file = open_to_write(path, append=append)
    return io.TextIOWrapper(file, encoding="utf-8", errors="backslashreplace")


def check_name(path: str | Path) -> None:
    """Raises an OSError for what no file can be called."""
    try:
        name = os.fsencode(path)
    except UnicodeEncodeError as error:
        raise _refusal("is no name of a file", ascii(str(path))) from error
    if b"\0" in name:
        raise _refusal("is no name of a file", ascii(str(path)))


def _open_regular(path: str, _: int) -> int:
    """A descriptor of a regular file, for reading."""
    try:
        fd = os.open(path, os.O_RDONLY | _FLAGS)
    except OSError as error:
        if error.errno == errno.ENXIO:
            raise _refusal("is a socket, expected a regular file", path) from error
        raise
    kind = stat.S_IFMT(os.fstat(fd).st_mode)
    if kind not in (stat.S_IFREG, stat.S_IFDIR):  # Python refuses a directory
        os.close(fd)
        raise _refusal(f"is {_KINDS.get(kind, 'no file')}, expected a regular file", path)
    if kind == stat.S_IFREG and os.pread(fd, len(_POINTER), 0) == _POINTER:
        os.close(fd)
        raise _refusal("is a pointer of Git LFS: get the file with git lfs pull", path)
    return fd


def _open_own(path: str, *, append: bool, private: bool) -> int:
    """A descriptor of a regular file of this user, for reading and writing."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | (os.O_APPEND if append else 0) | _FLAGS
    try:
        fd = os.open(path, flags, 0o600 if private else 0o666)
    except OSError as error:
        with contextlib.suppress(FileNotFoundError):
            reason = _strange(os.lstat(path))
            if reason:
                raise _refusal(reason, path) from error
        raise
    try:
        found = os.fstat(fd)
        reason = _strange(found)
        if reason:
            raise _refusal(reason, path)
        if private and stat.S_IMODE(found.st_mode) != 0o600:
            with contextlib.suppress(OSError):  # a file system without modes
                os.fchmod(fd, 0o600)
        if not append:
            os.ftruncate(fd, 0)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _strange(found: os.stat_result) -> str:
    """The reason why this user does not write to a file; empty without one."""
    kind = stat.S_IFMT(found.st_mode)
    if kind != stat.S_IFREG:
        return f"is {_KINDS.get(kind, 'no file')}; remove it, or name another place"
    if found.st_nlink > 1:
        return "has a second name (hard link); remove it, or name another place"
    if _is_of_another(found):
        return f"belongs to user number {found.st_uid}; remove it, or name another place"
    return ""


def _is_of_another(found: os.stat_result) -> bool:
    """True for another user's file. What root writes may get another owner, as over NFS."""
    return os.geteuid() not in (0, found.st_uid)


def _refusal(reason: str, path: str) -> OSError:
    return OSError(errno.EINVAL, reason, path)

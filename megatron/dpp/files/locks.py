"""Locks on files and directories that one run at a time may write.

A lock is an ``flock`` of an open file, which also names host and process. The kernel drops it when
that process ends in any way. NFS passes it on to the server unless mounted with ``local_lock``.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import json
import os
import re
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from megatron.dpp.errors import DataError
from megatron.dpp.files.safe_files import check_name, open_to_read, open_to_write

LOCK_NAME = ".lock"
"""File in a directory that only one run may write."""
_PATIENCE_S = 0.2
"""Longer than a probe of another process holds a lock, and than a killed one takes to end."""
_UNSUPPORTED = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
_OWNER = re.compile(rb'"host": ?"([^"]*)", ?"process": ?(\d{1,18})')
_HEAD_BYTES = 4096


class Lock:
    """A held lock; as a context it is released at the end."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def close(self) -> None:
        """Release the lock; calling it twice is fine."""
        if self._file.closed:
            return
        self._file.truncate(0)  # released, not left by a process that died
        fcntl.flock(self._file, fcntl.LOCK_UN)  # for children too that inherited the file
        self._file.close()

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def lock_directory(directory: str | Path, flag: str) -> Lock:
    """Let no other run write into ``directory``, which is made where it is missing.

    Args:
        flag: the flag that names the directory, for errors.

    Raises:
        DataError: another process holds it, it cannot be written, or its lock is no file of this
            user, which stays as it is then.
    """
    path = Path(directory) / LOCK_NAME
    try:
        check_name(path)
        was_there = path.parent.exists()
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open_to_write(path, append=True, private=True, buffered=False)
    except OSError as error:
        where = f"{path}: " if error.filename == str(path) else ""
        raise DataError(f"{flag} {directory}: {where}{error.strerror}") from error
    lock_file(file, f"{flag} {directory}")
    left = _owner(file)
    owner = {"host": socket.gethostname(), "process": os.getpid(), "since": int(time.time())}
    try:
        file.truncate(0)
        file.write(json.dumps(owner).encode() + b"\n")
    except OSError as error:
        if left is None:  # nothing stays of an attempt on a full disk
            with contextlib.suppress(OSError):
                path.unlink()
                if not was_there:
                    path.parent.rmdir()
        file.close()
        raise DataError(f"{flag} {directory}: {error.strerror}") from error
    return Lock(file)


def lock_file(file: IO[bytes], named: str) -> None:
    """Lock an open file until it is closed.

    Args:
        file: readable; its head names its owner where it is locked already.
        named: what the user calls it, for errors.

    Raises:
        DataError: another process holds the lock; ``file`` is closed then.
    """
    if not _locked(file):
        with file:
            raise _taken(file, named)


@contextlib.contextmanager
def scratch_directory(parent: Path, prefix: str) -> Iterator[Path]:
    """A directory for files on their way, which goes away at the end. Others of this name that a
    killed process of this host left in ``parent`` go away as well.

    Raises:
        OSError: it cannot be made.
        DataError: it cannot be locked.
    """
    for left in parent.glob(f"{glob.escape(prefix)}*"):
        if _is_left(left):
            shutil.rmtree(left, ignore_errors=True)
    path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    try:
        with lock_directory(path, "scratch directory"):
            yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _is_left(directory: Path) -> bool:
    """True for a directory of this user whose lock names a process of this host that is gone."""
    try:
        file = open_to_read(directory / LOCK_NAME)
    except OSError:
        return False
    with file:
        owner = _owner(file)
        if owner is None or owner[0] != socket.gethostname():
            return False
        own = directory.lstat().st_uid == os.geteuid() and not directory.is_symlink()
        return own and not Path(f"/proc/{owner[1]}").exists() and _locked(file)


def _locked(file: IO[bytes]) -> bool:
    """True once the file is locked, or where the file system has no locks; False where others hold
    it for longer than :data:`_PATIENCE_S`."""
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _UNSUPPORTED:
                return True
        else:
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)


def _owner(file: IO[bytes]) -> tuple[str, int] | None:
    """Host and process that the file names."""
    try:
        found = _OWNER.search(os.pread(file.fileno(), _HEAD_BYTES, 0))
    except OSError:
        return None
    return (found[1].decode(errors="replace"), int(found[2])) if found else None


def _taken(file: IO[bytes], named: str) -> DataError:
    owner = _owner(file)
    who = f"process {owner[1]} on host {owner[0]}" if owner else "another process"
    return DataError(f"{named}: {who} writes there; name another directory, or end that run first")

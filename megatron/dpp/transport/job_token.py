"""The job's token: a secret that all ranks know, and how they come to know it.

A file that the user names, a private file of this host, or the job's store. Others may be able to
write into the store: no rank opens a path from there, and none deletes what another one made.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import re
import secrets
import stat
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from megatron.dpp.errors import ConfigError, ProtocolError, SetupError, setting

_SHORTEST_TOKEN = 16
_MOST_TOKEN_BYTES = 1 << 16
_PREFIX = "dpp-token-"
_NAME = re.compile(rf"{_PREFIX}\w{{1,64}}", re.ASCII)
_LOOK_SECONDS = 0.05
_FORGOTTEN_SECONDS = 3600.0
"""Age from which a token's file is removed if the process that made it has ended."""


def read_token(path: Path) -> bytes:
    """The job's secret from a file that only its owner may read, and that is ours.

    Raises:
        ConfigError: there is no such file, or it is of another kind, owner, mode or length.
    """
    return _read(path, 0)


def _read(path: Path, flags: int) -> bytes:
    try:
        # A named pipe would let open() wait for a writer.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | flags)
    except (OSError, ValueError) as error:  # a path with a zero byte
        raise ConfigError(f"token file {path}: {getattr(error, 'strerror', error)}") from error
    with os.fdopen(fd, "rb") as file:
        _require_private(path, os.fstat(fd))
        try:
            content = file.read(_MOST_TOKEN_BYTES + 1)
        except OSError as error:
            raise ConfigError(f"token file {path}: {error.strerror}") from error
    if len(content) > _MOST_TOKEN_BYTES:
        raise ConfigError(f"token file {path} has more than {_MOST_TOKEN_BYTES} bytes")
    secret = content.strip()
    if len(secret) < _SHORTEST_TOKEN:
        raise ConfigError(f"token file {path} holds {len(secret)} bytes; 16 are the least")
    return secret


def _require_private(path: Path, facts: os.stat_result) -> None:
    if not stat.S_ISREG(facts.st_mode):
        raise ConfigError(f"token file {path} is not a regular file")
    if facts.st_uid != os.getuid():
        raise ConfigError(
            f"token file {path} belongs to user {facts.st_uid}; it must be ours ({os.getuid()})"
        )
    if (mode := stat.S_IMODE(facts.st_mode)) & 0o077:
        raise ConfigError(f"token file {path} has mode {mode:o}; chmod 600 it")


def read_shared_token(rank: int, name: str) -> bytes:
    """The secret from the file that a :class:`SecretFile` of this host's ranks has made.

    Args:
        rank: this rank, for errors.
        name: the file's name, from anybody.

    Raises:
        ProtocolError: it is not the name of such a file.
        SetupError: there is no such file, or it is not one that a rank of ours makes.
    """
    if not _NAME.fullmatch(name):
        raise ProtocolError(
            f"rank {rank}: the store names {name[:80]!r} as the file of the job's token, expected "
            f"{_PREFIX}...; another process writes into it"
        )
    try:
        return _read(Path(tempfile.gettempdir(), name), os.O_NOFOLLOW)
    except (ConfigError, OSError) as error:  # OSError: there is no temporary directory
        token_file = setting("token_file")
        raise SetupError(
            f"rank {rank}: the job's token, from the store: {error}. All ranks of a host need one "
            f"temporary directory (TMPDIR), or a file of their own ({token_file})",
            token_file,
        ) from error


class SecretFile:
    """A new file with a secret in the temporary directory, for this user's processes alone.

    The process that made it deletes it: ``delete_when`` lets a thread do so, else it ends with the
    process. It is locked meanwhile, so that the next job finds the files of killed processes.

    Attributes:
        name: of the file, in the temporary directory.
    """

    def __init__(self, rank: int) -> None:
        try:
            _remove_forgotten()
            self._fd, path = tempfile.mkstemp(prefix=_PREFIX)
            self._path, self._owner = Path(path), os.getpid()
            self._deleted = threading.Lock()  # for ever with the thread that deletes
            atexit.register(self.delete)
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.write(self._fd, secrets.token_hex(32).encode())
        except OSError as error:
            raise SetupError(
                f"rank {rank}: cannot write the job's token into the temporary directory "
                f"(TMPDIR): {error}"
            ) from error
        self.name = self._path.name

    def delete(self) -> None:
        """Delete the file, in the process that made it; may be called twice."""
        if os.getpid() != self._owner or not self._deleted.acquire(blocking=False):
            return
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)
        os.close(self._fd)
        atexit.unregister(self.delete)

    def delete_when(self, is_read: Callable[[], bool], seconds: float) -> None:
        """Start a thread that deletes the file once ``is_read`` holds; it looks for ``seconds``."""
        until = time.monotonic() + seconds

        def watch() -> None:
            with contextlib.suppress(RuntimeError, ValueError):  # the store is gone, or broken
                while time.monotonic() < until:
                    if is_read():
                        self.delete()
                        return
                    time.sleep(_LOOK_SECONDS)

        threading.Thread(target=watch, name="dpp-token", daemon=True).start()


def _remove_forgotten() -> None:
    """Remove the files of our processes that were killed before they could do so.

    Nothing but a name in the temporary directory goes, whatever it refers to.
    """
    paths: list[str] = []
    with contextlib.suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        paths = [entry.path for entry in entries if _NAME.fullmatch(entry.name)]
    for path in paths:
        with contextlib.suppress(OSError):  # another user's, or still locked
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
            with os.fdopen(fd, "rb"):
                facts = os.fstat(fd)
                is_ours = stat.S_ISREG(facts.st_mode) and facts.st_uid == os.getuid()
                if is_ours and time.time() - facts.st_mtime > _FORGOTTEN_SECONDS:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.unlink(path)

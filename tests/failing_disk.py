"""A folder whose file-system calls are counted, and one of which fails or ends the process.

Python's own calls are wrapped in :mod:`os` and :mod:`io`, where pathlib and shutil look them up. A
write that fails has written half of its bytes.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

READS = ("scandir", "listdir", "stat", "lstat", "statvfs", "read")
CALLS = (
    "mkdir", "rename", "replace", "unlink", "remove", "rmdir", "open", "scandir", "listdir", "stat",
    "lstat", "statvfs", "link", "symlink", "truncate", "utime", "chmod", "fsync",
)  # fmt: skip
KILLED = 77
"""Exit status of a process that :meth:`Disk.kill_at` ended."""


class Disk:
    """The calls on files below a folder.

    Attributes:
        calls: name and path of each so far.
    """

    def __init__(self, patch: pytest.MonkeyPatch, root: Path) -> None:
        self.calls: list[tuple[str, str]] = []
        self._root = str(root)
        self._at, self._lasts, self._kills, self._off = -1, False, False, False
        for name in CALLS:
            patch.setattr(os, name, self._wrapped(name, getattr(os, name)))
        patch.setattr(io, "open", self._opener(io.open))
        patch.setattr(builtins, "open", io.open)
        patch.setattr(torch, "save", self._torch_save(torch.save))

    def fail_at(self, number: int, *, lasts: bool = False) -> None:
        """Let the call of this number fail, and all after it if it ``lasts``."""
        self.calls.clear()
        self._at, self._lasts, self._kills, self._off = number, lasts, False, False

    def kill_at(self, number: int) -> None:
        """Let the call of this number end the process at once; reads do not count."""
        self.fail_at(number)
        self._kills = True

    def heal(self) -> None:
        """Let calls succeed, and count them no longer."""
        self._off = True

    def _call(self, name: str, path: str, before: Callable[[], object] = lambda: None) -> None:
        """Counts a call, which fails if it is its turn; ``before`` does a part of it then."""
        if self._off or not path.startswith(self._root) or (self._kills and name in READS):
            return
        number = len(self.calls)
        self.calls.append((name, path))
        if number == self._at or (self._lasts and number > self._at >= 0):
            before()
            if self._kills:
                os._exit(KILLED)
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)

    def _wrapped(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*given: Any, **options: Any) -> Any:
            path = self._path(given[0] if given else ".", options.get("dir_fd"))
            try:
                self._call(name, path)
            except OSError as error:
                if name == "fsync":  # it is given a number, and can name no file
                    raise OSError(error.errno, error.strerror) from None
                raise
            return call(*given, **options)

        return wrapped

    @staticmethod
    def _path(given: Any, folder: int | None) -> str:
        if isinstance(given, int):
            return os.readlink(f"/proc/self/fd/{given}")
        if folder is not None:
            return os.path.join(os.readlink(f"/proc/self/fd/{folder}"), os.fspath(given))
        return os.path.abspath(os.fspath(given))

    def _opener(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def opened(file: Any, mode: str = "r", *rest: Any, **options: Any) -> Any:
            if isinstance(file, int):
                return original(file, mode, *rest, **options)
            path = self._path(file, None)
            self._call("open", path)
            if self._off or not path.startswith(self._root):
                return original(file, mode, *rest, **options)
            raw = _Raw(path, mode.replace("t", ""), self._call, options.get("opener"))
            if options.get("buffering") == 0 or rest[:1] == (0,):
                return raw
            buffered = io.BufferedWriter(raw) if raw.writable() else io.BufferedReader(raw)
            if "b" in mode:
                return buffered
            return io.TextIOWrapper(buffered, encoding=options.get("encoding"))

        return opened

    def _torch_save(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """PyTorch writes a file that it is given by name without Python's calls."""

        def save(state: Any, path: Any, *rest: Any, **options: Any) -> None:
            if hasattr(path, "write"):
                original(state, path, *rest, **options)
                return
            data = io.BytesIO()
            original(state, data, *rest, **options)
            try:
                with Path(path).open("wb") as file:
                    file.write(data.getvalue())
            except OSError as error:
                raise RuntimeError(f"PytorchStreamWriter failed: {error.strerror}") from None

        return save


class _Raw(io.FileIO):
    def __init__(
        self, path: str, mode: str, call: Callable[..., None], opener: Callable[..., int] | None
    ) -> None:
        super().__init__(path, mode.replace("b", ""), opener=opener)
        self._path, self._call = path, call

    def write(self, data: Any) -> int:
        def half() -> None:
            super(_Raw, self).write(bytes(data)[: len(data) // 2])

        self._nameless("write", half)
        return super().write(data)

    def readinto(self, buffer: Any) -> Any:
        self._nameless("read")
        return super().readinto(buffer)

    def readall(self) -> Any:
        self._nameless("read")
        return super().readall()

    def _nameless(self, name: str, before: Callable[[], object] = lambda: None) -> None:
        try:
            self._call(name, self._path, before)
        except OSError as error:  # the kernel names no file here
            raise OSError(error.errno, error.strerror) from None


def fork(work: Callable[[], object]) -> int:
    """Exit status of a fork of this process that does ``work`` and then ends: 0, or :data:`KILLED`;
    1 where ``work`` raises."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

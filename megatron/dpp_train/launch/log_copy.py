"""Copies the output of a run into its log as well, in a process of its own.

:func:`copy_output` starts that process, and torchrun takes its place: :class:`LogWatch` is
torchrun's side. Where the copying process is killed, torchrun goes on with its work: else each line
of a rank would be an error, which nobody could read.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import selectors
import signal
import sys
import threading
import tty
from pathlib import Path
from typing import IO, Any

from megatron.dpp.errors import DataError
from megatron.dpp.locks import Lock
from megatron.dpp.processes import stopped
from megatron.dpp.safe_files import open_to_write

_READ_BYTES = 1 << 16
_WATCH = "DPP_LOG_COPY"
"""Variable by which torchrun gets what :class:`LogWatch` needs."""
_LAST_SECONDS = 5.0
_NAMES = ("standard output", "standard error")


def copy_output(log: Path, lock: Lock | None = None) -> dict[str, str]:
    """Copy what this process and its children print from now on into ``log`` as well.

    A child process copies until all writers have closed. When the reader of the output has left, as
    ``head`` does, it says so and ends the run by SIGTERM; an output that cannot be written, as on a
    full disk, is left out. :class:`LogWatch` in the program that replaces this process goes on
    where the child is killed.

    Args:
        lock: of the run's directory; the child releases it at its end.

    Returns:
        The variables by which that program finds the child.

    Raises:
        DataError: the log cannot be opened, or is no file of this user.
    """
    try:
        file = open_to_write(log, append=True, buffered=False)
    except OSError as error:
        raise DataError(f"{log}: {error.strerror}") from error
    sys.stdout.flush()
    sys.stderr.flush()
    streams = {_channel(1): 1, _channel(2): 2}
    torchrun = os.getpid()
    if pid := os.fork():
        kept = {read_end: os.dup(stream) for (read_end, _), stream in streams.items()}
        copied = os.dup(file.fileno())
        file.close()
        for fd in (*kept, *kept.values(), copied):
            os.set_inheritable(fd, True)
        for (_, write_end), stream in streams.items():
            os.dup2(write_end, stream)
            os.close(write_end)
        watch = {"pid": pid, "streams": list(kept.items()), "file": copied, "log": str(log)}
        return {_WATCH: json.dumps(watch)}
    status = 1
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # the ranks' last lines are to come
        for _, write_end in streams:
            os.close(write_end)
        ends = {read_end: stream for (read_end, _), stream in streams.items()}
        _copy(ends, file, str(log), torchrun)
        status = 0
    finally:
        if lock is not None:
            lock.close()
        os._exit(status)


def _channel(stream: int) -> tuple[int, int]:
    """Both ends of a pipe; of a terminal where ``stream`` is one, so that progress is shown."""
    if not os.isatty(stream):
        return os.pipe()
    master, slave = os.openpty()
    tty.setraw(slave)
    return master, slave


def _copy(streams: dict[int, int], file: IO[bytes], log: str, torchrun: int) -> None:
    """Copy from each read end to its stream and into the log, until all writers have closed.

    Args:
        streams: standard output and standard error, in this order, by their read ends.
        log: path of ``file``, for messages.
        torchrun: process that gets SIGTERM when the reader of a stream has left.
    """
    lost: set[int] = set()
    with file, selectors.DefaultSelector() as selector:
        for read_end in streams:
            selector.register(read_end, selectors.EVENT_READ)
        while selector.get_map():
            for key, _ in selector.select():
                try:
                    data = os.read(key.fd, _READ_BYTES)
                except OSError:  # a terminal without writers
                    data = b""
                if not data:
                    selector.unregister(key.fd)
                    continue
                with contextlib.suppress(OSError):  # a full disk ends the log, not the run
                    file.write(data)
                if key.fd in lost:
                    continue
                try:
                    _write(streams[key.fd], data)
                except OSError as error:
                    lost.add(key.fd)
                    name = _NAMES[list(streams).index(key.fd)]
                    said = f"warning: {name} cannot be written ({error.strerror}): read {log}\n"
                    if isinstance(error, BrokenPipeError):
                        said = f"the reader of {name} has left: the run ends\n"
                        _end(torchrun)
                    if not data.endswith(b"\n"):
                        said = f"\n{said}"
                    for each in (file.fileno(), *(streams[each] for each in streams.keys() - lost)):
                        with contextlib.suppress(OSError):
                            _write(each, os.fsencode(said))


def _write(stream: int, data: bytes) -> None:
    while data:
        try:
            data = data[os.write(stream, data) :]
        except BlockingIOError:  # a pipe that another program has set so
            select.select([], [stream], [])


def _end(torchrun: int) -> None:
    if torchrun in (os.getpid(), os.getppid()):  # else it has ended, and its number is another's
        os.kill(torchrun, signal.SIGTERM)


class LogWatch:
    """Goes on with the copying where the process that does it is killed; a context around a run.

    Does nothing in a process that :func:`copy_output` has not prepared.
    """

    def __init__(self) -> None:
        self._given: dict[str, Any] = json.loads(os.environ.pop(_WATCH, "{}"))
        self._streams: dict[int, int] = dict(self._given.get("streams", []))
        self._thread = threading.Thread(target=self._watch, name="dpp-log", daemon=True)

    def __enter__(self) -> LogWatch:
        if self._streams:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if not self._streams:
            return
        signal.signal(
            signal.SIGTERM, signal.SIG_IGN
        )  # the run is over, whoever reads its last lines
        sys.stdout.flush()
        sys.stderr.flush()
        for stream, saved in zip((1, 2), self._streams.values(), strict=True):
            os.dup2(saved, stream)  # the last writer of the pipe: its reader comes to the end
        self._thread.join(_LAST_SECONDS)
        if self._thread.is_alive() and stopped(self._given["pid"]):
            os.kill(self._given["pid"], signal.SIGKILL)  # it would keep the last lines, and a lock
            self._thread.join(_LAST_SECONDS)

    def _watch(self) -> None:
        pid = self._given["pid"]
        status = os.waitpid(pid, 0)[1]
        if not os.WIFSIGNALED(status):  # the output's reader has left, or all is copied
            for read_end in self._streams:
                os.close(read_end)
            return
        name = signal.Signals(os.WTERMSIG(status)).name
        said = (
            f"warning: process {pid}, which copied the output into {self._given['log']}, was ended "
            f"by {name}; torchrun goes on with it\n"
        )
        with contextlib.suppress(OSError):
            os.write(self._streams[max(self._streams)], said.encode())
        with contextlib.suppress(OSError):
            file = os.fdopen(self._given["file"], "ab", buffering=0)
            _copy(self._streams, file, self._given["log"], os.getpid())

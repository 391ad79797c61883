"""Starts ranks by forking a process that has PyTorch and megatron-core imported already.

Importing them takes longer than most runs of the tests. ``launcher.py`` starts one such process per
session of pytest. A request has a rank's script, arguments, environment and folder; with it come
two file descriptors: the rank's output, and a socket that tells the rank's pid and its exit status.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

MAX_REQUEST = 1 << 20
_CLONE_NEWNET = 0x40000000


def preload() -> None:
    """Imports what runs need, as they do it themselves: megatron-core after the stand-ins."""
    from megatron.dpp.mcore import cpu

    support = cpu.install()
    importlib.import_module("megatron.dpp.train.job")
    support.close()
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"a process with {len(threads)} threads must not be forked"
    gc.freeze()


class Server:
    """Forks ranks as asked on ``control``, and kills them when its other end is closed."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ)
        self._ranks: dict[int, tuple[int, socket.socket]] = {}

    def serve(self) -> dict[str, Any]:
        """Runs until the tests end; returns only in a forked rank, with its request."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is not self._control:
                    self._report(key.fd)
                    continue
                message, descriptors, _, _ = socket.recv_fds(self._control, MAX_REQUEST, 2)
                if not message:
                    self._end()
                if self._fork(*descriptors):
                    request: dict[str, Any] = json.loads(message)
                    return request

    def _fork(self, output: int, status: int) -> bool:
        """Starts a rank; True in the rank."""
        told = socket.socket(fileno=status)
        if pid := os.fork():
            os.close(output)
            watched = os.pidfd_open(pid)
            self._ranks[watched] = (pid, told)
            self._selector.register(watched, selectors.EVENT_READ)
            return False
        os.setsid()
        for stream in (1, 2):
            os.dup2(output, stream)
        os.close(output)
        told.send(b"%d" % os.getpid())
        self._selector.close()
        for each in (told, self._control, *(one for _, one in self._ranks.values())):
            each.close()
        for watched in self._ranks:
            os.close(watched)
        return True

    def _report(self, watched: int) -> None:
        pid, told = self._ranks.pop(watched)
        self._selector.unregister(watched)
        os.close(watched)
        _, status = os.waitpid(pid, 0)
        told.send(b"%d" % os.waitstatus_to_exitcode(status))
        told.close()

    def _end(self) -> None:
        for pid, _ in self._ranks.values():
            with contextlib.suppress(ProcessLookupError):  # it has no group of its own yet
                os.killpg(pid, signal.SIGKILL)
            os.kill(pid, signal.SIGKILL)
        os._exit(0)


def enter_network(name: str) -> None:
    """Moves this process into a network namespace that ``ip netns`` has made."""
    with open(f"/run/netns/{name}") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "setns")


def _hide_leaks() -> None:
    """Called last by a rank's ``atexit``. To free what it has inherited takes longer than most runs
    do, so that stays, which nanobind then reports as leaked: to the C library's stderr alone.
    """
    sys.stderr.flush()
    sys.stderr = sys.__stderr__ = open(os.dup(2), "w", buffering=1, closefd=False)  # noqa: SIM115
    faulthandler.enable(sys.stderr)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def become(request: dict[str, Any]) -> None:
    """Runs the script of a request in this process."""
    script, arguments = request["script"], request["arguments"]
    os.chdir(request["folder"])
    if request["network"]:
        enter_network(request["network"])
    if request["fresh"]:
        words = [sys.executable, "-X", "faulthandler", script, *arguments]
        os.execve(sys.executable, words, request["environment"])
    atexit.register(_hide_leaks)
    os.environ.clear()
    os.environ.update(request["environment"])
    tempfile.tempdir = None  # where the environment says
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).parent)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    if sys.argv[2] == "preload":
        preload()
    become(Server(socket.socket(fileno=int(sys.argv[1]))).serve())

"""Starts ranks by forking a process that has PyTorch and megatron-core imported already.

Importing them takes longer than most runs of the tests. ``launcher.py`` starts one such process per
process of pytest, as a fork of one without megatron-core, which serves ranks that bring a version
of their own or need a stand-in before it. Arguments: the connection, a file descriptor or the name
of an abstract socket, and what to import. A request has a rank's script, arguments, environment and
folder; with it come two file descriptors: the rank's output, and a socket that tells the rank's pid
and its exit status.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
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
import threading
from pathlib import Path
from typing import Any, NoReturn

MAX_REQUEST = 1 << 20
_CLONE_NEWNET = 0x40000000


LIBRARIES = (
    "pydantic", "torch", "torch._dynamo", "torch.distributed.checkpoint",
    "torch.distributed.tensor", "transformers.models.auto.tokenization_auto", "triton",
    "unittest.mock",
)  # fmt: skip
"""What Megatron-LM imports of others that takes long, where it is installed."""


JOB = (
    "megatron.core.models.gpt", "megatron.core.dist_checkpointing", "megatron.core.optimizer",
    "megatron.dpp.plugin", "megatron.dpp.runtime.static",
)  # fmt: skip
"""What most ranks of tests build a model and a schedule from."""

TRAINING = "megatron.training.arguments", "megatron.training.training"
"""Megatron's own loop, which megatron-core has from 0.17 on."""


def preload(what: str) -> None:
    """Imports :data:`LIBRARIES`, or what a ``"job"`` or a ``"training"`` needs, as it does it
    itself: megatron-core after the stand-ins."""
    if what in ("job", "training"):
        from megatron.dpp.core import cpu

        support = cpu.install(host=what == "training")
        for name in TRAINING if what == "training" else JOB:
            importlib.import_module(name)
        support.close()
    else:
        for name in LIBRARIES:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
        _share_gloos_device()  # also those of the job, a fork of this process
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"a process with {len(threads)} threads must not be forked"
    gc.freeze()


def _share_gloos_device() -> None:
    """Lets all of gloo's process groups of a rank share a device, which its first group makes.

    A device has a thread that looks for work a hundred times a second, also for groups of one rank.
    Where each group has its own, threads of dozens of groups take a tenth of the time of tests.
    PyTorch 2.15 gives groups further options, and each its own device.
    """
    from torch.distributed import ProcessGroupGloo, distributed_c10d

    make: Any = ProcessGroupGloo.__init__
    devices: list[Any] = []

    def init(
        group: Any,
        store: Any,
        rank: int,
        size: int,
        timeout: Any = distributed_c10d.default_pg_timeout,
        **more: Any,
    ) -> None:
        if more or os.environ.get("GLOO_SOCKET_IFNAME"):
            make(group, store, rank, size, timeout, **more)
            return
        if not devices:
            devices.append(ProcessGroupGloo.create_default_device())
        options = ProcessGroupGloo._Options()
        options._timeout, options._devices = timeout, devices
        make(group, store, rank, size, options)

    ProcessGroupGloo.__init__ = init  # type: ignore[method-assign, assignment]


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


def run(script: str) -> NoReturn:
    """Runs a script as the main one, and ends as Python does, but for one thing: the system frees
    what this process has inherited, because Python takes longer for that than most runs do.
    """
    status = 0
    left: object = None
    try:
        left = runpy.run_path(script, run_name="__main__")
    except SystemExit as asked:
        left, status = asked, _status_of(asked)
    except Exception as error:
        left, status = error, 1
        sys.excepthook(type(error), error, error.__traceback__)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    del left
    gc.collect()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _status_of(asked: SystemExit) -> int:
    if asked.code is None or isinstance(asked.code, int):
        return asked.code or 0
    print(asked.code, file=sys.stderr)
    return 1


def become(request: dict[str, Any]) -> None:
    """Runs the script of a request in this process."""
    script, arguments = request["script"], request["arguments"]
    os.chdir(request["folder"])
    if request["network"]:
        enter_network(request["network"])
    if request["fresh"]:
        words = [sys.executable, "-X", "faulthandler", script, *arguments]
        os.execve(sys.executable, words, request["environment"])
    os.environ.clear()
    os.environ.update(request["environment"])
    tempfile.tempdir = None  # where the environment says
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).parent)
    run(script)


if __name__ == "__main__":
    if sys.argv[1].isdecimal():
        connection = socket.socket(fileno=int(sys.argv[1]))
    else:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.connect(f"\0{sys.argv[1]}")
    if sys.argv[2] != "nothing":
        preload(sys.argv[2])
    become(Server(connection).serve())

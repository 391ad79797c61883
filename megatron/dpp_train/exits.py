"""Ends a run before its last iteration: on SIGTERM, after some minutes, at an interval.

torchrun and batch systems send SIGTERM to the processes that a rank has started, too. With
``--exit-signal-handler`` the rank goes on for a while and needs them: ``data`` gives its loaders
:func:`prepare_worker`, ``saver`` saves inside :func:`sigterm_held_back`.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import resource_sharer, resource_tracker
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from megatron.dpp.processes import end_with_parent
from megatron.dpp_train.state import Run


class ExitConditions:
    """The conditions of a run. Owns the handler of SIGTERM until :meth:`close`."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._signalled = False
        self._old: Any = None
        if run.args.exit_signal_handler:
            self._old = signal.signal(signal.SIGTERM, self._note)

    def close(self) -> None:
        """Gives the former handler back; calling it twice is fine."""
        if self._old is not None:
            signal.signal(signal.SIGTERM, self._old)
            self._old = None

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._signalled = True

    def reason(self, iteration: int) -> str | None:
        """The reason to end after ``iteration``, the same on every rank; None to go on.

        A collective where only one rank may see a condition: a signal, or its clock.
        """
        args = self._run.args
        if args.exit_signal_handler and any(largest([int(self._signalled)])):
            return "a rank received SIGTERM"
        if args.exit_duration_in_mins:
            minutes = (time.monotonic() - self._run.started) / 60.0
            if any(largest([int(minutes > args.exit_duration_in_mins)])):
                return f"{minutes:.1f} minutes have passed (--exit-duration-in-mins)"
        if args.exit_interval and iteration % args.exit_interval == 0:
            return f"--exit-interval {args.exit_interval}"
        return None


def largest(values: list[int]) -> list[int]:
    """The largest of each value over all ranks; a collective."""
    tensor = torch.tensor(values, device=torch.cuda.current_device())
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    found: list[int] = tensor.tolist()
    return found


def prepare_worker(worker: int, *, outlives_sigterm: bool) -> None:
    """Prepares a data loader's worker, which is forked in the middle of a step.

    It never collects the garbage of its rank, whose C++ objects belong to threads that it lacks. It
    ends with its rank, and leaves no folder behind, also after ``kill -9``.

    Args:
        outlives_sigterm: SIGTERM ends it only if its rank sends it, as ``multiprocessing`` does at
            exit. PyTorch's worker ends by itself when its rank is gone.
    """
    gc.freeze()
    end_with_parent()
    sys.excepthook = _said_of_rank(sys.excepthook)
    _serve_without_a_name()
    if not outlives_sigterm:
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_end_by_parent, daemon=True).start()


def _said_of_rank(report: Callable[..., object]) -> Callable[..., None]:
    """``report`` for uncaught errors, without the tracebacks of a thread that hands tensors over to
    a rank which is killed meanwhile: its sockets close a moment before its workers end, too."""

    def hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if isinstance(error, ConnectionError | EOFError) and _is_other_thread():
            return
        report(kind, error, trace)

    return hook


def _is_other_thread() -> bool:
    return threading.current_thread() is not threading.main_thread()


def _serve_without_a_name() -> None:
    """Lets the rank fetch a worker's tensors from a socket whose folder is gone already.

    Python would make that folder at the first tensor, and only a worker that ends in good order
    would remove it. The rank, a process of the same user, reaches the socket through /proc.
    """
    process: Any = multiprocessing.current_process()
    folder = tempfile.mkdtemp(prefix="pymp-")  # which no finalizer removes
    process._config["tempdir"] = folder
    sharer: Any = resource_sharer._resource_sharer  # type: ignore[attr-defined]
    try:
        sharer._start()
        socket = os.open(sharer._address, os.O_PATH | os.O_CLOEXEC)
        sharer._listener._listener._unlink.cancel()
        sharer._address = f"/proc/{os.getpid()}/fd/{socket}"
    finally:  # also where there can be no thread
        shutil.rmtree(folder, ignore_errors=True)
        process._config.pop("tempdir", None)  # whoever needs a folder later gets a new one


def _end_by_parent() -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)


@contextlib.contextmanager
def sigterm_held_back() -> Iterator[None]:
    """Delays SIGTERM to this thread until the end of the block; processes started in it never get
    it, and end with their rank: they write checkpoints."""
    resource_tracker.ensure_running()  # when it starts, it ends by unblocking SIGTERM
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

"""When to leave before the last iteration: a signal, a number of minutes, an interval.

All ranks must leave at the same iteration, so what only one of them sees (a signal, its clock) is
agreed on. torchrun and batch systems send SIGTERM to the processes that a rank has started, too;
with ``--exit-signal-handler`` the rank goes on for a while and needs them: ``data`` gives its
loaders :func:`outlive_sigterm`, ``checkpointing`` saves inside of :func:`sigterm_held_back`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from multiprocessing import resource_tracker
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist

from megatron.dpp.train.initialize import Run


class ExitConditions:
    """Asked once per iteration. As a context it owns the handler of SIGTERM."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._signalled = False
        self._old: Any = None

    def __enter__(self) -> ExitConditions:
        if self._run.args.exit_signal_handler:
            self._old = signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._old is not None:
            signal.signal(signal.SIGTERM, self._old)
            self._old = None

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._signalled = True

    def reason(self, iteration: int) -> str | None:
        """Why the run should end after ``iteration``, the same on every rank; None to go on."""
        args = self._run.args
        if args.exit_signal_handler and _anywhere(self._signalled):
            return "a rank received SIGTERM"
        if args.exit_duration_in_mins:
            minutes = (time.time() - self._run.start_time) / 60.0
            if _anywhere(minutes > args.exit_duration_in_mins):
                return f"{minutes:.1f} minutes have passed (--exit-duration-in-mins)"
        if args.exit_interval and iteration % args.exit_interval == 0:
            return f"--exit-interval {args.exit_interval}"
        return None


def _anywhere(condition: bool) -> bool:
    """Is it so on any rank? A collective."""
    seen = torch.tensor([int(condition)], device=torch.cuda.current_device())
    dist.all_reduce(seen, op=dist.ReduceOp.MAX)
    return bool(seen.item())


def outlive_sigterm(worker: int) -> None:
    """In a data loader's worker: from now on SIGTERM ends it only if the rank itself sends it, as
    ``multiprocessing`` does at exit. When the rank is gone, PyTorch's worker sees that and ends.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_end_by_parent, daemon=True).start()


def _end_by_parent() -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)


@contextlib.contextmanager
def sigterm_held_back() -> Iterator[None]:
    """Meanwhile this thread gets SIGTERM later, and processes started get it never: those that
    write checkpoints end with their rank anyway."""
    resource_tracker.ensure_running()  # when it starts, it ends by unblocking SIGTERM
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

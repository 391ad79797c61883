"""Ends a process with the one that started it. Ranks and spawned processes import it."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_C_LIBRARY = ctypes.CDLL(None)  # opened before any fork: another thread may hold the loader's lock


def end_with_parent() -> None:
    """Let the kernel kill this process when the thread that started it ends. A process of
    ``multiprocessing`` whose parent has ended already ends now.
    """
    _C_LIBRARY.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    parent = multiprocessing.parent_process()
    if parent is not None and os.getppid() != parent.pid:
        os.kill(os.getpid(), signal.SIGKILL)

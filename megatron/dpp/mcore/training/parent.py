"""A process that ends with the one that started it. ``writers`` uses it; spawned processes import
it, so it imports little.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_C_LIBRARY = ctypes.CDLL(None)  # opened before any fork: another thread may hold the loader's lock


def end_with_parent() -> None:
    """In a process of ``multiprocessing``: from now on the kernel kills it when the thread that
    started it ends, and at once if its parent has ended already.
    """
    _C_LIBRARY.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    parent = multiprocessing.parent_process()
    if parent is not None and os.getppid() != parent.pid:
        os.kill(os.getpid(), signal.SIGKILL)

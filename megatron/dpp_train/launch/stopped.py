"""Ends processes of a node's ranks that are stopped (SIGSTOP, a debugger) for too long.

While a run makes steps, ranks that wait for a stopped one end and name it. Behind the last
iteration, and on a node whose only rank is stopped, nobody does: torchrun waits without end.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading

from megatron.dpp.errors import print_error
from megatron.dpp.processes import stopped_below

SECONDS = "DPP_STOPPED_SECONDS"
"""Variable with the time that a process may be stopped."""
_GRACE = 30.0
"""Time for the ranks' own errors, whose deadline is that of collectives."""
_DEFAULT = 600.0 + _GRACE
_MOST_BETWEEN = 5.0


class StoppedWatch:
    """Looks at all that descends from this process; a context around torchrun.

    The only rank of a job may be stopped for as long as its user likes.
    """

    def __init__(self) -> None:
        self._patience = _seconds(os.environ.get(SECONDS, ""))
        self._between = min(_MOST_BETWEEN, self._patience / 10)
        self._late: dict[int, float] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="dpp-stopped", daemon=True)

    def __enter__(self) -> StoppedWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(self._between):
            found = stopped_below(os.getpid())
            # Seen so often, not since when: this process may have been stopped with them.
            self._late = {pid: self._late.get(pid, 0.0) + self._between for pid in found}
            for pid, name in found.items():
                if self._late[pid] >= self._patience:
                    self._end(pid, name)

    def _end(self, pid: int, name: str) -> None:
        import psutil  # type: ignore[import-untyped]  # the launchers' flags are read without it

        environ, parent = dict[str, str](), 0
        with contextlib.suppress(psutil.Error, OSError):
            process = psutil.Process(pid)
            environ, parent = process.environ(), process.ppid()
        rank = environ.get("RANK")
        if rank and environ.get("WORLD_SIZE") == "1" and parent == os.getpid():
            return
        with contextlib.suppress(OSError):  # before the line, which it may copy
            os.kill(pid, signal.SIGKILL)
        of_rank = f" of rank {rank}" if rank else ""
        print_error(
            f"{name}{of_rank} was stopped (SIGSTOP or a debugger) for {self._patience:g} s "
            f"({SECONDS}): it is ended"
        )


def setting(minutes: float) -> dict[str, str]:
    """The variable for a run whose collectives may take so many minutes."""
    return {SECONDS: f"{60.0 * minutes + _GRACE:g}"}


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0.0 < float(text) < math.inf:
            return float(text)
    return _DEFAULT

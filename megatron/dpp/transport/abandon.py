"""Ends a process that does not notice a link's failure.

A failure is raised at the rank's next call into the transport. A rank that waits in a collective of
another library makes no such call, and that library may wait for half an hour. So a thread watches
for failures. After a grace period it prints the failure and ends the process; the launcher then
ends the node's other ranks.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from megatron.dpp.errors import print_error
from megatron.dpp.processes import stopped

_LOOK_SECONDS = 0.5
_EXIT_STATUS = 1


class Abandon:
    """A thread that watches for a failure until ``stop``.

    Args:
        failure: returns the failure's text, or an empty string; called from the thread.
        rank: for the message.
        grace: seconds between a failure and the end of the process; None starts no thread.
    """

    def __init__(self, failure: Callable[[], str], rank: int, grace: float | None) -> None:
        self._failure, self._rank, self._grace = failure, rank, grace
        self._pid, self._stopped = os.getpid(), threading.Event()
        self._thread = threading.Thread(target=self._watch, name="dpp-abandon", daemon=True)
        if grace is not None:
            self._thread.start()

    def stop(self) -> None:
        """Stop watching; may be called twice. No effect in a forked child, whose parent has the
        thread, and may have had the event's lock.
        """
        if os.getpid() != self._pid:
            return
        self._stopped.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def _watch(self) -> None:
        while not self._stopped.wait(_LOOK_SECONDS):
            failure = self._failure()
            why = _own_fault() if failure else ""
            if failure and not self._stopped.wait(self._grace):
                print_error(
                    f"rank {self._rank}: {failure}. This rank has waited for something else for "
                    f"{self._grace:g} s since ({why}): ended"
                )
                os._exit(_EXIT_STATUS)


def _own_fault() -> str:
    """The thing that this process waits for, as far as it can be seen."""
    if names := stopped(os.getpid()):
        return f"{', '.join(names)}, which it started, {'is' if len(names) == 1 else 'are'} stopped"
    return "a collective with the lost one?"

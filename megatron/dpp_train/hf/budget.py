"""A bound on the time and the memory of work that a stranger's file asks for."""

from __future__ import annotations

import contextlib
import resource
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import NoReturn

_PAGE_BYTES = resource.getpagesize()


class OverBudget(Exception):
    """The work took longer than it may."""


@contextlib.contextmanager
def budget(seconds: float, num_bytes: int) -> Iterator[None]:
    """Bound what the block takes.

    A signal ends work that is too long, where Python handles one: in the main thread, at the next
    instruction. More memory is refused to the whole process meanwhile.

    Args:
        num_bytes: by which the process may grow.

    Raises:
        OverBudget: after ``seconds``; MemoryError at an allocation above ``num_bytes``.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    handler = signal.signal(signal.SIGALRM, _over)
    left, _ = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        try:
            _limit(num_bytes, soft, hard)
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, left)
    finally:
        signal.signal(signal.SIGALRM, handler)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _limit(num_bytes: int, soft: int, hard: int) -> None:
    used = int(Path("/proc/self/statm").read_bytes().split()[0]) * _PAGE_BYTES
    wanted = used + num_bytes
    for bound in (soft, hard):
        if bound != resource.RLIM_INFINITY:
            wanted = min(wanted, bound)
    resource.setrlimit(resource.RLIMIT_AS, (wanted, hard))


def _over(_: int, __: FrameType | None) -> NoReturn:
    raise OverBudget

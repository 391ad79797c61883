"""Processes that work on batches beside the one that reads them. None outlives it or keeps it
waiting without end, and one that fails is named."""

from __future__ import annotations

import concurrent.futures
import contextlib
import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from megatron.dpp.errors import DataError
from megatron.dpp.processes import end_stopped_children, end_with_parent, how_ended, stopped

Batch = TypeVar("Batch")
Result = TypeVar("Result")
_BATCHES_PER_WORKER = 4
_LOOK_SECONDS = 5.0
_ENDED_BY_THE_POOL = (None, 0, -15)
"""Exit codes of workers that did not break the pool."""


def in_order(
    workers: int,
    work: Callable[[Batch], Result],
    batches: Iterable[Batch],
    *,
    patience: float = 60.0,
) -> Iterator[tuple[Batch, Result]]:
    """Each batch with what ``work``, a function that can be pickled, makes of it.

    At most ``_BATCHES_PER_WORKER`` batches per worker are in flight, so memory stays bounded.

    Args:
        patience: seconds for which a process may be stopped while its result is waited for.

    Raises:
        DataError: the processes cannot start, or one of them died or is stopped.
    """
    started: dict[int | None, Any] = {}
    with _start_named(workers):  # spawned: a fork would take over locks of this process's threads
        context = multiprocessing.get_context("spawn")
        begun = ProcessPoolExecutor(workers, context, end_with_parent)
    with begun as pool:
        window: deque[tuple[Batch, Future[Result]]] = deque()
        try:
            for batch in batches:
                with _start_named(workers):
                    window.append((batch, pool.submit(work, batch)))
                if len(started) < workers:
                    started |= {each.pid: each for each in multiprocessing.active_children()}
                if len(window) > _BATCHES_PER_WORKER * workers:
                    oldest, future = window.popleft()
                    yield oldest, _result(future, patience)
            for oldest, future in window:
                yield oldest, _result(future, patience)
        except BrokenProcessPool as error:
            raise DataError(
                f"a worker process died ({_named(started)}; killed by the system for want of "
                f"memory?): try fewer than --workers {workers}"
            ) from error
        finally:
            end_stopped_children()  # else it would be waited for
            pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def _start_named(workers: int) -> Iterator[None]:
    """Around the start of workers, which Ctrl-C does not reach: they end with this process."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    except OSError as error:
        raise DataError(
            f"--workers {workers}: its processes cannot start ({error}): they need room in "
            "/dev/shm; --workers 1 does not"
        ) from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _result(future: Future[Result], patience: float) -> Result:
    late, between = 0.0, min(_LOOK_SECONDS, patience / 2)
    while True:
        try:
            return future.result(between)
        except concurrent.futures.TimeoutError:
            names = stopped(os.getpid())
            late = late + between if names else 0.0
        if late >= patience:
            raise DataError(f"stopped for {late:g} s (SIGSTOP, a debugger): {', '.join(names)}")


def _named(started: dict[int | None, Any]) -> str:
    """Text about those that broke the pool, which ends the others."""
    for each in started.values():
        each.join(_LOOK_SECONDS)
    codes = {pid: each.exitcode for pid, each in started.items()}
    broke = [pid for pid, code in codes.items() if code not in _ENDED_BY_THE_POOL] or list(codes)
    return ", ".join(f"process {pid} {how_ended(codes[pid])}" for pid in broke)

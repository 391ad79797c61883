"""Work on what strangers wrote, in processes that the kernel ends when it takes too much.

A chat template, a tokenizer's file or a table can keep a call into C busy for ever, in which no
Python signal is handled, or end the process. So such work is done in a :class:`Child`: the kernel
bounds its processor time per request, and its memory. The parent stays able to name what was bad.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import queue
import resource
import signal
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing import connection
from pathlib import Path
from typing import Any, TypeVar

from megatron.dpp.errors import DataError, DppError
from megatron.dpp.processes import are_stopped, how_ended, stopped

Name = TypeVar("Name")
Begin = Callable[[], Callable[[Any], Any]]
"""Runs in a child, can be pickled, and gives what answers each request."""
BEGIN_SECONDS = 60.0
"""Processor time for beginning, such as reading a tokenizer."""
MEMORY_BYTES = 8 << 30
"""By which a child may grow."""
LOOK_SECONDS = 10.0
"""After which a process that has not answered is looked at: it may be stopped."""
_REQUESTS_PER_WORKER = 4


class Died(Exception):
    """A child ended before it answered; the text says how.

    Args:
        code: its exit code, negative for a signal.
    """

    def __init__(self, code: int | None) -> None:
        self.code = code
        by_time = code == -signal.SIGXCPU
        super().__init__(
            "it takes too much processor time" if by_time else f"its process {how_ended(code)}"
        )


class Child:
    """A process that answers one request after the other.

    Raises:
        DppError: what ``begin`` raises there, or the process cannot start.
        Died: it ended while it began.
    """

    def __init__(self, begin: Begin, *, memory: int = MEMORY_BYTES) -> None:
        context = multiprocessing.get_context("forkserver")
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:  # Ctrl-C is the parent's
            self._connection, theirs = context.Pipe()
            self._process = context.Process(
                target=_serve, args=(theirs, begin, memory, BEGIN_SECONDS), daemon=True
            )
            self._process.start()
        except OSError as error:
            raise DataError(f"a worker process cannot start: {error}") from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        try:
            self.receive()
        except BaseException:
            self.close()
            raise

    def send(self, request: Any) -> None:
        """Ask for an answer, which :meth:`receive` gives."""
        with contextlib.suppress(OSError):  # it has ended, as the answer tells
            self._connection.send(request)

    def receive(self) -> Any:
        """The answer to the last request.

        Raises:
            Died: the process has ended.
            DppError: what the work raised, or somebody has stopped the process.
        """
        try:
            while not self._connection.poll(LOOK_SECONDS):
                if names := stopped(self._process.pid or 0, alone=True):
                    raise DataError(f"a worker does not answer: {are_stopped(names)}")
            answer, error = self._connection.recv()
        except (EOFError, OSError):
            self._process.join()
            raise Died(self._process.exitcode) from None
        if error is not None:
            raise error
        return answer

    def kill(self) -> None:
        """End the process, for whose answer another thread may wait."""
        self._process.kill()

    def close(self) -> None:
        """End the process, and free what it took here. May be called twice."""
        self._process.kill()
        self._process.join()
        self._connection.close()


def limit_time(seconds: float) -> None:
    """Let the kernel end this process after so much more processor time, also in a call into C."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _limit(resource.RLIMIT_CPU, math.ceil(used.ru_utime + used.ru_stime + seconds))


def limit_memory(num_bytes: int) -> None:
    """Refuse this process more memory than so many bytes beyond what it has."""
    pages = int(Path("/proc/self/statm").read_bytes().split()[0])
    _limit(resource.RLIMIT_AS, pages * resource.getpagesize() + num_bytes)


def _limit(kind: int, most: int) -> None:
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def prepare(*modules: str) -> None:
    """Import modules once for all children that are started from now on."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(modules))


def in_order(
    workers: int, begin: Begin, requests: Iterable[tuple[Name, Any]]
) -> Iterator[tuple[Name, Any | Died]]:
    """The name of each request with the answer of one of ``workers`` children, or with its death.

    At most ``_REQUESTS_PER_WORKER`` requests per worker are in flight, so memory stays bounded.

    Raises:
        DppError: what ``begin`` raises there, or a child ended while it began.
    """
    places: queue.SimpleQueue[Child | None] = queue.SimpleQueue()
    for _ in range(workers):
        places.put(None)
    started: list[Child] = []

    def answer(request: Any) -> Any:
        child = places.get()
        try:
            if child is None:
                child = _started(begin)
                started.append(child)
            child.send(request)
            return child.receive()
        except Died as died:
            assert child is not None
            child.close()
            started.remove(child)
            child = None
            return died
        finally:
            places.put(child)

    window: deque[tuple[Name, Future[Any]]] = deque()
    try:
        with ThreadPoolExecutor(workers) as threads:
            try:
                for name, request in requests:
                    if len(window) == _REQUESTS_PER_WORKER * workers:
                        first, found = window.popleft()
                        yield first, found.result()
                    window.append((name, threads.submit(answer, request)))
                for first, found in window:
                    yield first, found.result()
            finally:
                threads.shutdown(wait=False, cancel_futures=True)
                for child in [*started]:
                    child.kill()
    finally:
        for child in started:
            child.close()


def _started(begin: Begin) -> Child:
    try:
        return Child(begin)
    except Died as died:
        raise DataError(f"a worker process cannot start: {died}") from died


def _serve(channel: connection.Connection, begin: Begin, memory: int, seconds: float) -> None:
    """The work of a child, until the parent closes its end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 2)  # what libraries print when they abort; the parent tells it on one line
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    limit_time(seconds)
    limit_memory(memory)
    with contextlib.suppress(EOFError, OSError):
        work = _answered(channel, begin)
        while work is not None:
            request = channel.recv()
            _answered(channel, work, request)


def _answered(channel: connection.Connection, work: Callable[..., Any], *request: Any) -> Any:
    """The result of ``work``, after the parent has got it; of a beginning it gets None."""
    try:
        found = work(*request)
    except (DppError, MemoryError) as error:
        short = "more memory is needed than a worker may take"
        channel.send((None, error if isinstance(error, DppError) else DataError(short)))
        return None
    except BaseException:
        channel.send((None, RuntimeError(traceback.format_exc())))
        return None
    channel.send((found if request else None, None))
    return found

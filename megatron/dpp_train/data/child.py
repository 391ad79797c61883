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
import resource
import signal
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing import connection
from pathlib import Path
from typing import Any, TypeVar

from megatron.dpp.errors import DataError, DppError
from megatron.dpp.processes import how_ended, stopped

Batch = TypeVar("Batch")
Begin = Callable[[], Callable[[Any], Any]]
"""Runs in a child, can be pickled, and gives what answers each request."""
BEGIN_SECONDS = 60.0
"""Processor time for beginning, such as reading a tokenizer."""
MEMORY_BYTES = 8 << 30
"""By which a child may grow."""
_BATCHES_PER_WORKER = 4
_LOOK_SECONDS = 5.0
_PAGE_BYTES = resource.getpagesize()


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
            self.connection, theirs = context.Pipe()
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
            self.connection.send(request)

    def receive(self, *, patience: float = 60.0) -> Any:
        """The answer to the last request.

        Args:
            patience: seconds for which the process may be stopped.

        Raises:
            Died: the process has ended.
            DppError: what the work raised, or the process is stopped.
        """
        late = 0.0
        while not self.connection.poll(_LOOK_SECONDS):
            names = stopped(self._process.pid or 0)
            late = late + _LOOK_SECONDS if names else 0.0
            if late >= patience:
                raise DataError(f"stopped for {late:g} s (SIGSTOP, a debugger): {', '.join(names)}")
        try:
            answer, error = self.connection.recv()
        except (EOFError, OSError):
            self._process.join()
            raise Died(self._process.exitcode) from None
        if error is not None:
            raise error
        return answer

    def close(self) -> None:
        """End the process. May be called twice."""
        self.connection.close()
        self._process.kill()
        self._process.join()


def limit_time(seconds: float) -> None:
    """Let the kernel end this process after so much more processor time, also in a call into C."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    most = math.ceil(used.ru_utime + used.ru_stime + seconds)
    if hard != resource.RLIM_INFINITY:
        most = min(most, hard)
    resource.setrlimit(resource.RLIMIT_CPU, (most, hard))


def prepare(*modules: str) -> None:
    """Import modules once for all children that are started from now on."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(modules))


def in_order(
    workers: int, begin: Begin, batches: Iterable[Batch], request: Callable[[Batch], Any]
) -> Iterator[tuple[Batch, Any | Died]]:
    """Each batch with the answer of one of ``workers`` children to what ``request`` makes of it, or
    with its death.

    At most ``_BATCHES_PER_WORKER`` batches per worker are in flight, so memory stays bounded.

    Raises:
        DppError: what ``begin`` raises there, or a child ended while it began.
    """
    idle: list[Child] = []
    busy: dict[Child, int] = {}
    window: deque[tuple[int, Batch]] = deque()
    answers: dict[int, Any] = {}

    def oldest() -> tuple[Batch, Any]:
        number, batch = window.popleft()
        while number not in answers:
            _collect(begin, idle, busy, answers)
        return batch, answers.pop(number)

    try:
        for number, batch in enumerate(batches):
            while len(window) >= _BATCHES_PER_WORKER * workers:
                yield oldest()
            if not idle and len(busy) < workers:
                idle.append(_started(begin))
            while not idle:
                _collect(begin, idle, busy, answers)
            child = idle.pop()
            child.send(request(batch))
            busy[child] = number
            window.append((number, batch))
        while window:
            yield oldest()
    finally:
        for child in (*idle, *busy):
            child.close()


def _started(begin: Begin) -> Child:
    try:
        return Child(begin)
    except Died as died:
        raise DataError(f"a worker process cannot start: {died}") from died


def _collect(
    begin: Begin, idle: list[Child], busy: dict[Child, int], answers: dict[int, Any]
) -> None:
    """Wait for answers; a child that died is replaced."""
    ready = connection.wait([child.connection for child in busy], _LOOK_SECONDS)
    waiting: Sequence[Child] = [c for c in busy if c.connection in ready] or list(busy)[:1]
    for child in waiting:
        try:
            answers[busy[child]] = child.receive()
        except Died as died:
            answers[busy[child]] = died
            child.close()
            del busy[child]
            idle.append(_started(begin))
            continue
        del busy[child]
        idle.append(child)


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


def limit_memory(num_bytes: int) -> None:
    """Refuse this process more memory than so many bytes beyond what it has."""
    used = int(Path("/proc/self/statm").read_bytes().split()[0]) * _PAGE_BYTES
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = used + num_bytes
    if hard != resource.RLIM_INFINITY:
        most = min(most, hard)
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))

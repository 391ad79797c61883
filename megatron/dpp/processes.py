"""Binds processes to each other: none outlives the one that works with its results."""

from __future__ import annotations

import codecs
import contextlib
import ctypes
import functools
import io
import locale
import multiprocessing
import multiprocessing.connection
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, NoReturn

from megatron.dpp.errors import ConfigError, print_error

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_C_LIBRARY = ctypes.CDLL(None)  # opened before any fork: another thread may hold the loader's lock
_PATIENCE_S = 5.0


def end_with_parent() -> None:
    """Let the kernel kill this process when the thread that started it ends. A process of
    ``multiprocessing`` whose parent has ended already ends now.
    """
    parent = multiprocessing.parent_process()
    _end_with(None if parent is None else parent.pid, signal.SIGKILL)


def stopped(pid: int, *, alone: bool = False) -> list[str]:
    """Names the stopped ones (SIGSTOP, a debugger) among a process of this host and, unless it is
    looked at ``alone``, all that descend from it, as ``process 12 (name)``."""
    import psutil  # type: ignore[import-untyped]

    names = []
    with contextlib.suppress(psutil.Error, OSError):  # it has ended, or no file can be opened
        process = psutil.Process(pid)
        below = [] if alone else process.children(recursive=True)
        for each in (process, *below):
            with contextlib.suppress(psutil.Error, OSError):
                if each.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
                    names.append(f"process {each.pid} ({each.name()})")
    return names


def are_stopped(names: Sequence[str], of: str = "") -> str:
    """Text about stopped processes of this host, of which ``of`` says more, and what to do."""
    where = f"{'is' if len(names) == 1 else 'are'} stopped on {socket.gethostname()}"
    return f"{', '.join(names)}{of} {where} (SIGSTOP or a debugger; kill -CONT)"


def stopped_of_job(*, alone: bool = False) -> str:
    """Text about torchrun, which started this process, and, unless it is looked at ``alone``, its
    ranks on this host, as far as they are stopped; else empty."""
    names = stopped(os.getppid(), alone=alone) if "TORCHELASTIC_RUN_ID" in os.environ else []
    return are_stopped(names) if names else ""


def how_ended(code: int | None) -> str:
    """Text about the exit code of a process of ``multiprocessing``."""
    if code is not None and code < 0:
        return f"ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def bound_to_this(number: int = signal.SIGTERM) -> Callable[[], None]:
    """For ``preexec_fn`` of a child, which gets signal ``number`` when this process ends."""
    return functools.partial(_end_with, os.getpid(), number)


def run_child(command: Sequence[str], **options: Any) -> int:
    """The exit status of a program that gets SIGTERM when this process ends in any way.

    Args:
        options: of :class:`subprocess.Popen`.
    """
    started = subprocess.Popen(command, preexec_fn=bound_to_this(), **options)
    with exits_on_sigterm(), started as process:
        try:
            return process.wait()
        except BaseException:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_PATIENCE_S)
            process.kill()
            raise


@contextlib.contextmanager
def exits_on_sigterm() -> Iterator[None]:
    """Turn the first SIGTERM in the block into SystemExit, so that what was begun is removed. No
    effect in other threads than the main one, or where the signal has a handler."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextlib.contextmanager
def sigint_held_back() -> Iterator[None]:
    """Raise the KeyboardInterrupt of a SIGINT in the block at its end: around imports of libraries,
    which catch it there and go on without what they were importing. No effect in other threads than
    the main one."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        signal.raise_signal(signal.SIGINT)


def begin_program() -> None:
    """Prepare a program before PyTorch is imported, which cannot be in some places.

    A rank of torchrun gets SIGTERM when torchrun ends in any way. Closed standard files are opened
    on nothing. The program ends where its working directory is gone. Where files are read, or texts
    printed, in another encoding than UTF-8 by default, the program begins again in Python's UTF-8
    mode: PyTorch's sources and the answers of models hold other characters than those of ASCII or
    GBK. What UTF-8 does not have, as some bytes of a file's name, is printed as an escape.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        _end_with(os.getppid(), signal.SIGTERM)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # else the next file that is opened gets what is printed
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - to the end
    try:
        os.getcwd()
    except OSError as error:  # of which PyTorch's libraries say that they cannot be loaded
        why = f"the working directory cannot be used ({error.strerror}): go to another one"
        sys.exit(print_error(ConfigError(why)))
    printed = os.environ.get("PYTHONIOENCODING", "").partition(":")[0] or "utf-8"
    used = (locale.getpreferredencoding(False), printed)
    if {codecs.lookup(each).name for each in used} == {"utf-8"}:
        if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
            sys.stdout.reconfigure(errors="backslashreplace")
        return
    os.environ.pop("PYTHONIOENCODING", None)
    os.environ["PYTHONUTF8"] = "1"  # for what this program starts
    sys.stdout.flush()
    # Python heeds the first of several -X utf8, and -I hides the variable.
    os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])


def _leave(number: int, _: FrameType | None) -> NoReturn:
    signal.signal(number, signal.SIG_DFL)
    raise SystemExit(128 + number)


def _end_with(parent: int | None, number: int) -> None:
    _C_LIBRARY.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), number)

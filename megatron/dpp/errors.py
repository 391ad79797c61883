"""The exceptions of this project, in one tree.

Everything a user can meet derives from :class:`DppError`, so ``except DppError`` is enough at the
edge of a program. Each message says what failed, with which values, which rule was broken and what
to do about it. ``assert`` is kept for our own mistakes and never for a user's.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import NoReturn


def one_line(error: BaseException, limit: int | None = None) -> str:
    """An error's text without line breaks, cut to ``limit`` characters; its type if it has none."""
    return " ".join(str(error).split())[:limit] or type(error).__name__


class DppError(Exception):
    """Base of every error that this project raises on purpose."""


class ConfigError(DppError, ValueError):
    """A setting, flag or combination of them cannot work; the message names the flag and the
    nearest choice.
    """


class DataError(DppError, ValueError):
    """An input file (corpus, vocabulary, index, checkpoint, trace) is missing, broken or of the
    wrong kind.
    """


class ScheduleError(DppError):
    """A schedule is impossible: a policy chose a task that may not run, or nothing can ever run
    again.
    """


class ReplayError(ScheduleError):
    """A recorded order of actions cannot be followed; the message names the action and why."""


class TransportError(DppError):
    """Base of everything that goes wrong between ranks."""


class SetupError(TransportError):
    """The machine refused a resource at set-up: memory, descriptors, device files."""


class TransportUnavailable(TransportError):
    """A transport kind is not possible on a link; the message says why and what would make it
    possible.
    """


class AuthError(TransportError):
    """A peer could not prove that it belongs to this job."""


class VersionMismatch(TransportError):
    """Two ranks run different versions, or were started with different settings; both values are
    named.
    """


class PeerDead(TransportError):
    """A peer's process ended or its host cannot be reached any more."""


class TransferTimeout(TransportError):
    """A message did not arrive before the deadline although its sender is alive; the oldest missing
    one is named.
    """


class ProtocolError(TransportError):
    """A peer sent something that does not fit the agreed geometry; it is not listened to any
    longer.
    """


class UsedAfterFork(TransportError):
    """A transport was used in a child process that inherited it by ``fork``."""


def require(condition: object, message: str) -> None:
    """The form in which settings' rules are written.

    Raises:
        ConfigError: with ``message``, unless ``condition`` holds.
    """
    if not condition:
        raise ConfigError(message)


def exit_with(main: Callable[[], int]) -> NoReturn:
    """End the program with the status that ``main`` returns; quietly when whoever read its output
    has left, as ``head`` does.
    """
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at the end
        status = 1
    sys.exit(status)

"""The exceptions of this project, in one tree.

Every error that a user can meet derives from :class:`DppError`. A message names the values, the
rule and the remedy. ``assert`` is for this project's own mistakes.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from argparse import Namespace


class DppError(Exception):
    """Base of every error that this project raises on purpose."""


class ConfigError(DppError, ValueError):
    """A setting, flag or combination of them cannot work; names the flag and the nearest choice."""


class DataError(DppError, ValueError):
    """An input file (corpus, vocabulary, index, checkpoint, trace) is missing, broken or of the
    wrong kind."""


class ScheduleError(DppError):
    """A schedule is impossible: a policy chose a forbidden task, or no task can ever run again."""


class ReplayError(ScheduleError):
    """A recorded order of actions cannot be followed; names the action and the reason."""


class TransportError(DppError):
    """Base of every error between ranks."""


class SetupError(TransportError):
    """The machine refused a resource at set-up: memory, descriptors, device files."""


class TransportUnavailable(TransportError):
    """A transport kind is not possible on a link; names the reason and the remedy."""


class AuthError(TransportError):
    """A peer could not prove that it belongs to this job."""


class VersionMismatch(TransportError):
    """Two ranks run different versions or settings; names both values."""


class PeerDead(TransportError):
    """A peer's process ended, or its host cannot be reached any more."""


class TransferTimeout(TransportError):
    """A message missed its deadline although its sender is alive; names the oldest missing one."""


class ProtocolError(TransportError):
    """A peer sent something that does not fit the agreed geometry; its further messages are not
    read."""


class UsedAfterFork(TransportError):
    """A transport was used in a child process that inherited it by ``fork``."""


def one_line(error: BaseException, limit: int | None = None) -> str:
    """An error's text without line breaks, cut to ``limit`` characters; its type if it has none."""
    return " ".join(str(error).split())[:limit] or type(error).__name__


def require(condition: object, message: str) -> None:
    """Raises :class:`ConfigError` with ``message`` unless ``condition`` holds."""
    if not condition:
        raise ConfigError(message)


def flag_name(name: str) -> str:
    """The flag whose value argparse calls ``name``: ``--hidden-size`` for ``hidden_size``."""
    return "--" + name.replace("_", "-")


def require_value(args: Namespace, name: str, good: object, rule: str) -> None:
    """Raises :class:`ConfigError` ``--FLAG VALUE: must be RULE`` unless ``good`` holds."""
    require(good, f"{flag_name(name)} {getattr(args, name)}: must be {rule}")


def require_multiple(args: Namespace, name: str, *others: str) -> None:
    """Raises :class:`ConfigError` unless the product of the values of the flags ``others`` divides
    that of the flag ``name``."""
    sizes = [f"{flag_name(other)} {getattr(args, other)}" for other in others]
    divisor = math.prod(getattr(args, other) for other in others)
    value = getattr(args, name)
    shown = f"{flag_name(name)} {value} is not divisible by {' x '.join(sizes)}"
    require(value % divisor == 0, shown)


def tell_torchrun(text: str) -> None:
    """Leave the error of this rank where torchrun looks for it, whose own report then ends with it;
    no effect without torchrun."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        details = {"py_callstack": text, "timestamp": str(int(time.time()))}
        scratch = Path(f"{path}.{os.getpid()}")  # torchrun fails on a file that is not whole
        try:
            scratch.write_text(
                json.dumps({"message": {"message": text, "extraInfo": details}}), encoding="utf-8"
            )
            scratch.replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                scratch.unlink()


def exit_with(main: Callable[[], int]) -> NoReturn:
    """Ends the program with the status that ``main`` returns; without an error when the reader of
    its output has left, as ``head`` does. A package that is missing is one line."""
    try:
        status = main()
        sys.stdout.flush()
    except ModuleNotFoundError as error:
        if (error.name or "megatron.dpp").startswith("megatron.dpp"):
            raise
        print(
            f"error: {sys.executable} has no package {error.name}: install it, or go to the "
            "environment of the clone (source tools/activate.sh)",
            file=sys.stderr,
        )
        status = 2
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at the end
        status = 1
    sys.exit(status)

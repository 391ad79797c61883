"""The exceptions of this project, in one tree, and the settings that texts name.

Every error that a user can meet derives from :class:`DppError`. A message names the values, the
rule and the remedy. ``assert`` is for this project's own mistakes.

A text spells a setting as Python does, and keeps it beside the words. The program that prints the
text may spell it otherwise: a flag on a command line, a variable in a launch script.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import numbers
import os
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, NoReturn

_PLAIN_BITS = 128
"""Bits of the longest whole number that a text shows digit by digit."""


@dataclass(frozen=True)
class Setting:
    """A setting that a text names; as a string it is what Python writes.

    >>> f"{Setting('DppConfig', 'slots', 3)}, {Setting('DppConfig', 'slots')}"
    'DppConfig(slots=3), DppConfig(slots=...)'

    Args:
        owner: the class or function that takes it, such as ``DppConfig``.
        name: the field or argument.
        value: as it was given or should be, ``str``, ``bool``, ``int`` or ``float``; ``...`` where
            the text names no value.
    """

    owner: str
    name: str
    value: Any = ...

    def __str__(self) -> str:
        return f"{self.owner}({self.name}={'...' if self.value is ... else repr(self.value)})"


Naming = Callable[[Setting], str]
"""Spells a setting as the users of a program write it."""


def setting(name: str, value: Any = ..., *, owner: str = "DppConfig") -> Setting:
    """A :class:`Setting` of :class:`~megatron.dpp.config.DppConfig`, whose value is a plain one."""
    if value is not ... and not isinstance(value, str | bool | int | float | None):
        value = str(value)
    if isinstance(value, int) and value.bit_length() > _PLAIN_BITS:
        value = shown(value)
    return Setting(owner, name, value)


class Text(str):
    """A text that keeps the settings it names, for :func:`said`.

    Args:
        text: the words, with each setting as its string.
        named: those settings; of texts and errors within this one, the texts and errors.
    """

    settings: tuple[Setting, ...]

    def __new__(cls, text: object, *named: object) -> Text:
        made = super().__new__(cls, text)
        made.settings = _settings_of(text, *named)
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return Text, (str(self), *self.settings)


def said(text: object, naming: Naming) -> str:
    """A text or an error, its settings spelled by ``naming``."""
    words = str(text)
    for named in _settings_of(text):
        words = words.replace(str(named), naming(named))
    return words


def to_json(text: object) -> str:
    """A text or an error for another rank, with its settings; :func:`from_json` reads it."""
    named = [
        (owner, name) if value is ... else (owner, name, value)
        for owner, name, value in map(astuple, _settings_of(text))
    ]
    return json.dumps([str(text), named])


def from_json(text: str) -> Text:
    """The text that :func:`to_json` was given; of anything else the text itself."""
    try:
        words, named = json.loads(text)
        return Text(words, *(Setting(*fields) for fields in named))
    except (ValueError, TypeError, RecursionError):
        return Text(text)


def _settings_of(*parts: object) -> tuple[Setting, ...]:
    named: dict[Setting, None] = {}
    for part in parts:
        named |= dict.fromkeys(
            [part] if isinstance(part, Setting) else getattr(part, "settings", ())
        )
    return tuple(named)


class DppError(Exception):
    """Base of every error that this project raises on purpose.

    Args:
        text: what happened, what was expected, and what to do.
        named: as those of :class:`Text`.

    Attributes:
        settings: those that the text names.
    """

    def __init__(self, text: object = "", *named: object) -> None:
        super().__init__(str(text))
        self.settings = _settings_of(text, *named)


class ConfigError(DppError, ValueError):
    """A setting or a combination of them cannot work; names it and the nearest choice."""


class DataError(DppError, ValueError):
    """An input file (corpus, vocabulary, index, checkpoint, trace) is missing, broken or of the
    wrong kind."""


class ScheduleError(DppError):
    """A schedule is impossible: a policy chose a forbidden task, or no task can ever run again."""


class ReplayError(ScheduleError):
    """A recorded order of actions cannot be followed; names the action and the reason."""


class TransportError(DppError):
    """Base of every error between ranks.

    Attributes:
        cause: the failure alone, where the text also says what it meant here; empty elsewhere.
    """

    cause: str = ""


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


def one_line(error: BaseException, limit: int | None = None) -> Text:
    """An error's text without line breaks, cut to ``limit`` characters; its type if it has none."""
    return Text(" ".join(str(error).split())[:limit] or type(error).__name__, error)


def shown(value: object) -> str:
    """A value for an error: as Python writes it, on one line of at most 80 characters."""
    try:
        text = " ".join(repr(value).split())
    except (ValueError, RecursionError):  # a number of too many digits, a structure too deep
        text = f"a {type(value).__name__}"
        if isinstance(value, int):
            text = f"a number of {value.bit_length()} bits"
    return text if len(text) <= 80 else f"{text[:77]}..."


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The part of a text about an unknown name that names the nearest known one; empty if none is
    near.

    >>> did_you_mean("reprot", ["report", "runs"])
    ' (did you mean report?)'
    """
    near = difflib.get_close_matches(word.lower(), known, n=1, cutoff=0.5)
    return f" (did you mean {near[0]}?)" if near else ""


def number_fault(value: Any, least: float, most: float, *, whole: bool = True) -> str:
    """The reason why a value is no number from ``least`` to ``most``; empty where it is.

    >>> number_fault(0, 1, 2**20)
    'is 0; expected a whole number from 1 to 1048576'
    """
    is_one = isinstance(value, numbers.Integral if whole else numbers.Real)
    if is_one and not isinstance(value, bool) and least <= value <= most:
        return ""
    return f"is {shown(value)}; expected a{' whole' * whole} number from {least} to {most}"


def require(condition: object, message: str) -> None:
    """Raises :class:`ConfigError` with ``message`` unless ``condition`` holds."""
    if not condition:
        raise ConfigError(message)


PROGRAM = "DPP_PROGRAM"
"""Variable with the name of the program that started this one, as its user typed it."""
_UNTYPED = ("__main__.py", "-m", "-c")
"""What ``sys.argv[0]`` ends with where its user typed no file."""


def program() -> str:
    """The name of this program, as its user typed it; of the launcher of a run in its ranks."""
    name = Path(os.environ.get(PROGRAM) or sys.argv[0] or "-c").name
    return "megatron-dpp" if name in _UNTYPED else name


def plain(text: str) -> str:
    """A text for a terminal: control characters, which strangers' files may hold, as Python writes
    them.

    >>> plain("a\x1b[2J")
    'a\\\\x1b[2J'
    """
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


def error_line(error: object, prog: str | None = None, naming: Naming = str) -> str:
    """The line of an error that ends a program, as argparse writes it.

    Args:
        prog: the program's name; :func:`program` without one.
        naming: spells the settings that the error names.

    >>> error_line(DataError("x.json: No such file"), "megatron-dpp sim")
    'megatron-dpp sim: error: x.json: No such file'
    """
    return plain(f"{prog or program()}: error: {said(error, naming)}")


def print_error(error: object, prog: str | None = None, naming: Naming = str) -> int:
    """Print :func:`error_line` on standard error; returns :func:`status_of` the error."""
    sys.stdout.flush()
    print(error_line(error, prog, naming), file=sys.stderr, flush=True)
    return status_of(error)


def status_of(error: object) -> int:
    """The exit status of a command that an error ends: 2 where its settings cannot work, else 1."""
    return BAD_USAGE if isinstance(error, ConfigError) else FAILED


def tell_torchrun(text: str, *, printed: bool) -> None:
    """Leave the error of this rank where torchrun looks for it, whose own report then ends with it;
    no effect without torchrun.

    Args:
        printed: this rank prints the error, too.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        details = {"py_callstack": text, "timestamp": str(int(time.time())), "printed": printed}
        scratch = Path(f"{path}.{os.getpid()}")  # torchrun fails on a file that is not whole
        try:
            scratch.write_text(
                json.dumps({"message": {"message": text, "extraInfo": details}}), encoding="utf-8"
            )
            scratch.replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                scratch.unlink()


FAILED, BAD_USAGE, INTERRUPTED = 1, 2, 130
"""Exit statuses: of a failure at work, of what is refused before it begins, of Ctrl-C."""


def exit_with(main: Callable[[], int]) -> NoReturn:
    """Ends the program with the status that ``main`` returns; without an error when the reader of
    its output has left, as ``head`` does, or after Ctrl-C. A missing package and an output that
    cannot be written are one line, as is an error of this project."""
    try:
        status = main()
        sys.stdout.flush()
    except DppError as error:
        status = print_error(error)
    except ModuleNotFoundError as error:
        if (error.name or "megatron.dpp").startswith("megatron.dpp"):
            raise
        remedy = "install it, or go to the environment of the clone (source tools/activate.sh)"
        status = print_error(ConfigError(f"{sys.executable} has no package {error.name}: {remedy}"))
    except BrokenPipeError:
        _drop_output()
        status = FAILED
    except OSError as error:
        if not output_fails():
            raise
        _drop_output()
        status = print_error(DataError(f"the output cannot be written: {error.strerror}"))
    except KeyboardInterrupt:
        status = INTERRUPTED
    sys.exit(status)


def output_fails() -> bool:
    """True where standard output cannot be written, as on a full disk."""
    try:
        return os.write(sys.stdout.fileno(), b"\n") != 1
    except OSError:
        return True


def _drop_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at the end

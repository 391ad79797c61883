"""The exceptions of this project, in one tree, and the settings that texts name.

Every error that a user can meet derives from :class:`DppError`. A message names the values, the
rule and the remedy. ``assert`` is for this project's own mistakes.

A text names a setting with :func:`setting`, as a field. The program that prints it chooses the
spelling: a field in Python, a flag on a command line, a variable in a launch script.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import math
import numbers
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

_PLAIN_BITS = 128
"""Bits of the longest whole number that a text shows digit by digit."""


class Setting(NamedTuple):
    """A setting that a text names.

    Args:
        owner: the class or function that takes it, such as ``DppConfig``; empty for megatron-core's
            fields, arguments of a call, and settings of a training program.
        name: the field or argument.
        value: as it was given or should be, ``str``, ``bool``, ``int`` or ``float``; ``...`` where
            the text names no value.
    """

    owner: str
    name: str
    value: Any = ...


Naming = Callable[[Setting], str]
"""Spells a setting as the users of a program write it."""

_BEGIN, _END = "\x02", "\x03"
"""Characters around a setting in a text that is not rendered yet, which no other text has."""


def setting(name: str, value: Any = ..., *, owner: str = "DppConfig") -> str:
    """A setting of :class:`~megatron.dpp.config.DppConfig` as a part of a text; :func:`render`
    spells it. The arguments are those of :class:`Setting`.
    """
    if value is ...:
        return f"{_BEGIN}{owner}.{name}{_END}"
    plain = value if isinstance(value, str | bool | int | float | None) else str(value)
    if isinstance(plain, int) and plain.bit_length() > _PLAIN_BITS:
        plain = shown(plain)
    return f"{_BEGIN}{owner}.{name}={json.dumps(plain)}{_END}"


def core_setting(name: str, value: Any = ...) -> str:
    """As :func:`setting`, of one without an owner: a field of megatron-core, an argument of a call,
    or a setting of a training program."""
    return setting(name, value, owner="")


def in_python(given: Setting) -> str:
    """The spelling in Python.

    >>> in_python(Setting("DppConfig", "slots", 3)), in_python(Setting("", "seq_length"))
    ('DppConfig(slots=3)', 'seq_length')
    """
    value = "..." if given.value is ... else repr(given.value)
    if given.owner:
        return f"{given.owner}({given.name}={value})"
    return given.name if given.value is ... else f"{given.name}={value}"


_naming: Naming = in_python


def render(text: str, naming: Naming | None = None) -> str:
    """``text`` with its settings spelled by ``naming``; None takes that of :func:`use_names`."""
    if _BEGIN not in text:
        return text
    naming = naming or _naming
    first, *parts = text.split(_BEGIN)
    rendered = [first]
    for part in parts:
        mark, end, rest = part.partition(_END)
        given = _read_mark(mark) if end else None  # a peer's text may be cut off, or anything
        rendered += [mark if given is None else naming(given), rest]
    return "".join(rendered)


def _read_mark(mark: str) -> Setting | None:
    owner, dot, rest = mark.partition(".")
    name, equals, value = rest.partition("=")
    try:
        return Setting(owner, name, json.loads(value) if equals else ...) if dot else None
    except ValueError:
        return None


@contextlib.contextmanager
def use_names(naming: Naming) -> Iterator[None]:
    """Spell settings by ``naming``, in the whole process, for a block or a decorated function. An
    error that leaves it keeps its spelling.
    """
    global _naming
    before, _naming = _naming, naming
    try:
        yield
    except BaseException as error:
        _keep_spelling(error)
        raise
    finally:
        _naming = before


def _keep_spelling(error: BaseException | None) -> None:
    while error is not None:
        if isinstance(error, DppError):
            error.args = (str(error),)
        error = error.__cause__ or error.__context__


class DppError(Exception):
    """Base of every error that this project raises on purpose. Its text may name settings."""

    def __str__(self) -> str:
        return render(super().__str__())

    def said(self, naming: Naming) -> str:
        """The text, its settings spelled by ``naming``."""
        return render(super().__str__(), naming)

    @property
    def settings(self) -> tuple[Setting, ...]:
        """The settings that the text names."""
        found: list[Setting] = []

        def note(given: Setting) -> str:
            found.append(given)
            return ""

        self.said(note)
        return tuple(found)


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


def require_value(args: object, name: str, good: object, rule: str) -> None:
    """Raises :class:`ConfigError` ``SETTING: must be RULE`` unless ``good`` holds."""
    if not good:  # the text takes longer than most rules
        raise ConfigError(f"{core_setting(name, getattr(args, name))}: must be {rule}")


def require_multiple(args: object, name: str, *others: str) -> None:
    """Raises :class:`ConfigError` unless the product of the values of the settings ``others``
    divides that of the setting ``name``."""
    sizes = [core_setting(other, getattr(args, other)) for other in others]
    divisor = math.prod(getattr(args, other) for other in others)
    value = getattr(args, name)
    shown = f"{core_setting(name, value)} is not divisible by {' x '.join(sizes)}"
    require(value % divisor == 0, shown)


PROGRAM = "DPP_PROGRAM"
"""Variable with the name of the program that started this one, as its user typed it."""
_UNTYPED = ("__main__.py", "-m", "-c")
"""What ``sys.argv[0]`` ends with where its user typed no file."""


def program() -> str:
    """The name of this program, as its user typed it; of the launcher of a run in its ranks."""
    name = Path(os.environ.get(PROGRAM) or sys.argv[0] or "-c").name
    return "megatron-dpp" if name in _UNTYPED else name


def error_line(error: object, prog: str | None = None) -> str:
    """The line of an error that ends a program, as argparse writes it.

    Args:
        prog: the program's name; :func:`program` without one.

    >>> error_line(DataError("x.json: No such file"), "megatron-dpp sim")
    'megatron-dpp sim: error: x.json: No such file'
    """
    return f"{prog or program()}: error: {error}"


def print_error(error: object, prog: str | None = None) -> int:
    """Print :func:`error_line` on standard error; returns :func:`status_of` the error."""
    if isinstance(error, OSError):
        error = no_scratch(error) or error
    sys.stdout.flush()
    print(error_line(error, prog), file=sys.stderr, flush=True)
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
    _open_standard_files()
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
    except ImportError as error:
        if "shared object" not in str(error):
            raise
        why = "too little memory for it (ulimit -v), or a package that is not whole"
        status = print_error(ConfigError(f"{sys.executable} cannot load a library, {error}: {why}"))
    except BrokenPipeError:
        _drop_output()
        status = FAILED
    except OSError as error:
        if no_scratch(error) is not None:
            sys.exit(print_error(error))
        if not output_fails():
            raise
        _drop_output()
        status = print_error(DataError(f"the output cannot be written: {error.strerror}"))
    except KeyboardInterrupt:
        status = INTERRUPTED
    sys.exit(status)


def _open_standard_files() -> None:
    """Open standard files that are closed on nothing: else the next files have their numbers, and
    get what is printed."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            if os.open(os.devnull, os.O_RDWR) == number:  # the lowest that is free
                setattr(sys, name, open(number, mode, encoding="utf-8"))  # noqa: SIM115 - to the end


def output_fails() -> bool:
    """True where standard output cannot be written, as on a full disk."""
    try:
        return os.write(sys.stdout.fileno(), b"\n") != 1
    except OSError:
        return True


def no_scratch(error: OSError) -> ConfigError | None:
    """The text of the error that libraries raise at their import where they can write no
    temporary file; None where ``error`` is another one."""
    _, found, where = str(error.strerror).partition("No usable temporary directory found in ")
    why = f"no temporary directory can be written ({where}): make room, or name another as TMPDIR"
    return ConfigError(why) if found else None


def _drop_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at the end

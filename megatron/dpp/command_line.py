"""Parts that the sub-commands share: their parser, their error line, the source tree."""

from __future__ import annotations

import argparse
import contextlib
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron.dpp.errors import DataError, DppError, Naming, output_fails, print_error
from megatron.dpp.naming import in_flags
from megatron.dpp.processes import exits_on_sigterm

WHERE_THE_REST_IS = "All commands: megatron-dpp --help. Pages: docs/index.md"
"""The end of every help."""
ROOT = Path(__file__).resolve().parents[2]
"""The source tree. In an installed package: the folder of the packages."""


def new_parser(prog: str, description: str, usage: str = "[options]") -> argparse.ArgumentParser:
    """A parser with one usage line and narrow columns, so that the help fits on a screen."""
    return argparse.ArgumentParser(
        prog=prog,
        usage=f"{prog} {usage}",
        description=description,
        epilog=WHERE_THE_REST_IS,
        formatter_class=functools.partial(argparse.HelpFormatter, max_help_position=30),
    )


def guarded(prog: str, run: Callable[[], int], *, naming: Naming = in_flags) -> int:
    """Exit status of ``run``; an error becomes one line on standard error, and its
    status. ``naming`` spells the settings of that line."""
    try:
        with exits_on_sigterm():
            return run()
    except BrokenPipeError:
        raise
    except (DppError, OSError) as error:
        if isinstance(error, OSError) and error.filename is None and output_fails():
            raise  # exit_with says so
        return print_error(error, prog, naming)
    except MemoryError:
        short = "too little memory: raise the limit (ulimit -v), or use a larger machine"
        return print_error(DataError(short), prog)


def command(
    name: str,
    parser: Callable[[str], argparse.ArgumentParser],
    run: Callable[[argparse.Namespace], int],
) -> Callable[..., int]:
    """The ``main`` of a sub-command.

    Args:
        name: as its user types it.
        parser: makes the parser for a program's name.
        run: does the work; returns the exit status.

    Returns:
        ``main(argv=None, *, prog=name)``, which returns that status, and after an error
        :func:`~megatron.dpp.errors.status_of` it.
    """

    def main(argv: Sequence[str] | None = None, *, prog: str = name) -> int:
        args = parser(prog).parse_args(argv)
        return guarded(prog, lambda: run(args))

    return main


def progress_bar(total_bytes: int, **settings: Any) -> Any:
    """A bar of ``tqdm`` over bytes; silent where standard error is no terminal, or without tqdm."""
    try:
        from tqdm import tqdm
    except ImportError:
        return _NoBar()
    form = "{percentage:3.0f}%|{bar:20}| {rate_fmt}, {remaining} left{postfix}"
    defaults = {"unit": "B", "unit_scale": True, "bar_format": form, "disable": None}
    return tqdm(total=total_bytes, **{**defaults, "leave": False, **settings})


class _NoBar(contextlib.nullcontext["_NoBar"]):
    """Takes the calls of a bar and shows nothing."""

    def __enter__(self) -> _NoBar:
        return self

    def update(self, amount: int) -> None:
        pass

    def set_postfix_str(self, text: str, *, refresh: bool) -> None:
        pass


def from_source_tree(name: str) -> Path:
    """A file that only the source tree has.

    Raises:
        DataError: this is an installed package.
    """
    path = ROOT / name
    if not path.exists():
        raise DataError(f"{name} needs the source tree: {ROOT} is an installed package")
    return path

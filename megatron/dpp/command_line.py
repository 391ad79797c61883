"""Parts that the sub-commands share: parsers, the flags of ``DppConfig``, and the spellings of the
settings that errors name (:func:`megatron.dpp.errors.said`).
"""

from __future__ import annotations

import argparse
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from megatron.dpp.config import DppConfig, option_fields
from megatron.dpp.errors import (
    ConfigError,
    DppError,
    Naming,
    Setting,
    did_you_mean,
    output_fails,
    print_error,
)
from megatron.dpp.processes import exits_on_sigterm

WHERE_THE_REST_IS = "All commands: megatron-dpp --help. Pages: docs/index.md"
"""The end of every help."""
ROOT = Path(__file__).resolve().parents[2]
"""The source tree. In an installed package: the folder of the packages."""
_OWNERS = {"HostTrace": "--dpp-trace-", "DppConfig": "--dpp-", "install": "--dpp-"}
"""Owner of a setting -> how its flags begin."""


def flag_of(field_name: str) -> str:
    """The command line flag of a :class:`~megatron.dpp.config.DppConfig` field.

    >>> flag_of("activation_cap")
    '--dpp-activation-cap'
    """
    if field_name == "node_ips":  # older than DppConfig
        return "--node-ips"
    return "--dpp-" + field_name.replace("_", "-")


def in_flags(given: Setting) -> str:
    """A setting as a flag, with its value.

    >>> in_flags(Setting("DppConfig", "task_rng", False))
    '--no-dpp-task-rng'
    """
    flag = flag_of(given.name)
    if given.owner != "DppConfig":
        flag = _OWNERS[given.owner] + given.name.replace("_", "-")
    if given.value is False:
        return flag.replace("--", "--no-", 1)
    return flag if given.value is ... or given.value is True else f"{flag} {given.value}"


def renamed(names: Mapping[str, str], joint: str = " ") -> Naming:
    """Flags, but for the settings that a program calls otherwise.

    Args:
        names: name of a setting -> what the program calls it.
        joint: stands between such a name and a value: ``=`` for variables.
    """

    def spell(given: Setting) -> str:
        name = names.get(given.name)
        if name is None:
            return in_flags(given)
        return name if given.value is ... else f"{name}{joint}{given.value}"

    return spell


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises instead of leaving the process."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


class _SetsWorkload(argparse.Action):
    """The flag of earlier scripts for the variable that links read."""

    def __call__(self, parser: object, args: object, value: Any, flag: str | None = None) -> None:
        os.environ["DPP_WORKLOAD"] = str(value)


def add_dpp_flags(parser: argparse.ArgumentParser) -> None:
    """Add one flag per field of :class:`~megatron.dpp.config.DppConfig`, section by section."""
    names = {field.name: flag_of(field.name) for field in option_fields()}
    groups: dict[str, Any] = {}
    for field in option_fields():
        section, flag = field.metadata["section"], flag_of(field.name)
        if section not in groups:
            groups[section] = parser.add_argument_group(f"dynamic pipeline: {section}")
        options: dict[str, Any] = {
            "dest": f"dpp_{field.name}",
            "default": field.default,
            "help": field.metadata["help"].format_map(names),
        }
        if isinstance(field.default, bool):
            options["action"] = argparse.BooleanOptionalAction
        else:
            options["type"] = str if field.default is None else type(field.default)
        groups[section].add_argument(flag, **options)
    parser.add_argument("--workload", action=_SetsWorkload, type=int, help=argparse.SUPPRESS)


def dpp_config(args: object) -> DppConfig:
    """The settings of the dynamic pipeline, from the attributes ``dpp_*``."""
    return DppConfig(**{f.name: getattr(args, f"dpp_{f.name}") for f in option_fields()})


def given_flags(parser: argparse.ArgumentParser, argv: Sequence[str]) -> dict[str, str]:
    """Destinations of the flags that the command line spells out, with their spelling."""
    options = parser._option_string_actions
    names = (text.split("=", 1)[0] for text in argv)
    return {options[name].dest: name for name in names if name in options}


def refuse_unknown(parser: argparse.ArgumentParser, unknown: Sequence[str]) -> None:
    """Refuse flags that ``parser`` lacks: a ConfigError names them, each with the nearest flag."""
    known = list(parser._option_string_actions)
    names = [word.partition("=")[0] for word in unknown]
    if names:
        raise ConfigError(f"unknown flag {', '.join(n + did_you_mean(n, known) for n in names)}")


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
    """A bar of ``tqdm`` over bytes; silent where standard error is no terminal."""
    from tqdm import tqdm

    form = "{percentage:3.0f}%|{bar:20}| {rate_fmt}, {remaining} left{postfix}"
    defaults = {"unit": "B", "unit_scale": True, "bar_format": form, "disable": None}
    return tqdm(total=total_bytes, **{**defaults, "leave": False, **settings})

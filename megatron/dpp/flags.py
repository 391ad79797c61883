"""The settings of the dynamic pipeline on a command line: one flag per field of ``DppConfig``."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from megatron.dpp.config import DppConfig, option_fields
from megatron.dpp.errors import ConfigError, did_you_mean
from megatron.dpp.naming import flag_of
from megatron.dpp.schedule import BUILT_IN

_WERE_SWITCHES = ("split_backward",)
"""Fields of words whose ``off`` may be spelled as that of a switch: ``--no-dpp-x``."""


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises instead of leaving the process."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def add_dpp_flags(parser: argparse.ArgumentParser) -> None:
    """Add one flag per field of :class:`~megatron.dpp.config.DppConfig`."""
    group = parser.add_argument_group("dynamic pipeline: schedule and transport")
    names = {field.name: flag_of(field.name) for field in option_fields()}
    names["policies"] = ", ".join(BUILT_IN)
    for field in option_fields():
        options: dict[str, Any] = {
            "dest": f"dpp_{field.name}",
            "default": field.default,
            "help": field.metadata["help"].format_map(names),
        }
        if field.name in _WERE_SWITCHES:
            off = options | {"action": "store_const", "const": "off", "help": argparse.SUPPRESS}
            group.add_argument(flag_of(field.name).replace("--", "--no-", 1), **off)
        if isinstance(field.default, bool):
            options["action"] = argparse.BooleanOptionalAction
        else:
            options["type"] = str if field.default is None else type(field.default)
        group.add_argument(flag_of(field.name), **options)


def dpp_config(args: object) -> DppConfig:
    """The settings of the dynamic pipeline, from the attributes ``dpp_*``."""
    return DppConfig(**{f.name: getattr(args, f"dpp_{f.name}") for f in option_fields()})


def given_flags(parser: argparse.ArgumentParser, argv: Sequence[str]) -> dict[str, str]:
    """Destinations of the flags that the command line spells out, with their spelling."""
    options = parser._option_string_actions
    names = (text.split("=", 1)[0] for text in argv)
    return {options[name].dest: name for name in names if name in options}


def refuse_unknown(
    parser: argparse.ArgumentParser,
    unknown: list[str],
    answer: Callable[[str], str | None] = lambda flag: None,
) -> None:
    """Refuse flags that ``parser`` lacks: a ConfigError names them, each with the nearest flag.

    Args:
        answer: gives the text for a flag that is known elsewhere, or None.
    """
    if not unknown:
        return
    known = list(parser._option_string_actions)
    parts = []
    for text in unknown:
        if not text.startswith("--"):
            continue
        name = text.split("=", 1)[0]
        known_elsewhere = answer(name)
        if known_elsewhere:
            raise ConfigError(known_elsewhere)
        parts.append(name + did_you_mean(name, known))
    raise ConfigError("unknown flag " + ", ".join(parts or unknown))

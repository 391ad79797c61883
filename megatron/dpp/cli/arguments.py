"""The command line of ``pretrain_gpt.py`` and ``pretrain_bert.py``.

Rows of ``flags``, ``flags_run`` and ``flags_special`` first, then ours from
:class:`megatron.dpp.config.DppConfig`, then one flag per remaining field of megatron-core's
dataclasses. This module turns text into a namespace; ``validate`` checks the values.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from megatron.dpp.cli.fields import add_flags, core_fields
from megatron.dpp.cli.flags import GROUPS, UNSET_FIELDS, WITHOUT_EFFECT, Flag
from megatron.dpp.cli.flags_run import RUN_GROUPS
from megatron.dpp.cli.flags_special import SPECIAL, answer
from megatron.dpp.cli.run_config import RunConfig
from megatron.dpp.config import flag_of, option_fields
from megatron.dpp.errors import ConfigError
from megatron.dpp.schedule import BUILT_IN


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises instead of leaving the process."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def build_parser() -> argparse.ArgumentParser:
    """The parser with every flag."""
    parser = Parser(allow_abbrev=False, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    for title, rows in (GROUPS | RUN_GROUPS | SPECIAL).items():
        group = parser.add_argument_group(title)
        for row in rows:
            _add_row(group, row)
    add_dpp_flags(parser)
    for name, fields in core_fields().items():
        add_flags(parser, fields, skip=UNSET_FIELDS, title=f"megatron-core {name}")
    return parser


def _add_row(group: Any, row: Flag) -> None:
    names = [row.name]
    if row.name.startswith("--override-opt_param") or row.name.startswith("--use-checkpoint-opt_"):
        names.append(row.name.replace("_", "-"))
    options: dict[str, Any] = {"default": row.default, "help": row.help.replace("%", "%%")}
    if row.dest:
        options["dest"] = row.dest
    if isinstance(row.kind, bool):
        options["action"] = "store_true" if row.kind else "store_false"
    else:
        options |= {"type": row.kind, "choices": row.choices, "nargs": row.nargs}
    group.add_argument(*names, **options)


def add_dpp_flags(parser: argparse.ArgumentParser) -> None:
    """Add one flag per field of :class:`~megatron.dpp.config.DppConfig`."""
    group = parser.add_argument_group("dynamic pipeline: schedule and transport")
    for field in option_fields():
        options: dict[str, Any] = {
            "dest": f"dpp_{field.name}",
            "default": field.default,
            "help": field.metadata["help"].replace("{policies}", ", ".join(BUILT_IN)),
        }
        if isinstance(field.default, bool):
            options["action"] = argparse.BooleanOptionalAction
        else:
            options["type"] = str if field.default is None else type(field.default)
        group.add_argument(flag_of(field.name), **options)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse a command line (``sys.argv`` by default).

    Settings of ``--yaml-cfg`` come below the command line's and above the defaults.

    Raises:
        ConfigError: an unknown flag (with the nearest match), or a value of the wrong type.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = build_parser()
    path = _yaml_path(argv)
    if path:
        from megatron.dpp.cli.yaml_file import defaults_from_yaml

        parser.set_defaults(**defaults_from_yaml(path, parser))
    args, unknown = parser.parse_known_args(argv)
    refuse_unknown(parser, unknown)
    args.given = given_flags(parser, argv)
    args.parsed = dict(vars(args))
    return args


def given_flags(parser: argparse.ArgumentParser, argv: Sequence[str]) -> dict[str, str]:
    """Destinations of the flags that the command line spells out, with their spelling."""
    options = parser._option_string_actions
    names = (text.split("=", 1)[0] for text in argv)
    return {options[name].dest: name for name in names if name in options}


def _yaml_path(argv: list[str]) -> str | None:
    finder = Parser(add_help=False, allow_abbrev=False)
    finder.add_argument("--yaml-cfg")
    path: str | None = finder.parse_known_args(argv)[0].yaml_cfg
    return path


def refuse_unknown(parser: argparse.ArgumentParser, unknown: list[str]) -> None:
    """Refuse flags that ``parser`` does not have.

    Raises:
        ConfigError: names them, each with the nearest flag.
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
        nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        parts.append(f"{name} (did you mean {nearest[0]}?)" if nearest else name)
    raise ConfigError("unknown flag " + ", ".join(parts or unknown))


def warnings_of(args: RunConfig) -> list[str]:
    """A line for every given flag without effect."""
    lines = [f"{args.given[name]} has no effect" for name in WITHOUT_EFFECT if name in args.given]
    for field in option_fields():
        flag = args.given.get(f"dpp_{field.name}")
        why = _why_idle(args, field) if flag else None
        if why:
            lines.append(f"{flag} {why}")
    return lines


def _why_idle(args: RunConfig, field: dataclasses.Field[Any]) -> str | None:
    """The reason why a setting of ours has no effect in this run; None where it has one."""
    if args.deepspeed_zero_stage:
        return "has no effect with --deepspeed-zero-stage"
    if args.use_dpp:
        return None
    needs, value = field.metadata["needs"], getattr(args, f"dpp_{field.name}")
    if needs == "dpp":
        return "has no effect without --use-dpp"
    if needs != "nothing" and args.pipeline_model_parallel_size == 1:
        return "has no effect without a pipeline"
    if needs == "links" and args.dpp_transport == "auto":
        return "has no effect without --use-dpp or a --dpp-transport other than auto"
    if needs != "links" and value == "auto":
        return "auto has no effect without --use-dpp"
    return None


def rank_and_world(env: Any = os.environ) -> tuple[int, int]:
    """Rank and number of ranks of this process as torchrun set them; 0 and 1 without a launcher."""
    return int(env.get("RANK", "0")), int(env.get("WORLD_SIZE", "1"))

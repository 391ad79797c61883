"""``megatron-dpp run SCRIPT ...``: run a Megatron-LM script, unmodified, with the dynamic pipeline.

    torchrun --nproc-per-node 8 -m megatron.dpp.run pretrain_gpt.py --use-dpp [its flags]

Settings of the dynamic pipeline are taken from the command line before the script reads it, and
from variables: ``USE_DPP=1``, and ``DPP_X`` for each ``--dpp-x``. A flag wins over its variable.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import runpy
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from megatron.dpp.cli.arguments import (
    Parser,
    add_dpp_flags,
    given_flags,
    refuse_unknown,
)
from megatron.dpp.cli.run_config import dpp_config
from megatron.dpp.config import DppConfig, flag_of, option_fields
from megatron.dpp.errors import ConfigError, require
from megatron.dpp.schedule import find_policy

_BAD_INPUT = 2
_SWITCHES = {"1": True, "true": True, "on": True, "0": False, "false": False, "off": False}


def usage() -> str:
    """The help of the command."""
    names = " ".join(flag_of(field.name) for field in option_fields())
    return f"""\
usage: megatron-dpp run SCRIPT [SCRIPT'S FLAGS] [--use-dpp] [--dpp-*]
       torchrun ... -m megatron.dpp.run SCRIPT [the same]

Run a training script of Megatron-LM, unmodified, with a dynamic pipeline.

  --use-dpp      run the dynamic pipeline, not megatron-core's (USE_DPP=1)
  --dpp-strict   end with an error where megatron-core's schedule would run

Settings, each also a variable (--dpp-policy: DPP_POLICY):
{textwrap.fill(names, 79, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)}
A flag wins over its variable. docs/plugin.md describes what is honoured."""


def _parser() -> argparse.ArgumentParser:
    parser = Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--use-dpp", action="store_true")
    parser.add_argument("--dpp-strict", action="store_true")
    add_dpp_flags(parser)
    return parser


def flags_of(environment: Mapping[str, str]) -> Iterator[str]:
    """The flags that variables stand for.

    Raises:
        ConfigError: a switch is neither on nor off.
    """
    switches: dict[str, tuple[str, str | None]] = {
        "USE_DPP": ("--use-dpp", None),
        "DPP_STRICT": ("--dpp-strict", None),
    }
    for field in option_fields():
        name, flag = f"DPP_{field.name.upper()}", flag_of(field.name)
        if isinstance(field.default, bool):
            switches[name] = (flag, flag.replace("--", "--no-", 1))
        elif environment.get(name):
            yield f"{flag}={environment[name]}"
    for name, (on, off) in switches.items():
        value = environment.get(name, "")
        if value:
            require(value.lower() in _SWITCHES, f"{name}={value}: expected 1 or 0")
            chosen = on if _SWITCHES[value.lower()] else off
            yield from [chosen] if chosen else []


def take_flags(
    words: Sequence[str], environment: Mapping[str, str]
) -> tuple[argparse.Namespace, list[str]]:
    """Split a command line into the settings of the dynamic pipeline and the script's own flags.

    Raises:
        ConfigError: an unknown ``--dpp-*``, or a value of the wrong type.
    """
    parser, words = _parser(), [*flags_of(environment), *words]
    given, rest = parser.parse_known_args(words)
    refuse_unknown(parser, [word for word in rest if word.startswith(("--dpp-", "--no-dpp-"))])
    idle = given_flags(parser, words).values()
    if idle and not given.use_dpp and environment.get("RANK", "0") == "0":
        print(f"megatron-dpp: without --use-dpp no effect: {', '.join(idle)}", file=sys.stderr)
    return given, rest


def main(argv: Sequence[str] | None = None) -> int:
    """Run the script.

    Returns:
        0; 2 for bad flags or settings. The script's own exit status and errors are its own.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("--help", "-h"):
        print(usage())
        return 0 if words else _BAD_INPUT
    try:
        script, *flags = words
        require(Path(script).is_file(), f"{script}: no such script (it comes before its flags)")
        given, rest = take_flags(flags, os.environ)
        config = dpp_config(given)
        find_policy(config.policy)
        _run(script, rest, config if given.use_dpp else None, strict=given.dpp_strict)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return _BAD_INPUT
    return 0


def _run(script: str, flags: Sequence[str], config: DppConfig | None, *, strict: bool) -> None:
    """Run ``script`` as ``python SCRIPT FLAGS`` does, with the dynamic pipeline if ``config`` is
    given. On a machine without a GPU megatron-core runs on the CPU.
    """
    sys.argv = [script, *flags]
    # Before anything of megatron-core is imported: the script's checkout comes first.
    sys.path.insert(0, str(Path(script).resolve().parent))
    import torch

    if not torch.cuda.is_available():
        from megatron.dpp.mcore import cpu

        cpu.install(host=True)
    with contextlib.ExitStack() as around:
        if config is not None:
            from megatron.dpp import plugin

            around.enter_context(plugin.installed(config, strict=strict))
        runpy.run_path(script, run_name="__main__")
